"""Starting the processes of a run, watching them, and saying in one line how they ended.

The caller holds no GPU, follows the metrics file that rank 0 writes, and passes stop signals on.
Every worker leaves its output in `logs/rank-<N>.log`, its process in `logs/rank-<N>.pid`, and, if
it fails, why and when in `logs/rank-<N>.error.json`: the earliest of these is the cause, the others
are its echo. Of a worker that was killed torchrun knows.
"""

import datetime
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch

from lsai_core.base.errors import Preempted, Unavailable, UserError
from lsai_core.base.limits import cpu_cores
from lsai_lab.launch.stop import stop_requests
from lsai_lab.launch.watch import NewRows, Rows, Survivors, end_family, send, workers

RESULTS = "results.json"
LAUNCHER_LOG = "launcher.log"
# Told to the workers, so that they end when the launcher is gone.
LAUNCHER = "LSAI_LAUNCHER"
_POLL_S = 0.2
_REPEAT_S = 1.0
_SAME_MOMENT = datetime.timedelta(seconds=10)


class WorkerFailed(Exception):
    """A process of the run failed; the message says which, and how."""


def launch(
    folder: Path,
    data_root: Path,
    nproc: int,
    *,
    on_rows: Callable[[Rows], None] = lambda rows: None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Execute the planned run in `folder` with `nproc` processes; returns the results that rank 0
    wrote.

    `command`: what starts, with the words from `-m` on behind it, `nproc` workers, ends them all
    when one fails, and passes signals on (srun); None is torchrun on this machine. Workers want
    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or Slurm's variables.

    Raises what ended the run: MemoryError, Unavailable, Preempted, UserError or WorkerFailed. No
    process is left on this machine.
    """
    words = [
        *(command or torchrun(nproc)),
        "-m",
        "lsai_lab.runs.worker",
        str(folder),
        str(data_root),
    ]
    return watched(words, folder, nproc=nproc, on_rows=on_rows, here=command is None)


def watched(
    words: Sequence[str],
    folder: Path,
    *,
    nproc: int,
    on_rows: Callable[[Rows], None],
    here: bool = True,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Execute `words`, which start `nproc` processes that call `worker.as_worker`, on this machine
    if `here`; see `launch`."""
    logs = folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    (folder / RESULTS).unlink(missing_ok=True)
    environment = {
        "OMP_NUM_THREADS": str(max(1, cpu_cores() // nproc)),
        **(on_this_machine() if here else os.environ),
        **variables,
        LAUNCHER: f"{os.getpid()}@{socket.gethostname()}",
        "PYTHONUNBUFFERED": "1",
    }
    rows, survivors, told_at = NewRows(folder / "metrics.jsonl"), Survivors(logs), -math.inf
    with (logs / LAUNCHER_LOG).open("wb") as log, stop_requests() as stop:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(words, **streams, env=environment, start_new_session=True)
        try:
            while process.poll() is None:
                # Told again and again: a worker that has not reached its training loop yet ignores
                # it.
                if stop.number is not None and time.monotonic() - told_at > _REPEAT_S:
                    told_at = time.monotonic()
                    send(workers(logs).values() if here else [process.pid], signal.SIGUSR1)
                on_rows(rows.read())
                if here:
                    survivors.look()
                time.sleep(_POLL_S)
        finally:
            # torchrun has ended its workers, unless the caller was interrupted or torchrun was
            # killed.
            end_family(process.pid)
            process.wait()
    on_rows(rows.read())
    if (folder / RESULTS).exists():
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        (folder / RESULTS).unlink()  # they go into summary.json
        return results
    raise _cause(logs, process.returncode, stop.number, survivors.ended)


def torchrun(nproc: int) -> list[str]:
    """The command that starts `nproc` workers on this machine, on a free port."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={nproc}",
        "--nnodes=1",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--local-addr=localhost",
    ]


def on_this_machine() -> dict[str, str]:
    """The environment of processes that meet on this machine only; what the caller has set stays.

    They talk over the loopback interface and hardly wait for a name server: where none answers,
    each of gloo's and PyTorch's look-ups costs ten seconds otherwise.
    """
    interfaces = {
        address.address: name for name, found in psutil.net_if_addrs().items() for address in found
    }
    if "127.0.0.1" not in interfaces:
        raise UserError(
            "processes meet at 127.0.0.1, which this machine does not have; `ip link set lo up`"
        )
    return {
        "RES_OPTIONS": "timeout:1 attempts:1",
        "GLOO_SOCKET_IFNAME": interfaces["127.0.0.1"],
        **os.environ,
    }


def require_devices(device: str, nproc: int) -> None:
    """Raise Unavailable unless this machine has what `nproc` processes on `device` need (leaves
    CUDA uninitialized)."""
    count = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and count == 0):
        return
    if count < nproc:
        raise Unavailable(
            f"needs {nproc} GPUs and torch sees {count} here; device: cpu runs on CPU processes"
        )


def _cause(logs: Path, code: int, asked: int | None, ended: set[int]) -> Exception:
    """The exception that says why the workers ended without results. `ended`: ranks that the
    launcher killed."""
    errors = [
        {
            "rank": int(path.name.split("-")[1].split(".")[0]),
            **json.loads(path.read_text(encoding="utf-8")),
        }
        for path in logs.glob("*.error.json")
    ]
    first = min(errors, key=lambda error: error["time"], default=None)
    log = (logs / LAUNCHER_LOG).read_text(encoding="utf-8", errors="replace")
    if killed := _killed_rank(log, ended):
        rank, number = killed
        # Whoever reports an error after a neighbour's death reports that death.
        if first is None or first["outcome"] == "failed":
            return WorkerFailed(
                f"rank {rank} was ended by {_named(number)}; see logs/rank-{rank}.log"
            )
    if first is None and code < 0:
        return WorkerFailed(f"the process was ended by {_named(-code)}")
    if first is None:
        lines = [line for line in log.splitlines() if line.strip()]
        return WorkerFailed(
            f"the workers ended with exit code {code}: {lines[-1] if lines else 'no output'}"
        )
    reason, rank = first["reason"], first["rank"]
    if first["outcome"] == "preempted":
        return Preempted(reason + (f" ({signal.Signals(asked).name})" if asked else ""))
    if first["outcome"] == "oom":
        return MemoryError(f"rank {rank}: {reason}")
    if first["outcome"] == "unavailable" or first["user_error"]:
        return (Unavailable if first["outcome"] == "unavailable" else UserError)(reason)
    return WorkerFailed(f"rank {rank}: {reason}; see logs/rank-{rank}.log")


def _named(number: int) -> str:
    by_whom = " (by hand, or by the system when memory ran out)" if number == signal.SIGKILL else ""
    return signal.Signals(number).name + by_whom


def _killed_rank(log: str, ended: set[int]) -> tuple[int, int] | None:
    """(rank, signal) of the worker that died by a signal not sent from here, from srun's messages
    or torchrun's closing report.

    torchrun itself ends the others with SIGTERM, and those that do not react with SIGKILL half a
    minute later.
    """
    if match := re.search(r"task (\d+): Killed", log):
        return int(match[1]), signal.SIGKILL
    others, _, root = log.partition("Root Cause (first observed failure):")
    found = r"time\s*: (\S+)\n.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)"
    dead = [
        (datetime.datetime.strptime(time_, "%Y-%m-%d_%H:%M:%S"), int(rank), -int(code))
        for time_, rank, code in re.findall(found, root, re.DOTALL)
        + re.findall(found, others, re.DOTALL)
    ]
    for at, rank, number in dead:
        if (
            number > 0
            and number != signal.SIGTERM
            and rank not in ended
            and at - dead[0][0] < _SAME_MOMENT
        ):
            return rank, number
    return None
