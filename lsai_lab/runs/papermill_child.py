"""One papermill execution, in a process of its own: `python -m lsai_lab.runs.papermill_child IN OUT KEY=JSON ...`.

The driver can watch, time and kill this process and its kernel without risking itself. What goes wrong is one line on
standard error and exit code 1.

A stop signal is the driver's to deliver, to the kernel alone. Batch systems send SIGTERM to a whole process tree, and nbclient
would kill the kernel on it before its checkpoint is written; so papermill works in a second thread, where nbclient cannot
install its handlers, and the main thread lets the signals pass. It also ends everything when the driver is gone (killed,
crashed), because nobody would watch the time any more, and the kernel might hold a GPU for hours.

When the last cell has ended everything is on disk, so the kernel is killed. To ask it and wait takes seconds for each run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import papermill
import psutil
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

# Notebooks that start at the same moment can race for ports: the kernel then dies before its first answer.
START_ATTEMPTS = 3


def main(arguments: list[str]) -> int:
    """Execute notebook IN with the given parameters, writing OUT as it goes."""
    source, target, *pairs = arguments
    parameters = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in pairs)}
    for attempt in range(START_ATTEMPTS):
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
            if "Kernel died before replying" not in str(error) or attempt + 1 == START_ATTEMPTS:
                raise
    return 1


def end_without(driver: int, poll_s: float = 2.0) -> None:
    """Wait for the process `driver`, the parent of this one, to end; then end this one and all below it."""
    while os.getppid() == driver:
        threading.Event().wait(poll_s)
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_without, args=(os.getppid(),), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN: the kernel must not inherit it
    with ThreadPoolExecutor(1) as pool:
        sys.exit(pool.submit(main, sys.argv[1:]).result())
