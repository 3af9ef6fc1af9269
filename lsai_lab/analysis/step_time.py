"""Where the time of a training step goes: what each change gains over the one before it, the time
by class of kernel, and how far the step is from the ideal one.

The ideal step is its matrix products at the dense peak of the GPU's data sheet, and nothing else.
Linear layers are 6 FLOPs per parameter and token; attention's are those that a causal mask or a
window needs. Each is divided by the peak of the dtype that it runs in. The data sheet's is the one
bound that no step can exceed: products of library calls that were timed alone ran slower than the
same products within a training step, because the clock follows the power.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_core.config.model import ModelConfig
from lsai_core.config.strict import validated
from lsai_core.fp8.shapes import parameters_in
from lsai_core.profiling.flops import MATMUL_DTYPE, flops_per_token, theoretical_peak
from lsai_lab.analysis.summary import SESSION_SPREAD
from lsai_lab.runs.records import read_run

CLASSES = {
    "matmul": "matmul",
    "attention": "attention",
    "norm_pointwise": "norms, pointwise",
    "optimizer": "optimizer",
    "fp8_cast": "fp8 casts",
}
REST = "other, idle"


def levers(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per change, in their order, from runs of one machine (rows of `lab.load`).

    Numbers are medians over the repeats, other columns those of the first. `change`: the label
    without its plus sign; `n`: the repeats; `low`, `high`: smallest and largest tokens/s; `gain`,
    `gain_low`, `gain_high`: over the line above, and what the runs of both allow; `real`: whether
    the ranges do not meet and the gain exceeds `SESSION_SPREAD`; `mj_per_token`: the GPU's mean
    power times the step's time. A change of the attention kernel that changed none is left out.
    """
    repeats = runs[runs["outcome"] == "ok"].groupby("variant", sort=False)
    middle = repeats.median(numeric_only=True)
    first = repeats.first()
    rows = pd.concat([first.drop(columns=middle.columns), middle], axis=1).reset_index()
    speeds = repeats["tokens_per_s"]
    rows = rows.assign(n=speeds.count().array, low=speeds.min().array, high=speeds.max().array)
    kernel = rows["attention_kernel"]
    rows = rows[(rows["variant"] != "attention") | (kernel != kernel.shift())]
    before = rows.shift()
    rows["change"] = rows["label"].str.removeprefix("+ ")
    rows["gain"] = rows["tokens_per_s"] / before["tokens_per_s"] - 1
    rows["gain_low"] = rows["low"] / before["high"].astype(float) - 1
    rows["gain_high"] = rows["high"] / before["low"].astype(float) - 1
    apart = (rows["gain_low"] > 0) | (rows["gain_high"] < 0)
    rows["real"] = apart & (rows["gain"].abs() > SESSION_SPREAD)
    tokens = rows["batch_size"] * rows["seq_len"]
    rows["mj_per_token"] = rows["gpu_power_w"] * rows["step_ms"] / tokens
    return rows.reset_index(drop=True)


def gain_range(row: Mapping[str, Any]) -> str | None:
    """The gain of a row of `levers` in percent, with what its runs allow in brackets; None for the
    first row."""
    if pd.isna(row["gain"]):
        return None
    ends = ("gain_low", "gain_high")
    low, high = (f"{round(100 * row[end], 1) + 0:.1f}" for end in ends)  # and no -0.0
    between = f" ({low} to {high})" if row["n"] > 1 else ""
    return f"{100 * row['gain']:.1f}{between}".replace("-", "−")


def same_kernels(before: pd.DataFrame, after: pd.DataFrame, classes: Sequence[str]) -> float:
    """The share of the time of `classes` in the trace `before` (of `lab.kernels`) that its kernels
    take which the trace `after` has, too, called as often."""
    traces = (before, after)
    old, new = (trace[trace["class"].isin(classes)].set_index("name") for trace in traces)
    both = old.join(new, how="inner", rsuffix="_after").query("calls == calls_after")
    return float(both["ms"].sum() / old["ms"].sum())


def class_times(rows: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds per step by class of kernel, from the traces: one row per row of `rows` (index
    `label`), columns `CLASSES` and the rest of the step, idle time included."""
    times = rows.set_index("label").filter(regex=r"^kernel_\w+_ms$").fillna(0)
    times.columns = times.columns.str.removeprefix("kernel_").str.removesuffix("_ms")
    named = times.reindex(columns=list(CLASSES), fill_value=0).rename(columns=CLASSES)
    return named.assign(**{REST: rows["step_ms"].array - named.sum(axis=1)})


@dataclass(frozen=True)
class Ideal:
    """FLOPs of the linear layers in one step by the dtype of their products, and the milliseconds
    that they and attention take at the data sheet's peaks."""

    linear_tflop: dict[str, float]
    linear_ms: float
    attention_ms: float

    @property
    def ms(self) -> float:
        return self.linear_ms + self.attention_ms


def ideal_step(config: Mapping[str, Any], gpu: str) -> Ideal | None:
    """The ideal step of a training config (as in config.json) on one `gpu`; None if no data sheet
    of it is known."""
    model = validated(ModelConfig, dict(config["model"]), "the run's config")
    dtype = MATMUL_DTYPE[config["precision"]]
    flops = flops_per_token(model, config["seq_len"], config["attention"]["window"])
    tokens = config["batch_size"] * config["grad_accum"] * config["seq_len"]
    fp8 = config.get("fp8") or {"recipe": "none"}
    in_fp8 = 0 if fp8["recipe"] == "none" else parameters_in(model, tuple(fp8["layers"]))
    linear = {dtype: flops.counted_parameters - in_fp8, "fp8": in_fp8}
    tflop = {name: 6e-12 * parameters * tokens for name, parameters in linear.items() if parameters}
    attention = (flops.causal_discounted - 6.0 * flops.counted_parameters) * tokens / 1e12
    peaks = {name: theoretical_peak(gpu, name) for name in {*tflop, dtype}}
    if not all(peaks.values()):
        return None
    rate = {name: peak.tflops for name, peak in peaks.items() if peak}
    linear_ms = 1e3 * sum(work / rate[name] for name, work in tflop.items())
    return Ideal(tflop, linear_ms, attention_ms=1e3 * attention / rate[dtype])


def ideal_of(row: Mapping[str, Any]) -> Ideal | None:
    """The ideal step of a row of `lab.load`."""
    gpu = row.get("env.gpu")
    return ideal_step(read_run(Path(row["run"])).config, gpu) if isinstance(gpu, str) else None


def beyond_ideal(row: Mapping[str, Any]) -> pd.Series:
    """Milliseconds that each class of kernel takes beyond the ideal step, longest first, the rest
    last; their sum is the median step less the ideal one. `row`: a row of `levers`."""
    ideal = ideal_of(row)
    assert ideal is not None, "the data sheet of the GPU is known"
    times = class_times(pd.DataFrame([row])).iloc[0]
    times["matmul"] -= ideal.linear_ms
    times["attention"] -= ideal.attention_ms
    rest = times.pop(REST)
    return pd.concat([times.sort_values(ascending=False), pd.Series({REST: rest})])


def waterfall(rows: pd.DataFrame) -> pd.DataFrame:
    """The bars from the first step of `levers` down to the last one, and on to the ideal step:
    `what`, `from_ms`, `to_ms`, `moved_ms` and `kind` (step, change, or left: what a class of kernel
    takes beyond the ideal step)."""
    steps = rows["step_ms"].tolist()
    bars = [(rows["change"].iloc[0], 0.0, steps[0], "step")]
    for change, before, after in zip(rows["change"][1:], steps, steps[1:], strict=False):
        bars.append((change, before, after, "change"))
    bars.append((f"{rows['change'].iloc[-1].split()[0]} step", 0.0, steps[-1], "step"))
    level = steps[-1]
    for name, ms in beyond_ideal(rows.iloc[-1].to_dict()).items():
        below = f"{name}, above its ideal" if name in ("matmul", "attention") else str(name)
        bars.append((below, level, level - ms, "left"))
        level -= ms
    bars.append(("ideal step", 0.0, level, "step"))
    frame = pd.DataFrame(bars, columns=["what", "from_ms", "to_ms", "kind"])
    return frame.assign(moved_ms=frame["to_ms"] - frame["from_ms"])


def matmul_rates(row: Mapping[str, Any], alone: Mapping[str, float]) -> dict[str, float]:
    """How fast the matmuls of a step run: `tflops`, their `peak` on the data sheet, and the rate of
    the best square products timed `alone` (TFLOP/s by dtype), both for the step's own mix of
    dtypes."""
    ideal = ideal_of(row)
    assert ideal is not None, "the data sheet of the GPU is known"
    work = sum(ideal.linear_tflop.values())
    alone_s = sum(tflop / alone[dtype] for dtype, tflop in ideal.linear_tflop.items())
    return {
        "tflops": 1e3 * work / row["kernel_matmul_ms"],
        "peak": 1e3 * work / ideal.linear_ms,
        "alone": work / alone_s,
    }


def compile_pays(runs: pd.DataFrame, plain: str) -> pd.DataFrame:
    """From which step on a job that compiles is ahead of the job `plain`, which does not.

    `runs`: rows of several jobs of one machine. One row per other job and start (`start`: "first
    run" compiles, "later runs", their median, find compiled kernels on the disk): `label`,
    `start`, `first_step_s`, `step_s`, `plain_first_s`, `plain_step_s`, `step`."""
    rows = []
    base = runs[runs["variant"] == plain]
    begin = base["first_step_s"].min()
    base_step = base["step_ms"].median() / 1e3
    for label, group in runs[runs["variant"] != plain].groupby("label", sort=False):
        step_s = group["step_ms"].median() / 1e3
        starts = group.sort_values("repeat")["first_step_s"]
        for start, first_s in (
            ("first run", starts.iloc[0]),
            ("later runs", starts.iloc[1:].median()),
        ):
            ahead = 1 + (first_s - begin) / (base_step - step_s)
            rows.append((label, start, first_s, step_s, begin, base_step, ahead))
    names = ["label", "start", "first_step_s", "step_s", "plain_first_s", "plain_step_s", "step"]
    return pd.DataFrame(rows, columns=names)
