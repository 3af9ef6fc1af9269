"""The explorable of the roofline: rates of GPUs as measured, what operations of a training step
compute and move, and calls that were timed alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lsai_core.config.train import ModelConfig
from lsai_core.profiling.gpus import GPUS, find_gpu
from lsai_lab.report.load import load, points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "The roofline: drag an operation over it"
LENGTH = 4096  # tokens of a sequence, for attention
_RATES = {"bf16": "matmul_bf16_tflops", "fp8": "matmul_fp8_tflops", "copy": "copy_gb_per_s"}
_SHEET_ONLY = ("A100-80", "RTX 4090")  # beside the GPUs that were measured


def operations(shape: ModelConfig) -> dict[str, dict[str, Any]]:
    """What operations of one block compute and move in the forward pass (AdamW: for the block's
    parameters), in bf16, `read` in the format of the products where these may run in fp8.

    `flop`, `read` and `written` are pairs: at no tokens, and by each token more; FLOPs and numbers.
    `fused`: the operation that may follow in the same kernel, and the numbers of a token that then
    move no more: what the first writes (if nothing else needs it) and the second reads.
    """
    d, f, size = shape.d_model, shape.d_ff, shape.head_dim
    kv = shape.n_kv_heads * size
    weights = 2 * d * d + 2 * d * kv + 3 * d * f
    scores = shape.n_heads * LENGTH
    return {
        "gate and up product": {
            "flop": (0, 4 * d * f),
            "read": (2 * d * f, d),
            "written": (0, 2 * f),
            "product": True,
            "fused": ("SwiGLU", 4 * f),
        },
        "SwiGLU": {"flop": (0, 5 * f), "read": (0, 2 * f), "written": (0, f)},
        "RMSNorm": {"flop": (0, 4 * d), "read": (0, d), "written": (0, d)},
        "residual sum": {
            "flop": (0, d),
            "read": (0, 2 * d),
            "written": (0, d),
            "fused": ("RMSNorm", d),  # the sum itself is needed again
        },
        "eager attention": {
            "flop": (0, 2 * scores * size),
            "read": (0, 2 * scores),
            "written": (0, 2 * scores),
            # the scores stay on the chip; queries, keys, values and the output move
            "fused": ("fused attention", 4 * scores - 2 * (d + kv)),
        },
        "fused attention": {
            "flop": (0, 2 * scores * size),
            "read": (0, d + 2 * kv),
            "written": (0, d),
        },
        "AdamW, states in bf16": {
            "flop": (13 * weights, 0),
            "read": (4 * weights, 0),
            "written": (3 * weights, 0),
        },
    }


def data() -> dict[str, Any]:
    """The GPUs' rates (TFLOP/s, GB/s), the operations, and measured products and attention."""
    machines = load("machine").query("outcome == 'ok' and not own").sort_values("started")
    machines = machines.drop_duplicates("gpu", keep="last").set_index("gpu")
    gpus = {
        str(name): {key: float(row[column]) for key, column in _RATES.items()}
        for name, row in machines.iterrows()
    }
    sheets = [gpu for gpu in GPUS if gpu.name in _SHEET_ONLY]
    for gpu in sheets:
        gpus[f"{gpu.name}, data sheet"] = {
            "bf16": gpu.peak("bf16"),
            "fp8": gpu.peak("fp8"),
            "copy": gpu.memory_gb_per_s,
        }
    return {
        "gpus": gpus,
        "operations": operations(ModelConfig(preset="course")),
        "measured": _measured_products(),
    }


def _measured_products() -> list[dict[str, Any]]:
    """Products that were timed alone: `gpu`, `way`, FLOPs per byte and TFLOP/s."""
    runs = load("gemm")
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
