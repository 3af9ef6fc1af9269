"""The section on matrix products: TFLOP/s by shape and way, and what a layer's three products and casts take together."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lsai_core.profiling.flops import theoretical_peak
from lsai_lab.kit.style import series_style
from lsai_lab.report.fp8.results import Fp8Results
from lsai_lab.report.show import run_link, show_figure, show_table, show_text
from lsai_lab.runs.records import Run

WAYS = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8_rowwise": "fp8, rows",
    "fp8_casts": "fp8 + casts",
}
IN_A_BLOCK = ("qkv", "attention_output", "gate_up", "down")


def show_products(results: Fp8Results) -> None:
    """Table, figure and sentences of one machine; nothing if its products were not measured."""
    points, run = results.points, results.gemm
    tokens = most_measured(points)
    if run is None or tokens is None:
        return
    show_text(" ".join([f"**On {results.machine}** ({run_link('the run', run.summary.id.key)}):", *sentences(results)]))
    layers = layer_times(points, tokens)
    if "fp8" in layers:
        _layer_table(results, layers, tokens)
    show_points(points, tokens, run, results.slug)


def most_measured(points: pd.DataFrame) -> int | None:
    """The number of tokens over which products were measured in every way; None if there is no product but squares."""
    layers = points[points["layer"] != "square"] if len(points) else points
    return int(layers["m"].iloc[0]) if len(layers) else None


def wide(points: pd.DataFrame, tokens: int, value: str = "tflops") -> pd.DataFrame:
    """One row per layer and product over `tokens` tokens, one column per way, in the order of measurement."""
    some = points[(points["m"] == tokens) & (points["layer"] != "square")]
    table = some.pivot_table(index=["layer", "product"], columns="way", values=value, sort=False)
    return table[[way for way in WAYS if way in table]]


def layer_times(points: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """Milliseconds of each layer's three products by way; a way that lacks one of them has no figure."""
    return wide(points, tokens, "ms").groupby("layer", sort=False).agg(lambda ms: ms.sum(min_count=3))


def block_times(points: pd.DataFrame, tokens: int) -> pd.Series:
    """Milliseconds of all products of one block's four layers by way (missing where a layer is)."""
    layers = layer_times(points, tokens)
    inside = [layer for layer in IN_A_BLOCK if layer in layers.index]
    return layers.loc[inside].sum(min_count=len(IN_A_BLOCK))


def ceilings(points: pd.DataFrame) -> dict[str, tuple[float, int]]:
    """The fastest square product of each way: TFLOP/s and its n."""
    best = points[points["layer"] == "square"].sort_values("tflops").groupby("way").tail(1)
    return {row.way: (float(row.tflops), int(row.n)) for row in best.itertuples()}


def sentences(results: Fp8Results) -> list[str]:
    """What the points say, computed."""
    points, run = results.points, results.gemm
    assert run is not None
    found, device = [], str(run.summary.results.get("gemm_device", ""))
    for way, (tflops, n) in ceilings(points).items():
        peak = theoretical_peak(device, way)
        share = f", {tflops / peak.tflops:.0%} of the data sheet's {peak.tflops:,.4g}" if peak else ""
        found.append(f"square {WAYS[way]} products reach {tflops:,.4g} TFLOP/s (n = {n:,}{share})")
    text = ["; ".join(found) + "."] if found else []
    for tokens in points[points["layer"] != "square"]["m"].unique():
        table = wide(points, int(tokens))
        if {"fp8", "bf16"} <= set(table):
            ratio = (table["fp8"] / table["bf16"]).dropna()
            slow, fast = ratio.idxmin(), ratio.idxmax()
            text.append(
                f"Over {tokens:,} tokens the bare fp8 product is {ratio.min():.2f} ({' '.join(slow)}) to {ratio.max():.2f} "
                f"({' '.join(fast)}) times as fast as bf16."
            )
        if {"fp8_casts", "bf16"} <= set(table):
            block = block_times(points, int(tokens))
            if block[["fp8", "fp8_casts", "bf16"]].notna().all():
                text.append(
                    f"All products of one block take {block['bf16']:.3g} ms in bf16, {block['fp8']:.3g} ms in fp8 "
                    f"({block['bf16'] / block['fp8']:.2f} times as fast), and {block['fp8_casts']:.3g} ms with the casts "
                    f"({block['bf16'] / block['fp8_casts']:.2f} times): casts are {1 - block['fp8'] / block['fp8_casts']:.0%} "
                    "of it."
                )
    reason = run.summary.results.get("fp8_unavailable")
    if reason:
        text.append(f"fp8 was not measured: {reason}.")
    skipped = run.summary.results.get("points_skipped")
    if skipped:
        text.append(f"{skipped} of {run.summary.results['points']} points were skipped when the time was over.")
    if run.summary.outcome != "ok":
        text.append(
            f"The measurement ended as {run.summary.outcome} ({run.summary.reason}); these are its finished points."
        )
    return text


def _layer_table(results: Fp8Results, layers: pd.DataFrame, tokens: int) -> None:
    table = layers.reset_index()
    table.columns = [f"{WAYS[c]} (ms)" if c in WAYS else c for c in table.columns]
    table["layer"] = [f"`{name}`" for name in table["layer"]]
    table["speed-up"] = (layers["bf16"] / layers["fp8"]).to_numpy()
    if "fp8_casts" in layers:
        table["with casts"] = (layers["bf16"] / layers["fp8_casts"]).to_numpy()
        table["casts' share"] = (1 - layers["fp8"] / layers["fp8_casts"]).to_numpy()
    shown = {"speed-up": "{:.2f}x", "with casts": "{:.2f}x", "casts' share": ".0%"}
    show_table(
        table,
        f"tbl-fp8-layers-{results.slug}",
        f"Time of the three products of each linear layer over {tokens:,} tokens on {results.machine}, and the speed-up of fp8 "
        "against bf16, of the bare products and with all casts.",
        formats={name: spec for name, spec in shown.items() if name in table}
        | {name: ".3f" for name in table if name.endswith("(ms)")},
    )


def show_points(points: pd.DataFrame, tokens: int, run: Run, slug: str) -> None:
    """The table and the figure of all products over `tokens` tokens; also on the run's own page."""
    table = wide(points, tokens)
    sizes = (
        points[(points["m"] == tokens) & (points["layer"] != "square")].groupby("layer", sort=False)[["n", "k"]].first()
    )
    best = ceilings(points)
    rows = table.reset_index()
    rows.insert(2, "N x K", [f"{sizes.loc[layer, 'n']} x {sizes.loc[layer, 'k']}" for layer in rows["layer"]])
    rows["layer"] = [f"`{name}`" for name in rows["layer"]]
    for way in ("bf16", "fp8"):
        if way in table and way in best:
            rows[f"{way} of ceiling"] = (table[way] / best[way][0]).to_numpy()
    rows = rows.rename(columns=WAYS)
    shown = [name for way, name in WAYS.items() if way in table]
    show_table(
        rows,
        f"tbl-fp8-products-{slug}",
        f"TFLOP/s of each product of the model's linear layers over M = {tokens:,} tokens on {run.machine}: medians over "
        f"{float(run.config['point_s']):g} s each, on random data. The ceiling is the fastest square product of that type in the same run.",
        formats=dict.fromkeys(shown, ",.4g") | {name: ".0%" for name in rows if name.endswith("ceiling")},
    )
    caption = (
        f"Speed of each product over {tokens:,} tokens on {run.machine}; bars span the quartiles, vertical lines are the "
        "fastest square products of a type."
    )
    show_figure(_figure(points, tokens), f"fig-fp8-products-{slug}", caption)


def _figure(points: pd.DataFrame, tokens: int) -> Figure:
    some = points[(points["m"] == tokens) & (points["layer"] != "square")]
    names = [f"{layer.replace('_', ' ')}, {product}" for layer, product in wide(points, tokens).index]
    fig, axes = plt.subplots(figsize=(6.3, 1.0 + 0.26 * len(names)))
    ways = [way for way in WAYS if way in set(some["way"])]
    best = ceilings(points)
    for index, way in enumerate(ways):
        mine = some[some["way"] == way]
        at = [names.index(f"{row.layer.replace('_', ' ')}, {row.product}") for row in mine.itertuples()]
        style = series_style(index)
        spread = [mine["tflops"] - mine["tflops_p25"], mine["tflops_p75"] - mine["tflops"]]
        axes.errorbar(
            mine["tflops"], at, xerr=[part.clip(lower=0) for part in spread], fmt=style["marker"], color=style["color"],
            markersize=5.5, capsize=2, elinewidth=1, label=WAYS[way],
        )  # fmt: skip
        if way in best:
            line = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.1}
            axes.axvline(best[way][0], label=f"{WAYS[way]} square", **line)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="TFLOP/s", xlim=(0, None))
    axes.invert_yaxis()
    fig.legend(loc="outside lower center", ncols=3)
    return fig
