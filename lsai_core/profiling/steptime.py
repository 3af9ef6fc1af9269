"""Step times without disturbing the steps, what a step costs the host, and the GPU's clock and
power beside it.

On a GPU the timer drops a CUDA event into the stream at each step boundary and reads it when it has
completed anyway, so the host never waits; on a CPU a clock is exact. A duration is the time between
two marks. Work that is no step (validation, a checkpoint) is kept out by `restart()`.
"""

import contextlib
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator

import torch


class StepTimer:
    """Durations between step boundaries on `device`. `mark()` once before the first step and after
    every step."""

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._durations: list[float] = []
        self._last: float | None = None
        # None: a gap, the events beside it are no step
        self._events: deque[torch.cuda.Event | None] = deque()

    def mark(self) -> None:
        """A step boundary: ends the running step (if any) and begins the next. Never waits for the
        GPU."""
        if not self._cuda:
            now = time.perf_counter()
            if self._last is not None:
                self._durations.append((now - self._last) * 1e3)
            self._last = now
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        self._resolve()

    def restart(self) -> None:
        """Forget the last boundary: the time until the next `mark()` is not a step."""
        self._last = None
        if self._events and self._events[-1] is not None:
            self._events.append(None)

    def durations_ms(self) -> list[float]:
        """All step durations so far, in milliseconds and in order. Waits for the last marked step
        to end."""
        if event := next(filter(None, reversed(self._events)), None):
            event.synchronize()
        self._resolve()
        return list(self._durations)

    def _resolve(self) -> None:
        """Turn completed event pairs into durations and drop their events, so that memory stays
        bounded."""
        while len(self._events) >= 2:
            start, end = self._events[0], self._events[1]
            if end is not None and not end.query():
                return
            self._events.popleft()
            if start is not None and end is not None:
                self._durations.append(start.elapsed_time(end))


class PhaseClock:
    """The host's time in each phase of a step (`train_step`): on a GPU what starting the kernels
    takes, unless the GPU is slower and its queue full (about 1,000 kernels); then the host waits
    within whichever phase that happens in."""

    def __init__(self) -> None:
        self._steps: list[defaultdict[str, float]] = []
        self._open = False

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase; a step has any number of them and ends with `optimizer`."""
        if not self._open:
            self._steps.append(defaultdict(float))
        begun = time.perf_counter()
        yield
        self._steps[-1][name] += (time.perf_counter() - begun) * 1e3
        self._open = name != "optimizer"

    def summary(self) -> dict[str, float]:
        """`host_<phase>_ms`: the median over the steps; empty if there were none."""
        phases = dict.fromkeys(name for step in self._steps for name in step)
        return {
            f"host_{name}_ms": statistics.median(step[name] for step in self._steps)
            for name in phases
        }


class PowerMeter:
    """The GPU's clock and power in the steps in which `on` is set: a thread reads NVML ten times a
    second, until `on` is None."""

    def __init__(self, device: torch.device) -> None:
        self.on: bool | None = False
        self._readings: list[tuple[float, float]] = []
        if device.type == "cuda":
            threading.Thread(target=self._read, args=(device,), daemon=True).start()

    def _read(self, device: torch.device) -> None:
        # a GPU, or a machine without pynvml, that does not tell
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            # torch's own readings take NVML's order of GPUs for CUDA's.
            identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            gpu = pynvml.nvmlDeviceGetHandleByUUID(identity)
            while self.on is not None:
                time.sleep(0.1)
                if self.on:
                    clock = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
                    self._readings.append((clock, pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3))

    def summary(self) -> dict[str, float]:
        """`gpu_clock_mhz` and `gpu_power_w`, medians of the readings; empty if there were none."""
        medians = map(statistics.median, zip(*self._readings, strict=True))
        return dict(zip(("gpu_clock_mhz", "gpu_power_w"), medians, strict=False))
