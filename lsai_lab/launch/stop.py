"""Stopping in good order: a warning from outside becomes a checkpoint, a record and an exit code
that says so.

Batch systems warn a job before they end it (SIGUSR1 by our own wish, SIGTERM by theirs). The driver
passes both on to the notebook's process, where training ends at its next step with a checkpoint,
waits for that a bounded time, and then raises `Stopped`.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from lsai_core.base.errors import UserError

# Asked to stop by SIGUSR1, and there is more to do (sysexits.h calls it EX_TEMPFAIL). Not 99: where
# Slurm is configured with RequeueExit=99 it requeues such a job even if it was submitted with
# --no-requeue.
PREEMPTED_EXIT = 75
_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")  # the last is not known to Windows
STOPS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class Stopped(Exception):
    """The plan was asked to stop before its end."""

    def __init__(self, number: int, left: int) -> None:
        name = signal.Signals(number).name
        super().__init__(
            f"stopped by {name}, {left} runs are left; the same command goes on from here"
        )
        self.left = left
        self.exit_code = PREEMPTED_EXIT if number == signal.SIGUSR1 else 128 + number


class Interrupted(KeyboardInterrupt):
    """A person's Ctrl-C (the stop button of a notebook) ended the work in good order: one line says
    how far it is. It ends what called, as any interrupt does."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it: that line."""
        return [str(self)]


class StopRequest:
    """The first stop signal this process received, and the end of patience ($LSAI_STOP_GRACE_S
    later). Later ones change nothing, but a person's second Ctrl-C ends the patience."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.deadline = float("inf")
        self._told: set[int] = set()
        given = os.environ.get("LSAI_STOP_GRACE_S", "60")
        try:
            self._grace_s = float(given)
        except ValueError:
            raise UserError(f"LSAI_STOP_GRACE_S wants seconds, got {given!r}") from None

    def receive(self, number: int, _frame: object = None) -> None:
        if self.number is None:
            self.number, self.deadline = number, time.monotonic() + self._grace_s
        elif number == signal.SIGINT:
            self.deadline = 0.0

    def pass_on(self, child_pid: int) -> None:
        """Send the signal, once, to the notebook's process `child_pid`; Ctrl-C as SIGTERM. One that
        still begins has it blocked (`lsai_lab.runs.engine`), and takes it once it can."""
        if self.number is None or child_pid in self._told:
            return
        self._told.add(child_pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child_pid, signal.SIGTERM if self.number == signal.SIGINT else self.number)


@contextlib.contextmanager
def stop_requests(*more: signal.Signals) -> Iterator[StopRequest]:
    """Collect SIGTERM, SIGUSR1 and the signals `more` while the block runs (in the main thread;
    elsewhere nothing can be caught)."""
    request, old = StopRequest(), {}
    with contextlib.suppress(ValueError):
        for number in (signal.SIGTERM, signal.SIGUSR1, *more):
            old[number] = signal.signal(number, request.receive)
    try:
        yield request
    finally:
        for number, before in old.items():
            signal.signal(number, before)
