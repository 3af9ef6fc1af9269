"""Count the bytes of live tensors on the CPU, where the allocator keeps no statistics.

A dispatch mode sees the result of each operator; views share their storage; a weak reference to the
storage fires when its memory is freed, also for activations that only the autograd graph holds.
Births minus deaths is the live total.

What is not seen: scratch memory inside an operator, and memory outside PyTorch. PyTorch runs
compiled functions eagerly while a dispatch mode is on, so a compiled model shows the memory of its
eager form.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lsai_core.optimizers.base import held_here

_PLAIN = (torch.Tensor, torch.nn.Parameter)
Seed = torch.nn.Module | torch.optim.Optimizer | torch.Tensor


class LiveTensors(TorchDispatchMode):
    """While active (`with tracker:`, repeatedly), counts every CPU storage that an operator reads
    or creates.

    `live` and `peak` are in bytes; `peak` is the largest `live` since `reset_peak()`. Storages that
    die while the mode is off are still subtracted. The backward pass is seen too: on the CPU it
    runs in the calling thread.
    """

    device_type = "cpu"  # of the storages that count

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        # Sharded training frees and regrows parameters by resizing storages, which is no operator
        # and needs a hook of its own (PyTorch's memory tracker does the same).
        original = self._resize

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            original(storage, size)
            self._see_storage(storage)
            return storage

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def reset_peak(self) -> None:
        """Begin a new peak at what is live now."""
        self.peak = self.live

    def add(self, seeds: Iterable[Seed]) -> None:
        """Count what exists already: parameters, buffers and gradients of modules, optimizer
        states, single tensors."""
        for seed in seeds:
            for tensor in _tensors_of(seed):
                self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            # A tensor subclass (a sharded DTensor, say): let it unpack itself; its inner operators
            # come by here.
            return NotImplemented
        for value in tree_leaves((args, kwargs)):
            self._see(value)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            self._see(value)
        return result

    def _see(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.device.type != self.device_type:
            return
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                self._see(getattr(value, name))
            return
        if value.layout is torch.strided:
            self._see_storage(value.untyped_storage())

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None:
            # The Python storage object lives exactly as long as the C++ one, so this fires when the
            # memory is freed.
            self._known[key] = (weakref.ref(storage, functools.partial(self._freed, key)), size)
        elif known[1] != size:  # resized in place, as sharded parameters are
            self._known[key] = (known[0], size)
        else:
            return
        self.live += size - (known[1] if known else 0)
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        self.live -= self._known.pop(key)[1]


def _tensors_of(seed: Seed) -> Iterator[torch.Tensor]:
    if isinstance(seed, torch.Tensor):
        yield seed
        if seed.is_leaf and seed.grad is not None:
            yield seed.grad
    elif isinstance(seed, torch.optim.Optimizer):
        yield from (
            leaf
            for leaf in tree_leaves(list(held_here(seed).state.values()))
            if isinstance(leaf, torch.Tensor)
        )
    else:
        for tensor in (*seed.parameters(), *seed.buffers()):
            yield from _tensors_of(tensor)
