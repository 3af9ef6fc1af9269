"""The section on scaling: more processes at the same work each, at the same work in sum, and a model that needs several."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lsai_lab.kit.style import series_style
from lsai_lab.report.fsdp.results import Sharding, good, unsteady
from lsai_lab.report.show import run_link, show_figure, show_table, show_text

_PARTS = {"weak": "the same batch on every process", "strong": "the same batch in sum", "large": "a larger model"}


def show_scaling(sharding: Sharding) -> None:
    """Tables, a figure and sentences of one machine; nothing if nothing was run there."""
    curves: dict[str, pd.DataFrame] = {}
    for part, words in _PARTS.items():
        # On a CPU the tiny model is no larger than the others.
        rows = sharding.rows("fsdp", part) if part != "large" or sharding.on_gpu else pd.DataFrame()
        if good(rows).empty:
            continue
        rows = rows.sort_values(["processes", "label"])
        rows = rows.assign(efficiency=efficiency(rows, sharding.on_gpu) if part != "large" else None)
        _table(sharding, rows, part, words)
        if part != "large":
            curves |= _curves(good(rows).dropna(subset=["efficiency"]), f"{part}: {words}")
    if curves:
        show_figure(
            _figure(curves),
            f"fig-scaling-{sharding.slug}",
            f"Scaling efficiency on {sharding.machine}: the speed of a {'GPU' if sharding.on_gpu else 'process'} among N over its speed alone.",
        )
    if lines := sentences(sharding):
        show_text("\n".join(f"- {sentence}" for sentence in lines))


def _curves(rows: pd.DataFrame, name: str) -> dict[str, pd.DataFrame]:
    """One process, and all runs of several that free gathered weights, or keep them; a curve has three points or more."""
    curves = {
        name + words: rows[(rows["processes"] == 1) | (rows["resharded"] == resharded)]
        for resharded, words in ((True, ""), (False, ", weights kept"))
    }
    return {name: curve for name, curve in curves.items() if len(curve) > 2}


def efficiency(rows: pd.DataFrame, on_gpu: bool) -> pd.Series:
    """Speed over N times that of one process (on a CPU, which all processes share, over that of one); missing without one."""
    alone = good(rows)
    alone = alone[alone["processes"] == 1]["tokens_per_s"]
    wanted = (float(alone.iloc[0]) if len(alone) else float("nan")) * (rows["processes"] if on_gpu else 1)
    return rows["tokens_per_s"].where(rows["outcome"] == "ok") / wanted


def in_short(sharding: Sharding) -> list[str]:
    """Weak scaling, and the fastest run of the larger model."""
    return [line for line in sentences(sharding) if line.startswith(("*Weak", "*Fastest"))]


def sentences(sharding: Sharding) -> list[str]:
    text = []
    fine = {part: rows for part in _PARTS if len(rows := good(sharding.rows("fsdp", part)))}
    for part in ("weak", "strong"):
        if part not in fine:
            continue
        rows = fine[part].assign(efficiency=efficiency(fine[part], sharding.on_gpu)).dropna(subset=["efficiency"])
        rows = rows[rows["processes"] > 1]
        if rows.empty:
            continue
        most = rows[rows["processes"] == rows["processes"].max()]
        last = most.loc[most["efficiency"].idxmax()]
        kept = "" if last["resharded"] else " that keep gathered weights"
        name = run_link(f"{last['processes']} processes", last["key"]) + kept
        if sharding.on_gpu:
            text.append(
                f"*{part.capitalize()} scaling:* {name} run at {last['efficiency']:.1%} of {last['processes']} times the speed of one."
            )
        else:
            text.append(
                f"*{part.capitalize()} scaling:* {name} on this one processor train at {last['efficiency']:.0%} of the speed of one; the rest is what the "
                "processes exchange and wait. It says nothing about GPUs, which are not shared."
            )
    for part, rows in fine.items():
        rows = rows.dropna(subset=["exposed_communication_ms"])
        if rows.empty:
            continue
        last = rows.loc[rows["processes"].idxmax()]
        share = last["exposed_communication_ms"] / last["kernel_communication_ms"]
        text.append(
            f"*Communication ({_PARTS[part]}, {run_link(last['label'], last['key'])}):* its kernels run {last['kernel_communication_ms']:,.1f} ms of a step of "
            f"{last['step_ms']:,.0f} ms; {share:.0%} of that, {last['exposed_communication_ms'] / last['step_ms']:.1%} of the step, is not hidden "
            "behind other work. A kernel that waits for a slower GPU counts as communication."
        )
    rows = fine.get("large", pd.DataFrame()) if sharding.on_gpu else pd.DataFrame()
    if len(rows) and rows["mfu"].notna().any():
        best = rows.loc[rows["tokens_per_s_per_gpu"].idxmax()]
        text.append(
            f"*Fastest on the larger model:* {run_link(best['label'], best['key'])} with {best['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU, "
            f"MFU {best['mfu']:.1%}."
        )
    if fine and (line := unsteady(pd.concat(fine.values(), ignore_index=True))):
        text.append(line)
    # A larger model is held against torchtitan's run of the same sitting, not against other sizes.
    if apart := sharding.sittings("weak", "strong"):
        text.append(apart)
    return text


def _table(sharding: Sharding, rows: pd.DataFrame, part: str, words: str) -> None:
    first = sharding.run(good(rows).iloc[0]["key"], "fsdp").config
    model = first["model"]
    table = pd.DataFrame(
        {
            "processes": rows["label"].str.removeprefix("on "),
            "key": rows["key"],
            "sequences each": rows["batch"],
            "tokens/s": rows["tokens_per_s"],
            "per GPU": rows["tokens_per_s_per_gpu"] if sharding.on_gpu else None,
            "efficiency": pd.to_numeric(rows["efficiency"]),
            "MFU (%)": rows["mfu"] * 100,
            "step (ms)": rows["step_ms"],
            "communication (ms)": rows["kernel_communication_ms"] if sharding.on_gpu else None,
            "exposed (ms)": rows["exposed_communication_ms"],
            "peak each (GiB)": rows["mem_peak_allocated_gib"],
            "outcome": rows["outcome"],
        }
    ).dropna(axis="columns", how="all")
    if (table["outcome"] == "ok").all():
        table = table.drop(columns="outcome")
    formats = {
        "tokens/s": "{:,.0f}", "per GPU": "{:,.0f}", "efficiency": ".1%", "MFU (%)": ".1f", "step (ms)": "{:,.1f}", "communication (ms)": ".1f",
        "exposed (ms)": ".1f", "peak each (GiB)": ".3g",
    }  # fmt: skip
    exposed = (
        " *Exposed* is the time per step in which nothing but communication ran." if "exposed (ms)" in table else ""
    )
    show_table(
        table,
        f"tbl-scaling-{part}-{sharding.slug}",
        f"{words.capitalize()} on {sharding.machine}: {model['n_layers']} layers of width {model['d_model']:,}, sequences of {first['seq_len']} tokens, "
        f"{first['precision']}{', blocks compiled' if first['compile'] else ''}. tokens/s in sum.{exposed}",
        formats={name: form for name, form in formats.items() if name in table},
        links={"processes": "key"},
    )


def _figure(curves: dict[str, pd.DataFrame]) -> Figure:
    fig, axes = plt.subplots(figsize=(4.5, 2.8))
    for index, (name, rows) in enumerate(curves.items()):
        axes.plot(rows["processes"], rows["efficiency"] * 100, label=name, **series_style(index))
    axes.axhline(100, color="#444444", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="processes",
        ylabel="efficiency (%)",
        ylim=(0, 105 * max(1, *(rows["efficiency"].max() for rows in curves.values()))),
    )
    axes.set_xscale("log", base=2)
    ticks = sorted({int(n) for rows in curves.values() for n in rows["processes"]})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.legend()
    return fig
