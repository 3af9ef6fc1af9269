"""AdamW: torch's fused kernel, the project's own, which clips while it updates, or with moments in
8 bits.

torch's path makes four trips over the gradients: the norm, the scaling, the update's read, and the
clearing. `TritonAdamW` computes the norm, turns it into one factor on the device, and multiplies
that in as the update reads the gradient. At 8 billion parameters in bf16 the difference is tens of
milliseconds a step. State names are torch's, so that checkpoints of one resume with the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch

from lsai_core import kernels
from lsai_core.base.errors import Unavailable
from lsai_core.optimizers.adam8bit import MOMENTS, AdamW8bit, moments_of
from lsai_core.optimizers.base import FactorOptimizer, Groups, Optimizer

if TYPE_CHECKING:
    from lsai_core.config.train import OptimConfig


class TritonAdamW(FactorOptimizer):
    """Moments in the weights' dtype, updated by the Triton kernel. Parameters: CUDA tensors or
    DTensors of them."""

    def moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return _full(parameter)

    def updater(self, weight: torch.Tensor) -> Callable[..., None]:
        from lsai_core.optimizers.adamw_kernel import adamw_

        return functools.partial(adamw_, stochastic=self.stochastic)


def _full(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS
    }


def _states(parameter: torch.Tensor, optim: OptimConfig) -> dict[str, torch.Tensor]:
    return moments_of(parameter) if optim.states == "8bit" else _full(parameter)


def _build(groups: Groups, optim: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    settings = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    kernel = optimizer_kernel(optim, device)
    if optim.states == "8bit" or kernel == "triton":
        made = (AdamW8bit if optim.states == "8bit" else TritonAdamW)(groups, **settings)
        made.stochastic = optim.rounding == "stochastic"
        return made
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def optimizer_kernel(optim: OptimConfig, device: torch.device) -> Literal["torch", "triton"]:
    """What `optim.kernel` comes to for parameters on `device`."""
    possible = kernels.available(device)
    if not possible and (optim.kernel == "triton" or optim.rounding == "stochastic"):
        asked = "kernel=triton" if optim.kernel == "triton" else "rounding=stochastic"
        raise Unavailable(
            f"optim.{asked} needs a CUDA GPU and Triton; the parameters are on {device.type}"
        )
    return "triton" if possible and optim.kernel != "torch" else "torch"


def _refusal(optim: OptimConfig) -> str | None:
    if (optim.states, optim.rounding) != ("full", "nearest") and optim.kernel == "torch":
        own = "states 8bit and rounding stochastic are the project's own update"
        return f"{own}; torch's AdamW has neither: use kernel auto or triton"
    return None


OPTIMIZER = Optimizer(_build, _states, _refusal)
