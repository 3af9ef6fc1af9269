"""AdamW whose moments are kept in 8 bits: 2.03 bytes a parameter instead of 4 (bf16) or 8 (fp32).

Dettmers et al. 2022 (arXiv:2110.02861): blocks of 256 values, each divided by its largest magnitude
and rounded to one of the 256 values of a "dynamic" type, fine near 1 and reaching down seven
decades: decade n below 1 is cut into half as many steps as the one above it. The first moment has
127 magnitudes with a sign and +1, the second, which has no sign, 254 magnitudes, 0 and 1. An update
is computed in fp32 from the decoded moments, and uses the new ones before they are rounded.

Two choices of this project. A block lies within a row, so that slices of a sharded matrix hold
whole blocks and a checkpoint fits any number of processes. And a second moment that is not zero is
never rounded to zero: where a gradient vanishes (the embedding of a word that did not occur) the
first moment would be divided by eps. Norm weights, a vanishing share, keep moments in their own
dtype.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lsai_core import kernels
from lsai_core.optimizers.base import FactorOptimizer, local

VALUES = 256  # of one block
# values that the plain update decodes together: what it needs in between stays at some MiB
_AT_ONCE = 2**16
_PLUS_ONE = 128  # code of +1 in the signed type, where -0 would be
# what the signed type rounds to zero, of the largest of its block: half of its smallest value
_SMALLEST = 2.75e-7

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit(FactorOptimizer):
    """AdamW with 8-bit moments of matrices."""

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        return moments_of(parameter)

    def updater(self, weight: Tensor) -> Callable[..., None]:
        if not kernels.available(weight.device):
            return functools.partial(_plain_update, eight_bit=weight.ndim == 2)
        from lsai_core.optimizers.adamw8_kernel import adamw8_
        from lsai_core.optimizers.adamw_kernel import adamw_

        return functools.partial(
            adamw8_ if weight.ndim == 2 else adamw_, stochastic=self.stochastic
        )

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
            for name, moment in moments_of(parameter).items():
                value = saved[number][name]
                if value.dtype != moment.dtype or value.shape != moment.shape:
                    raise ValueError(
                        f"{name} is {value.dtype} {tuple(value.shape)}, not {moment.dtype}"
                    )
                local(moment).copy_(local(value))
                self.state[parameter][name] = moment


def moments_of(parameter: Tensor) -> dict[str, Tensor]:
    """Fresh moments: of a matrix (N, K) uint8 codes (N, K) and fp32 scales (N, K / 256, rounded
    up), sharded as it is."""
    from torch.distributed.tensor import DTensor

    if parameter.ndim != 2:
        return {name: torch.zeros_like(parameter) for name in MOMENTS}
    moments: dict[str, Tensor] = {}
    rows, blocks = parameter.shape[0], -(-parameter.shape[1] // VALUES)
    for name in MOMENTS:
        scale: Tensor = local(parameter).new_zeros(
            (local(parameter).shape[0], blocks), dtype=torch.float32
        )
        if isinstance(parameter, DTensor):
            scale = DTensor.from_local(
                scale,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=torch.Size((rows, blocks)),
                stride=(blocks, 1),
            )
        moments |= {name: torch.zeros_like(parameter, dtype=torch.uint8), f"{name}_scale": scale}
    return moments


@functools.cache
def type_values(signed: bool) -> Tensor:
    """The magnitudes of the type in ascending order, fp32: 0, the middles of every decade's steps,
    and 1."""
    values = [torch.zeros(1)]
    for level in range(7):
        steps = 2 ** (level + (0 if signed else 1))
        values.append(10.0 ** (level - 6) * (0.1 + 0.9 * (torch.arange(steps) + 0.5) / steps))
    return torch.cat([*values, torch.ones(1)])


@functools.cache
def _edges(signed: bool) -> Tensor:
    """Between `type_values`: the ends of the steps, so that a value lies in the step that stands
    for it."""
    edges = [torch.tensor([_SMALLEST if signed else 0.0])]
    for level in range(7):
        steps = 2 ** (level + (0 if signed else 1))
        edges.append(10.0 ** (level - 6) * (0.1 + 0.9 * torch.arange(1, steps + 1) / steps))
    edges[-1][-1] = 1.0 - 0.9 / (256 if signed else 512)  # halfway to 1
    return torch.cat(edges)


def quantized(values_NK: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (N, K) uint8 and scales (N, K / 256) fp32 of fp32 values."""
    rows, columns = values_NK.shape
    padded = torch.nn.functional.pad(values_NK, (0, -columns % VALUES)).view(rows, -1, VALUES)
    scale_NB = padded.abs().amax(-1)
    a = padded.abs() / torch.where(scale_NB > 0, scale_NB, 1.0)[..., None]
    codes = torch.bucketize(a, _edges(signed).to(a.device))
    if signed:
        top = len(type_values(True)) - 1
        codes = torch.where(
            padded < 0, codes.clamp(max=top - 1) + torch.where(codes > 0, 128, 0), codes
        )
        codes = torch.where((padded > 0) & (codes == top), _PLUS_ONE, codes)
    return codes.to(torch.uint8).view(rows, -1)[:, :columns].contiguous(), scale_NB


def restored(codes_NK: Tensor, scale_NB: Tensor, signed: bool) -> Tensor:
    """The fp32 values (N, K) that codes and scales stand for."""
    values = type_values(signed)
    if signed:  # magnitudes without 1; +1 where -0 would be; the negative ones
        values = torch.cat((values[:-1], values[-1:], -values[1:-1]))
    spread_NK = scale_NB.repeat_interleave(VALUES, 1)[:, : codes_NK.shape[1]]
    return values.to(codes_NK.device)[codes_NK.int()] * spread_NK


def _plain_update(
    weight: Tensor,
    gradient: Tensor,
    *moments_and_factor: Tensor,
    eight_bit: bool,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """What the kernels compute, by torch's operations on some rows at a time."""
    *moments_, factor = moments_and_factor
    rows = max(1, _AT_ONCE // weight[0].numel())
    for w_, gradient_, *moments in zip(
        *(tensor.split(rows) for tensor in (weight, gradient, *moments_)), strict=True
    ):
        g, w = gradient_.float() * factor, w_.float()
        if eight_bit:
            m, v = restored(moments[0], moments[1], True), restored(moments[2], moments[3], False)
        else:
            m, v = moments[0].float(), moments[1].float()
        m = m + (1 - betas[0]) * (g - m)
        v = betas[1] * v + (1 - betas[1]) * g * g
        denominator = v.sqrt() / (1 - betas[1] ** step) ** 0.5 + eps
        w_.copy_(w * (1 - lr * weight_decay) - lr / (1 - betas[0] ** step) * m / denominator)
        new = (*quantized(m, True), *quantized(v, False)) if eight_bit else (m, v)
        for moment, value in zip(moments, new, strict=True):
            moment.copy_(value)
