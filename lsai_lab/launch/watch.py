"""What drivers and launchers do alike: read new rows of a run, catch stop signals, end processes with all that they started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

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
