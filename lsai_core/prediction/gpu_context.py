"""Anybody's training step on a GPU that is not there.

    with simulated_gpu("h100") as gpu:
        model = AutoModelForCausalLM.from_config(config)
        for _ in range(3):
            train_step(model)
    gpu.peak_reserved_gib, gpu.verdict, gpu.memory

Inside, all tensors are fake: shapes, dtypes and lifetimes are true, and neither arithmetic nor
memory exists. They take a GPU's way through PyTorch (`gpu_operators.py`, `presented.py`), every
birth and death is counted (`step_tracker.py`), and what PyTorch's allocator makes of these is
replayed (`allocator.py`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lsai_core.base.attributes import attributes_as
from lsai_core.base.errors import UserError, forget_frames
from lsai_core.base.shown import Shown
from lsai_core.base.tables import Part
from lsai_core.kernels import FakeGpu
from lsai_core.prediction.allocator import (
    GAP,
    WORKSPACE,
    Allocator,
    Block,
    OutOfMemory,
    Verdict,
)
from lsai_core.prediction.cuda_calls import Stream
from lsai_core.prediction.gpu_operators import GpuOperators
from lsai_core.prediction.no_values import NoValues
from lsai_core.prediction.presented import OnGpu, capability_of, presented, require_inside
from lsai_core.prediction.process import one_rank, refusals
from lsai_core.prediction.purposes import name_sharding
from lsai_core.prediction.simulated_compile import compiling
from lsai_core.prediction.step_tracker import StepTracker, by_cause
from lsai_core.prediction.tracker import ALLOCATION
from lsai_core.profiling.gpus import OUTSIDE_GIB, Gpu, find_gpu, usable_gib
from lsai_core.profiling.memory import Moment

GIB = 2**30
_HERE = Path(__file__).parent
_FOLDERS = (str(Path(torch.__file__).parent), str(_HERE), str(_HERE.with_name("profiling")))
_OPERATORS = 10  # that are shown one by one
_REASON = 120  # characters of an error
_UNSAID_GIB = 0.1  # of tensors without a device, above which the remark tells them
_OTHER_PEAK = "torch.cuda.max_memory_allocated() inside leaves out the libraries' part"
SMALL_WORKSPACE = 8320 * 1024  # cuBLAS's before Hopper
# Whose update has a multi-tensor form that is not its default on a GPU.
_ONE_BY_ONE = ("Adafactor",)


class SimulatedGpu(Shown):
    """A context (see `simulated_gpu`), and, once it is closed, what was found. All GiB. `updates`:
    how many steps of optimizers were seen."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._main = Stream()
        with torch.cpu.stream(self._main):
            self._tracker = StepTracker(has_fp8=capability_of(gpu) >= (8, 9))
        self._seen: set[int] = set()
        self.updates = 0
        self._in_vain = False  # whether an update found no gradient
        self._on_host = False  # whether an update was of weights on the host
        self._values = NoValues()
        self._unsaid = 0.0  # GiB before the first forward pass of which no device was said
        self._cut = ""
        self._stack = contextlib.ExitStack()
        self._replayed: Allocator | None = None

    def __enter__(self) -> Self:
        tracker, fakes = self._tracker, FakeGpu(allow_non_fake_inputs=True)
        memory = SimpleNamespace(
            live=lambda: tracker.live,
            peak=self._peak_asked,
            reserved=lambda: self._replay().reserved,
            reset=tracker.reset_peak,
        )
        handles = [
            register_optimizer_step_pre_hook(self._update_begins),
            register_optimizer_step_post_hook(self._update_ends),
            nn.modules.module.register_module_forward_pre_hook(self._name_weights),
        ]
        for handle in handles:
            self._stack.callback(handle.remove)
        for context in (
            torch.random.fork_rng(devices=[]),
            compiling(fakes, tracker, self._name_weights),
            presented(self.gpu, memory, self._values, tracker, self._main),
            torch.cpu.stream(self._main),
            one_rank(),
            attributes_as(refusals()),
            GpuOperators(),
            OnGpu(tracker, self._values),
            fakes,
            tracker,
        ):
            self._stack.enter_context(context)  # type: ignore[arg-type]
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self.cut_off(traceback.tb_lineno, error)
        self._stack.close()
        self._replayed = self._replay()
        if error is not None:
            forget_frames(error, _FOLDERS)

    def cut_off(self, line: int | None, error: BaseException) -> None:
        """Keep that the program ended with `error`, in its `line`: what would have come is not
        known."""
        where = "" if line is None else f" at line {line}"
        reason = str(error).strip().partition("\n")[0][:_REASON]
        said = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        self._cut = f"cut off{where}: figures are up to there ({said})"

    def _peak_asked(self) -> int:
        self._values.peaks += 1
        return self._tracker.peak

    def _name_weights(self, module: nn.Module, *_inputs: Any) -> None:
        if torch.compiler.is_compiling() or id(module) in self._seen:
            return
        is_first = not self._seen
        for part in module.modules():
            if id(part) not in self._seen:
                self._seen.add(id(part))
                self._name_own_weights(part)
        if is_first:
            self._unsaid = self._tracker.made_without_a_device / GIB

    def _name_own_weights(self, module: nn.Module) -> None:
        name_sharding(module, self._tracker)
        for parameter in module.parameters(recurse=False):
            if torch._C._functorch.is_functorch_wrapped_tensor(parameter):
                continue  # one that torch.func has put in its place
            require_inside(module, parameter)
            self._tracker.mark(parameter, "weights")
            if parameter.requires_grad and id(parameter) not in self._seen:
                self._seen.add(id(parameter))
                hook = parameter.register_post_accumulate_grad_hook(self._name_gradient)
                self._stack.callback(hook.remove)
        for buffer in module.buffers(recurse=False):
            self._tracker.mark(buffer, "weights")

    def _name_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._tracker.mark(parameter.grad, "gradients")

    def _update_begins(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        self._tracker.updating = True
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._in_vain |= all(weight.grad is None for weight in weights)
        self._on_host |= all(map(self._tracker.lies_on_host, weights))
        if type(optimizer).__name__ in _ONE_BY_ONE:
            return
        for group in optimizer.param_groups:  # fake tensors are not of the types that it asks for
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = not group.get("differentiable")

    def _update_ends(self, *_arguments: Any) -> None:
        self._tracker.updating = False
        self.updates += 1

    def _replay(self, limit: int | None = None) -> Allocator:
        """The allocator after all that the program made and freed. Raises OutOfMemory if `limit`
        bytes are not enough."""
        allocator, blocks = Allocator(limit), dict[int, Block]()
        marks = self._tracker.marks
        products = {
            marks[name] for name in ("forward product", "backward product") if name in marks
        }
        workspace = WORKSPACE if capability_of(self.gpu) >= (9, 0) else SMALL_WORKSPACE
        born = 0
        for at, event in enumerate(self._tracker.events):
            if at == marks.get("forward", 0):
                allocator.gap = GAP
            if at in products:
                allocator.gap = 0
                allocator.malloc(workspace)
            if event > 0:
                born += 1
                blocks[born] = allocator.malloc(
                    event // ALLOCATION * ALLOCATION, event % ALLOCATION
                )
            elif -event in blocks:
                allocator.free(blocks.pop(-event))
        return allocator

    @property
    def peak_allocated_gib(self) -> float:
        """Of `torch.cuda.max_memory_allocated`; without side streams the active peak, too."""
        return self._done().peak_allocated / GIB

    peak_active_gib = peak_allocated_gib

    @property
    def peak_reserved_gib(self) -> float:
        """Of `torch.cuda.max_memory_reserved`, on a GPU with memory to spare."""
        return self._done().peak_reserved / GIB

    @property
    def verdict(self) -> str:  # no alias: the Tab key would find nothing behind `gpu.`
        """Whether it fits the GPU: as `lsai_core.prediction.memory.verdict`; `cut off` where the
        program ended with an error before it was too large."""
        return self.verdict_on(self.gpu)

    def verdict_on(self, gpu: Gpu | str) -> Verdict | Literal["cut off"]:
        """Whether it fits another GPU, on which the same kernels are taken to run. UserError for an
        unknown one."""
        found = self._verdict_on(find_gpu(gpu) if isinstance(gpu, str) else gpu)
        return "cut off" if self._cut and found != "too large" else found

    def _verdict_on(self, gpu: Gpu) -> Verdict:
        if self.peak_reserved_gib <= usable_gib(gpu):
            return "fits"
        try:
            self._replay(int((gpu.memory_gib - OUTSIDE_GIB) * GIB))
        except OutOfMemory:
            return "too large"
        return "tight"

    @property
    def fits(self) -> bool | None:
        """Whether it gets through, if only by giving cached memory back; None where the program
        ended with an error before that was known."""
        return None if self.verdict == "cut off" else self.verdict != "too large"

    @property
    def remark(self) -> str:
        """Where the program was cut off, what it left out of a whole training step, how much it
        made without a device, how often it read values, and which peak it saw; empty where two
        steps were seen and nothing read."""
        reads = self._values.reads
        times = "once" if reads == 1 else f"{reads} times"
        said = [
            self._cut,
            self._left_out,
            f"{self._unsaid:.2f} GiB were made without a device before the first forward pass and "
            'count on the GPU; with device="cpu" they lie on the host'
            if self._unsaid >= _UNSAID_GIB
            else "",
            f"values were asked for {times}: they are zeros" if reads else "",
            _OTHER_PEAK if self._values.peaks else "",
        ]
        return "; ".join(filter(None, said))

    @property
    def _left_out(self) -> str:
        if not self._tracker.moments:
            return "no tensor was made on the GPU"
        missing = ["gradients"] if "backward" not in self._tracker.highest else []
        if self.updates == 0:
            missing.append("states of the optimizer")
            return f"no optimizer step was seen: {' and '.join(missing)} do not count"
        if self._on_host:
            return "an optimizer updated weights that lie on the host: the model is not on the GPU"
        if self._in_vain:
            return "an optimizer stepped, but none of its parameters has a gradient"
        if self.updates == 1:
            return (
                "one optimizer step was seen: only a second one runs beside the first one's states"
            )
        return ""

    def _parts(self) -> Iterable[Part]:
        """The verdict, both peaks, the memory by cause, and the remark; before the program's end
        only the GPU."""
        if self._replayed is None:
            yield Part(f"simulated {self.gpu.name}; its program has not ended")
            return
        allocated, reserved = self.peak_allocated_gib, self.peak_reserved_gib
        peaks = f"{allocated:.2f} GiB allocated, {reserved:.2f} reserved"
        room = f"{usable_gib(self.gpu):.1f} of {self.gpu.memory_gib:.1f} GiB surely fit"
        title = f"simulated {self.gpu.name}: {self.verdict}; {peaks}; {room}"
        yield Part(title, note=self.remark)
        yield Part("At the highest moment", ("cause", "GiB"), [*self.memory.items()])
        made = [(name, size) for name, size in self.operators.items() if ": " in name]
        if smaller := made[_OPERATORS:]:
            made = [*made[:_OPERATORS], (f"{len(smaller)} more", sum(gib for _, gib in smaller))]
        if made:
            yield Part("Results of operators among them", ("operator", "GiB"), made, folded=True)

    @property
    def phases(self) -> dict[str, float]:
        """The peak of each phase, without the libraries' workspaces."""
        return {name: sum(parts.values()) / GIB for name, parts in self._tracker.highest.items()}

    @property
    def memory(self) -> dict[str, float]:
        """GiB by cause at the highest moment, the largest first, together `peak_allocated_gib`:
        weights, gradients, the optimizer, activations that wait for the backward pass, what the
        backward pass has in use, and `libraries`, their workspaces and what the allocator rounds
        up. `operators` has those of operators one by one."""
        found = by_cause(self._highest)
        libraries = self._done().peak_allocated - found.total()
        found += Counter({"libraries": libraries})
        return {name: size / GIB for name, size in found.most_common()}

    @property
    def operators(self) -> dict[str, float]:
        """GiB at the highest moment, without `libraries`, the largest first; results of operators
        by the pass and the operator that made them: `forward: gelu`."""
        return {name: size / GIB for name, size in self._highest.most_common() if size}

    @property
    def _highest(self) -> Counter[str]:
        return max(self._tracker.highest.values(), key=Counter.total, default=Counter[str]())

    @property
    def moments(self) -> Sequence[Moment]:
        """What was allocated after each operator that changed it, without `libraries`."""
        return self._tracker.with_weights()

    def _done(self) -> Allocator:
        if self._replayed is None:
            raise UserError("simulated_gpu: figures are there once the context is closed")
        return self._replayed


def simulated_gpu(gpu: str | float = "h100") -> SimulatedGpu:
    """A context in which PyTorch runs on fake tensors as on `gpu` (a name as in `lsai predict`, or
    its memory: `24GiB`), and nothing is allocated.

    Everything that happens inside counts, from the first tensor on: build the model and the
    optimizer there, and run three steps, for states come with the first. A tensor that is made
    without a device lies on the GPU. Values do not exist: `.item()`, `float()` and comparisons see
    zeros, which a line and the remark say; `torch.save` writes nothing, and `torch.load` gives the
    shapes of what was saved. A program that ends with an error is cut off there: no verdict but
    `too large` is known then. Inside,
    `torch.cuda.max_memory_allocated()` leaves out the libraries' workspaces, which
    `peak_allocated_gib` has. Raises UserError for a model that was built outside, with the
    operator's name where the program cannot be followed without values, and for what is not
    simulated: flex_attention, tensor parallelism, torch.compile in other modes than its default,
    for shapes that vary, or of most convolutions (`simulated_compile.py`). DistributedDataParallel
    and FSDP2 are, as one of their processes (`process.py`). What PyTorch refuses raises its own
    errors.
    """
    return SimulatedGpu(find_gpu(gpu))
