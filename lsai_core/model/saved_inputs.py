"""The inputs of checkpointed blocks in host memory, where they wait for the backward pass.

With gradient checkpointing what grows with the sequence is one tensor per block, its input. A long
block's backward pass takes seconds, and the way over PCIe a tenth of one; so each input is copied
to pinned host memory while its block computes, and comes back while the block behind it runs its
backward pass. The idea is ALST's (Bekman et al. 2025, arXiv:2506.13996).

Autograd's hooks for saved tensors do the exchange, and take the block's input only. Copies run on a
stream of their own. Beside the input in use the GPU holds at most two others: one that is being
copied to the host, and one that is being copied back. The GPU's memory of an input is freed only
after the computing stream waits for the copy, so that nothing overwrites it too early.

Where the GPU has room for some inputs but not for all, it is the last blocks' that stay there
(`inputs_on_gpu`): the backward pass needs them first and frees them before its gradients are all
there. What `grad_checkpoint: attention` keeps beside the inputs, the results of attention, stays on
the GPU.

Host buffers are pinned once, at exactly their size (torch's own pinned memory rounds up to powers
of two), and serve all steps.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lsai_core.base.limits import host_limit_gib
from lsai_core.config.precision import residual_dtype
from lsai_core.config.train import TrainConfig

Kind = tuple[torch.Size, torch.dtype]


class HostInputs:
    """Keeps block inputs in host memory. Works on any device; on a CPU the copies are plain ones.

    `first`: the inputs of so many blocks, from the first block on, go to the host; the inputs of
    the blocks after them stay on the GPU. `new_buffer`: host memory for a tensor like this one.
    """

    def __init__(self, first: int, new_buffer: Callable[[Tensor], Tensor]) -> None:
        self._first, self._new_buffer = first, new_buffer
        self._free: defaultdict[Kind, list[Tensor]] = defaultdict(list)
        self._stream: torch.cuda.Stream | None = None
        self._leaving: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._last: weakref.ref[_Kept] | None = None

    @contextlib.contextmanager
    def of_block(self, index: int, x: Tensor) -> Iterator[None]:
        """A context in which block `index` runs forward on its input `x`: where autograd saves `x`
        for the backward pass, a copy in host memory is saved instead."""
        if not torch.is_grad_enabled() or not x.requires_grad:
            # the first block of a model whose embedding does not learn, or no training at all
            yield
            return
        if index >= self._first:
            # else the input copied last would stay on the GPU until the backward pass
            self._settle()
            yield
            return
        storage, shape = x.untyped_storage()._cdata, x.shape
        kept: list[weakref.ref[_Kept]] = []

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata != storage or tensor.shape != shape:
                return tensor
            known = kept[0]() if kept else None
            if known is None:  # it is copied once, however often autograd saves it
                known = self._keep(tensor)
                kept.append(weakref.ref(known))
            return known

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
            yield

    def _keep(self, x: Tensor) -> _Kept:
        self._settle()
        buffers = self._free[x.shape, x.dtype]
        host = buffers.pop() if buffers else self._new_buffer(x)
        event = self._copy(host, x)
        self._leaving = (x, event)
        kept = _Kept(self, host, x.device, self._last)
        self._last = weakref.ref(kept)
        return kept

    def _settle(self) -> None:
        """Free the GPU's memory of the input that was copied to the host last. What the computing
        stream is given from now on runs after that copy."""
        if self._leaving is not None and self._leaving[1] is not None:
            torch.cuda.current_stream(self._leaving[0].device).wait_event(self._leaving[1])
        self._leaving = None

    @torch.no_grad()
    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy `source` into `target` on the stream of the copies, after all that the computing
        stream was given so far. Returns the event of the copy's end; None on a CPU."""
        device = source.device if source.is_cuda else target.device
        if device.type != "cuda":
            target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def give_back(self, host: Tensor) -> None:
        """Make the buffer `host` free for another input. A copy into it runs after those out of it,
        because all copies run on one stream."""
        self._free[host.shape, host.dtype].append(host)


class _Kept:
    """One block's input in host memory, and how it comes back to its device."""

    def __init__(
        self,
        owner: HostInputs,
        host: Tensor,
        device: torch.device,
        before: weakref.ref[_Kept] | None,
    ) -> None:
        self._owner, self._host, self._device, self._before = owner, host, device, before
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None

    def fetch(self) -> None:
        """Begin to copy the input back to its device, unless that has begun."""
        if self._coming is None:
            x = torch.empty_like(self._host, device=self._device)
            self._coming = (x, self._owner._copy(x, self._host))

    def take(self) -> Tensor:
        """Return the input on its device. The computing stream waits for its copy, and the copy of
        the input that the backward pass needs next begins."""
        self._owner._settle()
        self.fetch()
        assert self._coming is not None
        (x, event), self._coming = self._coming, None
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()
        return x

    def __del__(self) -> None:
        if self._coming is not None and self._coming[1] is not None:
            self._coming[1].synchronize()  # nobody waited for it: an aborted backward pass
        self._owner.give_back(self._host)


def blocks_on_host(config: TrainConfig) -> int:
    """How many blocks, from the first one on, keep their inputs on the host."""
    if config.saved_inputs == "gpu":
        return 0
    # A search for the largest model also tries smaller ones than the config's.
    return max(0, config.model.n_layers - config.inputs_on_gpu)


def host_gib(config: TrainConfig) -> float:
    """GiB of host memory that the inputs of the blocks take, for one process."""
    tokens = config.batch_size * config.seq_len / config.parallel.cp
    return (
        blocks_on_host(config)
        * tokens
        * config.model.d_model
        * residual_dtype(config).itemsize
        / 2**30
    )


def require_host_memory(config: TrainConfig) -> None:
    """MemoryError if this machine's memory cannot hold the inputs of its processes."""
    # As torchrun sets it, or Slurm.
    processes = int(
        os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1
    )
    needed, allowed = host_gib(config) * processes, host_limit_gib()
    if needed > allowed:
        raise MemoryError(
            f"saved_inputs: host needs {needed:.0f} GiB of host memory; {allowed:.0f} GiB may be "
            f"used"
        )


def _unpacked(kept: Any) -> Tensor:
    return kept.take() if isinstance(kept, _Kept) else kept


def host_buffer(like: Tensor) -> Tensor:
    """Host memory for a tensor of this shape and dtype, pinned (page-locked) if it comes from a
    GPU."""
    host = torch.empty(like.shape, dtype=like.dtype)
    if like.is_cuda:
        address, cudart = host.data_ptr(), torch.cuda.cudart()
        # portable, as torch's pinned memory
        torch.cuda.check_error(cudart.cudaHostRegister(address, host.nbytes, 1))
        weakref.finalize(host, cudart.cudaHostUnregister, address)
    return host
