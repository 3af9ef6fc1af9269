"""Count what anybody's program makes and frees on a simulated GPU, by phase and cause."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lsai_core.base.errors import UserError
from lsai_core.prediction.dtypes import refuse_dtypes
from lsai_core.prediction.gpu_scratch import GPU_SCRATCH
from lsai_core.prediction.tracker import OTHER, PurposeTracker, by_autograd, storage_of
from lsai_core.profiling.memory import Moment, Phase, cause_of_results, running_phase

Place = Literal["host", "GPU", "sent"]  # `sent`: on the GPU, as the program says in words
# Operators (words of their names) that take tensors of the host beside a GPU's. A tensor of no
# dimension goes with all others.
_BOTH = ("copy", "index", "packed", "pack_padded", "ctc_loss", "tensor_split", "set_")


class Moments(list[Moment]):
    """A list that shows itself in a line."""

    def __repr__(self) -> str:
        return f"{len(self):,} moments, [0] the first: phase, operator, bytes_of, allocated_gib"


@functools.cache
def _cause_of(purpose: str) -> str:
    """Of an operator's results as their phase says; all else is its own cause."""
    phase, of_operator, _ = purpose.partition(": ")
    return cause_of_results(phase) if of_operator else purpose


def by_cause(bytes_of: Mapping[str, int]) -> Counter[str]:
    """Bytes by purpose, summed up by cause."""
    found: Counter[str] = Counter()
    for purpose, size in bytes_of.items():
        if size:
            found[_cause_of(purpose)] += size
    return found


class StepTracker(PurposeTracker):
    """`PurposeTracker` over anybody's program: phases and causes follow from what runs.

    `moments`: after each operator that made or freed something. `has_fp8`: whether the GPU
    multiplies in fp8.
    """

    def __init__(self, has_fp8: bool = True) -> None:
        super().__init__(on_gpu=True)
        self._has_fp8 = has_fp8
        self.moments = Moments()
        self._place: Place | None = None
        self._sent: set[int] = set()  # storages that a program put on the GPU in words
        self._in_part: set[int] = set()  # of these, those of which a slice alone was put there
        self.updating = False
        self._operator = ""
        self._entered: Phase | None = None
        self._last = 0
        self._born_at: dict[int, int] = {}  # storage -> the moment of its birth
        self._weights: list[tuple[int, int, int]] = []  # first and last moment as another, bytes

    @property
    def running(self) -> Phase:
        """The phase of the step that the program is in."""
        return running_phase(self.updating)

    def mark(self, tensor: Tensor, name: str) -> None:
        """As in the base class. Parameters are known as such from the first forward pass on, and
        were weights before."""
        key = storage_of(tensor)._cdata
        if name == "weights" and self._purposes.get(key, name).startswith("forward: "):
            size = self._known[key][1]
            self._weights.append((self._born_at.get(key, 0), len(self.moments), size))
        super().mark(tensor, name)

    def with_weights(self) -> Moments:
        """The moments, in which what became weights was so from its birth on."""
        change = Counter[int]()
        for first, last, size in self._weights:
            change[first] += size
            change[last] -= size
        found, moved = Moments(), 0
        for place, moment in enumerate(self.moments):
            moved += change[place]
            bytes_of = Counter(moment.bytes_of)
            bytes_of["activations"] -= moved
            bytes_of["weights"] += moved
            found.append(replace(moment, bytes_of=+bytes_of) if moved else moment)
        return found

    def _phase_of(self, func: Any) -> Phase:
        """The phase that an operator belongs to: the one before where it only looks at what is
        there, marks a place for a profiler, or changes gradients (norms are clipped) before their
        update."""
        phase, before = self.running, self._entered
        if phase != "forward" or before is None:
            return phase
        looks = func.is_view or func is torch.ops.aten._local_scalar_dense.default
        clips = before == "backward" and not torch.is_grad_enabled()
        return before if looks or clips or func.namespace == "profiler" else phase

    def cause(self) -> str:
        """Why a tensor is born now: the optimizer, the gradients' way, or an operator's result."""
        if self._open[-1] != OTHER:
            return self._open[-1]
        phase = self.running
        return phase if phase == "optimizer" else f"{phase}: {self._operator}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func is torch.ops.aten.add.Tensor and by_autograd(sys._getframe(1)):
            func = torch.ops.aten.add_.Tensor  # as in the base class, which this method calls
        name = func.name().partition(".")[0]
        self._operator = name.partition("::")[2]
        refuse_dtypes(name, args, self._has_fp8)
        before = self._place
        self._place = before or self._place_of(func, args, kwargs)
        try:
            return self._run(func, types, args, kwargs)
        finally:
            self._place = before

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if (phase := self._phase_of(func)) != self._entered:
            self._entered = phase
            self.enter(phase)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            return _some_value(func, args)
        except (DynamicOutputShapeException, UnsupportedOperatorException, NotImplementedError):
            raise UserError(
                f"simulated_gpu cannot follow the operator {func.name()}: its result's shape "
                f"depends on values, or it has no fake implementation"
            ) from None
        if result is NotImplemented:  # a sharded tensor, whose parts come by here
            return result
        name = func.name().partition(".")[0]
        if name in GPU_SCRATCH:
            self.scratch(GPU_SCRATCH[name](args, kwargs or {}, result))
        if self._operator == "all":
            result.of_all = True
        if func is torch.ops.aten.native_layer_norm.default:
            result = _wide_statistics(self, result)
        if self.live != self._last:
            self._last = self.live
            self.moments.append(Moment(phase, self._operator, by_cause(self._by_purpose)))
        return result

    def _note(self) -> None:
        super()._note()
        self.peak = max(self.peak, self.live)

    def _see(self, value: Any) -> None:
        # Others are data on the host, but for sharded tensors.
        if isinstance(value, FakeTensor) or is_traceable_wrapper_subclass(value):
            super()._see(value)

    @contextlib.contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Tensors that are born inside lie there. Elsewhere the results of what lies on the host
        lie there, too, and all others on the GPU."""
        before, self._place = self._place, place
        try:
            yield
        finally:
            self._place = before

    def lies_on_host(self, tensor: Tensor) -> bool:
        """Whether `tensor` is not on the GPU; one with values is older than the simulation."""
        if not isinstance(tensor, FakeTensor) and not is_traceable_wrapper_subclass(tensor):
            return True
        return storage_of(tensor)._cdata in self._on_host

    def send(self, tensor: Tensor) -> None:
        """A program says that `tensor` lies on the GPU, and not only leaves out where it lies."""
        storage = storage_of(tensor)
        key = storage._cdata
        if key not in self._sent and tensor.numel() * tensor.element_size() < storage.nbytes():
            self._in_part.add(key)
        self._sent.add(key)

    @property
    def made_without_a_device(self) -> int:
        """Bytes that are taken to lie on the GPU since the program says nowhere of them where they
        lie; weights left out."""
        return sum(
            size
            for key, (_, size) in self._known.items()
            if (key not in self._sent or key in self._in_part)
            and self._purposes.get(key) != "weights"
        )

    def _place_of(self, func: Any, args: Any, kwargs: Any) -> Place | None:
        """Where an operator's results lie by what it reads. RuntimeError, as PyTorch's, for a
        tensor of the host beside one that was put on the GPU."""
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        host = [value for value in read if self.lies_on_host(value)]
        if len(host) == len(read):
            return "host" if host else None
        sent = [value for value in read if storage_of(value)._cdata in self._sent]
        if not sent:
            return None
        name = func.name()
        both = func.namespace != "aten" or any(word in name for word in _BOTH)
        if not both and max(map(Tensor.dim, sent)) and any(map(Tensor.dim, host)):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! ({name.partition('.')[0]}, in simulated_gpu)"
            )
        return "sent"

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            super()._see_storage(storage)
            return
        if self._place == "host":
            self.keep_on_host(storage)
            return
        if self._place == "sent":
            self._sent.add(storage._cdata)
        self._born_at[storage._cdata] = len(self.moments)
        with self.purpose(self.cause()):
            super()._see_storage(storage)

    def _freed(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self._sent.discard(key)
        self._in_part.discard(key)
        super()._freed(key, reference)


def _some_value(func: Any, args: Any) -> Any:
    """What a program reads of a tensor's value, which nobody knows: zero; that all are so, and that
    none is."""
    if func is not torch.ops.aten._local_scalar_dense.default:
        raise UserError(
            f"simulated_gpu cannot follow the operator {func.name()}: its result depends on values"
        ) from None
    dtype = args[0].dtype
    if dtype == torch.bool and getattr(args[0], "of_all", False):
        return True
    return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0


def _wide_statistics(tracker: StepTracker, result: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A GPU's layer norm keeps means and deviations in fp32."""
    out, *statistics = result
    if statistics[0].dtype == torch.float32:
        return result
    wide = [torch.empty_like(s, dtype=torch.float32) for s in statistics]
    for tensor in wide:
        tracker._see(tensor)
    return (out, *wide)
