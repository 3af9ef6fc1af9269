"""The optimizer of a run, gradient clipping, and the states in numbers. Which optimizers there are:
`optimizers/`, a file each."""

from __future__ import annotations

import math

import torch

from lsai_core import kernels
from lsai_core.base.plugins import declared
from lsai_core.config.train import OptimConfig
from lsai_core.optimizers.base import FactorOptimizer, Groups, Optimizer, local
from lsai_core.optimizers.rounding import ROUNDS

PACKAGE = "lsai_core.optimizers.kinds.*"


def get_optimizer(name: str) -> Optimizer:
    """The optimizer that the file `name` declares."""
    return declared(PACKAGE, name, "OPTIMIZER")


def build_optimizer(
    model: torch.nn.Module, optim: OptimConfig, seed: int = 0
) -> torch.optim.Optimizer:
    """The optimizer that `optim` names; weight decay applies to matrices, not to norms. `seed`: of
    stochastic rounding.

    Raises Unavailable if a kernel is asked for where it cannot run.
    """
    parameters = list(model.parameters())
    matrices, vectors = ([p for p in parameters if (p.ndim >= 2) is wide] for wide in (True, False))
    groups: Groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = get_optimizer(optim.name).build(groups, optim, parameters[0].device)
    if isinstance(optimizer, FactorOptimizer):
        optimizer.seed = seed
    return optimizer


def way_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What a record says of an optimizer: `optimizer_kernel`, torch (any of torch's), triton or
    plain (the project's own update with and without Triton); `optimizer_rounding` of updated
    weights, none of those in fp32."""
    weight = local(optimizer.param_groups[0]["params"][0])
    kernel, rounding = "torch", "nearest"
    if isinstance(optimizer, FactorOptimizer):
        kernel = "triton" if kernels.available(weight.device) else "plain"
        rounding = f"stochastic, {ROUNDS} Philox rounds" if optimizer.stochastic else "nearest"
    return {
        "optimizer_kernel": kernel,
        "optimizer_rounding": rounding if weight.dtype == torch.bfloat16 else "none",
    }


def bytes_per_parameter(optim: OptimConfig, dtype: torch.dtype) -> float:
    """What the optimizer keeps of a parameter of a matrix of `dtype`."""
    matrix = torch.empty(256, 256, dtype=dtype)
    return (
        sum(state.nbytes for state in get_optimizer(optim.name).states(matrix, optim).values())
        / matrix.numel()
    )


@torch.no_grad()
def make_states(optimizer: torch.optim.Optimizer) -> int:
    """Make the moments that the first update would make, and change no weight: as memory is in
    every step but the first.

    Returns the bytes of this process's part.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(local(value).nbytes for value in states if isinstance(value, torch.Tensor))


def clip_and_update(optimizer: torch.optim.Optimizer, limit: float) -> torch.Tensor:
    """Scale all gradients, together, to a norm of at most `limit` (0: no limit) and update the
    parameters.

    Returns the norm before clipping, over all shards: fp32, a scalar on the device of the
    gradients.
    """
    parameters = [
        p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    norm = gradient_norm([p.grad for p in parameters])
    if isinstance(optimizer, FactorOptimizer):
        optimizer.step(factor=torch.clamp(limit / (norm + 1e-6), max=1.0) if limit else None)
    else:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit or math.inf, norm, foreach=True)
        optimizer.step()
    return norm


def gradient_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm of all gradients together, over all shards: a plain fp32 scalar on their
    device.

    Squares are summed in fp64 on CPUs (fp32 by the GPUs' kernel), so that neither sharding nor the
    gradients' dtype shows in it.
    """
    # a second, in processes that only describe a run
    from torch.distributed.tensor import DTensor, Partial, Replicate

    parts = [part for gradient in gradients if (part := local(gradient)).numel()]
    device = local(gradients[0]).device
    fused = kernels.available(device)
    total = torch.zeros((), dtype=torch.float32 if fused else torch.float64, device=device)
    if fused and parts:
        from lsai_core.optimizers.adamw_kernel import total_of_squares

        total = total_of_squares(parts)
    elif parts:
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        total = torch.stack(norms).square().sum()
    if isinstance(first := gradients[0], DTensor):
        summed = [
            Partial() if placement.is_shard() else Replicate() for placement in first.placements
        ]
        total = DTensor.from_local(total, first.device_mesh, summed).full_tensor()
    return total.sqrt().to(device, torch.float32)
