"""The `batch_search` kind: the largest batch that trains, found by really training it on random tokens: which ones they are does not
matter to the memory of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from lsai_core import fp8
from lsai_core.config import TrainConfig
from lsai_core.errors import UserError
from lsai_core.training import step
from lsai_core.training.optimizer import build_optimizer
from lsai_core.training.precision import set_matmul_mode
from lsai_lab.runs.kinds import Context
from lsai_lab.searches.tries import SearchConfig, Tries, gpu_peaks, limit_allocations, search_largest


class BatchSearchConfig(SearchConfig):
    """How far to search."""

    start: int = Field(1, gt=0, description="first batch size tried")
    max_batch: int = Field(1 << 16, gt=0)
    steps: int = Field(2, gt=0, description="optimizer steps per try")
    cpu_limit_gib: float = Field(2.0, gt=0)

    @classmethod
    def from_study(cls, config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        found = super().from_study(config, settings)
        if TrainConfig.model_validate(config).parallel.sharded:
            advice = "leave out parallel.fsdp and cpu_offload, or measure the other parts alone (--parts train)"
            raise UserError(f"the search for the largest batch is for one process; {advice}")
        del found["train"]["batch_size"]  # what is searched for
        return found


def run(config: BatchSearchConfig, context: Context) -> dict[str, Any]:
    """Search; returns `largest_batch`, `largest_batch_tokens`, the limit, and every try."""
    tries = Tries(_train_random_tokens, config, context)
    kernel = step.attention_kernel(config.train, tries.device)
    fp8.require(config.train, tries.device)
    largest, _ = search_largest(
        lambda size: tries.attempt(size, (config, size), batch=size),
        start=config.start, limit=config.max_batch, resolution=config.resolution, capacity_gib=tries.limit_gib,
    )  # fmt: skip
    found = {"largest_batch": largest, "largest_batch_tokens": largest * config.train.seq_len}
    return found | {"attention_kernel": kernel, **tries.results(capped=largest == config.max_batch)}


def _train_random_tokens(rank: int, argument: tuple[BatchSearchConfig, int]) -> dict[str, float]:
    """Train `steps` steps at a batch size; returns the peak of reserved GPU memory in GiB, on a CPU nothing."""
    config, size = argument
    train = config.train
    # From the second micro-batch on all are alike.
    train = train.model_copy(update={"batch_size": size, "grad_accum": min(2, train.grad_accum)})
    device = step.resolve_device(train.device)
    if device.type == "cpu":
        limit_allocations(config.cpu_limit_gib)
    set_matmul_mode(train.precision)
    model = step.prepare_model(train, device)
    optimizer = build_optimizer(model, train.optim)
    generator = torch.Generator().manual_seed(train.seed)
    tokens = torch.randint(train.model.vocab_size, (size * train.grad_accum, train.seq_len + 1), generator=generator)
    # One sequence first: library handles and optimizer states take their memory while there is some, as they do in a run
    # that warms up, and the allocator can then give back what it cached for them.
    for sequences in (1, *[len(tokens)] * config.steps):
        x, y = tokens[:sequences, :-1], tokens[:sequences, 1:]
        step.train_step(model, optimizer, x, y, train, device)
    return {} if device.type == "cpu" else {"peak_gib": gpu_peaks()["peak_gib"]}
