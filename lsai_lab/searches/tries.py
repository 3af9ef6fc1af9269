"""Tries: a piece of work in processes of its own, whose end is an answer and never the end of the caller.

Processes are forked from a server that has torch imported and has not touched the GPU, so a try costs little. A try of several
processes is a process group of its own: each finds in its environment who it is, as torchrun sets it. The first process that does
not end well decides the outcome, and the others are killed, since they wait for a neighbour that is gone.

On a CPU there is no natural edge before the machine suffers, so the edge is set: each process may allocate a given amount
(RLIMIT_DATA), beyond which the allocator really fails.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import queue
import socket
import time
from collections.abc import Callable
from typing import Any

from lsai_core.training.host_memory import return_freed_memory
from lsai_lab.launch.launch import on_this_machine
from lsai_lab.runs.outcome import is_out_of_memory

GIB = 2**30
_POLL_S = 0.2
_ECHO_S = 1.0
# The work of one process: its rank and its argument to what it measured, with `peak_gib` (of memory) where that is known.
Work = Callable[[int, Any], dict[str, float]]


# The first step of any optimizer imports it, for seconds. On a GPU's machine each try does that by itself: nobody has checked that
# it leaves the GPU alone, as a process must that others are forked from.
_COMPILER = "torch._dynamo"


def server(preload: list[str], *, on_gpu: bool) -> Any:
    """What processes are forked from, with these modules imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload if on_gpu else [*preload, _COMPILER])
    return context


def attempt(workers: Any, work: Work, argument: Any, *, processes: int, timeout_s: float) -> dict[str, Any]:
    """Do `work(rank, argument)` in each of `processes` new processes; never raises for what happens inside them.

    Returns outcome, note and seconds, and for `ok` of each measured number the largest process's: `peak_gib`, and the others in
    `measured`. `work` and `argument` must be picklable.
    """
    answers = workers.Queue()
    port = _free_port()
    family = [
        workers.Process(target=_in_process, args=(work, argument, rank, processes, port, answers), daemon=True)
        for rank in range(processes)
    ]
    started = time.perf_counter()
    for process in family:
        process.start()
    found: dict[int, dict[str, Any]] = {}
    bad: dict[str, Any] | None = None
    while bad is None and len(found) < processes:
        with contextlib.suppress(queue.Empty):
            rank, answer = answers.get(timeout=_POLL_S)
            found[rank] = answer
            bad = None if answer["outcome"] == "ok" else _first_cause(answer, answers) if processes > 1 else answer
            continue
        if time.perf_counter() - started > timeout_s:
            bad = {"outcome": "timeout", "note": f"no answer within {timeout_s:g} s"}
        elif dead := [rank for rank, process in enumerate(family) if rank not in found and not process.is_alive()]:
            with contextlib.suppress(queue.Empty):  # it may have answered between the two looks
                while dead[0] not in found:
                    rank, found[rank] = answers.get(timeout=_POLL_S)
            bad = next((answer for answer in found.values() if answer["outcome"] != "ok"), None)
            if bad is None and dead[0] not in found:
                bad = _died(family[dead[0]].exitcode)
    for process in family:
        if bad is not None:
            process.kill()
        process.join(10)
    seconds = round(time.perf_counter() - started, 2)
    if bad is not None:
        return {"note": None, **bad, "seconds": seconds}
    measured = {
        name: max(answer["measured"][name] for answer in found.values())
        for name in next(iter(found.values()))["measured"]
    }
    peak_gib = measured.pop("peak_gib", None)
    return {"outcome": "ok", "note": None, "peak_gib": peak_gib, "seconds": seconds, "measured": measured}


def _first_cause(answer: dict[str, Any], answers: Any) -> dict[str, Any]:
    """An error that a neighbour's end may have caused, or that neighbour's own words if they come within a moment."""
    until = time.perf_counter() + _ECHO_S
    while answer["outcome"] == "failed" and (left := until - time.perf_counter()) > 0:
        with contextlib.suppress(queue.Empty):
            other = answers.get(timeout=left)[1]
            answer = other if other["outcome"] == "oom" else answer
    return answer


def _died(code: int | None) -> dict[str, Any]:
    # SIGKILL is how the operating system ends a process that outgrew the memory.
    return {"outcome": "oom" if code == -9 else "failed", "note": f"the process ended with exit code {code}"}


def _in_process(work: Work, argument: Any, rank: int, processes: int, port: int, answers: Any) -> None:
    """Body of one process: work, and answer with how that ended."""
    os.environ |= on_this_machine() | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    answer: dict[str, Any]
    try:
        answer = {"outcome": "ok", "measured": work(rank, argument)}
    except Exception as error:
        note = " ".join(str(error).split())[:300]
        full = is_out_of_memory(error) or _no_thread(error)
        answer = {"outcome": "oom" if full else "failed", "note": f"{type(error).__name__}: {note}"}
    _lift_limit()  # an answer needs memory, too
    answers.put((rank, answer))
    answers.close()
    answers.join_thread()
    os._exit(0)  # skip the teardown of a process that may be out of memory


def _no_thread(error: Exception) -> bool:
    """Whether a process under a limit of its own could not start a thread: there was no memory for its stack."""
    if "Resource temporarily unavailable" not in str(error):
        return False
    with contextlib.suppress(ImportError):
        import resource

        return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def limit_allocations(gib: float) -> None:
    """Let this process allocate `gib` more than it has now; anything beyond fails.

    What the first step imports comes before. It is there already, unless the process that this one was forked from had been
    started earlier for other work.
    """
    import resource

    importlib.import_module(_COMPILER)
    return_freed_memory()
    total = _data_bytes() + int(gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (total, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _data_bytes() -> int:
    """Size of this process's data segment and private mappings, the quantity that RLIMIT_DATA bounds (Linux)."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    except (OSError, StopIteration):
        return 0


def _lift_limit() -> None:
    with contextlib.suppress(ImportError):  # no such module outside of Unix, where no limit was set
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
