"""A world of several processes: torch.distributed with NCCL between GPUs and gloo between CPUs.

Who is who comes from the environment, as torchrun sets it (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT). Beside the GPUs' communicator there is always one for the hosts, which
carries what must not wait for a GPU: requests to stop, and checkpoints.
"""

from __future__ import annotations

import datetime
import os
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lsai_core.parallel.world import World

T = TypeVar("T")
# A process that hangs without dying is noticed after this time (NCCL's watchdog, gloo's timeout).
TIMEOUT = datetime.timedelta(minutes=10)


class ProcessWorld(World):
    """The processes of torch.distributed's default group. Make it with `connect`, end it with
    `close`."""

    launched = True

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Threads of their own order of calls need groups of their own.
        self._stop_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._stop: tuple[dist.Work, Tensor] | None = None

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.size

    def sum(self, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._stop_group)
        return values  # type: ignore[return-value]

    def barrier(self) -> None:
        dist.barrier(group=self._stop_group)

    def agree_to_stop(self, asked: bool) -> bool:
        # Started now, read one step later: by then the others' answers have long arrived.
        earlier, flag = self._stop, torch.tensor([int(asked)])
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._stop_group, async_op=True)
        self._stop = (work, flag)
        if earlier is None:
            return False
        earlier[0].wait()
        return bool(earlier[1].item())

    def close(self) -> None:
        """Leave the group, in good order; not for processes that end because of an error."""
        if self._stop is not None:
            self._stop[0].wait()
        dist.destroy_process_group()


def connect(device: torch.device) -> ProcessWorld:
    """Join the other processes of this run. On GPUs, this process takes the one numbered
    LOCAL_RANK, or the only one it sees."""
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    return ProcessWorld()
