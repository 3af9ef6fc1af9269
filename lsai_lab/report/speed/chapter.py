"""What the speed chapter shows, machine by machine: levers, kernels, start-up, and every attention kernel."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pandas as pd

from lsai_lab.kit.style import apply_style
from lsai_lab.report.pandoc import code_span
from lsai_lab.report.show import run_link, show_figure, show_table, show_text
from lsai_lab.report.speed.analysis import on_attention, on_levers
from lsai_lab.report.speed.figures import kernel_bars
from lsai_lab.report.speed.results import Speed, good, load_speed
from lsai_lab.report.variants import setting_row, sittings

TOP = 10


def load(own_runs: list[str], profile: str | None) -> list[Speed]:
    """The study's results on every machine; a sentence if there are none."""
    apply_style()
    found = load_speed(own_runs, profile)
    if not found:
        show_text("There are no records of this study yet: `make run STUDY=speed` makes them.")
    return found


def show_setting(machines: list[Speed]) -> None:
    """What was trained, one row per machine, and the levers in words."""
    if not machines:
        return
    rows = pd.concat([_settings(speed) for speed in machines])
    show_table(rows, "tbl-speed-setting", "What was trained, on each machine, for which part of this chapter.")
    study = machines[0].study
    levers = [
        {"lever": study.variants[name].label, "name": f"`{name}`", "what it does": study.variants[name].note}
        for name in study.measured("levers")
    ]
    show_table(pd.DataFrame(levers), "tbl-speed-levers", "The levers; each comes on top of those above it.")


def _settings(speed: Speed) -> pd.DataFrame:
    """One row per setting: parts of the study that train the same share one. Steps: of most variants."""
    rows: dict[str, dict[str, Any]] = {}
    for part in speed.study.parts:
        runs = [run for run in speed.runs if run.summary.id.part == part]
        if not runs:
            continue
        row = setting_row(runs, 1)
        row.pop("repeats")
        row["steps"] = Counter(run.config["steps"] for run in runs).most_common(1)[0][0]
        same = rows.setdefault(str({**row, "steps": None}), {"machine": row["machine"], "part": "", **row})
        same["part"] = ", ".join(filter(None, [same["part"], part]))
    return pd.DataFrame(rows.values())


def show_levers(speed: Speed) -> None:
    """Sentences, figure and tables of the levers on one machine."""
    show_text(f"## The levers on {speed.machine} {{#sec-speed-{speed.slug}}}")
    levers = [run for run in speed.runs if run.summary.id.part == "levers"]
    sentences = [*on_levers(speed), *filter(None, [sittings(levers)])]
    show_text("\n".join(f"- {sentence}" for sentence in sentences) or "No lever has been measured.")
    rows = speed.levers
    if rows.empty:
        return
    _bars(speed, rows, "levers")
    ideal = [
        speed.ideal(key) if outcome == "ok" else None for key, outcome in zip(rows["key"], rows["outcome"], strict=True)
    ]
    _show(
        pd.DataFrame(
            {
                "lever": rows["label"],
                "key": rows["key"],
                "tokens/s": rows["tokens_per_s"],
                "gain": rows["gain"],
                "MFU (%)": rows["mfu"] * 100,
                "step (ms)": rows["step_ms"],
                "of ideal": [i.ms / ms if i else None for i, ms in zip(ideal, rows["step_ms"], strict=True)],
                "GPU busy": rows["gpu_busy_share"],
                "peak (GiB)": rows["mem_peak_allocated_gib"],
                "outcome": rows["outcome"],
            }
        ),
        f"tbl-speed-{speed.slug}",
        f"The levers on {speed.machine}. The gain is over the lever before it that ran; *of ideal* is the time that the step's "
        "FLOPs take at the machine's ceiling over the time of the step (none where the ceiling is not known). Speed is the median of steps without warm-up and profiler.",
    )
    _show(
        pd.DataFrame(
            {
                "lever": rows["label"],
                "key": rows["key"],
                "set-up (s)": rows["setup_s"],
                "first step (s)": rows["first_step_s"],
                "cold start (s)": rows["cold_start_s"],
                "host memory (GiB)": rows["rss_peak_gib"],
                "outcome": rows["outcome"],
            }
        ),
        f"tbl-speed-start-{speed.slug}",
        f"Start-up on {speed.machine}: building the model and its optimizer, the first step with all compilation in it, both "
        "together, and the largest resident set of the process. Importing the libraries comes before and is not counted.",
    )
    for row in _best(speed).itertuples():
        _kernels(speed, str(row.key), str(row.label))


def show_attention(speed: Speed) -> None:
    """Sentences, figure and table of the attention kernels on one machine."""
    show_text(f"### {speed.machine} {{#sec-speed-attention-{speed.slug}}}")
    show_text("\n".join(f"- {s}" for s in on_attention(speed)) or "No attention kernel has been measured.")
    rows = speed.attention
    if rows.empty:
        return
    _bars(speed, rows, "attention")
    fastest = good(rows)["tokens_per_s"].max()
    _show(
        pd.DataFrame(
            {
                "attention": rows["label"],
                "key": rows["key"],
                "tokens/s": rows["tokens_per_s"],
                "of the fastest": rows["tokens_per_s"] / fastest,
                "MFU (%)": rows["mfu"] * 100,
                "attention (ms)": rows["kernel_attention_ms"],
                "peak (GiB)": rows["mem_peak_allocated_gib"],
                "time (s)": rows["train_s"],
                "train loss": rows["train_loss"],
                "val. loss": rows["validation_loss"],
                "outcome": rows["outcome"],
            }
        ),
        f"tbl-speed-attention-{speed.slug}",
        f"The model with every attention kernel on {speed.machine}. *Attention (ms)* is the time per step in kernels of that class; "
        "what eager and SDPA math spend in plain matrix products is not among it. MFU counts full attention, also for a window.",
    )


def _bars(speed: Speed, rows: pd.DataFrame, what: str) -> None:
    if (fig := kernel_bars(speed, rows)) is None:
        show_text(f"No run on {speed.machine} has a trace, so there is no figure of its kernels.")
        return
    measured = (
        "GPU kernels of three traced steps; idle is the rest of an untraced step"
        if speed.on_gpu
        else "operators' own time in three traced steps, which the profiler makes slower"
    )
    dtypes = dict.fromkeys(d for key in good(rows)["key"] if (i := speed.ideal(key)) for d in i.dtypes)
    ceilings = (
        "; ".join(speed.ceilings.source(dtype) for dtype in dtypes) or "no ceiling is known, so no ideal is drawn"
    )
    show_figure(
        fig,
        f"fig-speed-{what}-{speed.slug}",
        f"Where a step's time goes on {speed.machine}: {measured}. Ideal: the step's FLOPs at the ceiling ({ceilings}), causal "
        "attention counted by half.",
    )


def _best(speed: Speed) -> pd.DataFrame:
    """The fastest lever without fp8 and the fastest with it."""
    rows = good(speed.levers)
    if rows.empty:
        return rows
    in_fp8 = [(speed.run(key).config.get("fp8") or {}).get("recipe", "none") != "none" for key in rows["key"]]
    best = rows.assign(in_fp8=in_fp8).groupby("in_fp8")["tokens_per_s"].idxmax()
    return rows.loc[best]


def _kernels(speed: Speed, key: str, label: str) -> None:
    run = speed.run(key)
    top = run.kernels.head(TOP)
    if top.empty:
        return
    step = run.summary.results["step_ms"]
    what = "kernel" if speed.on_gpu else "operator"
    shown = pd.DataFrame(
        {
            what: [code_span(name if len(name) <= 72 else name[:69] + "...") for name in top["name"]],
            "class": top["class"],
            "ms per step": top["ms"],
            "of the step": top["ms"] / step,
            "calls": top["calls"],
        }
    )
    if not speed.on_gpu:  # the traced steps are slower than the timed ones
        shown = shown.drop(columns="of the step")
    show_table(
        shown,
        f"tbl-speed-kernels-{run.summary.id.variant.replace('_', '-')}-{speed.slug}",
        f"The {len(top)} {what}s with the most time in {run_link(label.removeprefix('+ '), key)} on {speed.machine}.",
        formats={"ms per step": ".3g", "calls": ".0f", **({"of the step": ".1%"} if speed.on_gpu else {})},
    )


_FORMATS = {
    "tokens/s": "{:,.0f}", "gain": "{:+.1%}", "MFU (%)": ".1f", "step (ms)": "{:,.1f}", "of ideal": ".0%", "GPU busy": ".1%",
    "peak (GiB)": ".2f", "set-up (s)": ".1f", "first step (s)": ".1f", "cold start (s)": ".1f", "host memory (GiB)": ".2f",
    "of the fastest": ".0%", "attention (ms)": ".1f", "time (s)": ".1f", "train loss": ".3f", "val. loss": ".4f",
}  # fmt: skip


def _show(table: pd.DataFrame, label: str, caption: str) -> None:
    """Show a table of variants without the columns that no row has; outcomes only where one is not ok."""
    table = table.dropna(axis="columns", how="all")
    if (table["outcome"] == "ok").all():
        table = table.drop(columns="outcome")
    first = str(table.columns[0])
    formats = {name: form for name, form in _FORMATS.items() if name in table}
    show_table(table, label, caption, formats=formats, links={first: "key"})
