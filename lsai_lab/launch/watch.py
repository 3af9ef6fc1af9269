"""What the launcher of a run's processes watches while they work: new rows and deaths.

A worker on a GPU may wait for a dead neighbour in a kernel that nothing interrupts: it is killed
after ten seconds. torchrun would ask it for thirty, whatever its `--shutdown-timeout`, which holds
for stop signals alone (2.13).
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

GRACE_S = 10.0
Rows = list[dict[str, Any]]


class NewRows:
    """The rows that were added to a metrics file since the last look; from the start if the file
    was replaced."""

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
    """Kills the workers of this machine that are still there some seconds after one of them has
    died; `ended`: their ranks."""

    def __init__(self, logs: Path) -> None:
        self.logs, self.ended = logs, set[int]()
        self._since: float | None = None

    def look(self) -> None:
        # A worker that leaves in good order takes the note of its process with it.
        found = workers(self.logs)
        alive = {rank: pid for rank, pid in found.items() if psutil.pid_exists(pid)}
        if alive == found:
            return
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > GRACE_S:
            self.ended |= alive.keys()
            send(alive.values(), signal.SIGKILL)


def workers(logs: Path) -> dict[int, int]:
    """The workers' processes by rank."""
    found = {}
    for path in logs.glob("rank-*.pid"):
        with contextlib.suppress(FileNotFoundError):  # it has just left
            found[int(path.stem.removeprefix("rank-"))] = int(path.read_text(encoding="utf-8"))
    return found


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to those of `pids` that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_family(pid: int, itself: bool = True) -> None:
    """Kill all processes below `pid`, and this one (one may have a session of its own: a signal to
    the group is not enough)."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [
            *psutil.Process(pid).children(recursive=True),
            *([psutil.Process(pid)] if itself else []),
        ]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=10)
