"""The `model_search` kind: the largest model that loads or trains on some processes, found by
really doing it.

`load` gives every parameter memory and a value; `train` takes one real step on random tokens, with
the optimizer's states there before it, as in every step but the first. With `cpu_offload` the
host's memory is the edge: a model whose slices would take more than 85 % of it is refused before it
is built.

The search begins at a prediction of the step, of weights alone at their bytes.
"""

import bisect
import math
import os
import time
from typing import Any

import psutil
import torch
from torch.distributed.tensor import DTensor

from lsai_core.config.precision import weight_dtype
from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import Transformer, count_parameters, shaped
from lsai_core.optimizers.build import build_optimizer, make_states, trained_bytes
from lsai_core.parallel.processes import connect
from lsai_core.parallel.world import World
from lsai_core.training import step
from lsai_lab.runs.kinds import Context
from lsai_lab.searches.config import ModelSearchConfig
from lsai_lab.searches.search import Search, predicted_size

# as every kind that can say what is missing
from lsai_lab.searches.search import require as require
from lsai_lab.searches.tries import GIB, begin_try, gpu_peaks

_STRIDE = 1.25  # between the first two sizes predicted


def run(config: ModelSearchConfig, context: Context) -> dict[str, Any]:
    """Search; returns the largest size and its model, what was measured of it (`_one_try`), its
    limit, the estimate, and every try. Raises Unavailable if the machine lacks the processes'
    GPUs."""
    search = Search(_one_try, config, context)
    start = first_size(config, search.usable_gib, search.host_limit_gib)
    if search.on_gpu and config.expandable_segments:
        # read where tries import torch
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    largest, found = search.run(start)
    facts: dict[str, Any] = {"largest_size": largest, "parameters": 0}
    if largest:
        train = config.sized(largest)
        facts |= search.measured[largest]
        facts |= {"parameters": count_parameters(train.model).total}
        facts |= {"n_layers": train.model.n_layers, "d_model": train.model.d_model}
        facts["weights_gib"] = facts["parameters"] * weight_dtype(train.precision).itemsize / GIB
        # Of all processes' memory.
        facts["weights_share"] = facts["weights_gib"] / (search.limit_gib * train.parallel.shards)
    return facts | found


def _one_try(rank: int, argument: tuple[ModelSearchConfig, int]) -> dict[str, float]:
    """One process of a try; returns of a GPU `peak_gib` (reserved) and `allocated_gib`, and of a
    training step `step_s` (with compilation and pinning of host memory), `loss` (nats per random
    token, all processes' mean), `states_gib` (the optimizer's, which exist before the step) and
    `host_gib` (what all processes have in host memory after it: resident pages)."""
    config, size = argument
    train = config.sized(size)
    world = connect(step.resolve_device(train.device)) if train.parallel.distributed else World()
    device = begin_try(train, config.cpu_limit_gib)
    measured = {}
    if config.measure == "load":
        _fill(_empty(train, device))
    else:
        measured = _train_one_step(train, device, rank, world)
    return measured if device.type == "cpu" else gpu_peaks() | measured


def _train_one_step(
    train: TrainConfig, device: torch.device, rank: int, world: World
) -> dict[str, float]:
    # With offload its values would be drawn on the host, whole on every rank, for minutes.
    model = (
        _fill(_empty(train, device))
        if train.parallel.cpu_offload
        else step.prepare_model(train, device)
    )
    optimizer = build_optimizer(model, train.optim)
    states = make_states(optimizer)
    # Processes that share sequences draw the same.
    generator = torch.Generator().manual_seed(train.seed + rank // train.parallel.members)
    tokens = torch.randint(
        train.model.vocab_size, (train.batch_size, train.seq_len + 1), generator=generator
    )
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
    return {
        "step_s": seconds,
        "loss": loss,
        "states_gib": states / GIB,
        "host_gib": float(world.sum(resident)),
    }


def _empty(train: TrainConfig, device: torch.device) -> Transformer:
    """The model with memory and no values in it, sharded if asked."""
    if train.parallel.distributed:
        from lsai_core.parallel.build import empty_sharded

        return empty_sharded(train, device)
    model = shaped(train.model, train.attention, grad_checkpoint=train.checkpointed)
    return model.to(weight_dtype(train.precision)).to_empty(device=device)


@torch.no_grad()
def _fill(model: Transformer) -> Transformer:
    """Write to every slice that this process holds: norms 1, matrices normal(0, 0.02)."""
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.fill_(1.0) if parameter.ndim == 1 else local.normal_(0.0, 0.02)
    return model


def first_size(config: ModelSearchConfig, usable_gib: float, on_host_gib: float | None) -> int:
    """Where to begin: at the largest step that is predicted to fit or, of weights alone, at what
    their bytes say."""

    def kept_gib(size: int) -> float:
        """What all processes together keep: weights and, to train, gradients and the optimizer's
        states."""
        train = config.sized(size)
        dtype = weight_dtype(train.precision)
        kept = dtype.itemsize * count_parameters(train.model).total
        if config.measure == "train":
            kept = trained_bytes(train.model, train.optim, dtype)
        return kept * train.parallel.replicate / GIB

    room_gib = on_host_gib or usable_gib * config.train.parallel.world_size
    sizes = range(1, config.max_size + 1)
    begin = max(1, bisect.bisect_right(sizes, room_gib, key=kept_gib))
    if config.measure == "load":
        return begin
    return predicted_size(config, usable_gib, on_host_gib, begin=begin, stride=_STRIDE)
