"""One process of a run: `python -m lsai_lab.runs.worker <run folder> <data root>`, started by
`lsai_lab.launch.launch`.

If anything is raised, it notes what and when, and leaves at once, without the farewells that could
wait for a dead neighbour.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from lsai_core.base.files import write_json, write_text
from lsai_lab.launch.binding import bind
from lsai_lab.launch.launch import LAUNCHER, RESULTS

_WATCH_S = 1.0


def main(folder: Path, data_root: Path) -> None:
    """Execute the planned run in `folder` as one of its processes; never returns."""
    # Who is who where srun started the workers, whose caller has set MASTER_ADDR and MASTER_PORT.
    for ours, theirs in {"RANK": "PROCID", "WORLD_SIZE": "NTASKS", "LOCAL_RANK": "LOCALID"}.items():
        if f"SLURM_{theirs}" in os.environ:
            os.environ.setdefault(ours, os.environ[f"SLURM_{theirs}"])
    as_worker(folder, lambda: _work(folder, data_root))


def as_worker(folder: Path, work: Callable[[], None]) -> None:
    """Do `work` as one of the processes that the launcher watches by `folder`; never returns."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the training loop can act on it
    bound = bind()
    logs, rank = folder / "logs", int(os.environ.get("RANK", 0))
    with (logs / f"rank-{rank}.log").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    print(bound, flush=True)
    write_text(logs / f"rank-{rank}.pid", str(os.getpid()))
    threading.Thread(target=_leave_with_launcher, daemon=True).start()
    code = 0
    try:
        work()
    except BaseException as error:
        code = _report(error, logs / f"rank-{rank}.error.json")
    if code == 0:  # in good order: the launcher is not to look for the others' cause of death
        (logs / f"rank-{rank}.pid").unlink(missing_ok=True)
    sys.stdout.flush()
    os._exit(code)


def _work(folder: Path, data_root: Path) -> None:
    from lsai_core.parallel.processes import connect
    from lsai_core.training.step import resolve_device
    from lsai_lab.runs.execute import ActiveRun
    from lsai_lab.runs.kinds import Context, get_kind

    run = ActiveRun(folder, data_root)
    world = connect(resolve_device(getattr(run.config, "device", "auto")))
    context = Context(run.folder, run.data_root, run.folder.parent.parent, world=world)
    results = get_kind(run.kind).function()(run.config, context)
    world.close()
    if world.is_main:
        write_json(folder / RESULTS, results)


def _report(error: BaseException, path: Path) -> int:
    """Write down why this process ends; returns its exit code (0 if all processes end like this, in
    good order)."""
    from lsai_core.base.errors import UserError
    from lsai_lab.runs.records import outcome_of

    at = time.time()
    traceback.print_exception(error)
    outcome, reason = outcome_of(error)
    write_json(
        path,
        {
            "time": at,
            "outcome": outcome,
            "reason": reason,
            "user_error": isinstance(error, UserError),
        },
    )
    return 0 if outcome == "preempted" else 1


def _leave_with_launcher() -> None:
    """End this process when its parent or, on the same machine, the launcher is gone: nobody would
    ever end it."""
    parent = os.getppid()
    pid, _, host = os.environ.get(LAUNCHER, "").partition("@")
    launcher = int(pid) if host == socket.gethostname() else None
    while os.getppid() == parent and (launcher is None or psutil.pid_exists(launcher)):
        time.sleep(_WATCH_S)
    print("the process that started this one is gone; leaving", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
