"""Starting the processes of a run, watching them, and saying in one line how they ended.

The caller (the run notebook's kernel) stays outside: it holds no GPU, follows the metrics file that rank 0 writes, and passes stop
signals on. On this machine it starts each worker itself, as torchrun would, and so knows each one's end; over several nodes srun does.
Every worker leaves its output in `logs/rank-<N>.log`, what it is in `logs/rank-<N>.pid`, and, if it fails, why and when in
`logs/rank-<N>.error.json`: the earliest of these is the cause, the others are its echo. A worker that was killed leaves none.

A worker on a GPU may wait for a dead neighbour in a kernel that nothing interrupts: it is killed after ten seconds. Workers on this
machine that bring no new row for a minute write their Python stacks into their logs, should somebody wonder what they wait for.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch

from lsai_core.errors import Preempted, Unavailable, UserError
from lsai_core.profiling.limits import cpu_cores
from lsai_lab.launch.watch import NewRows, Rows, caught, end_family, signal_workers

RESULTS = "results.json"
LAUNCHER_LOG = "launcher.log"
# Told to the workers, so that they end when the launcher is gone.
LAUNCHER = "LSAI_LAUNCHER"
WORKER = ("-m", "lsai_lab.launch.worker")
SILENCE_S, GRACE_S = 60.0, 10.0
_POLL_S = 0.2


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
    """Execute the planned run in `folder` with `nproc` processes; returns the results that rank 0 wrote.

    `command`: what starts `nproc` times "python -m lsai_lab.launch.worker <folder> <data root>" when the words from `-m` on are
    appended, ends them all when one fails, and passes signals on to them (srun, in an allocation of several nodes); None starts them
    on this machine. Workers want RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or Slurm's own variables.

    Raises what ended the run: MemoryError, Unavailable, Preempted, UserError or WorkerFailed. Whatever happens, no process is left
    on this machine afterwards.
    """
    words = [*(command or [sys.executable]), *WORKER, str(folder), str(data_root)]
    return watched(words, folder, nproc=nproc, on_rows=on_rows, here=command is None, each=command is None)


def watched(
    words: Sequence[str],
    folder: Path,
    *,
    nproc: int,
    on_rows: Callable[[Rows], None],
    here: bool = True,
    each: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Execute `words`, on this machine if `here`; see `launch`.

    `each`: they are one of `nproc` processes that call `worker.as_worker`; otherwise they start all of them.
    """
    logs = folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    (folder / RESULTS).unlink(missing_ok=True)
    rows, asked, died = NewRows(folder / "metrics.jsonl"), list[int](), dict[int, int]()
    deadline, heard, told = math.inf, time.monotonic(), 0.0
    environment = {
        "OMP_NUM_THREADS": str(max(1, cpu_cores() // nproc)),
        **(on_this_machine() if here else os.environ),
        **variables,
        LAUNCHER: f"{os.getpid()}@{socket.gethostname()}",
        "PYTHONUNBUFFERED": "1",
    }
    started = _started(words, environment, logs / LAUNCHER_LOG, nproc if each else None)
    with caught(lambda number, _frame: asked.append(number)), started as workers:
        while True:
            now, codes, new = time.monotonic(), [worker.poll() for worker in workers], rows.read()
            if each and now < deadline:
                died |= {rank: -code for rank, code in enumerate(codes) if code is not None and code < 0}
                deadline = min(deadline, now + GRACE_S) if any(codes) else math.inf
            elif each:
                for worker in workers:
                    end_family(worker.pid)
            on_rows(new)
            if None not in codes:
                break
            if asked and now > told + 1.0:
                told = now  # and again each second: a worker that has not reached its training loop ignores it
                signal_workers(logs, signal.SIGUSR1) if here else workers[0].send_signal(signal.SIGUSR1)
            heard = now if new else heard
            if here and now > heard + SILENCE_S:
                heard = math.inf  # once a silence
                signal_workers(logs, signal.SIGUSR2)
            time.sleep(_POLL_S)
    if (folder / RESULTS).exists():
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        (folder / RESULTS).unlink()  # they go into summary.json
        return results
    raise _cause(logs, max(worker.returncode for worker in workers), asked, died)


@contextlib.contextmanager
def _started(
    words: Sequence[str], environment: dict[str, str], log_file: Path, nproc: int | None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`nproc` processes that meet here, or the one that starts them (None), while the block runs; none is left behind."""
    workers: list[subprocess.Popen[bytes]] = []
    with log_file.open("wb") as log, reserved_port() as port:
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        sizes = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
        try:
            for rank in range(nproc or 1):
                who = meeting | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if nproc else {}
                workers.append(
                    subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment | who,
                                     start_new_session=True)
                )  # fmt: skip
            yield workers
        finally:
            for worker in workers:
                end_family(worker.pid)
                worker.wait()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine that nobody else is given while the block runs; rank 0, which reuses addresses, may listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def torchrun(nproc: int) -> list[str]:
    """The command that starts `nproc` workers on this machine, on a free port."""
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}", "--nnodes=1", "--max-restarts=0",
        "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost",
    ]  # fmt: skip


def on_this_machine() -> dict[str, str]:
    """The environment of processes that meet on this machine only; what the caller has set stays.

    They talk over the loopback interface, and hardly wait for a name server: gloo looks up the machine's name for every group,
    PyTorch's sockets the name behind each address. Where no server answers (a node of a cluster, a container), each costs ten
    seconds, and the start of two processes 95 s (12 s so, measured with a server that stays silent).
    """
    loopback = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.family == socket.AF_INET and address.address == "127.0.0.1" for address in addresses)
    ]
    defaults = {"RES_OPTIONS": "timeout:1 attempts:1"}
    if loopback:
        defaults["GLOO_SOCKET_IFNAME"] = loopback[0]
    return {**defaults, **os.environ}


def require_devices(device: str, nproc: int) -> None:
    """Raise Unavailable unless this machine has what `nproc` processes on `device` need (leaves CUDA uninitialized)."""
    count = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and count == 0):
        return
    if count < nproc:
        raise Unavailable(f"needs {nproc} GPUs and torch sees {count} here; device: cpu runs on CPU processes")


def _cause(logs: Path, code: int, asked: list[int], died: dict[int, int]) -> Exception:
    """The exception that says why the workers ended without results.

    `died`: the signals that ended workers, by rank, without those that were ended from here.
    """
    errors = [
        {"rank": int(path.name.split("-")[1].split(".")[0]), **json.loads(path.read_text(encoding="utf-8"))}
        for path in logs.glob("*.error.json")
    ]
    first = min(errors, key=lambda error: error["time"], default=None)
    log = (logs / LAUNCHER_LOG).read_text(encoding="utf-8", errors="replace")
    if match := re.search(r"task (\d+): Killed", log):  # srun
        died = {int(match[1]): signal.SIGKILL}
    # Whoever reports an error after a neighbour's death reports that death.
    if died and (first is None or first["outcome"] == "failed"):
        rank, number = next(iter(died.items()))
        return WorkerFailed(f"rank {rank} was ended by {_by(number)}; see logs/rank-{rank}.log")
    if first is None and code < 0:
        return WorkerFailed(f"the process was ended by {_by(-code)}")
    if first is None:
        lines = [line for line in log.splitlines() if line.strip()]
        return WorkerFailed(f"the workers ended with exit code {code}: {lines[-1] if lines else 'no output'}")
    reason = first["reason"]
    if first["outcome"] == "preempted":
        return Preempted(reason + (f" ({signal.Signals(asked[0]).name})" if asked else ""))
    if first["outcome"] == "oom":
        return MemoryError(f"rank {first['rank']}: {reason}")
    if first["outcome"] == "unavailable":
        return Unavailable(reason)
    if first["user_error"]:
        return UserError(reason)
    return WorkerFailed(f"rank {first['rank']}: {reason}; see logs/rank-{first['rank']}.log")


def _by(number: int) -> str:
    hint = " (by hand, or by the system when memory ran out)" if number == signal.SIGKILL else ""
    return signal.Signals(number).name + hint
