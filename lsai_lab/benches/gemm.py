"""The `gemm` kind: how fast this machine multiplies the matrices of a model, shape by shape, in
bf16 and in fp8.

A linear layer with weight (N, K) over M tokens is three products of 2 M N K FLOPs each, on matrices
that lie differently:

    forward  (M, K) x (K, N)      dgrad  (M, N) x (N, K)      wgrad  (N, M) x (M, K)

Four ways to do each, and square products beside them as the ceiling of each type:

    bf16         torch.mm on tensors as they lie in training
    fp8          torch._scaled_mm with one scale per operand, on fp8 operands that are already
                 there, already transposed
    fp8_rowwise  the same with one scale per row of each operand, e4m3 and fast accumulation
                 throughout
    fp8_casts    what the layer of `fp8/tensorwise.py` really does: maxima, casts and transposed
                 casts of the bf16 tensors, compiled, and the fp8 product; each maximum counts once:
                 the gradient's with dgrad, those of input and weight with forward

Each point runs for `point_s` seconds, long enough for the clocks to settle to the power limit,
after a fifth of that unmeasured. Points are taken in order of importance; what no longer fits into
`budget_s` is recorded as skipped.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lsai_core.fp8 import tensorwise
from lsai_core.fp8.recipes import missing
from lsai_core.fp8.shapes import linear_shapes
from lsai_core.training.step import resolve_device
from lsai_lab.benches.config import GemmConfig
from lsai_lab.benches.machine import repeated
from lsai_lab.benches.points import Points, Row, guarded
from lsai_lab.runs.kinds import Context

PRODUCTS = ("forward", "dgrad", "wgrad")
_FAST = {
    "forward": tensorwise.FAST_OUTPUT,
    "dgrad": tensorwise.FAST_DGRAD,
    "wgrad": tensorwise.FAST_WGRAD,
}
_WAYS = ("bf16", "fp8", "fp8_rowwise", "fp8_casts")
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Point:
    """A product of a layer with n outputs and k inputs over m tokens, in one way. `layer` is
    `square` for the ceilings."""

    layer: str
    product: str
    way: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


def run(config: GemmConfig, context: Context) -> dict[str, Any]:
    """Measure; the results hold the ceilings and how the points ended."""
    device, began = resolve_device(config.device), time.perf_counter()
    reason = missing("tensorwise", device)
    if device.type == "cpu":
        reason = "a CPU multiplies fp8 by converting it first; its speed says nothing"
    ways = ("fp32", "bf16") if device.type == "cpu" else ("bf16",) if reason else _WAYS
    torch._dynamo.reset()  # the casts are compiled for each shape
    (context.folder / "metrics.jsonl").unlink(missing_ok=True)
    kept = Points(context.folder / "metrics.jsonl", context.on_rows)
    for point in points(config, ways):
        found: Row = {"outcome": "skipped", "reason": f"the {config.budget_s:g} s were over"}
        if time.perf_counter() - began <= config.budget_s:
            found = guarded(device, partial(measure, point, device, config.point_s))
        kept.add({**point.__dict__, **found})
    rows = kept.rows
    measured = [row for row in rows if row["outcome"] == "ok"]
    if not measured:
        raise RuntimeError(f"no product could be measured: {rows[0]['reason']}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    skipped = sum(row["outcome"] == "skipped" for row in rows)
    results: dict[str, Any] = {
        "gemm_device": name,
        "gemm_s": time.perf_counter() - began,
        "fp8_unavailable": reason,
    }
    results |= {"points": len(rows), "points_ok": len(measured), "points_skipped": skipped}
    for way in ways:
        if squares := [row for row in measured if (row["layer"], row["way"]) == ("square", way)]:
            best = max(squares, key=lambda row: row["tflops"])
            results |= {f"square_{way}_tflops": best["tflops"], f"square_{way}_n": best["n"]}
    return results


def points(config: GemmConfig, ways: tuple[str, ...]) -> Iterator[Point]:
    """Every point, the most telling first: ceilings, products, products with casts, then the other
    numbers of tokens."""
    layers, (first, *others) = linear_shapes(config.model), config.tokens
    plain = [way for way in ways if way != "fp8_casts"]
    essential = [way for way in plain if way != "fp8_rowwise"]
    for n, way in itertools.product(config.squares, essential):
        yield Point("square", "forward", way, n, n, n)
    rounds = [
        (first, plain),
        (first, [way for way in ways if way == "fp8_casts"]),
        *((m, essential) for m in others),
    ]
    for m, some in rounds:
        for (layer, (n, k)), product, way in itertools.product(layers.items(), PRODUCTS, some):
            yield Point(layer, product, way, m, n, k)


@torch.no_grad()
def measure(point: Point, device: torch.device, seconds: float) -> dict[str, Any]:
    """Median seconds and TFLOP/s with quartiles."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the point before
    taken = repeated(_work(point, device), device, seconds, warm=0.2)
    slow, middle, quick = (float(q) for q in np.percentile(taken, [75, 50, 25]))
    rate = {
        f"tflops{end}": point.flops / s / 1e12
        for end, s in (("", middle), ("_p25", slow), ("_p75", quick))
    }
    return {"outcome": "ok", "reason": None, "ms": middle * 1e3, **rate, "repeats": len(taken)}


def _work(point: Point, device: torch.device) -> Callable[[], object]:
    dtype = torch.float32 if point.way == "fp32" else torch.bfloat16
    m, n, k = point.m, point.n, point.k
    # Of input (M, K), weight (N, K) and output gradient (M, N), the two that this product
    # multiplies.
    first = (m, k) if point.product == "forward" else (m, n)
    second = (m, k) if point.product == "wgrad" else (n, k)
    a, b = (torch.randn(shape, device=device, dtype=dtype) for shape in (first, second))
    if point.way == "fp8_casts":
        return _with_casts(point.product, a, b)
    # The summed dimension last, in both operands.
    a_AC, b_BC = (
        a.t() if point.product == "wgrad" else a,
        b if point.product == "forward" else b.t(),
    )
    if point.way in ("fp32", "bf16"):
        out = torch.empty(a_AC.shape[0], b_BC.shape[0], device=device, dtype=dtype)
        return lambda: torch.mm(a_AC, b_BC.t(), out=out)
    rowwise = point.way == "fp8_rowwise"
    gradient = tensorwise.GRAD_DTYPE if point.product != "forward" and not rowwise else E4M3
    a8_AC, a_inverse = _quantized(a_AC, gradient, rowwise)
    b8_BC, b_inverse = _quantized(b_BC, E4M3, rowwise)
    fast = rowwise or _FAST[point.product]
    return lambda: torch._scaled_mm(
        a8_AC,
        b8_BC.t(),
        scale_a=a_inverse,
        scale_b=b_inverse.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _quantized(x_AC: Tensor, dtype: torch.dtype, rowwise: bool) -> tuple[Tensor, Tensor]:
    """`x` in fp8, row-major, and its inverse scale: a scalar, or (A, 1) by rows."""
    if not rowwise:
        scale = tensorwise.scale_of(x_AC, dtype)
        return tensorwise.cast(x_AC, scale, dtype).contiguous(), scale.reciprocal()
    scale_A1 = torch.finfo(dtype).max / x_AC.abs().amax(1, keepdim=True).float()
    return tensorwise.cast(x_AC, scale_A1, dtype).contiguous(), scale_A1.reciprocal()


def _with_casts(product: str, a: Tensor, b: Tensor) -> Callable[[], object]:
    """The layer's own product, compiled; scales that another product of the layer has found already
    are given."""
    given_a, given_b = tensorwise.scale_of(a, tensorwise.GRAD_DTYPE), tensorwise.scale_of(b, E4M3)

    def forward(x_MK: Tensor, w_NK: Tensor) -> Tensor:
        x_scale = tensorwise.scale_of(x_MK, tensorwise.INPUT_DTYPE)
        return tensorwise.output_product(
            x_MK, w_NK, x_scale, tensorwise.scale_of(w_NK, tensorwise.WEIGHT_DTYPE)
        )

    def dgrad(g_MN: Tensor, w_NK: Tensor) -> Tensor:
        return tensorwise.dgrad_product(
            g_MN, w_NK, tensorwise.scale_of(g_MN, tensorwise.GRAD_DTYPE), given_b
        )

    def wgrad(g_MN: Tensor, x_MK: Tensor) -> Tensor:
        return tensorwise.wgrad_product(g_MN, x_MK, given_a, given_b, g_MN.dtype)

    compiled = torch.compile(
        {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}[product], dynamic=False
    )
    return lambda: compiled(a, b)
