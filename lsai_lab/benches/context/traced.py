"""One traced step: when each process computed and when it communicated, and what communication was not hidden.

On a GPU the events are kernels. A communication kernel also runs while it waits for a slower process; time in which it ran and
nothing else is exposed. Clocks of different processes are aligned at the end of the all-reduce behind which the step begins.
On a CPU the events are operators of the host's thread: they tell compute; what lies between is waiting, copying and Python,
which the profiler does not tell apart, so that communication is not known there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lsai_core.profiling.trace import KernelEvent, busy_ms, exposed_ms, kernel_events
from lsai_lab.benches.context.timing import MIB, SharedClock, Step

Intervals = list[tuple[float, float]]
COMMUNICATION = "communication"
_MARK = "context step"
# Intervals of a row's timeline: gaps shorter than this share of the step are drawn over anyway.
_SMALLEST = 0.001


def traced(step: Step, clock: SharedClock) -> dict[str, Any]:
    """One process's share of a traced forward and backward pass, the second of two; all processes must call.

    `step_ms`; `compute_ms`, the time in which anything but communication ran; on a GPU `communication_ms` and
    `exposed_ms`, else None; `timeline`: merged [start, end] in ms since the common start, by `compute` and `communication`.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if clock.on_gpu else [])]
    with contextlib.ExitStack() as stack:
        window = schedule(wait=0, warmup=1, active=1, repeat=1)
        prof = stack.enter_context(profile(activities=activities, schedule=window, acc_events=True))
        for _ in range(2):
            clock.start_together()
            sent = step.sent()
            with torch.profiler.record_function(_MARK):
                step.forward()
                step.backward()
            if clock.on_gpu:
                torch.cuda.synchronize()
            sent = step.sent() - sent
            prof.step()
    share = _gpu_share(kernel_events(prof)) if clock.on_gpu else _cpu_share(prof)
    return {"sent_training_mib": sent / MIB, **share}


def _gpu_share(events: list[KernelEvent]) -> dict[str, Any]:
    started = [event.end_ms for event in events if "allreduce" in event.name.lower()]
    start = min(started, default=min((event.start_ms for event in events), default=0.0))
    mine = [event for event in events if event.start_ms >= start]
    communication = [event for event in mine if event.label == COMMUNICATION]
    compute = [event for event in mine if event.label != COMMUNICATION]
    found = {name: _shifted(some, start) for name, some in (("compute", compute), (COMMUNICATION, communication))}
    step_ms = max((event.end_ms for event in mine), default=start) - start
    return {
        "step_ms": step_ms,
        "compute_ms": busy_ms(compute) or 0.0,
        "communication_ms": busy_ms(communication) or 0.0,
        "exposed_ms": exposed_ms(mine, COMMUNICATION) or 0.0,
        "timeline": {name: merged(intervals, _SMALLEST * step_ms) for name, intervals in found.items()},
    }


def _shifted(events: Iterable[KernelEvent], start: float) -> Intervals:
    return [(event.start_ms - start, event.end_ms - start) for event in events]


def _cpu_share(prof: profile) -> dict[str, Any]:
    events = prof.events() or []
    start, end = next(
        (e.time_range.start / 1e3, e.time_range.end / 1e3) for e in events if e.name == _MARK and e.time_range.end
    )
    compute = [(e.time_range.start / 1e3 - start, e.time_range.end / 1e3 - start) for e in events if e.name.startswith("aten::")]  # fmt: skip
    inside = [(a, b) for a, b in compute if 0 <= a < end - start]
    return {
        "step_ms": end - start,
        "compute_ms": sum(b - a for a, b in merged(inside, 0.0)),
        "communication_ms": None,
        "exposed_ms": None,
        "timeline": {"compute": merged(inside, _SMALLEST * (end - start)), COMMUNICATION: []},
    }


def merged(intervals: Intervals, gap: float) -> Intervals:
    """Ascending intervals without overlap, those closer than `gap` as one; rounded to microseconds."""
    found: list[list[float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1] + gap:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return [(round(start, 3), round(end, 3)) for start, end in found]
