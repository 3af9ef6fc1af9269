"""Stochastic rounding of bf16 weights: which random bits belong to which element, and the rounding
in plain PyTorch.

A bf16 weight has 8 significant bits, and loses an update of less than 1/512 of it. Rounded up as
often as the rest says (Gupta et al. 2015, arXiv:1502.02551), it keeps the update in the mean.

The bits are a function of the run's seed, the optimizer's step, the parameter's number and the
element's place in the whole tensor, so that another number of processes, or a resumed run, rounds
alike. They come from Philox4x32 (Salmon et al. 2011, doi:10.1145/2063384.2063405) with 7 rounds,
the fewest that passed all of their tests of randomness:

    key      the seed, 64 bits
    counter  (group, low 32 bits; group, high 32 bits; step, from 1; number of the parameter)
    group    place // 8, the place counted along the last dimension first, over all processes' parts
    bits     16 for each of the group's 8 elements: element 2 w has the low half of word w of the
             four words, element 2 w + 1 its high half

The 16 bits are added to the lowest 16 of the fp32 value, which are then cut off. NaN, infinities
and finite values beyond the largest bf16 become what rounding to nearest makes of them.

`lsai_core.optimizers.rounding_kernel` computes the same in Triton.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS = 7
LARGEST = torch.finfo(torch.bfloat16).max
TOGETHER = 8  # elements of one group

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


@dataclass(frozen=True)
class Noise:
    """Which random bits round a tensor: see this file's introduction.

    `first`: the place of the tensor's first element in the whole tensor.
    """

    seed: int
    step: int
    parameter: int
    first: int = 0


def first_place(parameter: Tensor) -> int:
    """The place of this process's first element in the whole tensor: 0 unless it is a DTensor."""
    from torch.distributed.tensor import DTensor  # a second, in processes that only describe a run

    if not isinstance(parameter, DTensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, mesh = parameter.shape, parameter.device_mesh
    local, offsets = compute_local_shape_and_global_offset(shape, mesh, parameter.placements)
    if local[1:] != shape[1:]:
        raise NotImplementedError(
            f"stochastic rounding of {parameter.placements}: only rows may be sharded"
        )
    return offsets[0] * math.prod(shape[1:])


def philox(
    counter: tuple[Tensor | int, ...], seed: int, rounds: int = ROUNDS
) -> tuple[Tensor, ...]:
    """The four words of Philox4x32 for four counter words and a 64-bit key: int64, below 2^32."""
    c0, c1, c2, c3 = (torch.as_tensor(word, dtype=torch.int64) for word in counter)
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(rounds):
        product0, product1 = (
            c0 * _MULTIPLIERS[0],
            c2 * _MULTIPLIERS[1],
        )  # of 64 bits, the highest as the sign
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ key0
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ key1
        c1, c3 = product1 & _MASK, product0 & _MASK
        key0, key1 = (key0 + _KEY_STEPS[0]) & _MASK, (key1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def random_bits(noise: Noise, count: int, device: torch.device) -> Tensor:
    """Random bits of `count` elements from `noise.first` on: int32 (count,), below 2^16."""
    first, end = noise.first // TOGETHER, -(-(noise.first + count) // TOGETHER)
    group_G = torch.arange(first, end, device=device)
    words_G4 = torch.stack(
        philox((group_G & _MASK, group_G >> 32, noise.step, noise.parameter), noise.seed), -1
    )
    bits = torch.stack((words_G4 & 0xFFFF, words_G4 >> 16), -1).to(torch.int32).flatten()
    begin = noise.first % TOGETHER
    return bits[begin : begin + count]


def rounded(values: Tensor, noise: Noise | None) -> Tensor:
    """fp32 values, contiguous, in bf16: stochastically, or to nearest without `noise`."""
    if noise is None:
        return values.to(torch.bfloat16)
    bits = random_bits(noise, values.numel(), values.device).view(values.shape)
    moved = (values.view(torch.int32) + bits).bitwise_and_(-65536).view(torch.float32)
    return torch.where(values.abs() <= LARGEST, moved, values).to(torch.bfloat16)
