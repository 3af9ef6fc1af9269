"""Time, memory and bytes of one step (forward, then backward) that several processes take together.

Before each step the processes meet, first on their hosts, then, behind a gigabyte that is overwritten to empty the caches and
to give the hosts a head start, on the GPUs: a tiny all-reduce, so that all begin within microseconds. From there each takes its own
time with CUDA events (on a CPU, the host's clock). A step has taken as long as its slowest process.

The first step may compile and open connections and is kept apart; the second tells memory and how many repeats fit into a
point's time. Where a step is known to be long the first does both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lsai_core.parallel.world import World
from lsai_lab.benches.attention.clock import LONG_MS, MIB, mark

_MIN_REPEATS, _MAX_REPEATS = 3, 20
_OVERWRITTEN = {"cuda": 2**30, "cpu": 2**26}


@dataclass
class Step:
    """Attention on this process's inputs, both passes. `sent()`: bytes that this process has sent to others so far."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    qkv: list[Tensor]
    dout_BSHD: Tensor
    sent: Callable[[], int] = lambda: 0
    out_BSHD: Tensor | None = None
    gradients: tuple[Tensor, ...] = field(default=())

    def forward(self) -> None:
        self.gradients = ()
        self.out_BSHD = self.function(*self.qkv)

    def backward(self) -> None:
        """Keeps the gradients, so that they count as memory."""
        assert self.out_BSHD is not None
        self.gradients = torch.autograd.grad(self.out_BSHD, self.qkv, self.dout_BSHD)
        self.out_BSHD = None


class SharedClock:
    """Times steps that all processes of `world` take on `device`; holds the memory that it overwrites."""

    def __init__(self, device: torch.device, world: World) -> None:
        self.world, self.on_gpu = world, device.type == "cuda"
        size = _OVERWRITTEN[device.type]
        if self.on_gpu:
            size = min(size, torch.cuda.mem_get_info(device)[0] // 16)
        self._cold = torch.empty(size, dtype=torch.uint8, device=device)
        self._flag = torch.zeros(1, device=device)
        self.start_together()  # NCCL wants a collective before ranks talk in pairs

    def start_together(self) -> None:
        """Return when all have called; on GPUs, what is queued next begins when all have come here."""
        self.world.barrier()
        self._cold.zero_()
        if self.world.size > 1:
            dist.all_reduce(self._flag)

    def once(self, step: Step) -> tuple[list[float], list[int]]:
        """Of forward, and of forward plus backward: this process's milliseconds, and the bytes that it sent."""
        self.start_together()
        marks, sent = [mark(self.on_gpu)], [step.sent()]
        for one in (step.forward, step.backward):
            one()
            marks.append(mark(self.on_gpu))
            sent.append(step.sent())
        if self.on_gpu:
            torch.cuda.synchronize()
        ms = [marks[0].elapsed_time(end) if self.on_gpu else (end - marks[0]) * 1e3 for end in marks[1:]]
        return ms, [total - sent[0] for total in sent[1:]]

    def measure(self, step: Step, *, point_ms: float, expected_ms: float | None, memory_before: int) -> dict[str, Any]:
        """What this process measured; all must call, with the same `expected_ms` of a step, if an earlier point tells.

        `forward_ms` and `training_ms` of every repeat, `memory_gib` (the peak beyond `memory_before` bytes; None on a CPU),
        `sent_forward_mib`, `sent_training_mib` and `first_call_s` (wall time of the first step).
        """
        began = time.perf_counter()
        ms, _ = self.once(step)
        first_call_s = time.perf_counter() - began
        if expected_ms is None or expected_ms < LONG_MS:
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            ms, _ = self.once(step)
        peak = (torch.cuda.max_memory_allocated() - memory_before) / 2**30 if self.on_gpu else None
        slowest_ms = max(self.world.gather(ms[1]))
        least = 1 if slowest_ms > LONG_MS else _MIN_REPEATS
        repeats = max(least, min(_MAX_REPEATS, int(point_ms / max(slowest_ms, 1e-3))))
        taken = [self.once(step) for _ in range(repeats)]
        sent = taken[-1][1]
        return {
            "forward_ms": [ms[0] for ms, _ in taken],
            "training_ms": [ms[1] for ms, _ in taken],
            "memory_gib": peak,
            "sent_forward_mib": sent[0] / MIB,
            "sent_training_mib": sent[1] / MIB,
            "first_call_s": first_call_s,
        }
