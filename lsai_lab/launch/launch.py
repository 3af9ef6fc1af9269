"""Starting the processes of a run, watching them, and saying in one line how they ended.

The caller (the run notebook's kernel) stays outside: it holds no GPU, follows the metrics file that rank 0 writes, and passes stop
signals on. On one machine it starts the workers itself, with the environment that torchrun would give them; over several nodes of a Slurm
job srun starts them. Every worker leaves its output in `logs/rank-<N>.log` and, if it fails, why and when in
`logs/rank-<N>.error.json`: the earliest of these is the cause, the others are its echo. One that still runs some seconds after another has
died is killed: it may wait for it in a GPU's kernel that nothing interrupts.
"""

from __future__ import annotations

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
from torch.distributed.elastic.utils.distributed import get_free_port

from lsai_core.errors import Preempted, Unavailable, UserError
from lsai_core.profiling.limits import cpu_cores
from lsai_lab.launch.watch import NewRows, Rows, caught, end_family

RESULTS = "results.json"
LAUNCHER_LOG = "launcher.log"
# Told to the workers, so that they end when the launcher is gone.
LAUNCHER = "LSAI_LAUNCHER"
PYTHON = [sys.executable]
GRACE_S, _POLL_S = 5.0, 0.2


class WorkerFailed(Exception):
    """A process of the run failed; the message says which, and how."""


def launch(
    folder: Path, data_root: Path, nproc: int, device: str = "auto", on_rows: Callable[[Rows], None] = lambda rows: None
) -> dict[str, Any]:
    """Execute the planned run in `folder` with `nproc` processes; returns the results that rank 0 wrote.

    Workers want RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or Slurm's own variables.

    Raises what ended the run: MemoryError, Unavailable (also for GPUs that are not there), Preempted, UserError or WorkerFailed.
    Whatever happens, no process is left on this machine afterwards.
    """
    srun = srun_command(nproc)
    if srun is None:
        require_devices(device, nproc)
    words = [*(srun or []), *PYTHON, "-m", "lsai_lab.launch.worker", str(folder), str(data_root)]
    return watched(words, folder, nproc=nproc, on_rows=on_rows, here=srun is None)


def watched(
    words: Sequence[str], folder: Path, *, nproc: int, on_rows: Callable[[Rows], None], here: bool = True,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """Execute `words`, which call `worker.as_worker`, in `nproc` processes here, or once if they start these elsewhere; see `launch`."""
    logs, family, asked = folder / "logs", list[subprocess.Popen[bytes]](), list[int]()
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    (folder / RESULTS).unlink(missing_ok=True)
    environment = {
        "OMP_NUM_THREADS": str(max(1, cpu_cores() // nproc)),
        **(on_this_machine(nproc) if here else os.environ),
        **variables,
        LAUNCHER: f"{os.getpid()}@{socket.gethostname()}",
        "PYTHONUNBUFFERED": "1",
    }
    rows = NewRows(folder / "metrics.jsonl")
    with (logs / LAUNCHER_LOG).open("wb") as log, caught(lambda number, _frame: asked.append(number)):
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        try:
            for rank in map(str, range(nproc if here else 1)):
                own = environment | ({"RANK": rank, "LOCAL_RANK": rank} if here else {})
                family.append(subprocess.Popen(words, **streams, env=own, start_new_session=True))
                (logs / f"rank-{rank}.pid").write_text(str(family[-1].pid))
            codes = _watch(family, logs, rows, on_rows, asked)
        finally:
            for process in family:
                end_family(process.pid)
                process.wait()
        on_rows(rows.read())
    if (folder / RESULTS).exists():
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        (folder / RESULTS).unlink()  # they go into summary.json
        return results
    raise _cause(logs, codes, here, asked)


def _watch(
    family: list[subprocess.Popen[bytes]], logs: Path, rows: NewRows, on_rows: Callable[[Rows], None], asked: list[int]
) -> dict[int, int]:
    """Wait until all have ended, or some seconds more than one that failed; returns the exit codes of those that ended by themselves."""
    told, patience_ends = 0.0, math.inf
    while any([process.poll() is None for process in family]):  # noqa: C419  (all are asked)
        now = time.monotonic()
        on_rows(rows.read())
        if asked and now > told + 1.0:  # again and again: one that has not reached its training loop yet ignores it
            told = now
            for rank, process in enumerate(family):
                if (logs / f"rank-{rank}.log").exists():  # before it has a log, a signal would end it
                    process.send_signal(signal.SIGUSR1)
        if any(process.returncode for process in family):
            patience_ends = min(patience_ends, now + GRACE_S)
        if now > patience_ends:
            break
        time.sleep(_POLL_S)
    return {rank: process.returncode for rank, process in enumerate(family) if process.returncode is not None}


def srun_command(nproc: int, environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """What starts `nproc` workers over the nodes of this Slurm job, one task each. None if this is no job of several nodes, or if one
    node's GPUs are enough; UserError if the job is too small.

    srun says who is who (SLURM_PROCID, ...), ends all when one fails, and passes signals on. Rank 0 is on the job's first node, where this
    process runs, too, so they meet at this host and a port that is free on it.
    """
    nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
    gpus = int(environment.get("SLURM_GPUS_ON_NODE", "0"))
    if nodes == 1 or (gpus and nproc <= gpus):
        return None
    if gpus and nproc > nodes * gpus:
        had = f"this run wants {nproc} GPUs and the job has {nodes} nodes with {gpus} each"
        raise UserError(f"{had}; submit it with --nodes {math.ceil(nproc / gpus)}")
    used = math.ceil(nproc / (gpus or math.ceil(nproc / nodes)))
    if nproc % used:
        raise UserError(f"{nproc} processes cannot be spread evenly over {used} nodes")
    per_node, cpus = nproc // used, int(environment.get("SLURM_CPUS_PER_TASK", "1"))
    host = environment.get("MASTER_ADDR") or socket.gethostname()
    spread = f"--nodes={used} --ntasks={nproc} --ntasks-per-node={per_node} --cpus-per-task={max(1, cpus // per_node)}"
    devices = f"--gpus-per-node={per_node}" if gpus else ""
    srun = f"srun {spread} --distribution=block --overlap --kill-on-bad-exit=1 --unbuffered {devices}"
    return ["env", f"MASTER_ADDR={host}", f"MASTER_PORT={get_free_port()}", *srun.split()]


def on_this_machine(nproc: int) -> dict[str, str]:
    """The environment of `nproc` processes that meet on this machine only; what the caller has set stays.

    They talk over the loopback interface, and hardly wait for a name server: gloo looks up the machine's name for every group,
    PyTorch's sockets the name behind each address. Where no server answers (a node of a cluster, a container), each costs ten
    seconds, and the start of two processes 95 s (12 s so, measured with a server that stays silent).
    """
    interfaces = {address.address: name for name, found in psutil.net_if_addrs().items() for address in found}
    loopback = {"GLOO_SOCKET_IFNAME": interfaces["127.0.0.1"]} if "127.0.0.1" in interfaces else {}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(get_free_port())}
    meeting |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(nproc))
    return {"RES_OPTIONS": "timeout:1 attempts:1", **loopback, **os.environ, **meeting}


def require_devices(device: str, nproc: int) -> None:
    """Raise Unavailable unless this machine has what `nproc` processes on `device` need (leaves CUDA uninitialized)."""
    count = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and count == 0):
        return
    if count < nproc:
        raise Unavailable(f"needs {nproc} GPUs and torch sees {count} here; device: cpu runs on CPU processes")


def _cause(logs: Path, codes: dict[int, int], here: bool, asked: list[int]) -> Exception:
    """The exception that says why the workers ended without results. `codes`: exit codes of the processes that were started here."""
    errors = [
        {"rank": int(path.name.split("-")[1].split(".")[0]), **json.loads(path.read_text(encoding="utf-8"))}
        for path in logs.glob("*.error.json")
    ]
    first = min(errors, key=lambda error: error["time"], default=None)
    log = (logs / LAUNCHER_LOG).read_text(encoding="utf-8", errors="replace")
    killed = {rank: -code for rank, code in codes.items() if code < 0 and here}
    killed |= {int(rank): signal.SIGKILL for rank in re.findall(r"task (\d+): Killed", log)}  # what srun says
    # Whoever reports an error after a neighbour's death reports that death.
    if killed and (first is None or first["outcome"] == "failed"):
        rank, number = next(iter(killed.items()))
        by = " (by hand, or by the system when memory ran out)" if number == signal.SIGKILL else ""
        return WorkerFailed(f"rank {rank} was ended by {signal.Signals(number).name}{by}; see logs/rank-{rank}.log")
    if first is None:
        lines = [line for line in log.splitlines() if line.strip()]
        code = next(filter(None, codes.values()), 0)
        return WorkerFailed(f"the workers ended with exit code {code}: {lines[-1] if lines else 'no output'}")
    reason, rank = first["reason"], first["rank"]
    if first["outcome"] == "preempted":
        return Preempted(reason + (f" ({signal.Signals(asked[0]).name})" if asked else ""))
    if first["outcome"] == "oom":
        return MemoryError(f"rank {rank}: {reason}")
    if first["outcome"] == "unavailable" or first["user_error"]:
        return (Unavailable if first["outcome"] == "unavailable" else UserError)(reason)
    return WorkerFailed(f"rank {rank}: {reason}; see logs/rank-{rank}.log")
