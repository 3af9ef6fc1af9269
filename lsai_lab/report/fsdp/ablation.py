"""The section on the loss: the same run by one process and by several, and by several in bf16 and in fp8, step by step."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lsai_lab.kit.style import series_style
from lsai_lab.report.fsdp.results import Sharding, good
from lsai_lab.report.losses import curve, validation_loss
from lsai_lab.report.show import run_link, show_figure, show_table, show_text
from lsai_lab.runs.records import Run

_OTHERS = ("fp8", "FSDP's bf16")  # computed otherwise than what they are held against, and not meant to be the same
BAR = 1e-3  # nats per token: what the differences are held against
EARLY = 10  # steps in which a difference is still that of the arithmetic; later ones are what training has made of it
# What fp32 cannot tell from zero on a logarithmic axis.
_FLOOR = 1e-8


def show_ablation(sharding: Sharding) -> None:
    """Table, figure and sentences of one machine; nothing if the study was not run there."""
    rows = good(sharding.rows("ablation", "train"))
    if rows.empty:
        return
    found = compared(sharding)
    merged = (
        rows.merge(found.drop(columns=["label", "key"], errors="ignore"), on="variant", how="left")
        if len(found)
        else rows
    )
    config = sharding.run(rows.iloc[0]["key"], "ablation").config
    table = pd.DataFrame(
        {
            "run": merged["label"],
            "key": merged["key"],
            **({"seeds": merged["repeats"]} if (rows["repeats"] > 1).any() else {}),
            "tokens/s": merged["tokens_per_s"],
            "MFU (%)": merged["mfu"] * 100,
            "peak each (GiB)": merged["mem_peak_allocated_gib"],
            "val. loss": merged["validation_loss"],
            **(
                {
                    "against": merged["against"],
                    "first steps": merged["early"],
                    "largest difference": merged["largest"],
                    "mean": merged["mean"],
                }
                if len(found)
                else {}
            ),
        }
    ).dropna(axis="columns", how="all")
    formats = {
        "tokens/s": "{:,.0f}", "MFU (%)": ".1f", "peak each (GiB)": ".3f", "val. loss": ".5f", "first steps": ".1e", "largest difference": ".1e", "mean": ".1e",
    }  # fmt: skip
    show_table(
        table,
        f"tbl-ablation-{sharding.slug}",
        f"The same run by one process and by several on {sharding.machine}: {config['model']['n_layers']} layers of width "
        f"{config['model']['d_model']:,}, {int(rows['batch'].iloc[0] * rows['processes'].iloc[0])} sequences of {config['seq_len']} tokens a step in sum, "
        f"{config['steps']} steps, equal seeds and data. Differences of the training loss are absolute, in nats per token, step by step and seed by seed; *first steps* is the largest of the first {EARLY}. "
        f"The validation loss is the mean over the seeds. MFU is computed from the unsharded model.",
        formats={name: form for name, form in formats.items() if name in table},
        links={"run": "key"},
    )
    if len(found):
        show_figure(
            _figure(sharding, rows, found),
            f"fig-ablation-{sharding.slug}",
            f"Training loss of the first seed of each run on {sharding.machine} (left), and its absolute difference from the run that it is held against "
            f"(right; differences below {_FLOOR:g} are drawn there).",
        )
        show_text("\n".join(f"- {sentence}" for sentence in sentences(sharding)))


def compared(sharding: Sharding) -> pd.DataFrame:
    """One row per variant that is held against another (see `_reference`).

    Columns: variant, label, key, `shows` (a precision, `fp8` or `FSDP's bf16`), reference (variant), against (its label), seeds that
    both have (a list) and steps; over all of them the training loss's largest difference, the step of that, the largest within the first
    `EARLY` steps, the mean difference and the largest relative one; of the validation loss the relative difference seed by seed (a list); the speed over one process's.
    """
    rows = good(sharding.rows("ablation", "train"))
    found = []
    for row in rows.itertuples() if len(rows) else ():
        reference = _reference(rows, row)
        if reference is None:
            continue
        mine, other = _by_seed(sharding, str(row.variant)), _by_seed(sharding, reference["variant"])
        seeds = [seed for seed in mine if seed in other]
        wanted = pd.DataFrame({seed: curve(other[seed]) for seed in seeds})
        difference = (pd.DataFrame({seed: curve(mine[seed]) for seed in seeds}) - wanted).abs().dropna()
        if difference.empty:
            continue
        alone = rows[(rows["processes"] == 1) & (rows["precision"] == row.precision) & ~rows["offload"]]
        found.append(
            {
                "variant": row.variant, "label": row.label, "key": row.key, "shows": _shows(row), "reference": reference["variant"],
                "against": reference["label"], "seeds": seeds, "steps": len(difference), "largest": difference.max(axis=None),
                "at_step": difference.max(axis=1).idxmax(), "early": difference.iloc[:EARLY].max(axis=None), "mean": difference.mean(axis=None), "relative": (difference / wanted).max(axis=None),
                "validation": [validation_loss(mine[seed]) / validation_loss(other[seed]) - 1 for seed in seeds],
                "speed": row.tokens_per_s / alone.iloc[0]["tokens_per_s"] if len(alone) else None,
            }
        )  # fmt: skip
    return pd.DataFrame(found)


def _reference(rows: pd.DataFrame, row: Any) -> pd.Series | None:
    """What a variant is held against, at the same sequences per step: fp8 against as many processes in bf16, FSDP of one process
    against that process without it, and several processes against one that computes as they do, if that was run.
    """
    if row.processes == 1 and not row.offload:
        return None
    same = (rows["precision"] == row.precision) & ~rows["fp8"]
    same &= rows["batch"] * rows["processes"] * rows["seq_len"] == row.batch * row.processes * row.seq_len
    same &= rows["processes"] == (row.processes if row.fp8 else 1)
    if row.processes == 1:
        same &= ~rows["offload"]
    found = rows[same].sort_values("offload", ascending=False, kind="stable")
    return None if found.empty else found.iloc[0]


def _shows(row: Any) -> str:
    if row.processes == 1:
        return "FSDP's bf16"
    return "fp8" if row.fp8 else str(row.precision)


def _by_seed(sharding: Sharding, variant: str) -> dict[int, Run]:
    """The runs of a variant that ended well, by seed."""
    runs = (run for run in sharding.runs if run.summary.id.study == "ablation" and run.summary.id.variant == variant)
    return {run.config["seed"]: run for run in runs if run.summary.outcome == "ok"}


def in_short(sharding: Sharding) -> list[str]:
    """One sentence for each precision; none of what is not meant to be the same."""
    found = compared(sharding)
    text = []
    for precision, some in found[~found["shows"].isin(_OTHERS)].groupby("shows", sort=False) if len(found) else ():
        worst = some.loc[some["largest"].idxmax()]
        text.append(
            f"*Loss, {precision}:* {_runs(some)} from one process by at most {worst['largest']:.1e} nats per token in {worst['steps']} steps, {some['early'].max():.1e} in the first {EARLY} "
            f"({run_link(worst['label'], worst['key'])})."
        )
    return text


def sentences(sharding: Sharding) -> list[str]:
    text = []
    for shown, some in compared(sharding).groupby("shows", sort=False):
        text += (
            [_other_arithmetic(row) for _, row in some.iterrows()] if shown in _OTHERS else _same_run(sharding, some)
        )
    return text


def _same_run(sharding: Sharding, some: pd.DataFrame) -> list[str]:
    """Of the sharded runs in one precision: how far from one process, and how fast."""
    worst, precision = some.loc[some["largest"].idxmax()], some["shows"].iloc[0]
    within = "stays within" if worst["largest"] <= BAR else "exceeds"
    validation = max(abs(change) for changes in some["validation"] for change in changes)
    text = [
        f"*{precision}:* over {worst['steps']} steps{_seeds(some)} {_runs(some)} from one process in the training loss by at most "
        f"{worst['largest']:.1e} nats per token ({run_link(worst['label'], worst['key'])}, step {worst['at_step']}; {worst['relative']:.1e} of the loss), "
        f"on average by at most {some['mean'].max():.1e}, in the first {EARLY} steps by at most {some['early'].max():.1e}. The largest {within} {BAR:g}.{_stream(some)} "
        f"Relative to that of one process, the validation loss differs by at most {validation:.1e}."
    ]
    if some["speed"].notna().any():
        fast = some.loc[some["speed"].idxmax()]
        shares = "" if sharding.on_gpu else ", with all processes on one processor"
        text.append(
            f"*{precision}:* {run_link(fast['label'], fast['key'])} is {fast['speed']:.2f} times as fast as one process{shares}."
        )
    return text


def _stream(some: pd.DataFrame) -> str:
    """What beside sharding sets bf16 runs apart from one under autocast."""
    under_autocast = (some["shows"] == "bf16_autocast") & ~some["reference"].str.contains("fsdp")
    return (
        " Not by sharding alone: one process under autocast carries the residual stream in fp32, several in bf16."
        if under_autocast.any()
        else ""
    )


def _runs(some: pd.DataFrame) -> str:
    """How many sharded runs; the seeds of one count as runs."""
    runs = sum(map(len, some["seeds"]))
    return f"{runs} sharded runs differ" if runs > 1 else "the sharded run differs"


def _seeds(some: pd.DataFrame) -> str:
    seeds = max(map(len, some["seeds"]))
    return f" of each of {seeds} seeds" if seeds > 1 else ""


def _other_arithmetic(row: pd.Series) -> str:
    """fp8 beside bf16, and FSDP's bf16 beside autocast: what is left of the validation loss's difference over the seeds."""
    changes = row["validation"]
    each = f" over {len(changes)} seeds ({min(changes):+.2%} to {max(changes):+.2%})" if len(changes) > 1 else ""
    return (
        f"*{row['shows']}:* after {row['steps']} steps the validation loss of {run_link(row['label'], row['key'])} differs from that of {row['against']} "
        f"by {sum(changes) / len(changes):+.2%}{', the mean' if each else ''}{each}; over the steps the training loss differs by {row['mean']:.1e} nats per "
        f"token on average, {row['largest']:.1e} at most and {row['early']:.1e} in the first {EARLY} steps."
    )


def _figure(sharding: Sharding, rows: pd.DataFrame, found: pd.DataFrame) -> Figure:
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.3, 3.2))
    for index, row in enumerate(rows.itertuples()):
        style, mine = series_style(index), _by_seed(sharding, row.variant)
        held = found[found["variant"] == row.variant]
        seed = next(iter(mine)) if held.empty else held.iloc[0]["seeds"][0]
        losses = curve(mine[seed])
        every = max(1, len(losses) // 6)
        marks = (index * every // max(1, len(rows)), every)
        left.plot(losses.index, losses, label=row.label, markevery=marks, **style)
        if len(held):
            change = (losses - curve(_by_seed(sharding, held.iloc[0]["reference"])[seed])).abs().clip(lower=_FLOOR)
            right.semilogy(change.index, change, markevery=marks, **{**style, "linewidth": 1.1})
    right.axhline(BAR, color="#444444", linewidth=0.9, linestyle=":")
    right.annotate(
        f"{BAR:g}", (1, BAR), xycoords=("axes fraction", "data"), xytext=(-2, 3), textcoords="offset points", ha="right", fontsize=8,
    )  # fmt: skip
    left.set(xlabel="step", ylabel="training loss (nats per token)")
    right.set(xlabel="step", ylabel="difference (nats per token)")
    fig.legend(loc="outside lower center", ncols=3, fontsize=8)
    return fig
