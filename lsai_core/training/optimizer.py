"""AdamW and gradient clipping: torch's fused kernel, or the project's own, which clips while it updates.

torch's path makes four trips over the gradients: the norm, the scaling, the update's read, and the clearing. `TritonAdamW`
computes the norm, turns it into one factor on the device, and multiplies that in as the update reads the gradient. At 8 billion
parameters in bf16 the difference is tens of milliseconds a step. State names are torch's, so that checkpoints of
one resume with the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch

from lsai_core import kernels
from lsai_core.config import OptimConfig
from lsai_core.errors import Unavailable
from lsai_core.training.adam8bit import MOMENTS, AdamW8bit
from lsai_core.training.adamw import FactorAdamW, Groups, local


class TritonAdamW(FactorAdamW):
    """Moments in the weights' dtype, updated by the Triton kernel. Parameters: CUDA tensors or DTensors of them."""

    def moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS}

    def updater(self, weight: torch.Tensor) -> Callable[..., None]:
        from lsai_core.kernels.adamw import adamw_

        return adamw_


def build_optimizer(model: torch.nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW by the kernel that `optim.kernel` names; weight decay applies to matrices, not to norms.

    Raises Unavailable if the Triton kernel is asked for where it cannot run.
    """
    parameters = list(model.parameters())
    matrices, vectors = ([p for p in parameters if (p.ndim >= 2) is wide] for wide in (True, False))
    groups: Groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    kernel = optimizer_kernel(optim, parameters[0].device)
    if optim.states == "8bit":
        return AdamW8bit(groups, optim.lr, optim.betas, optim.eps)
    if kernel == "triton":
        return TritonAdamW(groups, optim.lr, optim.betas, optim.eps)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def optimizer_kernel(optim: OptimConfig, device: torch.device) -> Literal["torch", "triton"]:
    """What `optim.kernel` comes to for parameters on `device`."""
    possible = kernels.available(device)
    if optim.kernel == "triton" and not possible:
        raise Unavailable(f"optim.kernel=triton needs a CUDA GPU and Triton; the parameters are on {device.type}")
    return "triton" if possible and optim.kernel != "torch" else "torch"


@torch.no_grad()
def make_states(optimizer: torch.optim.Optimizer) -> int:
    """Make the moments that the first update would make, and change no weight: as memory is in every step but the first.

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
    """Scale all gradients, together, to a norm of at most `limit` (0: no limit) and update the parameters.

    Returns the norm before clipping, over all shards: fp32, a scalar on the device of the gradients.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = gradient_norm([p.grad for p in parameters])
    if isinstance(optimizer, FactorAdamW):
        optimizer.step(factor=torch.clamp(limit / (norm + 1e-6), max=1.0) if limit else None)
    else:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit or math.inf, norm, foreach=True)
        optimizer.step()
    return norm


def gradient_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm of all gradients together, over all shards, as a plain scalar tensor."""
    from torch.distributed.tensor import DTensor, Partial, Replicate  # a second, in processes that only describe a run

    parts = [part for gradient in gradients if (part := local(gradient)).numel()]
    if not parts or not kernels.available(parts[0].device):
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    from lsai_core.kernels.adamw import total_of_squares

    total = total_of_squares(parts)
    if isinstance(first := gradients[0], DTensor):
        summed = [Partial() if placement.is_shard() else Replicate() for placement in first.placements]
        total = DTensor.from_local(total, first.device_mesh, summed).full_tensor()
    return total.sqrt()
