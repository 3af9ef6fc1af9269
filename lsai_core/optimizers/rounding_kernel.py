"""Stochastic rounding in Triton; its bits and its result are defined in
`lsai_core.optimizers.rounding`.

One call of Philox serves eight neighbours. A round is two wide multiplications and two logical
operations of three inputs, so 7 rounds and the unpacking are about 10 integer operations a
parameter. A GPU like the H100 does 3e13 of them a second: 0.3 ps, while the 14 bytes that an
update moves take 4 ps. Where groups of eight do not begin with the tile, as in a matrix whose row
length is no multiple of 8, each element makes the call for itself: about 50 operations, 2 ps.
"""

import triton
import triton.language as tl

ROUNDS: tl.constexpr = tl.constexpr(7)
LARGEST: tl.constexpr = tl.constexpr(3.3895313892515355e38)


@triton.jit
def _words(group, seed, step, parameter):
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    zero = low * 0
    return tl.philox(
        seed, low, high, zero + step.to(tl.uint32), zero + parameter.to(tl.uint32), ROUNDS
    )


@triton.jit
def random_bits(begin, seed, step, parameter, COUNT: tl.constexpr, ALIGNED: tl.constexpr):
    """Random bits (B, COUNT) uint32 below 2^16 of rows of elements.

    `begin`: (B, 1) int64, the place of each row's first element in the whole tensor; `ALIGNED`: all
    of them are multiples of 8.
    """
    if ALIGNED:
        a, b, c, d = _words((begin >> 3) + tl.arange(0, COUNT // 8)[None, :], seed, step, parameter)
        words = tl.join(tl.join(a, c), tl.join(b, d))
        bits = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (begin.shape[0], COUNT))
    else:
        place = begin + tl.arange(0, COUNT)[None, :]
        a, b, c, d = _words(place >> 3, seed, step, parameter)
        lane = (place & 7).to(tl.uint32)
        word = tl.where(lane < 4, tl.where(lane < 2, a, b), tl.where(lane < 6, c, d))
        bits = (word >> ((lane & 1) * 16)) & 0xFFFF
    return bits


@triton.jit
def rounded(values, bits):
    """fp32 values in bf16; `bits` uint32 below 2^16 of the same shape."""
    moved = ((values.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(values) <= LARGEST, moved, values).to(tl.bfloat16)
