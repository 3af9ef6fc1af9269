"""Tries: a piece of work in processes of its own, whose end is an answer and never the end of the
caller.

Processes are forked from a server that has torch imported and has not touched the GPU, so a try
costs little. The first process that does not end well decides the outcome, and the others are
killed, since they wait for a neighbour that is gone. On a CPU there is no natural edge before the
machine suffers, so each process may allocate a given amount (RLIMIT_DATA), beyond which the
allocator really fails.
"""

import contextlib
import importlib
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from lsai_core.config.precision import set_matmul_mode
from lsai_core.config.train import TrainConfig
from lsai_core.training.host_memory import return_freed_memory
from lsai_core.training.step import resolve_device
from lsai_lab.launch.launch import on_this_machine
from lsai_lab.runs.records import is_out_of_memory

GIB = 2**30
_ECHO_S = 1.0
# The work of one process: its rank and its argument to what it measured, with `peak_gib` (of
# memory) where that is known.
Work = Callable[[int, Any], dict[str, float]]
# The first step of any optimizer imports it, for seconds. On a GPU's machine each try does that by
# itself: nobody has checked that it leaves the GPU alone, as a process must that others are forked
# from.
_COMPILER = "torch._dynamo"


def server(preload: list[str], *, on_gpu: bool) -> Any:
    """What processes are forked from, with these modules imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload if on_gpu else [*preload, _COMPILER])
    return context


def attempt(
    workers: Any, work: Work, argument: Any, *, processes: int, timeout_s: float
) -> tuple[dict[str, Any], dict[str, float]]:
    """Do `work(rank, argument)`, both picklable, in each of `processes` new processes; never raises
    for what happens inside them.

    Returns how it ended (`outcome`: `ok`, `oom`, `failed`, `timeout`; `note`, `seconds`) and, of
    each measured number, the largest process's.
    """
    started, meeting = time.perf_counter(), on_this_machine()
    meeting |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    meeting |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(get_free_port())}
    waiting, found, bad = {}, list[dict[str, float]](), dict[str, Any]()
    for rank in range(processes):
        answer, told = workers.Pipe(duplex=False)
        process = workers.Process(
            target=_in_process, args=(work, argument, rank, meeting, told), daemon=True
        )
        process.start()
        told.close()  # here; the process has its own, and its end ends the pipe
        waiting[answer] = process
    family, until = list(waiting.values()), started + timeout_s
    while waiting and bad.get("outcome") in (None, "failed"):
        ready = multiprocessing.connection.wait(
            list(waiting), max(0.0, until - time.perf_counter())
        )
        if not ready:
            bad = bad or {"outcome": "timeout", "note": f"no answer within {timeout_s:g} s"}
            break
        for one in ready:
            end = _answer(one, waiting.pop(one))
            if end["outcome"] == "ok":
                found.append(end["measured"])
            elif not bad or end["outcome"] == "oom":
                # Its neighbour's end may have caused an error: that one's own words, if they come
                # within a moment.
                bad, until = end, min(until, time.perf_counter() + _ECHO_S)
    for process in family:
        if bad:
            process.kill()
        process.join(10)
    measured = {} if bad else {name: max(numbers[name] for numbers in found) for name in found[0]}
    end = {"outcome": "ok", "note": None, "seconds": round(time.perf_counter() - started, 2)}
    return end | bad, measured


def _answer(pipe: Any, process: Any) -> dict[str, Any]:
    """What a process has answered, or how it ended without an answer."""
    with contextlib.suppress(EOFError, OSError):
        return pipe.recv()
    process.join(10)
    # SIGKILL is how the operating system ends a process that outgrew the memory.
    outcome = "oom" if process.exitcode == -signal.SIGKILL else "failed"
    return {"outcome": outcome, "note": f"the process ended with exit code {process.exitcode}"}


def _in_process(work: Work, argument: Any, rank: int, meeting: dict[str, str], told: Any) -> None:
    """Body of one process: work, and answer with how that ended."""
    import resource  # of Unix; Windows plans and reads searches and has none

    os.environ |= meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    try:
        answer: dict[str, Any] = {"outcome": "ok", "measured": work(rank, argument)}
    except Exception as error:
        note = " ".join(str(error).split())[:300]
        # Under a limit of its own a process that cannot start a thread has no memory for its stack.
        limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
        full = is_out_of_memory(error) or (
            limited and "Resource temporarily unavailable" in str(error)
        )
        answer = {"outcome": "oom" if full else "failed", "note": f"{type(error).__name__}: {note}"}
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # an answer needs memory, too
    told.send(answer)
    os._exit(0)  # skip the teardown of a process that may be out of memory


def begin_try(train: TrainConfig, cpu_limit_gib: float) -> torch.device:
    """The device that a process of a try trains on; on a CPU it may allocate so much from now
    on."""
    device = resolve_device(train.device)
    if device.type == "cpu":
        limit_allocations(cpu_limit_gib)
    set_matmul_mode(train.precision)
    return device


def gpu_peaks() -> dict[str, float]:
    """What this process's GPU had at most so far: reserved (`peak_gib`) and allocated."""
    torch.cuda.synchronize()
    reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    return {"peak_gib": reserved / GIB, "allocated_gib": allocated / GIB}


def limit_allocations(gib: float) -> None:
    """Let this process allocate `gib` more than it has now; anything beyond fails."""
    import resource

    # there already, unless the server was started earlier for other work
    importlib.import_module(_COMPILER)
    return_freed_memory()
    total = psutil.Process().memory_info().data + int(gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (total, resource.getrlimit(resource.RLIMIT_DATA)[1]))
