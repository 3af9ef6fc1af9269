"""What one process does for a point: its inputs, the step (forward, then backward), and its share
of the answer.

Before each step the processes meet, first on their hosts, then, behind a gigabyte that is
overwritten to empty the caches and to give the hosts a head start, on the GPUs: a tiny all-reduce,
so that all begin within microseconds. From there each takes its own time, as for one call
(`attention.clock`).

A traced step tells when each process computed and when it communicated (on a GPU; a kernel also
runs while it waits for a slower process), and what communication was not hidden: time in which it
ran and nothing else. Clocks are aligned at the end of the all-reduce. On a CPU the events are
operators of the host's thread: what lies between is waiting, copying and Python.

For a comparison with float64 inputs are drawn whole and equal on every process, and the first one
holds the result against the exact one.
"""

import itertools
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from lsai_core.attention import attention
from lsai_core.attention.choice import tile_backend
from lsai_core.base.errors import Unavailable
from lsai_core.context import ContextParallel
from lsai_core.context.heads import key_heads
from lsai_core.context.peer import torch_missing, torch_sent_bytes
from lsai_core.parallel.world import World
from lsai_core.profiling.steptime import StepTimer
from lsai_core.profiling.trace import KernelEvent, busy_ms, exposed_ms, kernel_events
from lsai_lab.benches.attention.clock import MIB, Clock, Step, random_inputs, repeats_in
from lsai_lab.benches.attention.errors import example, relative_errors, values
from lsai_lab.benches.context.config import ALONE, ONE_TORCH, ContextBenchConfig, Point

TORCH_KERNEL = "sdpa_cudnn"  # of torch's context parallelism, see lsai_core.context.peer
COMMUNICATION = "communication"
_MARK = "context step"


class Rank(Clock):
    """This process's part of every point. Every method is collective: all processes of `world` must
    call it alike."""

    def __init__(self, config: ContextBenchConfig, world: World, device: torch.device) -> None:
        super().__init__(device, config.torch_dtype)
        self.config, self.world = config, world
        self._flag = torch.zeros(1, device=device)
        self._start_together()  # NCCL wants a collective before ranks talk in pairs

    def measure(self, point: Point) -> dict[str, Any]:
        """This process's answer: `kernel`, `plan_imbalance`, and what `_timed`, `_traced` or
        `_errors` say. UserError or Unavailable if the method cannot work here."""
        config, before = self.config, 0
        if point.measure != "error":
            example.cache_clear()  # its memory is for what is timed
        if self.on_gpu:
            torch.cuda.empty_cache()  # another length's blocks are of little use
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        cp = (
            None
            if point.method in ALONE
            else ContextParallel(point.method, point.length, kernel=config.kernel)
        )
        kernel = self._kernel(cp, point)
        facts = {"kernel": kernel, "plan_imbalance": cp.plan.imbalance() if cp else 1.0}
        if point.measure == "error":
            return facts | self._errors(cp, kernel, point.length)
        shape = config.shape(point.length // (config.processes if cp else 1))
        seed = config.seed + 1000 * self.world.rank + point.length % 997
        step = _step(cp, kernel, random_inputs(shape, config.torch_dtype, self.device, seed))
        found = self._traced(step) if point.measure == "trace" else self._timed(step, before)
        if cp is not None and cp.method.peer:
            _, k, v = step.qkv
            forward, backward = (
                torch_sent_bytes(k, v, cp.size, backward=b) / MIB for b in (False, True)
            )
            found |= {"sent_forward_mib": forward, "sent_training_mib": forward + backward}
        return facts | found

    def _kernel(self, cp: ContextParallel | None, point: Point) -> str:
        """The kernel that computes a method's tiles."""
        if point.method == ONE_TORCH or (cp and cp.method.peer):
            if (reason := torch_missing()) is not None:
                raise Unavailable(f"torch's context parallelism {reason}")
            return TORCH_KERNEL
        config, pieces, length = self.config, 1, point.length
        if cp is not None:
            pieces = cp.setting.pieces(cp.size)
            length = cp.layout.length // cp.size * pieces
        (first, end), *_ = key_heads(config.heads, config.kv_heads, pieces)
        grouped = config.heads // pieces != end - first
        backend = tile_backend(
            config.kernel,
            self.device,
            config.torch_dtype,
            config.head_dim,
            grouped=grouped,
            length=length,
        )
        return backend.name

    def _start_together(self) -> None:
        """Return when all have called; on GPUs, what is queued next begins when all have come
        here."""
        self.world.barrier()
        self.overwritten.zero_()
        if self.world.size > 1:
            dist.all_reduce(self._flag)

    def _once(self, step: Step) -> tuple[list[float], list[int]]:
        """Of forward, and of forward plus backward: this process's milliseconds, and the bytes that
        it sent."""
        self._start_together()
        timer, before, sent = StepTimer(self.device), step.sent(), []
        timer.mark()
        for one in step.passes:
            one()
            timer.mark()
            sent.append(step.sent() - before)
        return [*itertools.accumulate(timer.durations_ms())], sent

    def _timed(self, step: Step, memory_before: int) -> dict[str, Any]:
        """`forward_ms` and `training_ms` of every repeat, `memory_gib` (the peak beyond
        `memory_before` bytes; None on a CPU), `sent_forward_mib`, `sent_training_mib` and
        `first_call_s` (wall time of the first step)."""
        began = time.perf_counter()
        self._once(step)
        first_call_s = time.perf_counter() - began
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        ms, _ = self._once(step)
        peak = (torch.cuda.max_memory_allocated() - memory_before) / 2**30 if self.on_gpu else None
        slowest_ms = max(self.world.gather(ms[1]))
        taken = [self._once(step) for _ in range(repeats_in(self.config.point_ms, slowest_ms))]
        found: dict[str, Any] = {"memory_gib": peak, "first_call_s": first_call_s}
        for number, name in enumerate(("forward", "training")):
            found[f"{name}_ms"] = [ms[number] for ms, _ in taken]
            found[f"sent_{name}_mib"] = taken[-1][1][number] / MIB
        return found

    def _traced(self, step: Step) -> dict[str, Any]:
        """Of the second of two traced steps `sent_training_mib`, `step_ms`, `compute_ms` (the time
        in which anything but communication ran), and on a GPU `communication_ms` and `exposed_ms`,
        else None."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        window = schedule(wait=0, warmup=1, active=1, repeat=1)
        with profile(activities=activities, schedule=window, acc_events=True) as prof:
            for _ in range(2):
                self._start_together()
                before = step.sent()
                with torch.profiler.record_function(_MARK):
                    step.forward()
                    step.backward()
                if self.on_gpu:
                    torch.cuda.synchronize()
                sent = step.sent() - before
                prof.step()
        share = _gpu_share(kernel_events(prof)) if self.on_gpu else _cpu_share(prof)
        return {"sent_training_mib": sent / MIB, **share}

    def _errors(self, cp: ContextParallel | None, kernel: str, length: int) -> dict[str, Any]:
        """On the first process: `relative_errors`, with eager's beside them."""
        case = self.config.shape(length), self.config.torch_dtype, self.device, self.config.seed
        whole = random_inputs(*case)
        found = values(_step(cp, kernel, [cp.shard(x) for x in whole] if cp else whole))
        if cp is not None:
            found = [cp.unshard(x) for x in found]
        if not self.world.is_main:
            return {}
        _, exact, bounds = example(*case)
        return {**bounds, **relative_errors(found, exact)}


def _step(cp: ContextParallel | None, kernel: str, inputs: list[Tensor]) -> Step:
    if cp is None:
        return Step(partial(attention, backend=kernel), inputs)
    return Step(cp.attention, inputs, sent=lambda: cp.sent_bytes)


def _gpu_share(events: list[KernelEvent]) -> dict[str, Any]:
    started = [event.end_ms for event in events if "allreduce" in event.name.lower()]
    start = min(started, default=min((event.start_ms for event in events), default=0.0))
    own = [event for event in events if event.start_ms >= start]
    return {
        "step_ms": max((event.end_ms for event in own), default=start) - start,
        "compute_ms": busy_ms([event for event in own if event.label != COMMUNICATION]) or 0.0,
        "communication_ms": busy_ms([event for event in own if event.label == COMMUNICATION])
        or 0.0,
        "exposed_ms": exposed_ms(own, COMMUNICATION) or 0.0,
    }


def _cpu_share(prof: profile) -> dict[str, Any]:
    spans = [
        (e.name, e.time_range.start / 1e3, e.time_range.end / 1e3) for e in prof.events() or []
    ]
    start, end = next((a, b) for name, a, b in spans if name == _MARK and b)
    busy, until = 0.0, start
    for a, b in sorted(
        (a, b) for name, a, b in spans if name.startswith("aten::") and start <= a < end
    ):
        busy += max(0.0, b - max(a, until))
        until = max(until, b)
    return {
        "step_ms": end - start,
        "compute_ms": busy,
        "communication_ms": None,
        "exposed_ms": None,
    }
