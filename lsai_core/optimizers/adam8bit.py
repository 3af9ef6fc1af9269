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

import functools

import numpy as np
import torch
from torch import Tensor

from lsai_core.optimizers.base import local

VALUES = 256  # of one block
_PLUS_ONE = 128  # code of +1 in the signed type, where -0 would be
# what the signed type rounds to zero, of the largest of its block: half of its smallest value
_SMALLEST = 2.75e-7

MOMENTS = ("exp_avg", "exp_avg_sq")


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
def _in_steps(signed: bool, where: float) -> list[float]:
    """The places `where` (0 to 1) of all steps of all decades, ascending, as fp32 computes them."""
    places: list[float] = []
    for level in range(7):
        steps = 2 ** (level + (0 if signed else 1))
        step = np.arange(steps, dtype=np.float32) + np.float32(where)
        places += (10.0 ** (level - 6) * (0.1 + 0.9 * step / steps)).tolist()
    return places


def type_values(signed: bool) -> Tensor:
    """The magnitudes of the type in ascending order, fp32: 0, the middles of every decade's steps,
    and 1."""
    return torch.tensor([0.0, *_in_steps(signed, 0.5), 1.0])


def _edges(signed: bool) -> Tensor:
    """Between `type_values`: the ends of the steps, so that a value lies in the step that stands
    for it."""
    halfway_to_1 = 1.0 - 0.9 / (256 if signed else 512)
    return torch.tensor([_SMALLEST if signed else 0.0, *_in_steps(signed, 1.0)[:-1], halfway_to_1])


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
