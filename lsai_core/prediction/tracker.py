"""Count live bytes as a GPU's caching allocator would, and name what they are for.

The bytes are those of `live_tensors`, here of fake tensors, in the allocator's multiples of 512,
and what operators need while they run, which no tensor shows (`SCRATCH`). Every storage has a
purpose, the innermost `purpose(...)` block open at its birth. Host memory (CPU offload) is not
counted. All births and deaths are kept in order, with the current stream (FSDP2 sets streams on a
CPU, too), for the allocator's model (`replay.py`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from lsai_core.context.parts import PARTS
from lsai_core.model.feed_forward import backward_in, forward_in, parts
from lsai_core.prediction.work import PRODUCTS, add, is_work
from lsai_core.profiling.live_tensors import LiveTensors

ALLOCATION = 512
FIRST = ALLOCATION - 1  # stands for a stream's number: stream 0, in the first step alone
PROGRAMS = 4 * 132  # of the norm's gradient on a Hopper GPU, each with its part of the weight's
KERNEL_SCRATCH, OTHER = "kernel scratch", "other"


def _attention_backward(arguments: tuple[Any, ...], repeats: bool = False) -> list[int]:
    """In fp32 q's gradient and what belongs to a row; of grouped heads k's and v's: if it
    `repeats`, for every head of q, all in one block, as cuDNN; else in fp32, as
    FlashAttention-4."""
    q_BSHD, k_BSKD = arguments[1:3]
    rows, grouped = 4 * q_BSHD.numel() // q_BSHD.shape[-1], k_BSKD.numel() < q_BSHD.numel()
    if repeats:
        return [rows + 4 * q_BSHD.numel() + 2 * grouped * _bytes(q_BSHD)]
    return [4 * q_BSHD.numel(), rows, rows, *2 * grouped * [4 * k_BSKD.numel()]]


def _fused_backward(dout: Tensor, q: Tensor, k: Tensor) -> list[int]:
    """Of (B, H, S, D): in fp32 q's gradient, or in fp32 attention a product of the same size, and
    what belongs to a row; of grouped heads k's and v's gradients for every head of q."""
    grouped = k.shape[1] < q.shape[1]
    return [4 * q.numel() + 4 * q.numel() // q.shape[-1] + 2 * grouped * _bytes(q)]


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _ring(arguments: tuple[Any, ...]) -> list[int]:
    """An fp32 sum that becomes the output, a part of it, and the keys and values of two steps: this
    and the next."""
    q, k, v, key = arguments
    return (
        []
        if PARTS[key].ring.size == 1
        else [4 * q.numel() - _bytes(q), _bytes(q), _bytes(k, v), _bytes(k, v)]
    )


def _ring_backward(arguments: tuple[Any, ...]) -> list[int]:
    """fp32 sums that become the gradients, a step's parts, keys and values of two steps, and what
    the kernel needs."""
    _, q, k, v, _, _, key = arguments
    kernel = _attention_backward(arguments)
    if PARTS[key].ring.size == 1:
        return kernel
    sums = [4 * tensor.numel() - _bytes(tensor) for tensor in (q, k, v)]
    return [*sums, _bytes(q), _bytes(k, v), _bytes(k, v), _bytes(k, v), *kernel]


def _embedding_backward(arguments: tuple[Any, ...]) -> list[int]:
    """Of more than 3072 tokens: fp32 sums of at most ten rows of the gradient each, which belong to
    one word."""
    tokens, words = arguments[1].numel(), arguments[2]
    return (
        [4 * arguments[0].shape[-1] * (tokens // 10 + min(tokens, words))] if tokens > 3072 else []
    )


# Scratch bytes of an operator on a GPU, by its name, from its arguments.
SCRATCH: dict[str, Callable[[tuple[Any, ...]], list[int]]] = {
    "lsai::predicted_attention_backward": lambda a: _attention_backward(a, a[-1]),
    # the gradient in fp8, in both layouts
    "lsai::predicted_engine_backward": lambda a: 2 * [int(a[0].numel())],
    "lsai::fused_attention_backward": lambda a: _fused_backward(*a[:3]),
    "lsai::context_attend": _ring,
    "lsai::context_attend_backward": _ring_backward,
    "lsai::rms_norm_backward": lambda a: [4 * min(len(a[1]), PROGRAMS) * a[1].shape[-1]],
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_softmax_backward_data": lambda a: [_bytes(a[1])],  # the gradient times the result
}
ALIKE = 2  # whole chunks of a layer: further ones take and give back the same blocks


def _few(tokens: int, chunk: int) -> list[slice]:
    return parts(min(tokens, ALIKE * chunk + tokens % chunk), chunk)


# Operators whose functions run as on a GPU, one operation after the other.
BODIES: dict[str, Callable[..., Any]] = {
    "lsai::chunked_mlp": lambda x, *weights: forward_in(
        _few(len(x), weights[-1]), x, *weights[:-1]
    ),
    "lsai::chunked_mlp_backward": lambda grad, *rest: backward_in(
        _few(len(grad), rest[-1]), grad, *rest[:-1]
    ),
}
# What an operator of fused fp8 takes in the first step alone, to measure what it casts; -n: the nth
# goes back.
MEASURING: dict[str, Callable[[tuple[Any, ...]], list[int]]] = {
    "lsai::fp8_cast": lambda a: [_bytes(a[0])],
    "lsai::fp8_swiglu": lambda a: 2 * [_bytes(a[0]) // 2],
    "lsai::fp8_swiglu_backward": lambda a: [_bytes(a[1]), _bytes(a[0]), -2, _bytes(a[1])],
}


class Moment(NamedTuple):
    """How things stand at a phase's begin or after a birth (`rose`), or after a death: the number
    of `events` so far, and the living bytes by purpose."""

    phase: str
    events: int
    bytes_of: Counter[str]
    rose: bool


class PurposeTracker(LiveTensors):
    """`LiveTensors` over fake tensors, in allocator bytes, by purpose. `on_gpu=False`: plain bytes,
    no scratch.

    `highest`: bytes by purpose of the highest moment of each phase. `events`: size plus stream
    number (sizes are multiples of 512) of each birth, and -n for the death of what was born as the
    nth. `marks`: how many events came before each phase, and before its first matrix product.
    `levels`: after each birth and death in a phase, if a list is there to be filled. `work`: see
    `work.py`.
    """

    active: ClassVar[PurposeTracker | None] = None

    def __init__(self, on_gpu: bool = True) -> None:
        super().__init__()
        self._multiple, self._on_gpu = ALLOCATION if on_gpu else 1, on_gpu
        self.highest: dict[str, Counter[str]] = {}
        self.events: list[int] = []
        self.marks: dict[str, int] = {}
        self.work: Counter[str] = Counter()
        self.levels: list[Moment] | None = None
        self._births = 0
        self._numbers: dict[int, int] = {}  # of living storages
        self._streams: dict[Any, int] = {torch.cpu.current_stream(): 0}
        self._phase = ""
        self._level = 0  # of the phase, so far
        self._by_purpose: Counter[str] = Counter()
        self._purposes: dict[int, str] = {}
        self._on_host: set[int] = set()
        self._open = [OTHER]

    @contextlib.contextmanager
    def purpose(self, name: str) -> Iterator[None]:
        """Storages born inside are for `name`."""
        self._open.append(name)
        try:
            yield
        finally:
            self._open.pop()

    @property
    def births(self) -> int:
        """How many there were so far."""
        return self._births

    def enter(self, phase: str) -> None:
        """From now on moments belong to `phase`, which may be entered again."""
        self.marks.setdefault(phase, len(self.events))
        self._phase, self._level = (
            phase,
            self.highest[phase].total() if phase in self.highest else -1,
        )
        self._note()

    def ran(
        self, name: str, arguments: Any, read: Sequence[Any], made: Sequence[Any], where: str = ""
    ) -> None:
        """An operator's kernel has run, and its result has its memory (see `work.add`)."""
        if name in PRODUCTS:  # a pipeline goes both ways in one phase
            backward = torch._C._current_graph_task_id() >= 0
            phase = "backward" if backward else self._phase
            self.marks.setdefault(f"{phase} product", len(self.events))
        add(self.work, name, arguments, read, made, where)

    def measure(self, name: str, arguments: tuple[Any, ...]) -> None:
        """An operator is about to run, of which the first step may take more."""
        before = self._births
        for size in MEASURING[name](arguments) if name in MEASURING else ():
            self._births += size > 0
            self.events.append(
                -(-size // ALLOCATION) * ALLOCATION + FIRST if size > 0 else size - before
            )
        self.events += range(-before - 1, -self._births - 1, -1)

    def mark(self, tensor: Tensor, name: str) -> None:
        """Say what an existing tensor is for, for instance that it has become a gradient."""
        if (key := storage_of(tensor)._cdata) in self._purposes:
            size = self._known[key][1]
            self._by_purpose[self._purposes[key]] -= size
            self._by_purpose[name] += size
            self._purposes[key] = name

    def move_to_host(self, tensor: Tensor) -> None:
        """Stop counting `tensor`: it lies in host memory from now on."""
        self._see(tensor)
        key = storage_of(tensor)._cdata
        reference, size = self._known[key]
        self._known[key] = (reference, 0)
        self._died(key)
        self.live -= size
        self._by_purpose[self._purposes[key]] -= size
        self._on_host.add(key)

    def keep_on_host(self, storage: torch.UntypedStorage) -> None:
        """Never count `storage`, which is new: it lies in host memory."""
        key = storage._cdata
        self._known[key] = (weakref.ref(storage, functools.partial(self._freed, key)), 0)
        self._purposes[key] = OTHER
        self._on_host.add(key)

    def scratch(self, sizes: list[int], purpose: str = KERNEL_SCRATCH) -> None:
        """Something takes blocks of these bytes and gives them back at once."""
        with self.purpose(purpose):
            self.inside(list, (torch.empty(size, dtype=torch.uint8) for size in sizes))

    def inside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` returns, all seen that it makes, also inside of an operator, whose work
        counts as a whole (`ran`)."""
        work, self.work = self.work, Counter()
        # off while it dispatches; if it is on, what is seen twice counts once
        super(LiveTensors, self).__enter__()
        try:
            return function(*arguments)
        finally:
            super(LiveTensors, self).__exit__(None, None, None)
            self.work = work

    def _born(self, key: int, size: int) -> None:
        if size:
            self._births += 1
            self._numbers[key] = self._births
            stream = torch.cpu.current_stream()
            self.events.append(size + self._streams.setdefault(stream, len(self._streams)))

    def _died(self, key: int) -> None:
        if number := self._numbers.pop(key, 0):
            self.events.append(-number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Fake tensors are counted here; other subclasses (a sharded DTensor) unpack themselves, as
        # in the base class.
        if self._on_gpu and func is torch.ops.aten.add.Tensor and by_autograd(sys._getframe(1)):
            # A tensor's second gradient: autograd adds it in place, but not while a dispatch mode
            # watches.
            func = torch.ops.aten.add_.Tensor
        name = func.name().partition(".")[0]
        self.measure(name, args)
        run = (
            functools.partial(self.inside, BODIES[name])
            if self._on_gpu and name in BODIES
            else func
        )
        result = super().__torch_dispatch__(
            run, tuple(t for t in types if t is not FakeTensor), args, kwargs
        )
        if result is not NotImplemented:
            self.work["calls"] += is_work(name)
            if not func.is_view:
                self.ran(name, args, tree_leaves((args, kwargs)), tree_leaves(result))
            if self._on_gpu and name in SCRATCH:
                self.scratch(SCRATCH[name](args))
        return result

    def __enter__(self) -> Self:
        PurposeTracker.active = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        PurposeTracker.active = None
        super().__exit__(*error)

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = -(-storage.nbytes() // self._multiple) * self._multiple
        known = self._known.get(key)
        if key in self._on_host or (known is not None and known[1] == size):
            return
        if known is None:
            reference, before = weakref.ref(storage, functools.partial(self._freed, key)), 0
            self._purposes[key] = self._open[-1]
        else:
            reference, before = known
        self._known[key] = (reference, size)
        self._died(key)  # a resized one gets other memory
        self._born(key, size)
        self.live += size - before
        self._by_purpose[self._purposes[key]] += size - before
        self._note()

    def _freed(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self._by_purpose[self._purposes.pop(key)] -= self._known[key][1]
        self._on_host.discard(key)
        self._died(key)
        super()._freed(key, reference)
        self._keep_moment(rose=False)

    def _keep_moment(self, rose: bool) -> None:
        if self.levels is not None and self._phase:
            bytes_of = self._by_purpose.copy()
            self.levels.append(Moment(self._phase, len(self.events), bytes_of, rose))

    def _note(self) -> None:
        self._keep_moment(rose=True)
        if self.live > self._level and self._phase:
            self._level, self.highest[self._phase] = self.live, self._by_purpose.copy()


def by_autograd(frame: Any) -> bool:
    """Whether the backward pass's C++ called, not a Python function in it; torch wraps a dispatch
    mode's methods, and one may call its base class's."""
    wrapped = ("/eval_frame.py", "/_compile.py")
    while frame.f_code.co_filename.endswith(wrapped) or (
        frame.f_code.co_name == "__torch_dispatch__"
    ):
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The memory of a tensor, or of what this process has of a sharded one."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()
