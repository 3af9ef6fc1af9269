"""`lab.simulated_gpu`: any PyTorch step on a GPU that is not there, in a notebook."""

import pandas as pd

from lsai_core.prediction.gpu_context import GIB, SimulatedGpu
from lsai_core.profiling.gpus import find_gpu
from lsai_lab.interactive.asked import gpu_words
from lsai_lab.report.show import Picture
from lsai_lab.report.timelines import memory_picture
from lsai_lab.runs.frames import Frame, Values


class Simulated(SimulatedGpu):
    """A context, and afterwards `verdict`, `peak_allocated_gib`, `peak_reserved_gib`, `phases`
    (peak GiB of each), `memory` (GiB by cause at the highest moment), `moments` (GiB after each
    operator), `remark` (what a whole training step has beyond what ran) and a picture: `plot()`."""

    @property
    def phases(self) -> pd.Series:  # type: ignore[override]
        """The peak of each phase in GiB, without the libraries' workspaces."""
        return Values(super().phases, name="GiB", dtype=float)

    @property
    def memory(self) -> pd.Series:  # type: ignore[override]
        """GiB by cause at the highest moment, the largest first."""
        return Values(super().memory, name="GiB", dtype=float)

    @property
    def moments(self) -> pd.DataFrame:  # type: ignore[override]
        """One row a moment: `phase`, `operator`, `allocated_gib`."""
        rows = [vars(moment) for moment in super().moments]
        return Frame(rows, columns=["phase", "operator", "allocated_gib"])

    def plot(self) -> Picture:
        """The memory over the steps. UserError before the context is closed."""
        self._done()
        moments = super().moments
        sizes = [(each.phase, {"allocated": round(each.allocated_gib * GIB)}) for each in moments]
        return Picture(memory_picture(sizes, title="Allocated memory over the steps"))


def simulated_gpu(gpu: str | float = "h100") -> Simulated:
    """A context in which PyTorch runs on tensors without memory, as on `gpu` (a name as in
    `lab.predict`, or its memory: "24GiB", or 24): any model, any loop; three steps tell all.

        with lab.simulated_gpu("h100") as gpu:
            ...                              # build the model and the optimizer here, train
        gpu

    It is `lsai_core.simulated_gpu`, whose help says what is not simulated, with frames. UserError
    for an unknown GPU, and with the operator's name where the program cannot be followed.
    """
    return Simulated(find_gpu(gpu_words(gpu) or ""))
