"""What a training run measures beside its loss and step times, and which steps that disturbs.

A few early steps run with the memory meter on. If asked for, four later steps run under the
profiler, whose kernels go to `kernels.json`, and the whole run's allocations are recorded for a
snapshot. The steps that an instrument slows down are left out of the speed figures; in the
others a clock reads the host's time in each phase, and a thread the GPU's clock and power.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from lsai_core.base.files import write_json
from lsai_core.config.train import ProfileConfig
from lsai_core.profiling import trace
from lsai_core.profiling.memory import PhaseMemory
from lsai_core.profiling.steptime import PhaseClock, PowerMeter

TRACED_STEPS = 3


class Instruments:
    """The instruments of one run that begins (or resumes) at step `first`. Use as a context manager
    around the loop."""

    def __init__(
        self,
        config: ProfileConfig,
        device: torch.device,
        folder: Path,
        seeds: tuple[Any, ...],
        first: int,
    ) -> None:
        self.config, self.folder = config, folder
        self._meter, self._clock = PhaseMemory(device, seeds=seeds), PhaseClock()
        self._power = PowerMeter(device)
        # From the second step on the optimizer has its states, so that every phase is seen at full
        # size.
        self._metered = range(first + 1, first + 1 + config.memory_steps)
        start = max(self._metered.stop, config.skip_steps)
        # The profiler itself needs one step to warm up before those it keeps.
        self._traced = range(start, start + TRACED_STEPS + 1) if config.trace else range(0)
        self._stack, self._profiler = contextlib.ExitStack(), contextlib.ExitStack()
        self._prof: Any = None
        self._kernels: dict[str, float] = {}
        self._warm_up = range(first, max(first + 2, config.skip_steps))
        self.untimed = {*self._warm_up, *self._metered, *self._traced}

    def __enter__(self) -> Instruments:
        if self.config.snapshot:
            self._stack.enter_context(trace.memory_snapshot(self.folder / "memory-snapshot.pickle"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._power.on = None
        self._profiler.__exit__(*error)
        self._stack.__exit__(*error)

    def before(self, step: int) -> PhaseMemory | PhaseClock | None:
        """To be called before a step; returns what is to measure its phases: the memory meter, the
        clock in a timed step, or nothing."""
        if self._traced and step == self._traced.start:
            self._prof = self._profiler.enter_context(
                trace.trace(self.folder / "trace.json.gz", TRACED_STEPS)
            )
        self._power.on = step not in self.untimed
        if step in self._metered:
            return self._meter
        return None if step in self.untimed else self._clock

    def after(self, step: int) -> bool:
        """To be called after a step; True if that took time of its own (reading a trace takes
        seconds)."""
        if step not in self._traced:
            return False
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # or the kernels of the step before would fall into the trace
        self._prof.step()
        if step != self._traced[-1]:
            return False
        self._read_trace()
        self._profiler.close()
        return True

    def _read_trace(self) -> None:
        events, per_step = trace.kernel_events(self._prof), 1 / TRACED_STEPS
        self._kernels = {
            trace.result_name(label): ms * per_step
            for label, ms in trace.kernel_breakdown(events).items()
            if ms
        }
        if (busy := trace.busy_ms(events)) is not None:
            self._kernels["gpu_busy_ms"] = busy * per_step
        if (exposed := trace.exposed_ms(events, "communication")) is not None:
            self._kernels["exposed_communication_ms"] = exposed * per_step
        kernels = trace.top_kernels(events, per=TRACED_STEPS)
        write_json(self.folder / "kernels.json", {"per": "step", "kernels": kernels})

    @property
    def steps_needed(self) -> int:
        """So many steps must a run have that is to time one of them."""
        return 2 + max(self.untimed)

    def uses(self) -> str:
        """Which steps, counted from 0, are not timed, and for what, in words."""
        uses = {
            "warm up (profile.skip_steps, and the first two)": self._warm_up,
            "measure memory (profile.memory_steps)": self._metered,
            "are traced (profile.trace)": self._traced,
        }
        return ", ".join(
            f"{steps.start} to {steps.stop - 1} {what}" for what, steps in uses.items() if steps
        )

    def results(self) -> dict[str, Any]:
        """Flat results of the instruments; per traced step `kernel_<class>_ms` and, on a GPU,
        `gpu_busy_ms` and, where processes communicate, `exposed_communication_ms`."""
        memory = self._meter.summary() if self.config.memory_steps else {}
        return {**memory, **self._clock.summary(), **self._power.summary(), **self._kernels}


def over_processes(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One set of results for all processes: rank 0's, with the largest of every memory figure over
    the ranks, and in `mem_peak_allocated_gib_min_rank` the smallest rank's peak: how evenly the
    memory is spread."""
    merged = dict(results[0])
    for name, value in results[0].items() if len(results) > 1 else ():
        if name.startswith(("mem_", "rss_")) and isinstance(value, float):
            merged[name] = max(other[name] for other in results)
        if name == "mem_peak_allocated_gib":
            merged[f"{name}_min_rank"] = min(other[name] for other in results)
    return merged
