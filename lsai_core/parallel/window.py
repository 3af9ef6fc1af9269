"""Memory of the neighbours on one host: every process of a group opens a window that all of them read and write by plain copies.

On GPUs a window is PyTorch's symmetric memory, mapped into every process over NVLink: such a copy is work for a copy engine of the GPU
and takes none of its multiprocessors. On a CPU it is a file that all map. In a prediction, whose process group only pretends to
communicate, every neighbour is this process.
"""

from __future__ import annotations

import os
import socket
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lsai_core.errors import Unavailable


class Window(ABC):
    """`of(rank)`: the bytes (uint8, equally many) that this process of the group has put up."""

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def of(self, rank: int) -> Tensor: ...

    @abstractmethod
    def barrier(self) -> None:
        """What any process has enqueued on its current stream before is done before what any of them enqueues afterwards."""


def open_window(size: int, group: dist.ProcessGroup, device: torch.device) -> Window:
    """A window of `size` bytes on `device` for each process of `group`; all of them call this together.

    Raises Unavailable if they are not on one host, or their GPUs cannot reach each other's memory.
    """
    if dist.get_backend(group) == "fake":
        return _Pretended(size, device)
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), device.index), group=group)
    if (hosts := len({host for host, _ in places})) > 1:
        raise Unavailable(f"parallel.collectives: copies need processes of one host, and these are on {hosts}")
    if device.type == "cuda" and not all(_reaches(device.index, peer) for _, peer in places):
        raise Unavailable("parallel.collectives: copies need GPUs that reach each other's memory, and these do not")
    return _OnGPU(size, group, device) if device.type == "cuda" else _Mapped(size, group)


def _reaches(own: int, peer: int) -> bool:
    # A process to which its launcher shows one GPU only cannot ask about the others.
    return own == peer or peer >= torch.cuda.device_count() or torch.cuda.can_device_access_peer(own, peer)


class _OnGPU(Window):
    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        super().__init__(size)
        self._own = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._memory = symmetric.rendezvous(self._own, group)
        self._all = [self._memory.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())]

    def of(self, rank: int) -> Tensor:
        return self._all[rank]

    def barrier(self) -> None:
        self._memory.barrier()


class _Mapped(Window):
    def __init__(self, size: int, group: dist.ProcessGroup) -> None:
        super().__init__(size)
        name: list[Any] = [None]
        if group.rank() == 0:
            handle, name[0] = tempfile.mkstemp(prefix="lsai-window-")
            os.ftruncate(handle, size * group.size())
            os.close(handle)
        dist.broadcast_object_list(name, group=group, group_src=0)
        every = torch.from_file(name[0], shared=True, size=size * group.size(), dtype=torch.uint8)
        self._all, self._group = every.view(group.size(), size), group
        self.barrier()
        if group.rank() == 0:
            Path(name[0]).unlink()  # those who have mapped it keep it

    def of(self, rank: int) -> Tensor:
        return self._all[rank]

    def barrier(self) -> None:
        dist.barrier(group=self._group)


class _Pretended(Window):
    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size)
        self._own = torch.empty(size, dtype=torch.uint8, device=device)

    def of(self, rank: int) -> Tensor:
        return self._own

    def barrier(self) -> None:
        pass
