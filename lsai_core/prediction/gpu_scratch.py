"""What PyTorch's CUDA operators take while they run and give back at once, which no tensor shows.

Read off PyTorch's sources (2.11 to 2.13), and where a library decides (cuDNN), off the sizes of
blocks in recorded traces; each function says which. The number of multiprocessors is a Hopper
GPU's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PROCESSORS, THREADS, BLOCK = 132, 2048, 512  # threads of a multiprocessor, at most of a block
WARP = 32
FEWEST, MOST = 16, 256  # values of a thread


def reduction(x: Tensor, dims: Sequence[int] | None, element: int) -> list[int]:
    """Bytes of partial results of a reduction of `x` over `dims` (None or empty: over all), whose
    accumulator has `element` bytes: those of blocks of threads that share an output.

    ATen/native/cuda/Reduce.cuh, `setReduceConfig`. A sum over rows takes up to 132 MiB, for there
    every thread of a block has its own.
    """
    gone = set(range(x.dim())) if not dims else {d % max(x.dim(), 1) for d in dims}
    sizes = [(s, n, d in gone) for d, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True))]
    reduced = _joined([(s, n) for s, n, away in sizes if away and n > 1])
    kept = _joined([(s, n) for s, n, away in sizes if not away and n > 1])
    outputs = math.prod(n for _, n in kept)
    if not x.numel() or not reduced:
        return []
    inputs = x.numel() // outputs
    inside = not kept or reduced[0][0] < kept[0][0]  # whether neighbours in memory are summed
    vector, across, along = 1, inputs, outputs
    if not inside:
        across, along = outputs, inputs
        vector = _vector(kept, reduced) if kept[0][0] == 1 else 1
        across //= vector
    elif reduced[0][0] == 1 and inputs >= 128 and len(reduced) == 1:
        across //= 4
    width, height = _block(across, along, BLOCK // vector)
    step_in, step_out = (width, 1) if inside else (1, width)
    values = -(-inputs // step_in)
    if values < min(FEWEST * height, MOST):
        return []
    step_in *= height
    values = -(-inputs // step_in)
    grid = -(-(outputs // vector) // step_out)
    most = PROCESSORS * (THREADS // (width * height))
    if values < MOST or grid > most:
        return []
    shares = max(min(-(-most // grid), -(-values // FEWEST)), -(-values // MOST))
    if shares < 2:
        return []
    return [element * outputs * shares * (1 if inside else width * vector), 4 * grid]


def _joined(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(stride, size) from the fastest on, with those joined that are one range of addresses."""
    found: list[tuple[int, int]] = []
    for stride, size in sorted(dims):
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0], found[-1][1] * size)
        else:
            found.append((stride, size))
    return found


def _vector(kept: list[tuple[int, int]], reduced: list[tuple[int, int]]) -> int:
    """How many outputs a thread has: what all other strides and the size are multiples of."""
    vector = 4
    for number in (kept[0][1], *(stride for stride, _ in (*kept[1:], *reduced))):
        while number % vector:
            vector //= 2
    return vector


def _block(across: int, along: int, most: int) -> tuple[int, int]:
    across, along = (_power(n) if n < most else most for n in (across, along))
    width = min(across, WARP)
    height = min(along, most // width)
    return min(across, most // height), height


def _power(number: int) -> int:
    """The largest power of two that is not above `number`, at least 1."""
    return 1 << max(number.bit_length() - 1, 0)


def _accumulator(x: Tensor, dtype: torch.dtype | None) -> int:
    """Bytes of a sum's accumulator."""
    kind = dtype or x.dtype
    if kind.is_complex:
        return 2 * torch.finfo(kind).bits // 8
    return 8 if kind == torch.float64 or not kind.is_floating_point else 4


def _sum(arguments: tuple[Any, ...], options: dict[str, Any], _made: Any) -> list[int]:
    x, *others = arguments
    dims = next((value for value in others if isinstance(value, list | tuple)), None)
    dtype = options.get("dtype", next((v for v in others if isinstance(v, torch.dtype)), None))
    return reduction(x, dims, _accumulator(x, dtype))


def _convolution(arguments: tuple[Any, ...], _options: dict[str, Any], made: Any) -> list[int]:
    return convolution(arguments[0], arguments[1], made)


def _convolution_backward(
    arguments: tuple[Any, ...], _options: dict[str, Any], _made: Any
) -> list[int]:
    grad, x, weight, *_ = arguments
    return convolution(x, weight, grad)


def convolution(x: Tensor, weight: Tensor, out: Tensor) -> list[int]:
    """Bytes of copies of input, weight and output, with the channels last, as cuDNN's kernels for
    tensor cores have them; channels of 16-bit tensors are filled up to a multiple of eight.

    Off the sizes of blocks that an H100 took (cuDNN 9). None where the tensors lie so already,
    in depthwise convolutions, which are PyTorch's own, and for kernels of one place, which are
    products of matrices and most of which take nothing. If such a kernel leaves places out, it is
    none: input and output are copied, and the weight lies the same either way.
    """
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    exact = x.dtype == torch.float64 or (
        x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
    )
    depthwise = weight.shape[1] == 1 and x.shape[1] > 1
    if exact or depthwise or channels_last:
        return []
    if math.prod(weight.shape[2:]) > 1:
        return [sum(_filled(tensor) for tensor in (x, weight, out))]
    return [] if x.shape[2:] == out.shape[2:] else [_filled(x) + _filled(out)]


def _filled(tensor: Tensor) -> int:
    """Bytes with the second dimension filled up."""
    size = tensor.numel() * tensor.element_size()
    channels = tensor.shape[1]
    return size // channels * (-(-channels // 8) * 8) if tensor.element_size() == 2 else size


def recurrent(gates: int, x: Tensor, hx: Tensor) -> list[int]:
    """Bytes of cuDNN's workspace of recurrent layers, with a copy of an input of which the batch
    comes first. `x`: (T, B, D), `hx`: (layers x directions, B, H).

    Off the sizes of blocks of two shapes on an H100: twice the gates and the cell of one layer,
    and two matrices of a layer's recurrent weights.
    """
    wide = x.shape[0] * hx[0].numel() * x.element_size()
    square = hx.shape[0] * hx.shape[2] ** 2 * x.element_size()
    copy = [] if x.is_contiguous() else [x.numel() * x.element_size()]
    return [*copy, 2 * (gates + 1) * wide + 2 * square]


def _recurrent(arguments: tuple[Any, ...], _options: dict[str, Any], _made: Any) -> list[int]:
    return recurrent(arguments[4], arguments[0], arguments[1])


def _recurrent_backward(
    arguments: tuple[Any, ...], _options: dict[str, Any], _made: Any
) -> list[int]:
    return recurrent(arguments[4], arguments[1], arguments[2])


# Scratch bytes of an operator, by its name, from its arguments, its options and its result.
GPU_SCRATCH: dict[str, Callable[[tuple[Any, ...], dict[str, Any], Any], list[int]]] = {
    "aten::sum": _sum,
    "aten::mean": _sum,
    "aten::amax": _sum,
    "aten::amin": _sum,
    "aten::linalg_vector_norm": _sum,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "lsai::recurrent": _recurrent,
    "lsai::recurrent_backward": _recurrent_backward,
}
