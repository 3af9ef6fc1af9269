"""The `batch_search` kind: the largest batch that trains, found by really training it.

Each try is a process of its own, forked from a server that has torch imported and has not touched the GPU, so a try costs
little and its death (an out-of-memory error, a crash, a kill) ends that try alone. A try runs whole optimizer steps on random
tokens: the memory of a step does not depend on which tokens they are.

On a CPU there is no natural edge before the machine suffers, so the edge is set: the process may allocate
`cpu_limit_gib` (RLIMIT_DATA), beyond which the allocator really fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import queue
import sys
import time
from typing import Any

import torch
from pydantic import Field

from lsai_core.config import Strict, TrainConfig, validated
from lsai_core.errors import Unavailable, UserError
from lsai_core.runs.kinds import Context
from lsai_core.runs.outcome import is_out_of_memory
from lsai_core.runs.search import Try, search_largest

GIB = 2**30
_DECIDES_MEMORY = ("model", "attention", "precision", "fp8", "grad_checkpoint", "compile", "device", "seq_len", "seed")


class BatchSearchConfig(Strict):
    """Which training run, and how far and how finely to search."""

    train: TrainConfig
    start: int = Field(1, gt=0, description="first batch size tried")
    max_batch: int = Field(1 << 16, gt=0)
    resolution: float = Field(0.0, ge=0, lt=1, description="stop at this relative width; 0 finds the exact batch")
    steps: int = Field(2, gt=0, description="optimizer steps per try")
    try_timeout_s: float = Field(120.0, gt=0)
    cpu_limit_gib: float = Field(2.0, gt=0, description="on a CPU: what one try may allocate")

    @classmethod
    def from_study(cls, config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """Keep of the training config what decides memory, so that a new learning rate does not repeat the search."""
        if validated(TrainConfig, config, "the training config of a batch search").parallel.world_size > 1:
            raise UserError(
                "the search for the largest batch is for one process; leave out parallel.fsdp, or "
                "measure the other parts alone (--parts train)"
            )
        train = {key: value for key, value in config.items() if key in _DECIDES_MEMORY}
        if "vocab_size" in config.get("data", {}):
            train["data"] = {"vocab_size": config["data"]["vocab_size"]}
        return {"train": train, **settings}


def run(config: BatchSearchConfig, context: Context) -> dict[str, Any]:
    """Search; returns `largest_batch`, `largest_batch_tokens`, the limit, and every try."""
    from lsai_core import fp8
    from lsai_core.train.step import attention_kernel, resolve_device

    device = resolve_device(config.train.device)
    kernel = attention_kernel(config.train, device)
    fp8.require(config.train, device)
    on_gpu = device.type == "cuda"
    if not on_gpu and sys.platform != "linux":
        raise Unavailable("the search on a CPU limits memory with Linux's RLIMIT_DATA; this is not Linux")
    workers = multiprocessing.get_context("forkserver")
    workers.set_forkserver_preload([__name__, "lsai_core.train.step"])
    limit_gib = _gpu_memory_gib() if on_gpu else config.cpu_limit_gib
    seen: list[Try] = []

    def attempt(size: int) -> Try:
        result = _attempt(workers, config, size)
        seen.append(result)
        context.on_rows([{"step": len(seen), "batch": size, "outcome": result.outcome, "peak_gib": result.peak_gib}])
        if size == 1 and result.outcome == "failed":
            raise RuntimeError(f"a batch of one sequence does not run: {result.note}")
        return result

    largest, tries = search_largest(
        attempt, start=config.start, limit=config.max_batch, resolution=config.resolution, capacity_gib=limit_gib
    )
    return {
        "largest_batch": largest,
        "largest_batch_tokens": largest * config.train.seq_len,
        "attention_kernel": kernel,
        "search_limit_gib": limit_gib,
        "search_limit_kind": "GPU memory" if on_gpu else "process allocation limit (RLIMIT_DATA)",
        "search_resolution": config.resolution,
        "search_capped": largest == config.max_batch,
        "tries": [dataclasses.asdict(t) for t in tries],
    }


def _gpu_memory_gib() -> float:
    return torch.cuda.get_device_properties(0).total_memory / GIB


def _attempt(workers: Any, config: BatchSearchConfig, size: int) -> Try:
    """One try in its own process; never raises for what happens inside it."""
    answers = workers.Queue()
    process = workers.Process(target=_try_in_process, args=(config, size, answers), daemon=True)
    started = time.perf_counter()
    process.start()
    answer: dict[str, Any] | None = None
    while answer is None and time.perf_counter() - started < config.try_timeout_s:
        try:
            answer = answers.get(timeout=0.2)
        except queue.Empty:
            if not process.is_alive():
                with contextlib.suppress(queue.Empty):  # it may have answered between the two looks
                    answer = answers.get(timeout=0.2)
                break
    seconds = time.perf_counter() - started
    if answer is None and process.is_alive():
        process.kill()
        answer = {"outcome": "timeout", "note": f"no answer within {config.try_timeout_s:g} s"}
    process.join(10)
    if answer is None:
        # SIGKILL is how the operating system ends a process that outgrew the memory.
        code = process.exitcode
        answer = {"outcome": "oom" if code == -9 else "failed", "note": f"the process ended with exit code {code}"}
    return Try(size=size, seconds=round(seconds, 2), **answer)


def _try_in_process(config: BatchSearchConfig, size: int, answers: Any) -> None:
    """Body of a try: build, train `steps` steps at batch `size`, answer with the outcome."""
    import os

    try:
        answer = {"outcome": "ok", "peak_gib": _train_random_tokens(config, size)}
    except Exception as error:
        note = " ".join(str(error).split())[:300]
        answer = {"outcome": "oom" if is_out_of_memory(error) else "failed", "note": f"{type(error).__name__}: {note}"}
    _lift_limit()  # an answer needs memory, too
    answers.put(answer)
    answers.close()
    answers.join_thread()
    os._exit(0)  # skip the teardown of a process that may be out of memory


def _train_random_tokens(config: BatchSearchConfig, size: int) -> float | None:
    """Train; returns the peak of reserved GPU memory in GiB, or on a CPU the peak of the process's data segment growth."""
    from lsai_core.train import step
    from lsai_core.train.optimizer import build_optimizer
    from lsai_core.train.precision import set_matmul_mode

    train = config.train.model_copy(update={"batch_size": size, "grad_accum": 1})
    device = step.resolve_device(train.device)
    before = _data_bytes()
    if device.type == "cpu":
        _limit_allocations(before + int(config.cpu_limit_gib * GIB))
    set_matmul_mode(train.precision)
    model = step.prepare_model(train, device)
    optimizer = build_optimizer(model, train.optim)
    generator = torch.Generator().manual_seed(train.seed)
    tokens = torch.randint(train.model.vocab_size, (size, train.seq_len + 1), generator=generator)
    # One sequence first: library handles and optimizer states take their memory while there is some, as they do in a run
    # that warms up, and the allocator can then give back what it cached for them.
    for rows in (1, *[size] * config.steps):
        step.train_step(model, optimizer, tokens[:rows, :-1], tokens[:rows, 1:], train, device)
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() / GIB


def _data_bytes() -> int:
    """Size of this process's data segment and private mappings, the quantity that RLIMIT_DATA bounds (Linux)."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    except (OSError, StopIteration):
        return 0


def _limit_allocations(total: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (total, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _lift_limit() -> None:
    with contextlib.suppress(ImportError):  # no such module outside of Unix, where no limit was set
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
