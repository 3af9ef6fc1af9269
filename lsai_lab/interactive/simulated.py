"""`lab.simulated_gpu`: any PyTorch step on a GPU that is not there, in a notebook."""

import pandas as pd

from lsai_core.prediction.gpu_context import GIB, SimulatedGpu
from lsai_core.profiling.gpus import find_gpu
from lsai_core.profiling.memory import CAUSES
from lsai_lab.interactive.asked import gpu_words
from lsai_lab.report.show import Picture
from lsai_lab.report.timelines import memory_picture
from lsai_lab.runs.frames import Frame, Values

_TITLE = "Memory over the steps by cause, without libraries"


class Simulated(SimulatedGpu):
    """A context, and afterwards `verdict` (`fits`, `tight`, `too large`, or `cut off` after an
    error), `fits` (None if cut off), `peak_allocated_gib`, `peak_reserved_gib` (what must fit),
    `phases` (peak GiB of each), `memory` (GiB by cause at the highest moment), `operators` (of
    these, what each operator made), `moments` (GiB by cause after each operator), `remark` (where
    it was cut off, what a whole training step has beyond what ran, which values were asked for),
    `verdict_on("A100")`, and a picture: `plot()`."""

    @property
    def phases(self) -> pd.Series:  # type: ignore[override]
        """The peak of each phase in GiB, without the libraries' workspaces."""
        return Values(super().phases, name="GiB", dtype=float)

    @property
    def memory(self) -> pd.Series:  # type: ignore[override]
        """GiB by cause at the highest moment, the largest first, in the words of `lab.watch`; and
        `libraries`, their workspaces. The sum is `peak_allocated_gib`."""
        return Values(super().memory, name="GiB", dtype=float)

    @property
    def operators(self) -> pd.Series:  # type: ignore[override]
        """GiB at the highest moment, without libraries: `forward: gelu` is what gelu made in the
        forward pass."""
        return Values(super().operators, name="GiB", dtype=float)

    @property
    def moments(self) -> pd.DataFrame:  # type: ignore[override]
        """One row a moment: `phase`, `operator`, and GiB by cause, without libraries."""
        there = dict.fromkeys(cause for moment in super().moments for cause in moment.bytes_of)
        causes = [*CAUSES, *(cause for cause in there if cause not in CAUSES)]
        rows = [
            {"phase": moment.phase, "operator": moment.operator}
            | {cause: moment.bytes_of.get(cause, 0) / GIB for cause in causes}
            for moment in super().moments
        ]
        return Frame(rows, columns=["phase", "operator", *causes])

    def plot(self) -> Picture:
        """The memory over the steps by cause, without libraries. UserError before the context is
        closed."""
        self._done()
        moments = [(moment.phase, moment.bytes_of) for moment in super().moments]
        return Picture(memory_picture(moments, title=_TITLE))


def simulated_gpu(gpu: str | float = "h100") -> Simulated:
    """A context in which PyTorch runs on tensors without memory, as on `gpu` (a name as in
    `lab.predict`, or its memory: "24GiB", or 24): any model, any loop; three steps tell all.

    >>> with lab.simulated_gpu("h100") as gpu:  # build the model and the optimizer inside
    ...     model = torch.nn.Linear(1024, 1024)
    ...     optimizer = torch.optim.AdamW(model.parameters())
    ...     for _ in range(3):
    ...         model(torch.randn(64, 1024)).square().mean().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> gpu.verdict, gpu.peak_allocated_gib < 1
    ('fits', True)

    Tensors have no values: `.item()`, `float()` and comparisons see zeros (a loop that ends at a
    small loss ends at once, a log gets zeros), NumPy gets an error, `torch.save` writes nothing.
    After an error the figures are those up to its line, and `fits` is None. Inside,
    `torch.cuda.max_memory_allocated()` leaves out `libraries`, which `peak_allocated_gib` has.
    Not simulated: flex_attention, tensor parallelism, FSDP1, DataParallel, and of torch.compile
    other modes than its default, varying shapes and most convolutions.

    It is `lsai_core.simulated_gpu`, with frames. UserError for an unknown GPU, and with the
    operator's name where the program cannot be followed.
    """
    return Simulated(find_gpu(gpu_words(gpu) or ""))
