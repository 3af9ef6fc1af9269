"""How exact a backend is: ||value - exact|| / ||exact|| of output and gradients, against float64.

The exact values come from the same inputs (already rounded to the run's number format), in float64, a block of query
rows at a time, so that no S x S matrix is ever whole: with p the softmax of one block's scores and o = p v,

    dv += p^T do,  ds = p (do v^T - rowsum(do o)),  dq = ds k,  dk += ds^T q   (the last two scaled like the scores).

Beside it stands the error of eager attention in the run's own number format, on the same inputs: what rounding costs
when the definition is followed literally. A backend counts as correct up to `ALLOWED` times that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lsai_lab.benches.attention.clock import Call, Step, random_inputs
from lsai_lab.benches.attention.config import Shape

NAMES = ("out", "dq", "dk", "dv")
ALLOWED = 2.0
_BLOCK_BYTES = {"cuda": 2**30, "cpu": 2**26}


def exact_attention(shape: Shape, inputs: list[Tensor]) -> list[Tensor]:
    """out (B, S, H, D), dq (B, S, H, D), dk and dv (B, S, K, D) in float64 for q, k, v and the output's gradient."""
    q, k, v, dout = (x.double() for x in inputs)
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    groups, scale = shape.heads // shape.kv_heads, shape.head_dim**-0.5
    rows = max(1, _BLOCK_BYTES[q.device.type] // (8 * shape.batch * shape.heads * shape.length))
    for start in range(0, shape.length, rows):
        end = min(start + rows, shape.length)
        first = 0 if shape.window is None else max(0, start - shape.window + 1)
        block, keys = slice(start, end), slice(first, end if shape.causal else shape.length)
        q_block, do_block = (x[:, block].unflatten(2, (shape.kv_heads, groups)) for x in (q, dout))
        scores = torch.einsum("bikgd,bjkd->bkgij", q_block, k[:, keys]).mul_(scale)
        if shape.causal:
            scores.masked_fill_(~_allowed(block, keys, shape.window, q.device), -torch.inf)
        p = torch.softmax(scores, dim=-1)
        del scores
        o_block = torch.einsum("bkgij,bjkd->bikgd", p, v[:, keys])
        dv[:, keys] += torch.einsum("bkgij,bikgd->bjkd", p, do_block)
        ds = torch.einsum("bikgd,bjkd->bkgij", do_block, v[:, keys])
        ds.sub_((do_block * o_block).sum(-1).permute(0, 2, 3, 1)[..., None]).mul_(p).mul_(scale)
        out[:, block] = o_block.flatten(2, 3)
        dq[:, block] = torch.einsum("bkgij,bjkd->bikgd", ds, k[:, keys]).flatten(2, 3)
        dk[:, keys] += torch.einsum("bkgij,bikgd->bjkd", ds, q_block)
    return [out, dq, dk, dv]


def _allowed(rows: slice, keys: slice, window: int | None, device: torch.device) -> Tensor:
    row, key = (torch.arange(some.start, some.stop, device=device) for some in (rows, keys))
    distance = row[:, None] - key
    return (distance >= 0) & (distance < (window or rows.stop))


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
    """Random inputs, their exact values and eager attention's errors (`bound_*`): every backend is held against the same ones.
    `example.cache_clear()` gives their memory back."""
    inputs = random_inputs(shape, dtype, device, seed)
    exact = exact_attention(shape, inputs)
    return inputs, exact, relative_errors(eager_values(shape, inputs), exact, "bound_")


def relative_errors(found: list[Tensor], exact: list[Tensor], prefix: str = "") -> dict[str, Any]:
    """`<prefix>out` and, as far as `found` goes, `<prefix>dq`, `<prefix>dk`, `<prefix>dv`."""
    return {
        prefix + name: float(f"{float((value.double() - wanted).norm() / wanted.norm()):.4g}")
        for name, value, wanted in zip(NAMES, found, exact, strict=False)
    }
