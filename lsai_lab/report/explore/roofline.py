"""The explorable of the roofline: rates of GPUs as measured, what operations of a training step
compute and move, and calls that were timed alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lsai_core.config.model import ModelConfig
from lsai_core.prediction.speeds import measured
from lsai_core.profiling.gpus import GPUS
from lsai_lab.report.load import points, recorded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "The roofline: drag an operation over it"
LENGTH = 4096  # tokens of a sequence, for attention
_RATES = {"bf16": "matmul_bf16_tflops", "fp8": "matmul_fp8_tflops", "copy": "copy_gb_per_s"}
_SHEET_ONLY = ("A100-80", "RTX 4090")  # beside the GPUs that were measured


def operations(shape: ModelConfig) -> dict[str, dict[str, Any]]:
    """What operations of one block compute and move in the forward pass (AdamW: for the block's
    parameters), in bf16, products also with fp8 inputs.

    `flop`, and `bytes` by format, are lines over the tokens: the value at none, and that of each
    token. `fused` are the same of one kernel that does what follows, too (`with`): what the first
    writes and the second reads then moves no more, if nothing else needs it. `apart`: the bytes of
    both kernels. `whole`: the tokens of a sequence, where only whole ones count: in attention each
    query meets the keys and values of all tokens before it.
    """
    d, f, size = shape.d_model, shape.d_ff, shape.head_dim
    kv = shape.n_kv_heads * size
    weights = 2 * d * d + 2 * d * kv + 3 * d * f
    scores = shape.n_heads * LENGTH
    product = _operation((0, 4 * d * f), {"bf16": (4 * d * f, 2 * d + 4 * f)})
    product["bytes"]["fp8"] = (2 * d * f, d + 4 * f)
    swiglu = _operation((0, 5 * f), {"bf16": (0, 6 * f)})
    norm = _operation((0, 4 * d), {"bf16": (0, 4 * d)})
    residual = _operation((0, d), {"bf16": (0, 6 * d)})
    attention = _operation((0, 2 * scores * size), {"bf16": (0, 4 * (d + kv))})
    eager = _operation((0, 2 * scores * size), {"bf16": (0, 8 * scores)})
    return {
        "gate and up matmul": product | _fused(product, "SwiGLU", swiglu, 8 * f),
        "SwiGLU": swiglu,
        "RMSNorm": norm,
        "residual sum": residual | _fused(residual, "RMSNorm", norm, 2 * d),
        "eager attention": eager
        | {
            "with": "all of attention",
            "fused": attention,
            "apart": eager["bytes"],
            "whole": LENGTH,
        },
        "fused attention": attention | {"whole": LENGTH},
        "AdamW, states in bf16": _operation((13 * weights, 0), {"bf16": (14 * weights, 0)}),
    }


def _operation(flop: tuple[int, int], moved: dict[str, tuple[int, int]]) -> dict[str, Any]:
    return {"flop": flop, "bytes": moved}


def _fused(first: dict[str, Any], name: str, second: dict[str, Any], saved: int) -> dict[str, Any]:
    """`first` in one kernel with `second`, called `name`; `saved`: bytes that a token then moves
    no more."""
    flop = tuple(map(sum, zip(first["flop"], second["flop"], strict=True)))
    apart = {
        way: tuple(map(sum, zip(line, second["bytes"]["bf16"], strict=True)))
        for way, line in first["bytes"].items()
    }
    moved = {way: (base, each - saved) for way, (base, each) in apart.items()}
    return {"with": name, "fused": {"flop": flop, "bytes": moved}, "apart": apart}


def data() -> dict[str, Any]:
    """The GPUs' rates (TFLOP/s, GB/s), what it takes to start a kernel (µs), the operations, and
    measured products and attention."""
    machines = recorded("machine").query("outcome == 'ok'").sort_values("started")
    machines = machines.drop_duplicates("gpu", keep="last").set_index("gpu")
    gpus: dict[str, dict[str, Any]] = {
        str(name): {key: float(row[column]) for key, column in _RATES.items()}
        for name, row in machines.iterrows()
    }
    sheets = [gpu for gpu in GPUS if gpu.name in _SHEET_ONLY]
    for gpu in sheets:
        gpus[gpu.name] = {
            "sheet": True,
            "bf16": gpu.peak("bf16"),
            "fp8": gpu.peak("fp8"),
            "copy": gpu.memory_gb_per_s,
        }
    work = operations(ModelConfig.model_validate({"preset": "course"}))
    named = [[name, name + ", data sheet" * ("sheet" in gpu)] for name, gpu in gpus.items()]
    return {
        "title": "The roofline.",
        "about": "Drag the point, or move the slider. Does arithmetic or memory decide?",
        "fields": {
            "operation": {"label": "operation", "choices": list(work), "value": next(iter(work))},
            "gpu": {"label": "GPU", "choices": named, "value": "H100"},
            "format": {"label": "format of matmuls", "choices": ["bf16", "fp8"]},
            "tokens": {"label": "tokens", "range": [0, 15, 0.25], "value": 13, "show": "whole"},
            "fused": {"label": "fuse with what follows", "value": False},
        },
        "gpus": gpus,
        "start": 1e6 * float(measured()["costs"]["start"]),
        "operations": work,
        "measured": _measured_products(),
    }


def _measured_products() -> list[dict[str, Any]]:
    """Products that were timed alone: `gpu`, `way`, FLOPs per byte and TFLOP/s."""
    runs = recorded("gemm")
    timed = points(runs[~runs["own"].astype(bool)], ["gpu"])
    timed = timed[timed["way"].isin(["bf16", "fp8"]) & (timed["outcome"] == "ok")]
    rows = []
    for row in timed.to_dict("records"):
        m, n, k = (int(row[name]) for name in "mnk")
        moved = {"bf16": 2, "fp8": 1}[row["way"]] * (m + n) * k + 2 * m * n
        rows.append(
            {
                "gpu": row["gpu"],
                "way": row["way"],
                "intensity": round(2 * m * n * k / moved, 1),
                "tflops": round(float(row["tflops"]), 1),
            }
        )
    return rows


def picture(data: dict[str, Any]) -> Figure:
    """The roofs of the measured GPUs in bf16."""
    import numpy as np
    from matplotlib.figure import Figure as New

    figure = New(figsize=(6.3, 2.4), layout="constrained")
    axes = figure.subplots()
    intensity = np.geomspace(0.1, 10_000, 200)
    for name, rates in data["gpus"].items():
        axes.plot(intensity, np.minimum(rates["bf16"], intensity * rates["copy"] / 1e3), label=name)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="TFLOP/s")
    axes.legend()
    return figure
