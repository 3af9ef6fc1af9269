"""Tries: a piece of work in processes of its own, whose end is an answer and never the end of the caller.

Processes are forked from a server that has torch imported and has not touched the GPU, so a try costs little. The first process that does
not end well decides the outcome, and the others are killed, since they wait for a neighbour that is gone. On a CPU there is no natural
edge before the machine suffers, so each process may allocate a given amount (RLIMIT_DATA), beyond which the allocator really fails.

The search itself: doubling from `start` brackets the answer, bisection narrows it; from a start that is an estimate the first steps are
smaller. Where the peak memory of two successful tries and the capacity are known, the next try is taken where the straight line through
them reaches the capacity; the bracket is kept, so a bad guess costs a try and never a wrong answer. After two guesses in a row comes a
plain step, so readings that mislead cost at most three times the tries of a search without.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing.connection
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch
from pydantic import Field
from torch.distributed.elastic.utils.distributed import get_free_port

from lsai_core.config import TrainConfig
from lsai_core.errors import Unavailable
from lsai_core.facts import deciding
from lsai_core.strict import Strict, validated
from lsai_core.training.host_memory import return_freed_memory
from lsai_core.training.step import resolve_device
from lsai_lab.benches.points import Points
from lsai_lab.launch.launch import on_this_machine
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.records import is_out_of_memory

GIB = 2**30
_ECHO_S = 1.0
_GUESSES_IN_A_ROW = 2
# The work of one process: its rank and its argument to what it measured, with `peak_gib` (of memory) where that is known.
Work = Callable[[int, Any], dict[str, float]]
# The first step of any optimizer imports it, for seconds. On a GPU's machine each try does that by itself: nobody has checked that
# it leaves the GPU alone, as a process must that others are forked from.
_COMPILER = "torch._dynamo"


class SearchConfig(Strict):
    """What every search is told: which training run, and how finely to search."""

    train: TrainConfig
    resolution: float = Field(0.0, ge=0, lt=1, description="stop at this relative width; 0 finds the exact size")
    try_timeout_s: float = Field(120.0, gt=0)
    cpu_limit_gib: float = Field(gt=0, description="on a CPU: what one process of a try may allocate")

    @classmethod
    def from_study(cls, config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """The row's training config, as far as it decides memory: a new learning rate does not repeat the search."""
        row = validated(TrainConfig, config, "the training config of a search")
        return {"train": deciding(row, "memory"), **settings}


@dataclass(frozen=True)
class Try:
    """One attempt: its size, how it ended (`ok`, `oom`, `failed`, `timeout`), and what was seen; `measured`: what else, by name."""

    size: int
    outcome: str
    peak_gib: float | None = None
    seconds: float = 0.0
    note: str | None = None
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """As it stands in records, `measured` beside the rest."""
        fields = asdict(self)
        return fields | fields.pop("measured")


class Tries:
    """The tries of a search over sizes of a run: each is a row of `metrics.jsonl` as soon as it has ended.

    `limit_gib` is the memory of the GPU or, on a CPU, what one process may allocate. Raises Unavailable if the limit cannot be set here.
    """

    def __init__(self, work: Work, config: SearchConfig, context: Context) -> None:
        train = config.train
        self.device, self.seen = resolve_device(train.device), list[Try]()
        self.on_gpu = self.device.type == "cuda"
        if not self.on_gpu and sys.platform != "linux":
            raise Unavailable("the search on a CPU limits memory with Linux's RLIMIT_DATA; this is not Linux")
        self.limit_gib = torch.cuda.get_device_properties(0).total_memory / GIB if self.on_gpu else config.cpu_limit_gib
        self._work, self._config = work, config
        (context.folder / "metrics.jsonl").unlink(missing_ok=True)
        self._rows = Points(context.folder / "metrics.jsonl", context.on_rows)
        modules = [work.__module__, *["lsai_core.parallel.fsdp"] * train.parallel.sharded]
        self._server = server(modules, on_gpu=self.on_gpu)

    def attempt(self, size: int, argument: Any, **facts: Any) -> Try:
        """One try of `work(rank, argument)`; `facts` stand in its row, too. RuntimeError if not even size 1 runs."""
        processes, timeout_s = self._config.train.parallel.world_size, self._config.try_timeout_s
        answer = attempt(self._server, self._work, argument, processes=processes, timeout_s=timeout_s)
        self.seen.append(found := Try(size=size, **answer))
        self._rows.add({"step": len(self.seen), **found.row, **facts})
        if size == 1 and found.outcome == "failed":
            raise RuntimeError(f"size 1 does not run: {found.note}")
        return found

    def results(self, capped: bool) -> dict[str, Any]:
        """What the record says of any search; `capped`: whether the largest size that may be tried fitted."""
        return {
            "search_limit_gib": self.limit_gib,
            "search_limit_kind": "GPU memory" if self.on_gpu else "process allocation limit (RLIMIT_DATA)",
            "search_resolution": self._config.resolution,
            "search_capped": capped,
            "tries": [t.row for t in self.seen],
        }


def server(preload: list[str], *, on_gpu: bool) -> Any:
    """What processes are forked from, with these modules imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload if on_gpu else [*preload, _COMPILER])
    return context


def attempt(workers: Any, work: Work, argument: Any, *, processes: int, timeout_s: float) -> dict[str, Any]:
    """Do `work(rank, argument)`, both picklable, in each of `processes` new processes; never raises for what happens inside them.

    Returns the fields of a `Try` but its size, of each measured number the largest process's.
    """
    started, meeting = time.perf_counter(), on_this_machine()
    meeting |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    meeting |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(get_free_port())}
    waiting, found, bad = {}, list[dict[str, float]](), dict[str, Any]()
    for rank in range(processes):
        answer, told = workers.Pipe(duplex=False)
        process = workers.Process(target=_in_process, args=(work, argument, rank, meeting, told), daemon=True)
        process.start()
        told.close()  # here; the process has its own, and its end ends the pipe
        waiting[answer] = process
    family, until = list(waiting.values()), started + timeout_s
    while waiting and bad.get("outcome") in (None, "failed"):
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, until - time.perf_counter()))
        if not ready:
            bad = bad or {"outcome": "timeout", "note": f"no answer within {timeout_s:g} s"}
            break
        for one in ready:
            end = _answer(one, waiting.pop(one))
            if end["outcome"] == "ok":
                found.append(end["measured"])
            elif not bad or end["outcome"] == "oom":
                # Its neighbour's end may have caused an error: that one's own words, if they come within a moment.
                bad, until = end, min(until, time.perf_counter() + _ECHO_S)
    for process in family:
        if bad:
            process.kill()
        process.join(10)
    seconds = round(time.perf_counter() - started, 2)
    if bad:
        return {"note": None, **bad, "seconds": seconds}
    measured = {name: max(numbers[name] for numbers in found) for name in found[0]}
    peak_gib = measured.pop("peak_gib", None)
    return {"outcome": "ok", "note": None, "peak_gib": peak_gib, "seconds": seconds, "measured": measured}


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
    os.environ |= meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    try:
        answer: dict[str, Any] = {"outcome": "ok", "measured": work(rank, argument)}
    except Exception as error:
        note = " ".join(str(error).split())[:300]
        # Under a limit of its own a process that cannot start a thread has no memory for its stack.
        limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
        full = is_out_of_memory(error) or (limited and "Resource temporarily unavailable" in str(error))
        answer = {"outcome": "oom" if full else "failed", "note": f"{type(error).__name__}: {note}"}
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # an answer needs memory, too
    told.send(answer)
    os._exit(0)  # skip the teardown of a process that may be out of memory


def gpu_peaks() -> dict[str, float]:
    """What this process's GPU had at most so far: reserved (`peak_gib`) and allocated."""
    torch.cuda.synchronize()
    reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    return {"peak_gib": reserved / GIB, "allocated_gib": allocated / GIB}


def limit_allocations(gib: float) -> None:
    """Let this process allocate `gib` more than it has now; anything beyond fails."""
    importlib.import_module(_COMPILER)  # there already, unless the server was started earlier for other work
    return_freed_memory()
    total = psutil.Process().memory_info().data + int(gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (total, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def search_largest(
    attempt: Callable[[int], Try], *, start: int = 1, limit: int = 1 << 20, resolution: float = 0.0,
    capacity_gib: float | None = None, first_step: float = 2.0,
) -> tuple[int, list[Try]]:  # fmt: skip
    """Largest size in 1..limit whose try is `ok` (0 if none), and every try in order.

    `resolution`: stop when the bracket is narrower than this share of the largest success (0: exact). `first_step`: the factor by
    which the second try lies above or below `start`, if nothing better is known; later ones are larger, up to 2.
    """
    tries: list[Try] = []
    fits, fails, size, guesses = 0, limit + 1, min(start, limit), 0
    while True:
        tries.append(attempt(size))
        fits, fails = (size, fails) if tries[-1].outcome == "ok" else (fits, size)
        if fails - fits <= max(1, int(resolution * fits)):
            return fits, tries
        guess, factor = (
            _predict(tries, capacity_gib, fits, fails),
            min(2.0, first_step ** min(64, 2 ** (len(tries) - 1))),
        )
        if guess is not None and fits < guess < fails and guesses < _GUESSES_IN_A_ROW:
            size, guesses = guess, guesses + 1
            continue
        size, guesses = (fits + fails) // 2, 0
        if fails == limit + 1:  # nothing has failed yet
            size = min(max(fits + 1, int(factor * fits)), limit)
        elif fits == 0:
            size = max(1, min(fails - 1, int(fails / factor)))


def _predict(tries: list[Try], capacity_gib: float | None, fits: int, fails: int) -> int | None:
    """Where the line through the two largest successes meets the capacity; None when it cannot be told."""
    seen = sorted({(t.size, t.peak_gib) for t in tries if t.outcome == "ok" and t.peak_gib})[-2:]
    if capacity_gib is None or len(seen) < 2:
        return None
    (size_a, peak_a), (size_b, peak_b) = seen
    slope = (peak_b - peak_a) / (size_b - size_a)
    if slope <= 0:
        return None
    size = int(size_b + (capacity_gib - peak_b) / slope)
    # A prediction that was tried already tells its error: look a few percent on, towards the answer.
    step = max(1, min(size // 50, (fails - fits) // 2))
    return size + step * ((size == fits) - (size == fails))
