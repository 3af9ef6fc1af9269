"""One writer a run: who writes into a run's folder holds its lock (`flock` on `<run>/.lock`); the
second one is told who has it.

The driver hands the lock to the process that executes the notebook, which keeps it to its end, even
if the driver was killed.
"""

import contextlib
import datetime
import errno
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from lsai_core.base.errors import UserError
from lsai_lab.machine.platforms import no_runs_here

_held: set[Path] = set()


def require_runs(folder: Path | None = None) -> None:
    """Raise UserError where nothing can be executed: it takes signals, process groups and locks of
    a Unix, and the `folder` of all records, which is made here."""
    if (reason := no_runs_here()) is not None:
        raise UserError(reason)
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"LSAI_RUNS={folder}: the folder cannot be made: {error.strerror}; set it to another"
        ) from None


@contextlib.contextmanager
def only_writer(folder: Path, name: str) -> Iterator[int | None]:
    """Hold the lock of the run `name` in `folder` while the block runs; yields its file descriptor
    (None: somebody holds it for us).

    Raises UserError if another process is writing this run, `folder` cannot be written, or nothing
    can be executed here.
    """
    require_runs()
    key = folder.resolve()
    if key in _held:  # by the caller, or by the driver of this process
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("a+", encoding="utf-8") as file:
            if not _locked(file):
                holder = _holder(file)
                since = f" since {holder['since']}" if "since" in holder else ""
                who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}{since}"
                raise UserError(
                    f"{name} is being run by {who}; wait for it, or end that process ({folder})"
                )
            _held.add(key)
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": platform.node(), "since": now}))
            file.flush()
            yield file.fileno()
    except OSError as error:
        raise UserError(
            f"cannot write the records of {name} in {folder}: {error.strerror or error}"
        ) from None
    finally:
        _held.discard(key)


def inherit(folder: Path) -> None:
    """Say that this process was handed the lock of the run in `folder`."""
    _held.add(folder.resolve())


def is_held(folder: Path) -> bool:
    """Whether this process holds the lock of the run in `folder`, or was handed it."""
    return folder.resolve() in _held


def _locked(file: IO[str]) -> bool:
    import fcntl  # of Unix

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # a file system without locks has none to wait for
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def holder_of(folder: Path) -> dict[str, Any]:
    """Who wrote the run in `folder` last (`pid`, `host`, `since`); empty if nobody has, or it
    cannot be read."""
    try:
        with (folder / ".lock").open(encoding="utf-8") as file:
            return _holder(file)
    except OSError:
        return {}


def _holder(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        return dict(json.loads(file.read(1000)))
    except (ValueError, TypeError):
        return {}  # it has just begun
