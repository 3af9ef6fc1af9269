"""The optimizer of a run, gradient clipping, and the states in numbers. Which optimizers there are:
`kinds/`, a file each."""

import functools
import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lsai_core import kernels
from lsai_core.base.errors import UserError
from lsai_core.base.plugins import declared
from lsai_core.config.model import ModelConfig
from lsai_core.config.train import OptimConfig
from lsai_core.model.transformer import count_parameters, shaped
from lsai_core.optimizers.base import (
    FactorOptimizer,
    Named,
    Optimizer,
    held_here,
    local,
    numbered,
    parts_of,
)
from lsai_core.optimizers.rounding import ROUNDS

PACKAGE = "lsai_core.optimizers.kinds.*"


def build_optimizer(
    model: torch.nn.Module,
    optim: OptimConfig,
    seed: int = 0,
    *,
    parameters: Named | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that `optim` names, over the parameters of `model`, or over `parameters` of it.
    `seed`: of stochastic rounding.

    Raises Unavailable if a kernel is asked for where it cannot run, and UserError if a parameter is
    left out.
    """
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    declaration: Optimizer = declared(PACKAGE, optim.name, "OPTIMIZER", "optimizers", Optimizer)
    optimizer = declaration.build(parameters, optim)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer {optim.name}: its build must return a torch.optim.Optimizer, not "
            f"{optimizer!r:.80}"
        )
    updated = numbered([optimizer])
    forgotten = [name for name, parameter in parameters.items() if parameter not in updated]
    if forgotten:
        raise UserError(f"optimizer {optim.name} does not update {', '.join(forgotten[:3])}")
    for part in parts_of(optimizer):
        if isinstance(part, FactorOptimizer):
            part.seed = seed
    return optimizer


def way_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What a record says of an optimizer, of several parts with a plus in between.

    `optimizer_kernel`: torch (any of torch's), triton or plain (the project's own update with and
    without Triton). `optimizer_rounding`: of updated weights; none of those in fp32.
    """
    ways = [_way_of_one(part) for part in parts_of(optimizer)]
    names = ("optimizer_kernel", "optimizer_rounding")
    return {
        name: " + ".join(dict.fromkeys(way[place] for way in ways))
        for place, name in enumerate(names)
    }


def _way_of_one(optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    weight = local(next(iter(numbered([optimizer]))))
    half, kernel, stochastic = weight.dtype == torch.bfloat16, "torch", False
    if isinstance(optimizer, FactorOptimizer):
        kernel = "triton" if kernels.available(weight.device) else "plain"
        stochastic = optimizer.stochastic
    rounding = f"stochastic, {ROUNDS} Philox rounds" if stochastic else "nearest"
    return kernel, rounding if half else "none"


@functools.lru_cache(maxsize=256)
def state_bytes(model: ModelConfig, optim: OptimConfig, dtype: torch.dtype) -> int:
    """What the optimizer keeps of a whole model with weights of `dtype`; allocates nothing."""
    empty = shaped(model).to(dtype)
    # Which kernel updates changes no state, and triton could not be asked for without a GPU.
    anywhere = optim.model_copy(update={"kernel": "auto"})
    with FakeTensorMode(allow_non_fake_inputs=True):
        optimizer = build_optimizer(empty.to_empty(device="cpu"), anywhere)
        make_states(optimizer, update=False)
    return sum(state.nbytes for state in kept_states(optimizer))


def trained_bytes(model: ModelConfig, optim: OptimConfig, dtype: torch.dtype) -> int:
    """Weights of `dtype`, gradients and what the optimizer keeps, of a whole model."""
    weights = dtype.itemsize * count_parameters(model).total
    return 2 * weights + state_bytes(model, optim, dtype)


def kept_states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This process's part of what the optimizer keeps, without counts of steps."""
    states = held_here(optimizer).state.values()
    values = (value for state in states for value in state.values())
    return [local(v) for v in values if isinstance(v, torch.Tensor) and v.ndim]


@torch.no_grad()
def make_states(optimizer: torch.optim.Optimizer, *, update: bool = True) -> int:
    """Make the states that the first update would make, and change no weight: as memory is in every
    step but the first. `update=False`: without running the project's own update.

    Returns the bytes of this process's part.
    """
    for part in parts_of(optimizer):
        if update or not isinstance(part, FactorOptimizer):
            _step_nowhere(part)
            continue
        for parameter in numbered([part]):
            part.make_state(parameter)
    return sum(state.nbytes for state in kept_states(optimizer))


def _step_nowhere(optimizer: torch.optim.Optimizer) -> None:
    """A step without gradients at a learning rate of 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def clip_and_update(optimizer: torch.optim.Optimizer, limit: float) -> torch.Tensor:
    """Scale all gradients, together, to a norm of at most `limit` (0: no limit) and update the
    parameters.

    Returns the norm before clipping, over all shards: fp32, a scalar on the device of the
    gradients.
    """
    parameters = [
        p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    group = getattr(optimizer, "pipeline_group", None)
    norm = gradient_norm([p.grad for p in parameters], group)
    if isinstance(held_here(optimizer), FactorOptimizer):
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit else None
        optimizer.step(factor=factor)  # type: ignore[call-overload]
    else:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit or math.inf, norm, foreach=True)
        optimizer.step()
    return norm


def gradient_norm(gradients: list[torch.Tensor], group: Any = None) -> torch.Tensor:
    """Euclidean norm of all gradients together, over all processes' parts: a plain fp32 scalar on
    their device. `group`: processes that have gradients of other parameters, if there are.

    Squares are summed in fp64 on CPUs (fp32 by the GPUs' kernel), so that neither sharding nor the
    gradients' dtype shows in it.
    """
    # a second, in processes that only describe a run
    from torch.distributed.tensor import DTensor, Partial

    alike: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        where = None
        if isinstance(gradient, DTensor):
            where = (gradient.device_mesh, gradient.placements)
        alike.setdefault(where, []).append(local(gradient))
    total: torch.Tensor | float = 0.0
    for where, parts in alike.items():
        squares = _sum_of_squares(parts)
        if where is not None:
            mesh, placements = where
            summed = [placed if placed.is_replicate() else Partial() for placed in placements]
            squares = DTensor.from_local(squares, mesh, summed, run_check=False).full_tensor()
        total = squares + total
    assert isinstance(total, torch.Tensor)
    if group is not None:
        torch.distributed.all_reduce(total, group=group)
    return total.sqrt().to(local(gradients[0]).device, torch.float32)


def _sum_of_squares(parts: list[torch.Tensor]) -> torch.Tensor:
    """Of all elements: a scalar on their device, fp64 on CPUs, fp32 by the GPUs' kernel."""
    device = parts[0].device
    fused = kernels.available(device)
    if not (parts := [part for part in parts if part.numel()]):
        return torch.zeros((), dtype=torch.float32 if fused else torch.float64, device=device)
    if fused:
        from lsai_core.optimizers.adamw_kernel import total_of_squares

        return total_of_squares(parts)
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    return torch.stack(norms).square().sum()
