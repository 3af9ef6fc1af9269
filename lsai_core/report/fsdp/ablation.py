"""The section on the loss: the same run by one process and by several, and by several in bf16 and in fp8, step by step."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lsai_core.report.fsdp.results import Sharding, good
from lsai_core.report.show import run_link, show_figure, show_table, show_text
from lsai_core.report.style import series_style

BAR = 1e-3  # nats per token: what the differences are held against
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
            "sequences each": merged["batch"],
            "tokens/s": merged["tokens_per_s"],
            "MFU (%)": merged["mfu"] * 100,
            "peak each (GiB)": merged["mem_peak_allocated_gib"],
            "val. loss": merged["validation_loss"],
            **(
                {"largest difference": merged["largest"], "at step": merged["at_step"], "mean": merged["mean"]}
                if len(found)
                else {}
            ),
        }
    ).dropna(axis="columns", how="all")
    formats = {
        "tokens/s": "{:,.0f}", "MFU (%)": ".1f", "peak each (GiB)": ".3f", "val. loss": ".5f", "largest difference": ".2e", "mean": ".2e",
        "at step": ".0f",
    }  # fmt: skip
    show_table(
        table,
        f"tbl-ablation-{sharding.slug}",
        f"The same run by one process and by several on {sharding.machine}: {config['model']['n_layers']} layers of width "
        f"{config['model']['d_model']:,}, {int(rows['batch'].iloc[0] * rows['processes'].iloc[0])} sequences of {config['seq_len']} tokens a step in sum, "
        f"{config['steps']} steps, equal seed and data. Differences of the training loss are absolute, in nats per token, against one process in the "
        f"same precision{', of fp8 against bf16 on as many processes' if merged['fp8'].any() else ''}. MFU is computed from the unsharded model.",
        formats={name: form for name, form in formats.items() if name in table},
        links={"run": "key"},
    )
    if len(found):
        show_figure(
            _figure(sharding, rows, found),
            f"fig-ablation-{sharding.slug}",
            f"Training loss of each run on {sharding.machine} (left), and its absolute difference from the run that it is held against (right; "
            f"differences below {_FLOOR:g} are drawn there).",
        )
        show_text("\n".join(f"- {sentence}" for sentence in sentences(sharding)))


def compared(sharding: Sharding) -> pd.DataFrame:
    """One row per sharded run that has a reference: variant, label, key, `in` what precision, and largest, mean, relative difference.

    The reference is the run of one process in the same precision, of fp8 that of as many processes in bf16; runs of other sizes per
    step are left out.
    """
    rows = good(sharding.rows("ablation", "train"))
    found = []
    for row in rows[rows["processes"] > 1].itertuples() if len(rows) else ():
        alone = rows[(rows["processes"] == (row.processes if row.fp8 else 1)) & (rows["precision"] == row.precision)]
        alone = alone[
            ~alone["fp8"]
            & (alone["batch"] * alone["processes"] * alone["seq_len"] == row.batch * row.processes * row.seq_len)
        ]
        if alone.empty:
            continue
        wanted, seen = (_curve(sharding, key) for key in (alone.iloc[0]["key"], str(row.key)))
        difference = (seen - wanted).abs().dropna()
        if difference.empty:
            continue
        found.append(
            {
                "variant": row.variant, "label": row.label, "key": row.key, "in": "fp8" if row.fp8 else row.precision, "reference": alone.iloc[0]["key"],
                "steps": len(difference), "largest": difference.max(), "at_step": difference.idxmax(), "mean": difference.mean(),
                "relative": (difference / wanted).max(), "speed": row.tokens_per_s / alone.iloc[0]["tokens_per_s"],
                "validation": abs(row.validation_loss / alone.iloc[0]["validation_loss"] - 1),
            }
        )  # fmt: skip
    return pd.DataFrame(found)


def in_short(sharding: Sharding) -> list[str]:
    """One sentence for each precision; none of fp8, which is not meant to be the same."""
    found = compared(sharding)
    text = []
    for precision, some in found[found["in"] != "fp8"].groupby("in", sort=False) if len(found) else ():
        worst = some.loc[some["largest"].idxmax()]
        text.append(
            f"*Loss, {precision}:* {_runs(some)} from one process by at most {worst['largest']:.1e} nats per token in {worst['steps']} steps "
            f"({run_link(worst['label'], worst['key'])})."
        )
    return text


def sentences(sharding: Sharding) -> list[str]:
    text = []
    for precision, some in compared(sharding).groupby("in", sort=False):
        if precision == "fp8":
            text += [_fp8_sentence(row) for _, row in some.iterrows()]
            continue
        worst = some.loc[some["largest"].idxmax()]
        within = "stays within" if worst["largest"] <= BAR else "exceeds"
        text.append(
            f"*{precision}:* over {worst['steps']} steps {_runs(some)} from one process in the training loss by at most "
            f"{worst['largest']:.1e} nats per token ({run_link(worst['label'], worst['key'])}, step {worst['at_step']}; {worst['relative']:.1e} of the loss), "
            f"on average by at most {some['mean'].max():.1e}. This {within} {BAR:g}. "
            f"Relative to that of one process, the validation loss differs by at most {some['validation'].max():.1e}."
        )
        fast = some.loc[some["speed"].idxmax()]
        shares = "" if sharding.on_gpu else ", with all processes on one processor"
        text.append(
            f"*{precision}:* {run_link(fast['label'], fast['key'])} is {fast['speed']:.2f} times as fast as one process{shares}."
        )
    return text


def _runs(some: pd.DataFrame) -> str:
    return f"{len(some)} sharded runs differ" if len(some) > 1 else "the sharded run differs"


def _fp8_sentence(row: pd.Series) -> str:
    return (
        f"*fp8:* after {row['steps']} steps the validation loss of {run_link(row['label'], row['key'])} is {row['validation']:.2%} from that of the same "
        f"processes in bf16; over the steps the training loss differs by {row['mean']:.1e} nats per token on average and {row['largest']:.1e} at most."
    )


def _curve(sharding: Sharding, key: str) -> pd.Series:
    return sharding.run(key, "ablation").metrics.set_index("step")["loss"]


def _figure(sharding: Sharding, rows: pd.DataFrame, found: pd.DataFrame) -> Figure:
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.3, 3.2))
    for index, row in enumerate(rows.itertuples()):
        style, curve = series_style(index), _curve(sharding, str(row.key))
        every = max(1, len(curve) // 6)
        marks = (index * every // max(1, len(rows)), every)
        left.plot(curve.index, curve, label=row.label, markevery=marks, **style)
        mine = found[found["variant"] == row.variant]
        if len(mine):
            change = (curve - _curve(sharding, mine.iloc[0]["reference"])).abs().clip(lower=_FLOOR)
            right.semilogy(
                change.index,
                change,
                markevery=marks,
                linewidth=1.1,
                **{k: v for k, v in style.items() if k != "linewidth"},
            )
    right.axhline(BAR, color="#444444", linewidth=0.9, linestyle=":")
    right.annotate(f"{BAR:g}", (0, BAR), xytext=(2, 3), textcoords="offset points", fontsize=8)
    left.set(xlabel="step", ylabel="training loss (nats per token)")
    right.set(xlabel="step", ylabel="difference (nats per token)")
    fig.legend(loc="outside lower center", ncols=3, fontsize=8)
    return fig
