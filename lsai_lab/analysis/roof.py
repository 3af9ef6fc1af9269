"""The roof of a GPU: what its memory and its tensor cores allow, and how long the operations of one
block take at least."""

import pandas as pd

from lsai_core import GPUS, ModelConfig, theoretical_peak

# Columns of the machine study and what they measure.
RATES = {
    "matmul_bf16_tflops": "matmul in bf16 (TFLOP/s)",
    "matmul_fp8_tflops": "matmul in fp8 (TFLOP/s)",
    "matmul_fp32_tflops": "matmul in fp32 (TFLOP/s)",
    "copy_gb_per_s": "copy in memory (GB/s)",
}


def machine_rates(runs: pd.DataFrame) -> pd.DataFrame:
    """The newest run of the machine study on each GPU, a row a GPU: the measured `RATES`, and for
    each `<rate>_sheet`, the dense rate of the data sheet."""
    newest = runs.sort_values("started").drop_duplicates("gpu", keep="last").set_index("gpu")
    rates = newest[[*RATES, "run"]].sort_index()
    bandwidth = {gpu.driver_name: gpu.memory_gb_per_s for gpu in GPUS}
    rates["copy_gb_per_s_sheet"] = newest["env.gpu"].map(bandwidth)
    for kind in ("bf16", "fp8", "fp32"):
        peaks = {name: theoretical_peak(name, kind) for name in newest["env.gpu"].unique()}
        tflops = {name: peak.tflops for name, peak in peaks.items() if peak}
        rates[f"matmul_{kind}_tflops_sheet"] = newest["env.gpu"].map(tflops)
    return rates


def block_operations(shape: ModelConfig, tokens: int, length: int) -> pd.DataFrame:
    """FLOPs and bytes moved of operations of one block for `tokens` tokens of sequences of `length`
    in bf16, by operation: `flop`, `bytes`, `format` of the matmul, and `intensity` (FLOPs per
    byte), lowest first. Each input is read and each output written once."""
    width, hidden = shape.d_model, shape.d_ff
    shared = shape.n_kv_heads * shape.head_dim
    weights = 2 * width * width + 2 * width * shared + 3 * width * hidden
    numbers = tokens * width
    scores = tokens * shape.n_heads * length
    attention = 2 * scores * shape.head_dim  # of the causal half
    up = 4 * numbers * hidden
    rows = {
        "residual sum": (numbers, 6 * numbers, "bf16"),
        "RMSNorm": (4 * numbers, 4 * numbers, "bf16"),
        "SwiGLU": (5 * tokens * hidden, 6 * tokens * hidden, "bf16"),
        # reads weight, gradient and two moments, writes all but the gradient
        "AdamW, states in bf16": (13 * weights, 14 * weights, "bf16"),
        "eager attention": (attention, 8 * scores, "bf16"),  # each score moves four times
        "fused attention": (attention, 4 * tokens * (width + shared), "bf16"),
        "gate and up": (up, 2 * (numbers + 2 * width * hidden + 2 * tokens * hidden), "bf16"),
        "gate and up in fp8": (up, numbers + 2 * width * hidden + 4 * tokens * hidden, "fp8"),
        "gate and up, one token": (
            up // tokens,
            2 * (width + 2 * width * hidden + 2 * hidden),
            "bf16",
        ),
    }
    work = pd.DataFrame(rows, index=["flop", "bytes", "format"]).T
    work[["flop", "bytes"]] = work[["flop", "bytes"]].astype(float)
    work["intensity"] = work["flop"] / work["bytes"]
    return work.sort_values("intensity")


def least_times(work: pd.DataFrame, rate: pd.Series) -> pd.DataFrame:
    """How long each row of `block_operations` takes at least at the measured rates of one GPU (a
    row of `machine_rates`), in microseconds: its `arithmetic` alone and its `memory` traffic
    alone."""
    tflops = work["format"].map(lambda kind: rate[f"matmul_{kind}_tflops"])
    return pd.DataFrame(
        {
            "arithmetic": work["flop"] / tflops / 1e6,
            "memory": work["bytes"] / rate["copy_gb_per_s"] / 1e3,
        }
    )


def tokens_to_fill(shape: ModelConfig, rate: pd.Series, kind: str) -> float:
    """From how many tokens on arithmetic sets the time of the gate and up matmul, by the measured
    balance of one GPU; weights and inputs in `kind` ("bf16", "fp8"), the result in bf16."""
    inner, outer = shape.d_model, 2 * shape.d_ff
    read = {"bf16": 2, "fp8": 1}[kind]
    balance = rate[f"matmul_{kind}_tflops"] / rate["copy_gb_per_s"] * 1e3
    moved_a_token = balance * (read * inner + 2 * outer)
    return float(balance * read * inner * outer / (2 * inner * outer - moved_a_token))


def layer_matmuls(points: pd.DataFrame) -> pd.DataFrame:
    """Of the `points` of the gemm bench the matmuls in bf16 and fp8 that were timed alone, of a
    model's layers and of squares, with their `intensity` in FLOPs per byte."""
    timed = points[points["way"].isin(["bf16", "fp8"]) & (points["outcome"] == "ok")]
    m, n, k = (timed[name].astype(float) for name in "mnk")
    read = timed["way"].map({"bf16": 2, "fp8": 1})
    return timed.assign(intensity=2 * m * n * k / (read * (m + n) * k + 2 * m * n))


def square_matmuls(runs: pd.DataFrame) -> pd.DataFrame:
    """The square matmuls of the machine study in bf16 and fp8, a row a GPU, format (`way`) and
    size: `tflops` with its quartiles `tflops_p25` and `tflops_p75`."""
    names = list(runs.filter(regex=r"^matmul_(bf16|fp8)_\d+_tflops"))
    long = runs.melt("gpu", names, var_name="what").dropna(subset=["value"])
    long[["way", "n", "stat"]] = long["what"].str.extract(r"matmul_(\w+?)_(\d+)_(tflops\w*)")
    wide = long.pivot_table(index=["gpu", "way", "n"], columns="stat", values="value")
    return wide.reset_index()
