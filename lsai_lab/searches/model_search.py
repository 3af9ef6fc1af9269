"""The `model_search` kind: the largest model that loads or trains on some processes, found by really doing it.

`load` gives every parameter memory and a value; `train` takes one real step on random tokens, with the optimizer's states there before
it, as in every step but the first. With `cpu_offload` the host's memory is the edge. Running over it would end more than the try, so a
model whose slices would take more than 85 % of it is refused before it is built.

The search begins at an estimate, which decides nothing else: what is kept (weights, gradients and the optimizer's states, a slice of each
per process) and the activations that wait for the backward pass, exact for weights alone. A try of a training step on several GPUs costs
half a minute, so there the step is predicted (`profiling.predict`), at three or four sizes.
"""

from __future__ import annotations

import bisect
import math
import os
import time
from collections.abc import Callable
from typing import Any, Literal

import psutil
import torch
from pydantic import Field
from torch.distributed.tensor import DTensor

from lsai_core.config import ModelConfig, TrainConfig
from lsai_core.model import Transformer, count_parameters
from lsai_core.parallel.processes import connect
from lsai_core.parallel.world import World
from lsai_core.presets import scaled_shape
from lsai_core.profiling.limits import host_limit_gib
from lsai_core.training import step
from lsai_core.training.optimizer import build_optimizer, bytes_per_parameter, make_states
from lsai_core.training.precision import compute_dtype, set_matmul_mode, weight_dtype
from lsai_lab.launch.launch import require_devices
from lsai_lab.runs.kinds import Context
from lsai_lab.searches.tries import GIB, SearchConfig, Tries, Try, gpu_peaks, limit_allocations, search_largest

DEVICE_SHARE = 0.98  # a GPU holds some hundred MiB of libraries beside what can be allocated
_STRIDE = 1.25  # between the first two sizes predicted; estimates for H200s were up to 45 % off
Grow = Literal["all", "n_layers"]
Measure = Literal["load", "train"]
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
    facts: dict[str, Any] = {"parameters": 0}
    if largest:
        model = grown(train, config.grow, largest).model
        facts = {"parameters": count_parameters(model).total, "n_layers": model.n_layers, "d_model": model.d_model}
        facts["weights_gib"] = facts["parameters"] * weight_dtype(train.precision).itemsize / GIB
        facts["weights_share"] = facts["weights_gib"] / (
            tries.limit_gib * train.parallel.shards
        )  # of all processes' memory
    return {
        "largest_size": largest,
        **next((t.measured for t in tries.seen if t.size == largest), {}),
        "estimated_size": start,
        **facts,
        "world_size": train.parallel.world_size,
        "search_out_of_time": len(asked) > len(tries.seen),
        "search_s": time.perf_counter() - started,
        "device": torch.cuda.get_device_name(tries.device) if tries.on_gpu else "cpu",
        **found,
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


def grown(train: TrainConfig, grow: Grow, size: int) -> TrainConfig:
    """The run `train` with a model of that size. `all`: the shape of scaling factor `size` (`presets.scaled_shape`); `n_layers`: its own
    with `size` layers."""
    if grow == "n_layers":
        return train.model_copy(update={"model": train.model.model_copy(update={"n_layers": size})})
    model = ModelConfig.model_validate({"preset": f"scaled-all-{size}", **scaled_shape(size, "all")})
    return train.model_copy(update={"model": model})


def device_gib(train: TrainConfig, measure: Measure) -> float:
    """Estimated peak of one process, in GiB, on the device that computes."""
    model, own = train.model, count_parameters(train.model).total / train.parallel.shards
    if measure == "load":
        return own * weight_dtype(train.precision).itemsize / GIB
    total = 0.0 if train.parallel.cpu_offload else own * _bytes_kept(train)
    tokens = train.batch_size * train.seq_len // train.parallel.cp
    # Of a token: the inputs of the blocks; without checkpointing also what their products read.
    values = model.d_model
    if train.grad_checkpoint in ("none", "selective", "alternating"):
        values = 7 * model.d_model + 4 * model.n_kv_heads * model.head_dim + 3 * model.d_ff
    total += tokens * compute_dtype(train.precision).itemsize * model.n_layers * values
    if train.loss == "full":
        total += 3 * 4 * tokens * model.vocab_size
    return total / GIB


def host_gib(train: TrainConfig) -> float:
    """What a model in host memory takes there, all processes together: weights, gradients and the optimizer's states."""
    return _bytes_kept(train) * count_parameters(train.model).total * train.parallel.replicate / GIB


def _bytes_kept(train: TrainConfig) -> float:
    """Of a parameter: weight, gradient, the optimizer's states."""
    dtype = weight_dtype(train.precision)
    return 2 * dtype.itemsize + bytes_per_parameter(train.optim, dtype)


def first_size(
    train: TrainConfig, grow: Grow, measure: Measure, *, on_gpu: bool, limit_gib: float, host_limit_gib: float,
    max_size: int,
) -> int:  # fmt: skip
    """The largest size in 1..max_size that may fit devices of `limit_gib`, 1 if none does: of a training step on GPUs as predictions
    go, else by the estimate."""
    last, limit = max_size, limit_gib * DEVICE_SHARE
    if train.parallel.cpu_offload:
        last = _largest(max_size, lambda size: host_gib(grown(train, grow, size)) <= host_limit_gib)
    if predicted := on_gpu and measure == "train":
        # Not needed by the processes of a try.
        from lsai_core.profiling.predict.aim import largest_within
        from lsai_core.profiling.predict.prediction import OUTSIDE_GIB, predict

        limit = limit_gib - OUTSIDE_GIB
    begin = _largest(last, lambda size: device_gib(grown(train, grow, size), measure) <= limit)
    if not predicted:
        return begin
    found, _ = largest_within(
        lambda size: predict(grown(train, grow, size)).needs, limit, first=1, last=last, begin=begin, stride=_STRIDE
    )
    return max(1, found)


def _largest(last: int, fits: Callable[[int], bool]) -> int:
    """The largest size in 1..last that fits; 1 if none does."""
    return max(1, bisect.bisect_left(range(1, last + 1), True, key=lambda size: not fits(size)))
