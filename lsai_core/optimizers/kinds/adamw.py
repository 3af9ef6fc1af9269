"""AdamW: torch's fused kernel, or the project's own update, which clips while it updates.

torch's path makes four trips over the gradients: the norm, the scaling, the update's read, and the
clearing. `ClippingAdamW` computes the norm, turns it into one factor on the device, and multiplies
that in as the update reads the gradient. At 8 billion parameters in bf16 the difference is tens of
milliseconds a step. It also keeps moments in 8 bits and rounds stochastically, by Triton's kernels
or plain operations. State names are torch's, so that checkpoints of one resume with the other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from lsai_core import kernels
from lsai_core.base.errors import Unavailable
from lsai_core.optimizers.adam8bit import MOMENTS, moments_of
from lsai_core.optimizers.base import (
    FactorOptimizer,
    Groups,
    Named,
    Optimizer,
    decayed,
    keeps_exact,
    local,
    own_update,
    tensor_class,
)
from lsai_core.optimizers.plain_update import plain_adamw_

if TYPE_CHECKING:
    from lsai_core.config.train import OptimConfig


class ClippingAdamW(FactorOptimizer):
    """AdamW with moments in the weights' dtype, or with `eight_bit` those of matrices in 8 bits."""

    def __init__(self, groups: Groups, *, eight_bit: bool, **settings: Any) -> None:
        self._fresh = moments_of if eight_bit else _full
        super().__init__(groups, **settings)

    def moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._fresh(parameter)

    def updater(self, weight: torch.Tensor) -> Callable[..., None]:
        if not kernels.available(weight.device):
            return functools.partial(plain_adamw_, cut=self.pieces)
        from lsai_core.optimizers.adamw8_kernel import adamw8_
        from lsai_core.optimizers.adamw_kernel import adamw_

        return adamw8_ if self._fresh is moments_of and weight.ndim == 2 else adamw_

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """As `Optimizer.load_state_dict`, which would turn codes and scales into the weights'
        dtype.

        Raises KeyError or ValueError for states of another kind.
        """
        saved = state_dict["state"]
        steps = {number: {"step": state["step"]} for number, state in saved.items()}
        super().load_state_dict({"state": steps, "param_groups": state_dict["param_groups"]})
        numbers = itertools.chain.from_iterable(
            group["params"] for group in state_dict["param_groups"]
        )
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            if number not in saved:
                continue
            for name, kept in self.fresh(parameter).items():
                value = saved[number][name]
                if value.dtype != kept.dtype or value.shape != kept.shape:
                    raise ValueError(
                        f"{name} is {value.dtype} {tuple(value.shape)}, not {kept.dtype}"
                    )
                local(kept).copy_(local(value))
                self.state[parameter][name] = kept


def _full(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS
    }


def bytes_per_parameter(states: str, dtype: torch.dtype) -> float:
    """What AdamW keeps of a parameter of a large matrix of `dtype`; `states` as in the config."""
    matrix = torch.empty(256, 256, dtype=dtype)
    moments = (moments_of if states == "8bit" else _full)(matrix)
    return sum(moment.nbytes for moment in moments.values()) / matrix.numel()


def _build(parameters: Named, optim: OptimConfig) -> torch.optim.Optimizer:
    kernel = optimizer_kernel(optim, next(iter(parameters.values())))
    groups = decayed(parameters, optim)
    settings = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    if kernel == "torch":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    made = ClippingAdamW(groups, eight_bit=optim.states == "8bit", **settings)
    made.stochastic = optim.rounding == "stochastic"
    made.exact = frozenset(
        p for name, p in parameters.items() if tensor_class(name) not in optim.rounded
    )
    return made


def optimizer_kernel(
    optim: OptimConfig, parameter: torch.Tensor
) -> Literal["torch", "triton", "plain"]:
    """What `optim.kernel` comes to where `parameter` lies; `plain`: the project's own update
    without Triton."""
    weight = local(parameter)
    possible = kernels.serves(weight)
    if not possible and optim.kernel == "triton":
        raise Unavailable(
            f"optim.kernel=triton needs a CUDA GPU and Triton; the parameters are on "
            f"{weight.device.type}"
        )
    if possible and optim.kernel != "torch":
        return "triton"
    return "plain" if own_update(optim) else "torch"


def _refusal(optim: OptimConfig) -> str | None:
    if own_update(optim) and optim.kernel == "torch":
        own = "states 8bit, rounding stochastic and a choice of rounded tensors are the project's"
        return f"{own} own update, and torch's AdamW has none of them: use kernel auto or triton"
    if keeps_exact(optim) and optim.states == "8bit":
        return "optim.rounded keeps some weights in fp32, and states 8bit has no such: use one"
    return None


OPTIMIZER = Optimizer(_build, _refusal)
