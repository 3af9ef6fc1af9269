"""FSDP's two collectives as copies between neighbours, for its extension points (`set_custom_all_gather`, `set_custom_reduce_scatter`).

NCCL's collectives are kernels: while they run they hold multiprocessors that the layers beside them would use, and a step whose
communication is hidden completely can still become slower. Copies are the work of copy engines. Gathering needs nothing else: each process
puts its slice into its window, and takes the others' from theirs. To sum, each process writes what belongs to a neighbour into that
neighbour's window, and the neighbour adds up what has arrived, a short kernel of its own, in fp32 if that is the gradients' type and
always in the order of the ranks.

Windows are opened at first use and are small: what is larger passes in pieces. All work is enqueued on the caller's stream, where a
barrier before the copies says that the windows are full (or free), and one after them that they may be filled again.

Like low-contention collectives of PyTorch's symmetric memory (`torch/distributed/_symmetric_memory`), written for FSDP2's buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lsai_core.parallel.window import Window, open_window

MIB = 2**20
# What a window holds: of a gathering one piece of the own slice, of a sum a piece from every process.
GATHER_BYTES, REDUCE_BYTES = 64 * MIB, 512 * MIB
_ALIGNED = 16  # of a piece's elements, so that every piece begins at an aligned address


@dataclass
class Windows:
    """The two windows of a model, opened at first use; they need not hold more than what passes at once (bytes)."""

    slice_bytes: int
    input_bytes: int
    _open: tuple[Window, Window] | None = None

    def opened(self, group: dist.ProcessGroup, device: torch.device) -> tuple[Window, Window]:
        """That of gathering and that of sums."""
        if self._open is None:
            gather, reduce = min(self.slice_bytes, GATHER_BYTES), min(self.input_bytes, REDUCE_BYTES)
            self._open = open_window(gather, group, device), open_window(reduce, group, device)
        return self._open


class _Copied:
    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CopiedAllGather(_Copied):
    """`output` (R * n,) becomes the `input` (n,) of all R processes; this process's place in it must be its `input` already."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        (window, _), own, size = self._windows.opened(group, output_tensor.device), group.rank(), group.size()
        mine, all_ = input_tensor.view(torch.uint8), output_tensor.view(torch.uint8).view(size, -1)
        for begin in range(0, mine.numel(), window.size):
            piece = slice(begin, min(begin + window.size, mine.numel()))
            held = piece.stop - piece.start
            window.of(own)[:held].copy_(mine[piece])
            window.barrier()
            for step in range(1, size):
                rank = (own + step) % size  # no two take from the same at a time
                all_[rank, piece].copy_(window.of(rank)[:held])
            window.barrier()


class CopiedReduceScatter(_Copied):
    """`output` (n,) becomes the sum (or mean) over the R processes of their `input` (R * n,) at this process's place."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if not (op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG):
            raise NotImplementedError(f"copies sum or average, and not {op}")
        (_, window), own, size = self._windows.opened(group, output_tensor.device), group.rank(), group.size()
        parts, count = input_tensor.view(size, -1), output_tensor.numel()
        room = window.size // (size * input_tensor.element_size())
        step = max(1, room // _ALIGNED * _ALIGNED)
        add_up = torch.mean if op == dist.ReduceOp.AVG else torch.sum

        def arrived(rank: int, held: int) -> Tensor:
            """What lies in the window of `rank`, by sender."""
            sent = window.of(rank)[: size * held * input_tensor.element_size()]
            return sent.view(input_tensor.dtype).view(size, held)

        for begin in range(0, count, step):
            piece = slice(begin, min(begin + step, count))
            held = piece.stop - piece.start
            window.barrier()  # all have added up what lay here before
            for turn in range(size):
                rank = (own + turn) % size
                arrived(rank, held)[own].copy_(parts[rank, piece])
            window.barrier()
            add_up(arrived(own, held), 0, out=output_tensor[piece])
