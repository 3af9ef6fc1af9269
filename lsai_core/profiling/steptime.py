"""Step times without disturbing the steps, and what a step costs the host.

On a GPU the timer drops a CUDA event into the stream at each step boundary and reads it when it has completed anyway,
so the host never waits; on a CPU a clock is exact. A duration is the time between two marks. Work that is no step
(validation, a checkpoint) is kept out by `restart()`.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator

import torch


class StepTimer:
    """Durations between step boundaries on `device`. `mark()` once before the first step and after every step."""

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._durations: list[float] = []
        self._last: float | None = None
        self._events: deque[torch.cuda.Event | None] = deque()  # None: a gap, the events beside it are no step
        self._spare: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """A step boundary: ends the running step (if any) and begins the next. Never waits for the GPU."""
        if not self._cuda:
            now = time.perf_counter()
            if self._last is not None:
                self._durations.append((now - self._last) * 1e3)
            self._last = now
            return
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        self._resolve()

    def restart(self) -> None:
        """Forget the last boundary: the time until the next `mark()` is not a step."""
        self._last = None
        if self._events and self._events[-1] is not None:
            self._events.append(None)

    def durations_ms(self) -> list[float]:
        """All step durations so far, in milliseconds and in order. Waits for the last marked step to end."""
        for event in reversed(self._events):
            if event is not None:
                event.synchronize()
                break
        self._resolve()
        return list(self._durations)

    def _resolve(self) -> None:
        """Turn completed event pairs into durations and reuse their events, so that memory stays bounded."""
        while len(self._events) >= 2:
            start, end = self._events[0], self._events[1]
            if end is not None and not end.query():
                return
            self._events.popleft()
            if start is None:
                continue
            if end is not None:
                self._durations.append(start.elapsed_time(end))
            self._spare.append(start)


class PhaseClock:
    """The host's time in each phase of a step (`train_step`): on a GPU what starting the kernels takes, unless the GPU
    is the slower and its queue full (about 1,000 kernels); then the host waits within whichever phase that happens
    in."""

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
        return {f"host_{name}_ms": statistics.median(step[name] for step in self._steps) for name in phases}
