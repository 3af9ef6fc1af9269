"""What the attention bench measured: one figure from repeated measurements, the lead of one kernel
over the best other one, memory, windows and errors."""

import re
from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd
import torch

from lsai_core import BACKENDS
from lsai_lab.analysis.summary import SESSION_SPREAD
from lsai_lab.benches.attention_table import choices_of

HEADS = ("heads", "kv_heads", "head_dim")
SHAPE = ("heads of", "mask", "window", "length")
# The major compute capability of a generation of NVIDIA GPUs.
GENERATIONS = {8: "Ampere", 9: "Hopper"}
PARTS = {"out": "output", "dq": "gradient of Q", "dk": "gradient of K", "dv": "gradient of V"}


def attention_points(points: pd.DataFrame, measure: str = "time") -> pd.DataFrame:
    """The good ones of `points` of one `measure`, a row a measurement; `heads of` names the width
    of the heads and whether keys and values are shared. `points`: of the attention bench, with the
    columns `HEADS` of their runs (`lab.points(runs, lab.HEADS)`)."""
    found = points[(points["measure"] == measure) & (points["outcome"] == "ok")]
    shared = (found["kv_heads"] < found["heads"]).map({True: ", grouped", False: ""})
    named = found["head_dim"].map("heads of {:.0f}".format) + shared
    return found.assign(**{"heads of": named, "window": found["window"].fillna(0)})


def kernel_times(timed: pd.DataFrame) -> pd.DataFrame:
    """Forward plus backward of each shape and kernel, over the measurements: `ms`, `ms_low`,
    `ms_high`, `n`, `tflops`."""
    found = timed.groupby([*SHAPE, "backend"], sort=False).agg(
        ms=("training_ms", "median"),
        ms_low=("training_ms", "min"),
        ms_high=("training_ms", "max"),
        n=("training_ms", "count"),
        tflops=("training_tflops", "median"),
    )
    return found.reset_index().query("n > 0")


def kernel_lead(times: pd.DataFrame, kernel: str) -> pd.DataFrame:
    """Each shape's row of `kernel` beside the best other kernel (`rival_` columns): `lead`, the
    rival's time over that of `kernel`, `low` and `high` by the measurements, and `verdict`:
    "faster" or "slower" if neither the measurements nor two sessions of equal work would explain
    it, else "tie"."""
    shape = list(SHAPE)
    ours = times[times["backend"] == kernel].set_index(shape)
    others = times[times["backend"] != kernel].reset_index(drop=True)
    rival = others.loc[others.groupby(shape)["ms"].idxmin()].set_index(shape)
    lead = ours.join(rival.add_prefix("rival_"), how="inner").reset_index()
    lead["lead"] = lead["rival_ms"] / lead["ms"]
    lead["low"] = lead["rival_ms_low"] / lead["ms_high"]
    lead["high"] = lead["rival_ms_high"] / lead["ms_low"]
    faster = (lead["low"] > 1) & (lead["lead"] > 1 + SESSION_SPREAD)
    slower = (lead["high"] < 1) & (lead["lead"] < 1 / (1 + SESSION_SPREAD))
    lead["verdict"] = np.select([faster, slower], ["faster", "slower"], "tie")
    return lead


def attention_curves(timed: pd.DataFrame, heads: str) -> pd.DataFrame:
    """Rate and memory over the length of one kind of heads under a causal mask, a row a kernel and
    length: `training_tflops`, `forward_mib`, `training_gib`, beyond the inputs.

    The memory of measurements that show less than outputs and gradients take is left out: an
    earlier version recorded too little. Of the others the largest counts."""
    causal = timed[(timed["mask"] == "causal") & (timed["heads of"] == heads)]
    one_mib = causal["batch"] * causal["length"] * causal["head_dim"] * 2 / 2**20
    tensors = 2 * (causal["heads"] + causal["kv_heads"])
    enough = causal["memory_forward_mib"] >= 0.99 * one_mib * causal["heads"]
    enough &= ~(causal["memory_training_mib"] < 0.99 * one_mib * tensors)
    keys = ["backend", "length"]
    rates = causal.groupby(keys, sort=False)["training_tflops"].median()
    known = causal[enough].groupby(keys)[["memory_forward_mib", "memory_training_mib"]].max()
    known = known.rename(columns={"memory_forward_mib": "forward_mib"})
    known["training_gib"] = known.pop("memory_training_mib") / 1024
    return known.join(rates, how="outer").reset_index()


def window_times(times: pd.DataFrame, heads: str, length: int) -> pd.DataFrame:
    """Times with a window of one kind of heads at one length: `pairs`, the share of the causal
    pairs that the window leaves, and `time`, over the same kernel's time under the causal mask."""
    here = times[(times["heads of"] == heads) & (times["length"] == length)]
    whole = here[here["mask"] == "causal"].set_index("backend")["ms"]
    found = here[(here["window"] > 0) & here["backend"].isin(whole.index)].sort_values("window")
    part = found["window"] / length
    time = found["ms"] / found["backend"].map(whole)
    return found.assign(pairs=2 * part - part**2, time=time)


def rounding_error() -> float:
    """The relative error that one rounding to bf16 makes in random numbers."""
    exact = torch.randn(2**20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return float((exact.bfloat16().double() - exact).norm() / exact.norm())


def kernel_errors(errors: pd.DataFrame) -> pd.DataFrame:
    """Errors against float64 (points of the measure "error"), a row a kernel, smallest first: the
    largest of the output and of the three gradients, `worst` of them, and `of_eager`, the largest
    error over that of eager attention in the same format."""
    parts = list(PARTS)
    over = pd.concat([errors[part] / errors[f"bound_{part}"] for part in parts], axis=1)
    found = errors.groupby("backend")[parts].max()
    found["worst"] = found.max(axis=1)
    found["of_eager"] = over.max(axis=1).groupby(errors["backend"]).max()
    return found.sort_values("worst").reset_index()


def auto_shares(runs: pd.DataFrame) -> pd.Series:
    """The smallest share of the fastest kernel's speed that `attention.backend: auto` reaches over
    all shapes of `runs`, for training and inference: by its measured "table", by that of the
    nearest other shape ("neighbour"), and by its fixed "order" without a table."""
    ways: dict[str, dict[str, Any]] = {
        "table": {},
        "neighbour": {"from_neighbours": True},
        "order": {"measured": ()},
    }
    found = {}
    for way, how in ways.items():
        chosen = [pd.DataFrame(choices_of(run, **how)) for run in runs["run"]]
        found[way] = float(pd.concat(chosen)["share"].min())
    return pd.Series(found)


def kernels_declared(measured: Collection[str]) -> pd.DataFrame:
    """The attention kernels as the package declares them, fused ones first: `kernel`, `what it is`,
    `runs on`, `window`. One that is not among the `measured` says so."""
    rows = []
    for kernel in sorted(BACKENDS.values(), key=lambda kernel: (not kernel.fused, -kernel.speed)):
        (since, _), (until, _) = kernel.compute_capability or ((0, 0), (99, 0))
        reach = "only" if until == since else "or newer"
        gpu = f"{GENERATIONS[since]} {reach}" if since in GENERATIONS else "any GPU"
        if "cpu" in kernel.dtypes:
            gpu += ", CPUs (forward only)" if "cpu" in kernel.forward_only else ", CPUs"
        about = re.split("[;:]", kernel.about)[0]
        if kernel.name not in measured:
            about += " (not measured)"
        by_matrix = kernel.masked or not kernel.fused
        window = "by a matrix" if by_matrix else "skips tiles" if "cuda" in kernel.window else "no"
        rows.append((f"`{kernel.name}`", about, gpu, window))
    return pd.DataFrame(rows, columns=["kernel", "what it is", "runs on", "window"])
