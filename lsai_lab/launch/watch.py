"""What the launcher of a run's processes watches while they work: new rows, deaths, and requests to stop.

A worker on a GPU may wait for a dead neighbour in a kernel that nothing interrupts: it is killed after ten seconds. torchrun would ask
it for thirty, whatever its `--shutdown-timeout`, which holds for stop signals alone (2.13).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

GRACE_S = 10.0
Rows = list[dict[str, Any]]


class NewRows:
    """The rows that were added to a metrics file since the last look; from the start if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.file = path, 0, -1

    def read(self) -> Rows:
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino != self.file:
                    self.file, self.offset = os.fstat(file.fileno()).st_ino, 0
                file.seek(self.offset)
                text = file.read()
        except FileNotFoundError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


class Survivors:
    """Kills the workers of this machine that are still there some seconds after one of them has died; `ended`: their ranks."""

    def __init__(self, logs: Path) -> None:
        self.logs, self.ended = logs, set[int]()
        self._since: float | None = None

    def look(self) -> None:
        # A worker that leaves in good order takes the note of its process with it.
        alive = {rank: _is_alive(pid) for rank, pid in _workers(self.logs).items()}
        if all(alive.values()):
            return
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > GRACE_S:
            self.ended |= {rank for rank, there in alive.items() if there}
            _signal(_workers(self.logs).values(), signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _workers(logs: Path) -> dict[int, int]:
    """The workers' processes by rank."""
    found = {}
    for path in logs.glob("rank-*.pid"):
        with contextlib.suppress(FileNotFoundError):  # it has just left
            found[int(path.stem.removeprefix("rank-"))] = int(path.read_text(encoding="utf-8"))
    return found


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Forwarder:
    """Passes a stop signal on as SIGUSR1, again and again until the workers have ended: one that has not reached its
    training loop yet ignores it."""

    def __init__(self, logs: Path, to_workers: bool) -> None:
        self.logs, self.to_workers, self.received = logs, to_workers, 0
        self._next = 0.0

    def receive(self, number: int, _frame: object = None) -> None:
        self.received = self.received or number

    def __call__(self, launcher: int) -> None:
        if not self.received or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1.0
        _signal(_workers(self.logs).values() if self.to_workers else [launcher], signal.SIGUSR1)


@contextlib.contextmanager
def caught(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Give stop signals to `handler` while the block runs (in the main thread; elsewhere nothing can be caught)."""
    old = {}
    with contextlib.suppress(ValueError):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            old[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


def end_family(pid: int, itself: bool = True) -> None:
    """Kill all processes below `pid`, and this one (one may have a session of its own: a signal to the group is not enough)."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(pid).children(recursive=True), *([psutil.Process(pid)] if itself else [])]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=10)
