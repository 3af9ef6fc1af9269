"""Time, memory and bytes of one step (forward, then backward) that several processes take together.

Before each step the processes meet, first on their hosts, then, behind a gigabyte that is overwritten to empty the caches and
to give the hosts a head start, on the GPUs: a tiny all-reduce, so that all begin within microseconds. From there each takes its own
time with CUDA events (on a CPU, the host's clock). A step has taken as long as its slowest process.

The first step may compile and open connections and is kept apart; the second tells memory and how many repeats fit into a
point's time. Where a step is known to be long the first does both.

One traced step: when each process computed and when it communicated, and what communication was not hidden.

On a GPU the events are kernels. A communication kernel also runs while it waits for a slower process; time in which it ran and
nothing else is exposed. Clocks of different processes are aligned at the end of the all-reduce behind which the step begins.
On a CPU the events are operators of the host's thread: they tell compute; what lies between is waiting, copying and Python,
which the profiler does not tell apart, so that communication is not known there.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from lsai_core.parallel.world import World
from lsai_core.profiling.trace import KernelEvent, busy_ms, exposed_ms, kernel_events
from lsai_lab.benches.attention.clock import LONG_MS, MIB, Clock, Step, mark, repeats_in

COMMUNICATION = "communication"
_MARK = "context step"


class SharedClock(Clock):
    """Times steps that all processes of `world` take on `device`."""

    def __init__(self, device: torch.device, world: World) -> None:
        super().__init__(device)
        self.world, self._flag = world, torch.zeros(1, device=device)
        self.start_together()  # NCCL wants a collective before ranks talk in pairs

    def start_together(self) -> None:
        """Return when all have called; on GPUs, what is queued next begins when all have come here."""
        self.world.barrier()
        self.overwritten.zero_()
        if self.world.size > 1:
            dist.all_reduce(self._flag)

    def once(self, step: Step) -> tuple[list[float], list[int]]:
        """Of forward, and of forward plus backward: this process's milliseconds, and the bytes that it sent."""
        self.start_together()
        start, ends, before, sent = mark(self.on_gpu), [], step.sent(), []
        for one in step.passes:
            one()
            ends.append((start, mark(self.on_gpu)))
            sent.append(step.sent() - before)
        return self.durations_ms(ends), sent

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
        taken = [self.once(step) for _ in range(repeats_in(point_ms, slowest_ms))]
        found: dict[str, Any] = {"memory_gib": peak, "first_call_s": first_call_s}
        for number, name in enumerate(("forward", "training")):
            found[f"{name}_ms"] = [ms[number] for ms, _ in taken]
            found[f"sent_{name}_mib"] = taken[-1][1][number] / MIB
        return found


def traced(step: Step, clock: SharedClock) -> dict[str, Any]:
    """One process's share of a traced forward and backward pass, the second of two; all processes must call.

    `step_ms`; `compute_ms`, the time in which anything but communication ran; on a GPU `communication_ms` and `exposed_ms`, else None.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if clock.on_gpu else [])]
    window = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=activities, schedule=window, acc_events=True) as prof:
        for _ in range(2):
            clock.start_together()
            before = step.sent()
            with torch.profiler.record_function(_MARK):
                step.forward()
                step.backward()
            if clock.on_gpu:
                torch.cuda.synchronize()
            sent = step.sent() - before
            prof.step()
    share = _gpu_share(kernel_events(prof)) if clock.on_gpu else _cpu_share(prof)
    return {"sent_training_mib": sent / MIB, **share}


def _gpu_share(events: list[KernelEvent]) -> dict[str, Any]:
    started = [event.end_ms for event in events if "allreduce" in event.name.lower()]
    start = min(started, default=min((event.start_ms for event in events), default=0.0))
    own = [event for event in events if event.start_ms >= start]
    return {
        "step_ms": max((event.end_ms for event in own), default=start) - start,
        "compute_ms": busy_ms([event for event in own if event.label != COMMUNICATION]) or 0.0,
        "communication_ms": busy_ms([event for event in own if event.label == COMMUNICATION]) or 0.0,
        "exposed_ms": exposed_ms(own, COMMUNICATION) or 0.0,
    }


def _cpu_share(prof: profile) -> dict[str, Any]:
    spans = [(e.name, e.time_range.start / 1e3, e.time_range.end / 1e3) for e in prof.events() or []]
    start, end = next((a, b) for name, a, b in spans if name == _MARK and b)
    busy, until = 0.0, start
    for a, b in sorted((a, b) for name, a, b in spans if name.startswith("aten::") and start <= a < end):
        busy += max(0.0, b - max(a, until))
        until = max(until, b)
    return {"step_ms": end - start, "compute_ms": busy, "communication_ms": None, "exposed_ms": None}
