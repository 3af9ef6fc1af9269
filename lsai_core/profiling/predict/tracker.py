"""Count live bytes as a GPU's caching allocator would, and name what they are for.

The bytes are those of `live_tensors`, here of fake tensors: storages that know their size and hold no memory. Two things are
added. The allocator hands out multiples of 512 bytes. And some operators need scratch memory while they run, which no tensor
shows: `SCRATCH` says how much.

Every storage is born with a purpose, the innermost `purpose(...)` block that was open. A step is deterministic: a first pass
finds the event at which the peak stands, and a second one, told so by `stop_at`, notes how the live bytes divide at that event.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lsai_core.profiling.live_tensors import LiveTensors

ALLOCATION = 512


def _attention_backward(arguments: tuple[Any, ...]) -> int:
    """The fused kernels sum the gradient of q in fp32 and keep one number per row: (B, S, H, D) and (B, H, S) fp32."""
    q_BSHD = arguments[1]
    return 4 * q_BSHD.numel() + 4 * q_BSHD.numel() // q_BSHD.shape[-1]


# Scratch bytes of an operator, by its name, from its arguments.
SCRATCH: dict[str, Callable[[tuple[Any, ...]], int]] = {"lsai::predicted_attention_backward": _attention_backward}


class PurposeTracker(LiveTensors):
    """`LiveTensors` over fake tensors, in allocator bytes, with a purpose for every storage."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.events = 0
        self.peak_event = 0
        self.at_stop: Counter[str] = Counter()
        self.before_stop: Callable[[], None] = lambda: None
        self._stop_at = stop_at
        self._purposes: dict[int, str] = {}
        self._open = ["other"]

    @contextlib.contextmanager
    def purpose(self, name: str) -> Iterator[None]:
        """Storages born inside are for `name`."""
        self._open.append(name)
        try:
            yield
        finally:
            self._open.pop()

    def mark(self, tensor: Tensor, name: str) -> None:
        """Say what an existing tensor is for, for instance that it has become a gradient."""
        local = getattr(tensor, "_local_tensor", tensor)
        if (key := local.untyped_storage()._cdata) in self._known:
            self._purposes[key] = name

    def scratch(self, size: int, purpose: str = "attention scratch") -> None:
        """Something takes `size` bytes and gives them back at once."""
        self._event(size, purpose)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A fake tensor is what is counted here; other subclasses (a sharded DTensor) unpack themselves, as in the base class.
        result = super().__torch_dispatch__(func, tuple(t for t in types if t is not FakeTensor), args, kwargs)
        if result is not NotImplemented and (scratch := SCRATCH.get(func.name().partition(".")[0])) is not None:
            self.scratch(scratch(args))
        return result

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
        known = self._known.get(key)
        if known is not None and known[1] == size:
            return
        if known is None:
            reference = weakref.ref(storage, functools.partial(self._freed, key))
            self._purposes[key] = self._open[-1]
        else:
            reference = known[0]
        self._known[key] = (reference, size)
        self.live += size - (known[1] if known else 0)
        self._event(0, "")

    def _freed(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        super()._freed(key, reference)
        del self._purposes[key]

    def _event(self, scratch: int, purpose: str) -> None:
        self.events += 1
        if self.events == self._stop_at:
            self.before_stop()
            for key, (_, size) in self._known.items():
                self.at_stop[self._purposes[key]] += size
            if scratch:
                self.at_stop[purpose] += scratch
        if self.live + scratch > self.peak:
            self.peak, self.peak_event = self.live + scratch, self.events
