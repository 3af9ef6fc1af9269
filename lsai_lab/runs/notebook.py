"""One papermill execution in a process of its own, which the driver can watch, time and kill
without risking itself.

What goes wrong is one line on standard error and exit code 1. The process has a session of its own,
so that a stop signal is the driver's to deliver. It ends everything when the driver is gone, and
holds the run's lock until then (`lsai_lab.runs.writer`).
"""

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lsai_core.base.errors import UserError
from lsai_lab.launch.watch import end_family
from lsai_lab.runs.stop import StopRequest
from lsai_lab.runs.writer import inherit

_POLL_S = 0.25
_FILES = 256  # that a process may open; torch's libraries want some 100
_processes: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_processes.set_forkserver_preload(["lsai_lab.runs.engine"])


def execute_notebook(
    source: Path,
    target: Path,
    parameters: dict[str, Any],
    *,
    root: Path,
    timeout_s: float,
    watch: Callable[[], None] = lambda: None,
    stop: StopRequest | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    inherited: int | None = None,
) -> str | None:
    """Execute a notebook in its own process tree, with `root` as the working folder; returns None,
    or one line of what went wrong.

    `inherited`: the lock of the folder of `target`, as a file descriptor that the process keeps
    open to its end. Raises UserError if the notebook does not exist, or if no notebook can be
    executed here.
    """
    if not source.exists():
        raise UserError(f"the notebook {source} is missing")
    _require_files()
    target.parent.mkdir(parents=True, exist_ok=True)
    log = target.with_suffix(".log")
    settings = {
        **os.environ,
        **_absolute_folders(root),
        **environment,
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    paths = portable(source, root), portable(target, root), str(root.resolve()), str(log.resolve())
    # A connection can be sent to a process that is being started, whatever the descriptor is of.
    with contextlib.nullcontext() if inherited is None else Connection(os.dup(inherited)) as held:
        child = _processes.Process(target=_process, args=(*paths, parameters, settings, held))
        child.start()
    deadline, stop = time.monotonic() + timeout_s, stop or StopRequest()
    try:
        while child.exitcode is None and time.monotonic() < min(deadline, stop.deadline):
            watch()
            stop.pass_on(child.pid or 0)
            child.join(_POLL_S)
        ended = child.exitcode is not None
    finally:
        end_family(child.pid or 0)
        child.join()
    if not ended:
        return f"no end within {timeout_s:g} s"
    if child.exitcode == 0:
        log.unlink()
        return None
    if (child.exitcode or 0) < 0:
        return f"the notebook's process was killed by {signal.Signals(-(child.exitcode or 0)).name}"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else f"the notebook process ended with exit code {child.exitcode}"


def _require_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _FILES:
        raise UserError(
            f"a process may open {hard} files here, and a notebook's needs {_FILES}; raise `ulimit "
            f"-n`"
        )
    if 0 <= soft < _FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, hard))


def portable(path: Path, root: Path) -> str:
    """`path` as seen from `root`, so that executed notebooks carry no folder of one machine;
    absolute if it lies outside."""
    path, root = path.resolve(), root.resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _absolute_folders(root: Path) -> dict[str, str]:
    """The folders of this session for a process that works in `root`: what is relative here would
    be elsewhere there."""
    moved = {
        name: os.path.abspath(os.environ[name])
        for name in ("LSAI_RUNS", "LSAI_DATA")
        if os.environ.get(name)
    }
    return {**moved, "LSAI_ROOT": str(root.resolve())}


def _process(
    source: str,
    target: str,
    root: str,
    log: str,
    parameters: dict[str, Any],
    settings: dict[str, str],
    held: Any,
) -> None:
    """The body of the process: papermill, with the driver watched."""
    os.chdir(root)
    if held is not None:
        inherit(Path(target).parent)
    os.environ.clear()
    os.environ.update(settings)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 1), 2)
    # What this process leaves when it is killed is its own, not the driver's to warn about.
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # which the fork server ignores
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    threading.Thread(target=_end_with_driver, daemon=True).start()
    try:
        code = _execute(source, target, parameters)
    finally:
        end_family(os.getpid(), itself=False)
    sys.stderr.flush()
    os._exit(code)


def _end_with_driver() -> None:
    """Wait for the process that started this one to end; then end all below this one, and
    itself."""
    if (driver := multiprocessing.parent_process()) is not None:
        driver.join()
        end_family(os.getpid(), itself=False)
        os._exit(1)


def _execute(source: str, target: str, parameters: dict[str, Any]) -> int:
    """Execute notebook `source` with the given parameters, writing `target` as it goes; returns the
    exit code."""
    import papermill
    from papermill.exceptions import PapermillExecutionError

    from lsai_lab.runs.engine import NAME

    try:
        # papermill takes braces in a path for the names of parameters.
        paths = (path.replace("{", "{{").replace("}", "}}") for path in (source, target))
        papermill.execute_notebook(
            *paths, parameters, engine_name=NAME, kernel_name="python3", progress_bar=False
        )
        return 0
    except PapermillExecutionError as error:
        print(
            f"the notebook failed in cell {error.exec_count}: {error.ename}: {error.evalue}",
            file=sys.stderr,
        )
        return 1
