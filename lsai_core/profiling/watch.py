"""Anybody's training loop, watched: the memory of a step by cause and phase, its kernels, its time.

    with StepWatch(model, optimizer) as seen:
        for batch in batches:          # at least 6
            loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    seen.phases_gib, seen.causes_gib, seen.kernels

A step ends with `optimizer.step()`. The first one is left alone, for states come with it. In the
second one a dispatch mode sees all tensors: bytes of live tensors, on a GPU without what the
allocator adds. The third warms up the profiler, which records the fourth and the fifth. Further
ones are timed. What runs within `loss.backward()` is the backward pass, what runs within
`optimizer.step()` the optimizer, and everything else the forward pass.
"""

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lsai_core.base.errors import UserError, forget_frames
from lsai_core.profiling.live_tensors import LiveTensors
from lsai_core.profiling.memory import (
    CAUSES,
    PHASES,
    Moment,
    Phase,
    cause_of_results,
    running_phase,
)
from lsai_core.profiling.trace import KernelEvent, kernel_events, top_kernels

GIB = 2**30
MEMORY_STEP, FIRST_TRACED, TRACED = 1, 3, 2
STEPS = FIRST_TRACED + TRACED + 1  # that a whole answer needs
# Whose frames an error in the loop does not show.
_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_BACKWARD = "autograd::engine::evaluate_function"


class CauseTracker(LiveTensors):
    """`LiveTensors` by cause, over the phases of a step; `moments`: after each operator that
    changed something."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.moments: list[Moment] = []
        self.updating = False
        self._by_cause: Counter[str] = Counter()
        self._causes: dict[int, str] = {}
        self._born_as: str | None = None

    @property
    def phase(self) -> Phase:
        """The phase that the program is in."""
        return running_phase(self.updating)

    @contextlib.contextmanager
    def born_as(self, cause: str) -> Iterator[None]:
        """What is seen inside for the first time is there for `cause`."""
        self._born_as = cause
        try:
            yield
        finally:
            self._born_as = None

    def mark(self, tensor: Tensor, cause: str) -> None:
        """Say what a tensor that is known is there for."""
        # of a sharded tensor, this process's part
        key = getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata
        if key in self._causes:
            size = self._known[key][1]
            self._by_cause[self._causes[key]] -= size
            self._by_cause[cause] += size
            self._causes[key] = cause

    def note(self, operator: str) -> None:
        """A moment: what is live now."""
        self.moments.append(Moment(self.phase, operator, dict(+self._by_cause)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.live
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.live != before:
            self.note(func.name().partition("::")[2].partition(".")[0])
        return result

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        key, before = storage._cdata, self.live
        super()._see_storage(storage)
        cause = self._causes.setdefault(key, self._born_as or cause_of_results(self.phase))
        self._by_cause[cause] += self.live - before

    def _freed(self, key: int, reference: Any) -> None:
        self._by_cause[self._causes.pop(key, "other")] -= self._known[key][1]
        super()._freed(key, reference)


def _checked(model: Any, optimizer: Any) -> tuple[Tensor, list[torch.optim.Optimizer]]:
    """The model's first parameter, and the optimizers. UserError for what is no model with
    parameters, or no optimizer of any of them."""
    several = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
    if not isinstance(model, nn.Module):
        raise UserError(f"watch takes a model, then its optimizer; {_kind(model)} is no model")
    if other := [one for one in several if not hasattr(one, "register_step_post_hook")]:
        raise UserError(f"watch takes a model, then its optimizer; {_kind(other[0])} is none")
    weights = list(model.parameters())
    if not weights or not several:
        raise UserError("watch wants a model with parameters and an optimizer")
    if isinstance(weights[0], FakeTensor):
        raise UserError("simulated_gpu tells memory by cause and phase itself: leave watch out")
    kept = {
        id(weight) for one in several for group in one.param_groups for weight in group["params"]
    }
    if kept.isdisjoint(map(id, weights)):
        raise UserError(
            "the optimizer has none of the model's parameters: make it from model.parameters()"
        )
    return weights[0], several


def _kind(thing: Any) -> str:
    return f"a {type(thing).__name__}"


class StepWatch:
    """Watches the steps of the loop inside of it, and holds what was found.

    `phases_gib`: the peak of each phase. `causes_gib`: what the highest moment was for. `moments`:
    the step by cause, operator by operator. `kernels`: name, class, ms and calls per step, longest
    first. `phase_ms`: of GPU time where there is a GPU, else of the host's own. `step_ms`: median
    of the timed steps. `reserved_gib`: what a GPU's allocator took by the third step. Each is empty
    or None while the loop has not come so far; `steps` says how far.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[Any], top: int = 25
    ) -> None:
        weights, self._optimizers = _checked(model, optimizer)
        self._model = model
        self._device, self._top = weights.device, top
        self._tracker = CauseTracker(weights.device.type)
        self._tracking, self._tracing = contextlib.ExitStack(), contextlib.ExitStack()
        self._hooks, self._update = contextlib.ExitStack(), contextlib.ExitStack()
        self._profiler: profile | None = None
        self._began = 0.0
        self._durations: list[float] = []
        self.steps = 0
        self.kernels: list[dict[str, Any]] = []
        self.events: list[KernelEvent] = []
        self.phase_ms: dict[str, float] = {}
        self.reserved_gib: float | None = None

    def __enter__(self) -> Self:
        last = self._optimizers[-1]
        for optimizer in self._optimizers:
            self._keep(optimizer.register_step_pre_hook(self._update_begins))
            self._keep(optimizer.register_step_post_hook(self._update_ends))
        self._keep(last.register_step_post_hook(lambda *_: self._step_ends()))
        self._began = time.perf_counter()
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        self._hooks.close()
        self._tracking.close()
        self._tracing.close()
        if error is not None:
            forget_frames(error, _FOLDERS)

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on a GPU, so that kernels are what is traced."""
        return self._device.type == "cuda"

    @property
    def live_moments(self) -> list[Moment]:
        """The watched step, moment by moment; none while it has not ended."""
        return self._tracker.moments if self.steps > MEMORY_STEP else []

    @property
    def phases_gib(self) -> dict[str, float]:
        """The peak of live tensors in each phase."""
        peaks: dict[str, float] = {}
        for moment in self.live_moments:
            peaks[moment.phase] = max(moment.allocated_gib, peaks.get(moment.phase, 0.0))
        return {phase: peaks[phase] for phase in PHASES if phase in peaks}

    @property
    def causes_gib(self) -> dict[str, float]:
        """What was live at the highest moment, by cause."""
        if not self.live_moments:
            return {}
        highest = max(self.live_moments, key=lambda moment: moment.allocated_gib).bytes_of
        return {cause: highest[cause] / GIB for cause in CAUSES if highest.get(cause)}

    @property
    def step_ms(self) -> float | None:
        """Median of the timed steps, ms."""
        return statistics.median(self._durations) if self._durations else None

    def _keep(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def _update_begins(self, *_: Any) -> None:
        self._tracker.updating = True
        # PyTorch's own range of that name ends behind the hook that ends the last traced step.
        self._update.enter_context(record_function("Optimizer.step of a watched loop"))

    def _update_ends(self, *_: Any) -> None:
        self._update.close()
        self._tracker.updating = False

    def _step_ends(self) -> None:
        now = self._now()
        if self.steps > FIRST_TRACED + TRACED - 1:
            self._durations.append(1e3 * (now - self._began))
        if self.steps == MEMORY_STEP:
            self._tracking.close()
        if self._profiler is not None:
            self._profiler.step()
            if self.steps == FIRST_TRACED + TRACED - 1:
                self._read_trace()
        self.steps += 1
        if self.steps == MEMORY_STEP:
            self._begin_tracking()
        if self.steps == FIRST_TRACED - 1:
            self._begin_tracing()
        self._began = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            if self.steps == MEMORY_STEP + 1:
                self.reserved_gib = torch.cuda.max_memory_reserved(self._device) / GIB
        return time.perf_counter()

    def _begin_tracking(self) -> None:
        tracker = self._tracker
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        for cause, seeds in (
            ("gradients", gradients),
            ("weights", [self._model]),
            ("optimizer", self._optimizers),
        ):
            with tracker.born_as(cause):
                tracker.add(seeds)
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._tracking.callback(
                    parameter.register_post_accumulate_grad_hook(self._name_gradient).remove
                )
        tracker.note("")
        self._tracking.enter_context(tracker)

    def _name_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._tracker.mark(parameter.grad, "gradients")
            self._tracker.note("accumulate_grad")

    def _begin_tracing(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=0, warmup=1, active=TRACED, repeat=1)
        self._profiler = self._tracing.enter_context(
            profile(activities=activities, schedule=plan, acc_events=True)
        )

    def _read_trace(self) -> None:
        assert self._profiler is not None
        self._tracing.close()
        self.events = kernel_events(self._profiler)
        self.kernels = top_kernels(self.events, self._top, per=TRACED)
        on_gpu = any(event.on_gpu for event in self.events)
        spent: Counter[str] = Counter()
        for event in self._profiler.events() or []:
            # of the range of a whole step only the profiler's own time is left
            if event.device_type == DeviceType.CPU and not event.name.startswith("ProfilerStep"):
                own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
                spent[_phase_of(event)] += own
        self.phase_ms = {phase: spent[phase] / 1e3 / TRACED for phase in PHASES}
        self._profiler = None


def _phase_of(event: Any) -> Phase:
    """The phase in which a profiled operator of the host ran."""
    while event is not None:
        if event.name.startswith("Optimizer.step"):
            return "optimizer"
        if event.name.startswith(_BACKWARD):
            return "backward"
        event = event.cpu_parent
    return "forward"
