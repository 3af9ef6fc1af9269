"""A run, or an execution of a notebook by papermill, in a process of its own, which the driver can
watch, time and kill without risking itself.

The two never share a process: what a run records is what the files under its key compute, whatever
the cells of a notebook change in the package's modules.

What goes wrong is one line on standard error and exit code 1. The process has a session of its own,
so that a stop signal is the driver's to deliver. It ends everything when the driver is gone, and
holds the run's lock until then (`lsai_lab.runs.writer`).
"""

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from lsai_core.base.errors import UserError
from lsai_core.base.limits import threads_wanted
from lsai_lab.launch.stop import STOPS, StopRequest
from lsai_lab.launch.watch import end_family
from lsai_lab.project.files import PAGE_FOLDER
from lsai_lab.runs.writer import inherit, require_runs

_POLL_S = 0.25
_FILES = 256  # that a process may open; torch's libraries want some 100
_processes: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_processes.set_forkserver_preload(["lsai_lab.runs.engine"])
_one_start = threading.Lock()
RUN_LOG = "run.log"  # in a run's folder: what its process printed


def execute_notebook(
    source: Path, target: Path, parameters: dict[str, Any], *, root: Path, **options: Any
) -> str | None:
    """Execute a notebook in its own process tree, with `root` as the working folder; returns None,
    or one line of what went wrong. `options`: see `_execute`.

    Raises UserError if the notebook does not exist, or if no notebook can be executed here.
    """
    require_notebook(source)
    log, paths = target.with_suffix(".log"), (portable(source, root), portable(target, root))
    page = {**options.pop("environment", {}), PAGE_FOLDER: str(source.parent.resolve())}
    options |= {"root": root, "environment": page}
    problem = _execute(_papermill, (*paths, parameters), "notebook", log, **options)
    if problem is None:
        log.unlink()
    return problem


def require_notebook(source: Path) -> None:
    """Raise UserError if the notebook `source` does not exist."""
    if not source.exists():
        raise UserError(f"the notebook {source} is missing")


def execute_run(folder: Path, data_root: Path, *, root: Path, **options: Any) -> str | None:
    """Do the work of the planned run in `folder`, in its own process tree; returns None, or one
    line of what went wrong, if that did not become a record. `options`: see `_execute`."""
    paths = portable(folder, root), str(data_root.resolve())
    return _execute(_work, paths, "run", folder / RUN_LOG, root=root, **options)


def _execute(
    body: Callable[..., int],
    arguments: tuple[Any, ...],
    what: str,
    log: Path,
    *,
    root: Path,
    timeout_s: float,
    watch: Callable[[], None] = lambda: None,
    stop: StopRequest | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    inherited: int | None = None,
) -> str | None:
    """Call `body` in a process of its own, whose output goes into `log`.

    `watch` is called all the while, `stop` passed on. `inherited`: the lock of the folder of `log`,
    a run's, as a file descriptor that the process keeps open to its end.
    """
    require_runs()
    _require_files()
    log.parent.mkdir(parents=True, exist_ok=True)
    settings = {**os.environ, **_absolute_folders(root), **environment}
    settings["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    places = str(root.resolve()), str(log.resolve())
    # A connection can be sent to a process that is being started, whatever the descriptor is of.
    with contextlib.nullcontext() if inherited is None else Connection(os.dup(inherited)) as held:
        words = (*places, settings, held, body, arguments)
        child = _processes.Process(target=_process, args=words)
        _start(child)
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
        return None
    if (child.exitcode or 0) < 0:
        killer = signal.Signals(-(child.exitcode or 0)).name
        return f"the {what}'s process was killed by {killer}"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else f"the {what}'s process ended with exit code {child.exitcode}"


def _start(child: Any) -> None:
    """Start a process without the script of this one, which multiprocessing would execute there
    once more, with all that it changes in the package's modules."""
    with _one_start:
        script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            child.start()
        finally:
            sys.modules["__main__"] = script


def _require_files() -> None:
    import resource  # of Unix

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
    root: str,
    log: str,
    settings: dict[str, str],
    held: Any,
    body: Callable[..., int],
    arguments: tuple[Any, ...],
) -> None:
    """The process: it calls `body`, with the driver watched, and ends with the code that comes
    back."""
    os.chdir(root)
    if held is not None:
        inherit(Path(log).parent)
    os.environ.clear()
    os.environ.update(settings)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 1), 2)
    # What this process leaves when it is killed is its own, not the driver's to warn about.
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    os.setsid()
    for number in STOPS:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # which wait since the fork
    threading.Thread(target=_end_with_driver, daemon=True).start()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # of a process that is killed the log stays
    if threads := threads_wanted():  # which torch had read before the fork
        import torch

        torch.set_num_threads(threads)
    try:
        code = body(*arguments)
    finally:
        end_family(os.getpid(), itself=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_driver() -> None:
    """Wait for the process that started this one to end; then end all below this one, and
    itself."""
    if (driver := multiprocessing.parent_process()) is not None:
        driver.join()
        end_family(os.getpid(), itself=False)
        os._exit(1)


def _work(folder: str, data_root: str) -> int:
    """Do the work of the planned run in `folder`; returns the exit code."""
    from lsai_lab.runs.execute import ActiveRun

    try:
        ActiveRun(folder, data_root).execute()
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


def _papermill(source: str, target: str, parameters: dict[str, Any]) -> int:
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
