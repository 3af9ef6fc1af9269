"""How exact a backend is: ||value - exact|| / ||exact|| of output and gradients, against float64.

The exact values come from the same inputs (already rounded to the run's number format), a block of
query rows at a time, so that no S x S matrix is ever whole. Beside them stands the error of eager
attention in the run's own number format: what rounding costs when the definition is followed
literally. A backend counts as correct up to `ALLOWED_ERROR` times that.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lsai_lab.benches.attention.clock import Call, Step, random_inputs
from lsai_lab.benches.attention.config import Shape

NAMES = ("out", "dq", "dk", "dv")
ALLOWED_ERROR = 2.0
_BLOCK_BYTES = {"cuda": 2**29, "cpu": 2**26}


def exact_attention(shape: Shape, inputs: list[Tensor]) -> list[Tensor]:
    """out (B, S, H, D), dq (B, S, H, D), dk and dv (B, S, K, D) in float64 for q, k, v and the
    output's gradient."""
    q, k, v, dout = (x.double() for x in inputs)
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    places = torch.arange(shape.length, device=q.device)
    rows = max(1, _BLOCK_BYTES[q.device.type] // (8 * shape.batch * shape.heads * shape.length))
    for start in range(0, shape.length, rows):
        end = min(start + rows, shape.length)
        first = 0 if shape.window is None else max(0, start - shape.window + 1)
        block, keys = slice(start, end), slice(first, end if shape.causal else shape.length)
        distance = places[block, None] - places[keys]
        allowed = (distance >= 0) & (distance < (shape.window or end)) if shape.causal else None
        some = [x.transpose(1, 2).requires_grad_() for x in (q[:, block], k[:, keys], v[:, keys])]
        found = F.scaled_dot_product_attention(
            some[0], some[1], some[2], attn_mask=allowed, enable_gqa=True
        )
        grads = torch.autograd.grad(found, some, dout[:, block].transpose(1, 2))
        out[:, block] = found.detach().transpose(1, 2)
        dq[:, block], dk_part, dv_part = (x.transpose(1, 2) for x in grads)
        dk[:, keys] += dk_part
        dv[:, keys] += dv_part
    return [out, dq, dk, dv]


def eager_values(shape: Shape, inputs: list[Tensor]) -> list[Tensor]:
    """What eager attention gives in the inputs' own number format, one key-value head at a time."""
    groups = shape.heads // shape.kv_heads
    one = Shape(shape.batch, shape.length, groups, 1, shape.head_dim, shape.causal, shape.window)
    q, k, v, dout = inputs
    parts = []
    for head in range(shape.kv_heads):
        own, shared = slice(head * groups, (head + 1) * groups), slice(head, head + 1)
        some = [q[:, :, own], k[:, :, shared], v[:, :, shared], dout[:, :, own]]
        parts.append(values(Call("eager", one, some, True)))
    return [torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True)]


def values(call: Step) -> list[Tensor]:
    """Output and, for training, gradients of one call."""
    call.forward()
    assert call.out_BSHD is not None
    found = [call.out_BSHD.detach()]
    if call.training:
        call.backward()
        found += call.gradients
    call.release()
    return found


@lru_cache(maxsize=1)
def example(
    shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """Random inputs, their exact values and eager attention's errors (`bound_*`): every backend is
    held against the same ones. `example.cache_clear()` gives their memory back."""
    inputs = random_inputs(shape, dtype, device, seed)
    exact = exact_attention(shape, inputs)
    return inputs, exact, relative_errors(eager_values(shape, inputs), exact, "bound_")


def relative_errors(found: list[Tensor], exact: list[Tensor], prefix: str = "") -> dict[str, Any]:
    """`<prefix>out` and, as far as `found` goes, `<prefix>dq`, `<prefix>dk`, `<prefix>dv`."""
    return {
        prefix + name: float(f"{float((value.double() - wanted).norm() / wanted.norm()):.4g}")
        for name, value, wanted in zip(NAMES, found, exact, strict=False)
    }
