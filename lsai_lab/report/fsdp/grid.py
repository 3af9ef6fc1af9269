"""The section on FSDP beside fused attention: the four combinations over the scaling factor."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lsai_lab.kit.style import series_style
from lsai_lab.report.fsdp.results import Sharding, good, size_of, unsteady
from lsai_lab.report.show import run_link, show_figure, show_table, show_text

STRATEGIES = {"all": "width, depth and heads grow", "layers": "only the layers grow"}
WAITING = 0.8  # a GPU that works for less of a step waits for the host, which starts its kernels
_PANELS = (
    ("tokens_per_s_per_gpu", "tokens/s per {process}", True),
    ("tflops", "TFLOP/s per {process}", False),
    ("mfu", "MFU (%)", False),
    ("mem_peak_allocated_gib", "peak memory (GiB)", True),
)


def show_grid(sharding: Sharding) -> None:
    """Figures, tables and sentences of one machine, strategy by strategy; nothing if nothing was run there."""
    rows = sharding.rows("fsdp", "grid")
    if rows.empty:
        return
    config = sharding.run(rows.iloc[0]["key"], "fsdp").config
    setting = f"{config['batch_size']} x {config['seq_len']} tokens a process and step, {config['precision']}{', blocks compiled' if config['compile'] else ''}"
    for strategy, words in STRATEGIES.items():
        some = rows[rows["variant"].str.startswith(f"{strategy}_")]
        if some.empty:
            continue
        fine = good(some)
        if len(fine) and fine["factor"].nunique() > 1:
            show_figure(
                _figure(sharding, fine),
                f"fig-fsdp-{strategy}-{sharding.slug}",
                f"Speed, arithmetic and memory over the scaling factor on {sharding.machine}, where {words}: each combination of attention and "
                f"number of processes, {setting}. A line ends where memory does.",
            )
        _table(sharding, some, strategy, f"{words}, {setting}")
    if lines := sentences(sharding):
        show_text("\n".join(f"- {sentence}" for sentence in lines))


def sentences(sharding: Sharding) -> list[str]:
    """The largest model of each combination, and what each technique brings alone and together where all four ran."""
    rows, text = sharding.rows("fsdp", "grid"), []
    for strategy, words in STRATEGIES.items():
        some = rows[rows["variant"].str.startswith(f"{strategy}_")] if len(rows) else rows
        fine = good(some)
        if fine.empty:
            continue
        if (some["outcome"] == "oom").any():
            ends = []
            for (attention, processes), mine in some.groupby(["attention", "processes"], sort=True):
                fits, fails = mine[mine["outcome"] == "ok"]["factor"], mine[mine["outcome"] == "oom"]["factor"]
                if len(fails):
                    ends.append(
                        f"{_name(attention)} on {processes} up to {fits.max():g} and not at {fails.min():g}"
                        if len(fits)
                        else f"{_name(attention)} on {processes} at none"
                    )
            text.append(f"*Memory ends ({words}):* factors that trained: {'; '.join(ends)}.")
        most = int(fine["processes"].max())
        corners = fine[fine["processes"].isin([1, most])]
        whole = corners.groupby("factor").filter(lambda group: len(group) == 4)
        if most == 1 or whole.empty:
            continue
        factor = whole["factor"].max()
        four = whole[whole["factor"] == factor].set_index(["attention", "processes"])
        rate = four["tokens_per_s_per_gpu" if sharding.on_gpu else "tokens_per_s"]
        peak = four["mem_peak_allocated_gib"]
        per = "per GPU" if sharding.on_gpu else "in sum (all processes share one processor)"
        line = (
            f"*Together ({words}, factor {factor:g}):* fused attention makes training {rate['auto', 1] / rate['eager', 1]:.2f} times as fast on one process "
            f"and {rate['auto', most] / rate['eager', most]:.2f} times on {most}; FSDP over {most} keeps {rate['eager', most] / rate['eager', 1]:.0%} "
            f"of the speed {per} with eager and {rate['auto', most] / rate['auto', 1]:.0%} with fused attention."
        )
        if peak.notna().all():
            line += (
                f" Peak memory of a process: eager {peak['eager', 1]:.3g} GiB alone, {peak['eager', most]:.3g} sharded; fused {peak['auto', 1]:.3g} and "
                f"{peak['auto', most]:.3g}: both together take {peak['auto', most] / peak['eager', 1]:.0%} of neither."
            )
        busy = four["gpu_busy_share"]
        if busy.notna().all():
            line += (
                f" A GPU works for {busy['eager', 1]:.0%} of a step with eager and {busy['auto', 1]:.0%} with fused attention alone, "
                f"{busy['eager', most]:.0%} and {busy['auto', most]:.0%} sharded."
            )
        text.append(line)
    fine = good(rows)
    text += [line for line in (_waiting(fine), unsteady(fine), sharding.sittings("grid")) if line]
    if len(fine):
        if sharding.on_gpu and fine["mfu"].notna().any():
            best = fine.loc[fine["mfu"].idxmax()]
            text.append(f"*Highest utilization:* {run_link(best['label'], best['key'])}, MFU {best['mfu']:.1%}.")
        text.append(
            "*Training tokens:* every batch is full sequences without padding, so all tokens counted in tokens/s are training tokens, in every run."
        )
    return text


def _waiting(rows: pd.DataFrame) -> str | None:
    """Where speeds are the host's and not the GPU's, and what a block costs the host there."""
    some = rows[rows["gpu_busy_share"] < WAITING] if len(rows) else rows
    if some.empty:
        return None
    block_ms = (some["step_ms"] / some["layers"]).groupby(some["processes"]).median()
    each = " and ".join(f"{ms:.1f} ms on {processes}" for processes, ms in block_ms.items())
    host = some[["host_forward_ms", "host_backward_ms", "host_optimizer_ms"]].dropna()
    parts = host.div(host.sum(axis=1), axis=0).median()
    where = (
        f" Of that, {parts['host_forward_ms']:.0%} goes to the forward pass, {parts['host_backward_ms']:.0%} to the backward pass and "
        f"{parts['host_optimizer_ms']:.0%} to clipping and the optimizer (medians of {len(host)} runs)."
        if len(host)
        else ""
    )
    return (
        f"*Waiting for the host:* in {len(some)} of {len(rows)} runs the GPU works for less than {WAITING:.0%} of a step ({some['gpu_busy_share'].min():.0%} "
        f"in the least): it is through with its kernels before the host has started the next. A block then costs {each} of the host's "
        f"time (median, the step over its blocks), however small it is, and that is what these speeds show.{where} More tokens a step hide it, as in the next section."
    )


def _name(attention: str) -> str:
    return "fused" if attention == "auto" else attention


def _table(sharding: Sharding, rows: pd.DataFrame, strategy: str, setting: str) -> None:
    table = pd.DataFrame(
        {
            "factor": rows["factor"].map("{:g}".format),
            "key": rows["key"],
            "layers x width": [
                f"{layers} x {width:,}" for layers, width in zip(rows["layers"], rows["width"], strict=True)
            ],
            "parameters": [size_of(value) for value in rows["planned_parameters"]],
            "attention": rows["attention"].map(_name),
            "on": rows["processes"],
            "tokens/s": rows["tokens_per_s"],
            "MFU (%)": rows["mfu"] * 100,
            "TFLOP/s": rows["tflops"],
            "peak (GiB)": rows["mem_peak_allocated_gib"],
            "GPU busy": rows["gpu_busy_share"],
            "exposed": rows["exposed_communication_ms"] / rows["step_ms"],
            "outcome": rows["outcome"],
        }
    ).dropna(axis="columns", how="all")
    if (table["outcome"] == "ok").all():
        table = table.drop(columns="outcome")
    formats = {
        "tokens/s": "{:,.0f}", "MFU (%)": ".1f", "TFLOP/s": ".3g", "peak (GiB)": ".3g", "GPU busy": ".0%", "exposed": ".1%",
    }  # fmt: skip
    device = "GPU" if sharding.on_gpu else "machine"
    shares = " *GPU busy* is the share of a step in which any kernel ran." if "GPU busy" in table else ""
    shares += " *Exposed* is the share in which nothing but communication ran." if "exposed" in table else ""
    show_table(
        table,
        f"tbl-fsdp-{strategy}-{sharding.slug}",
        f"Fused attention and FSDP on {sharding.machine}; {setting}. *On* is the number of processes, 1 without FSDP; tokens/s in sum, "
        f"TFLOP/s per {device}, peak of the fullest process.{shares}",
        formats={name: form for name, form in formats.items() if name in table},
        links={"factor": "key"},
    )


def _figure(sharding: Sharding, rows: pd.DataFrame) -> Figure:
    process = "GPU" if sharding.on_gpu else "process"
    panels = [panel for panel in _PANELS if rows[panel[0]].notna().any()]
    fig, grid = plt.subplots(
        (len(panels) + 1) // 2, 2, figsize=(6.3, 2.3 * ((len(panels) + 1) // 2) + 0.5), squeeze=False
    )
    for axes, (metric, label, logarithmic) in zip(grid.flat, panels, strict=False):
        for index, ((attention, processes), mine) in enumerate(rows.groupby(["attention", "processes"], sort=True)):
            mine = mine.sort_values("factor")
            values = mine[metric] * (100 if metric == "mfu" else 1)
            name = f"{_name(attention)} attention, {'one process' if processes == 1 else f'FSDP over {processes}'}"
            axes.plot(mine["factor"], values, label=name, **series_style(index))
        axes.set(xlabel="scaling factor", ylabel=label.format(process=process))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, None)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    return fig
