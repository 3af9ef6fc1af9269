"""The `model_search` kind: the largest model that loads or trains on some processes, found by really doing it.

`load` gives every parameter memory and a value; `train` takes one real step on random tokens, with the optimizer's states there before
it, as in every step but the first. With `cpu_offload` the host's memory is the edge. Running over it would end more than the try, so a
model whose slices would take more than 85 % of it is refused before it is built.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import psutil
import torch
from pydantic import Field
from torch.distributed.tensor import DTensor

from lsai_core.config import TrainConfig
from lsai_core.model import Transformer, count_parameters
from lsai_core.parallel.processes import connect
from lsai_core.parallel.world import World
from lsai_core.profiling.limits import host_limit_gib
from lsai_core.training import step
from lsai_core.training.optimizer import build_optimizer, make_states
from lsai_core.training.precision import set_matmul_mode, weight_dtype
from lsai_lab.launch.launch import require_devices
from lsai_lab.runs.kinds import Context
from lsai_lab.searches.model_size import DEVICE_SHARE, Grow, Measure, first_size, grown, host_gib
from lsai_lab.searches.tries import GIB, SearchConfig, Tries, Try, gpu_peaks, limit_allocations, search_largest

# From the estimate to the second try: on a GPU it is a prediction or, of weights alone, exact.
_FIRST_STEP_GPU, _FIRST_STEP_CPU = 1.02, 1.06


class ModelSearchConfig(SearchConfig):
    """What is measured, and by what the model grows."""

    measure: Measure = Field(description="load: the weights alone; train: one whole step")
    grow: Grow = Field(description="all: the scaling factor; n_layers: the layers of the given model")
    max_size: int = Field(4096, gt=0, description="largest scaling factor or number of layers tried")
    budget_s: float = Field(600.0, gt=0, description="no try begins later than this")
    cpu_limit_gib: float = Field(0.5, gt=0)
    expandable_segments: bool = Field(
        False, description="on a GPU: the allocator's setting under which free pieces of memory serve any size"
    )


def run(config: ModelSearchConfig, context: Context) -> dict[str, Any]:
    """Search; returns the largest size and its model, what was measured of it (`_one_try`), its limit, the estimate, and every try.
    Raises Unavailable if the machine lacks the processes' GPUs."""
    train, offload = config.train, config.train.parallel.cpu_offload
    require_devices(train.device, train.parallel.world_size)
    tries = Tries(_one_try, config, context)
    if config.measure == "train":
        step.attention_kernel(train, tries.device)
    on_host_gib = host_limit_gib()
    start = first_size(
        train, config.grow, config.measure,
        on_gpu=tries.on_gpu, limit_gib=tries.limit_gib, host_limit_gib=on_host_gib, max_size=config.max_size,
    )  # fmt: skip
    if tries.on_gpu and config.expandable_segments:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read where tries import torch
    started = time.perf_counter()

    def attempt(size: int) -> Try:
        if time.perf_counter() - started > config.budget_s and tries.seen:
            return Try(size, "timeout", note="not tried")
        parameters = count_parameters(grown(train, config.grow, size).model).total
        return tries.attempt(size, (config, size, on_host_gib), parameters=parameters)

    largest, asked = search_largest(
        attempt, start=start, limit=config.max_size, resolution=config.resolution,
        capacity_gib=tries.limit_gib * DEVICE_SHARE if tries.on_gpu and not offload else None,
        first_step=_FIRST_STEP_GPU if tries.on_gpu else _FIRST_STEP_CPU,
    )  # fmt: skip
    found = tries.results(capped=largest == config.max_size)
    if tries.on_gpu and offload:
        found["search_limit_kind"] += f" and {on_host_gib:.0f} GiB of the host's"
    return {
        "largest_size": largest,
        **next((t.measured for t in tries.seen if t.size == largest), {}),
        "estimated_size": start,
        **(_facts(config, largest, tries.limit_gib) if largest else {"parameters": 0}),
        "world_size": train.parallel.world_size,
        "search_out_of_time": len(asked) > len(tries.seen),
        "search_s": time.perf_counter() - started,
        "device": torch.cuda.get_device_name(tries.device) if tries.on_gpu else "cpu",
        **found,
    }


def _facts(config: ModelSearchConfig, size: int, limit_gib: float) -> dict[str, Any]:
    """What the largest model is, and the share of all processes' memory that its weights take."""
    model = grown(config.train, config.grow, size).model
    parameters = count_parameters(model).total
    weights_gib = parameters * weight_dtype(config.train.precision).itemsize / GIB
    return {
        "parameters": parameters,
        "n_layers": model.n_layers,
        "d_model": model.d_model,
        "weights_gib": weights_gib,
        "weights_share": weights_gib / (limit_gib * config.train.parallel.shards),
    }


def _one_try(rank: int, argument: tuple[ModelSearchConfig, int, float]) -> dict[str, float]:
    """One process of a try; returns of a GPU `peak_gib` (reserved) and `allocated_gib`, and of a training step `step_s` (with compilation
    and pinning of host memory), `loss` (nats per random token, all processes' mean), `states_gib` (the optimizer's, which exist before the
    step) and `host_gib` (what all processes have in host memory after it: resident pages)."""
    config, size, on_host_gib = argument
    train = grown(config.train, config.grow, size)
    device = step.resolve_device(train.device)
    world = connect(device) if train.parallel.sharded else World()
    if device.type == "cpu":
        limit_allocations(config.cpu_limit_gib)
    elif train.parallel.cpu_offload and (needed := host_gib(train)) > on_host_gib:
        raise MemoryError(f"needs {needed:.0f} GiB of the host's memory, of which {on_host_gib:.0f} may be used")
    set_matmul_mode(train.precision)
    if config.measure == "load":
        _fill(_empty(train, device))
    measured = _train_one_step(train, device, rank, world) if config.measure == "train" else {}
    return measured if device.type == "cpu" else gpu_peaks() | measured


def _train_one_step(train: TrainConfig, device: torch.device, rank: int, world: World) -> dict[str, float]:
    # With offload its values would be drawn on the host, whole on every rank, for minutes.
    model = _fill(_empty(train, device)) if train.parallel.cpu_offload else step.prepare_model(train, device)
    optimizer = build_optimizer(model, train.optim)
    states = make_states(optimizer)
    # Processes that share a sequence draw the same.
    generator = torch.Generator().manual_seed(train.seed + rank // train.parallel.cp)
    tokens = torch.randint(train.model.vocab_size, (train.batch_size, train.seq_len + 1), generator=generator)
    if device.type == "cuda":
        torch.cuda.synchronize()  # the weights' values are drawn outside of the measured time
    world.barrier()
    started = time.perf_counter()
    own_loss = step.train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], train, device)[:1]
    loss = float(world.mean(own_loss))  # waits for the step's end
    seconds = time.perf_counter() - started
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss of the step is {loss}")
    resident = torch.tensor([psutil.Process().memory_info().rss / GIB], device=device)
    return {"step_s": seconds, "loss": loss, "states_gib": states / GIB, "host_gib": float(world.sum(resident))}


def _empty(train: TrainConfig, device: torch.device) -> Transformer:
    """The model with memory and no values in it, sharded if asked."""
    if train.parallel.sharded:
        from lsai_core.parallel.fsdp import empty_sharded

        return empty_sharded(train, device)
    with torch.device("meta"):
        model = Transformer(train.model, train.attention, grad_checkpoint=train.grad_checkpoint)
    return model.to(weight_dtype(train.precision)).to_empty(device=device)


@torch.no_grad()
def _fill(model: Transformer) -> Transformer:
    """Write to every slice that this process holds: norms 1, matrices normal(0, 0.02)."""
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.fill_(1.0) if parameter.ndim == 1 else local.normal_(0.0, 0.02)
    return model
