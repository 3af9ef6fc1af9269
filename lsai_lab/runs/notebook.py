"""One papermill execution in a process of its own: `python -m lsai_lab.runs.notebook DRIVER IN OUT KEY=JSON ...`, and its driver's side.

The driver can watch, time and kill this process and its kernel without risking itself. What goes wrong is one line on standard error
and exit code 1.

A stop signal is the driver's to deliver, to the kernel alone. Batch systems send SIGTERM to a whole process tree, and nbclient would
kill the kernel on it before its checkpoint is written; so papermill works in a second thread, where nbclient cannot install its
handlers, and the main thread lets the signals pass. From its first moment on, before papermill is imported, the process watches its
driver, whose number it was given, and ends everything when the driver is gone (killed, crashed): nobody would watch the time any more,
and the kernel might hold a GPU for hours. It holds the run's lock until then (`lsai_lab.runs.writer`).

When the last cell has ended everything is on disk, so the kernel is killed. To ask it and wait takes seconds for each run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lsai_core.errors import UserError
from lsai_lab.launch.watch import end_family
from lsai_lab.runs.stop import StopRequest

_POLL_S = 0.25
# Notebooks that start at the same moment can race for ports: the kernel then dies before its first answer.
_START_ATTEMPTS = 3


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
    """Execute a notebook in its own process tree, with `root` as the working folder. `stop` is passed on to its kernel.

    `inherited`: a file descriptor that the process keeps open until its kernel has ended. Returns None, or one line that says what went
    wrong. Raises UserError if the notebook does not exist.
    """
    if not source.exists():
        raise UserError(f"the notebook {source} is missing")
    arguments = [f"{key}={json.dumps(value)}" for key, value in parameters.items()]
    words = [str(os.getpid()), portable(source, root), portable(target, root), *arguments]
    target.parent.mkdir(parents=True, exist_ok=True)
    log = target.with_suffix(".log")
    with log.open("w+", encoding="utf-8") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "lsai_lab.runs.notebook", *words],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=() if inherited is None else (inherited,),
            env={**os.environ, **_absolute_folders(root), **environment, "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
        )
        deadline, stop = time.monotonic() + timeout_s, stop or StopRequest()
        try:
            while child.poll() is None and time.monotonic() < min(deadline, stop.deadline):
                watch()
                stop.pass_on(child.pid)
                time.sleep(_POLL_S)
            ended = child.poll() is not None
        finally:
            end_family(child.pid)
            child.wait()
    if not ended:
        return f"no end within {timeout_s:g} s"
    if child.returncode == 0:
        log.unlink()
        return None
    if child.returncode < 0:
        return f"the process that executes the notebook was killed by {signal.Signals(-child.returncode).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"the notebook process ended with exit code {child.returncode}"


def portable(path: Path, root: Path) -> str:
    """`path` as seen from `root`, so that executed notebooks carry no folder of one machine; absolute if it lies outside."""
    path, root = path.resolve(), root.resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _absolute_folders(root: Path) -> dict[str, str]:
    """The folders of this session for a process that works in `root`: what is relative here would be elsewhere there."""
    moved = {name: os.path.abspath(os.environ[name]) for name in ("LSAI_RUNS", "LSAI_DATA") if os.environ.get(name)}
    return {**moved, "LSAI_ROOT": str(root.resolve())}


def _end_with(driver: int, poll_s: float = 1.0) -> None:
    """Wait for the process `driver`, the parent of this one, to end; then end all below this one, and itself."""
    while os.getppid() == driver:
        threading.Event().wait(poll_s)
    end_family(os.getpid(), itself=False)
    os._exit(1)


def _execute(source: str, target: str, *pairs: str) -> int:
    """Execute notebook `source` with the given parameters, writing `target` as it goes; returns the exit code."""
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    parameters = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in pairs)}
    for attempt in range(_START_ATTEMPTS):
        try:
            papermill.execute_notebook(
                source, target, parameters, kernel_name="python3", progress_bar=False, autosave_cell_every=30,
                start_timeout=120, shutdown_kernel="immediate",
            )  # fmt: skip
            return 0
        except PapermillExecutionError as error:
            print(f"the notebook failed in cell {error.exec_count}: {error.ename}: {error.evalue}", file=sys.stderr)
            return 1
        except DeadKernelError:
            print("the notebook's kernel died (killed, crashed, or out of memory)", file=sys.stderr)
            return 1
        except RuntimeError as error:
            if "Kernel died before replying" not in str(error) or attempt + 1 == _START_ATTEMPTS:
                raise
    return 1


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN: the kernel must not inherit it
    with ThreadPoolExecutor(1) as pool:
        sys.exit(pool.submit(_execute, *sys.argv[2:]).result())
