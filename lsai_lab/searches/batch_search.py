"""The `batch_search` kind: the largest batch that trains, found by really training it.

Each try is a process of its own (`tries.py`), so that its death (an out-of-memory error, a crash, a kill) ends that try alone. It
runs whole optimizer steps on random tokens: the memory of a step does not depend on which tokens they are.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from pydantic import Field

from lsai_core.config import TrainConfig
from lsai_core.errors import Unavailable, UserError
from lsai_core.strict import Strict, validated
from lsai_lab.runs.kinds import Context
from lsai_lab.searches import tries as processes
from lsai_lab.searches.search import Try, search_largest

_DECIDES_MEMORY = (
    "model", "attention", "precision", "fp8", "grad_checkpoint", "saved_inputs", "inputs_on_gpu", "mlp_chunk", "compile", "device", "seq_len", "seed",
)  # fmt: skip


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
        if validated(TrainConfig, config, "the training config of a batch search").parallel.sharded:
            raise UserError(
                "the search for the largest batch is for one process; leave out parallel.fsdp and cpu_offload, or "
                "measure the other parts alone (--parts train)"
            )
        train = {key: value for key, value in config.items() if key in _DECIDES_MEMORY}
        if "vocab_size" in config.get("data", {}):
            train["data"] = {"vocab_size": config["data"]["vocab_size"]}
        if "states" in config.get("optim", {}):
            train["optim"] = {"states": config["optim"]["states"]}
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
    workers = processes.server([__name__, "lsai_core.train.step"], on_gpu=on_gpu)
    limit_gib = _gpu_memory_gib() if on_gpu else config.cpu_limit_gib
    seen: list[Try] = []

    def attempt(size: int) -> Try:
        answer = processes.attempt(
            workers, _train_random_tokens, (config, size), processes=1, timeout_s=config.try_timeout_s
        )
        result = Try(size=size, **answer)
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
        "tries": [t.row for t in tries],
    }


def _gpu_memory_gib() -> float:
    return torch.cuda.get_device_properties(0).total_memory / processes.GIB


def _train_random_tokens(rank: int, argument: tuple[BatchSearchConfig, int]) -> dict[str, float]:
    """Train `steps` steps at a batch size; returns the peak of reserved GPU memory in GiB, on a CPU nothing."""
    from lsai_core.train import step
    from lsai_core.train.optimizer import build_optimizer
    from lsai_core.train.precision import set_matmul_mode

    config, size = argument
    train = config.train.model_copy(update={"batch_size": size, "grad_accum": 1})
    device = step.resolve_device(train.device)
    if device.type == "cpu":
        processes.limit_allocations(config.cpu_limit_gib)
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
        return {}
    torch.cuda.synchronize()
    return {"peak_gib": torch.cuda.max_memory_reserved() / processes.GIB}
