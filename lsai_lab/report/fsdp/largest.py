"""The section on the largest model: what loads and what trains, by technique and number of processes."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lsai_lab.kit.style import HATCHES, PALETTE
from lsai_lab.report.fsdp.results import Sharding, good, size_of
from lsai_lab.report.show import run_link, show_figure, show_table, show_text
from lsai_lab.report.variants import best_at_both_ends

_PARTS = {
    "load_all": ("loads", "scaling factor"),
    "load_layers": ("loads", "layers"),
    "train_all": ("trains", "scaling factor"),
    "train_layers": ("trains", "layers"),
}

# Techniques with checkpointing, and what they are without.
_CHECKPOINTED = {"checkpointed": "plain", "bf16cp": "bf16", "adam8bitcp": "adam8bit"}


def show_largest(sharding: Sharding) -> None:
    """Table, figure and sentences of one machine; nothing if no search was made there."""
    rows = searched(sharding)
    if rows.empty:
        return
    fine = good(rows)
    if len(fine):
        first = sharding.run(fine.iloc[0]["key"], "largest")
        limit = f"{first.summary.results['search_limit_gib']:.3g} GiB a process ({first.summary.results['search_limit_kind']})"
        train = next(
            (r for r in (sharding.run(key, "largest") for key in fine["key"]) if r.config["measure"] == "train"), None
        )
        step = (
            f" A training step is {train.config['train']['batch_size']} x {train.config['train']['seq_len']} tokens a process."
            if train
            else ""
        )
        table = pd.DataFrame(
            {
                "technique": fine["label"],
                "key": fine["key"],
                "does": fine["does"],
                "grows by": fine["by"],
                "processes": fine["processes"],
                "largest": fine["largest_size"],
                "parameters": [size_of(value) for value in fine["parameters"]],
                "weights fill": fine["weights_share"],
                "estimated": fine["estimated_size"],
                "tries": fine["tries"],
                "s": fine["search_s"],
            }
        )
        show_table(
            table,
            f"tbl-largest-{sharding.slug}",
            f"The largest model on {sharding.machine}, within {limit}. *Largest* is a scaling factor or a number of layers, whatever the model grows "
            "by; *weights fill* is the share of all processes' memory that the bytes of the weights alone take; *estimated* is where the search began."
            + step,
            formats={
                "largest": "{:,.0f}",
                "weights fill": ".1%",
                "estimated": "{:,.0f}",
                "tries": ".0f",
                "s": ".0f",
            },
            links={"technique": "key"},
        )
        if len(fine[fine["does"] == "trains"]) > 1:
            show_figure(
                _figure(fine[fine["does"] == "trains"]),
                f"fig-largest-{sharding.slug}",
                f"Parameters of the largest model that takes a whole training step on {sharding.machine}, by technique and number of processes; of the two "
                "ways to grow, the one that went further.",
            )
    if lines := sentences(rows, sharding.on_gpu):
        show_text("\n".join(f"- {sentence}" for sentence in lines))


def searched(sharding: Sharding) -> pd.DataFrame:
    """One row per search: the table of its variant, what the model does and grows by, and how many tries it took."""
    found = []
    for part, (does, by) in _PARTS.items():
        rows = sharding.rows("largest", part)
        if len(rows):
            results = [sharding.run(key, "largest").summary.results for key in rows["key"]]
            tries = [len(one.get("tries", [])) for one in results]
            bad = [_odd(one.get("tries", [])) for one in results]
            limits = [one.get("search_limit_kind") for one in results]
            found.append(rows.assign(does=does, by=by, tries=tries, odd=bad, limit=limits, technique=rows["label"]))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def in_short(sharding: Sharding) -> list[str]:
    """The largest model that trains, on one process and on most."""
    return [
        f"*Largest model that trains on {best['processes']}:* {run_link(size_of(best['parameters']), best['key'])} parameters, with {best['label']}."
        for best in largest_trained(sharding)
    ]


def largest_trained(sharding: Sharding) -> list[pd.Series]:
    """The searches that ended at the largest model that trains, on one process and on the most."""
    fine = good(searched(sharding))
    trains = fine[(fine["does"] == "trains") & (fine["parameters"] > 0)] if len(fine) else fine
    return best_at_both_ends(trains, "parameters")


def sentences(rows: pd.DataFrame, on_gpu: bool) -> list[str]:
    if rows.empty or good(rows).empty:
        return []
    fine, text = good(rows), []
    loads = fine[fine["does"] == "loads"].dropna(subset=["weights_share"])
    for processes, some in loads.groupby("processes"):
        best = some.loc[some["weights_share"].idxmax()]
        text.append(
            f"*Loading on {processes}:* {run_link(size_of(best['parameters']), best['key'])} parameters load; their bytes fill {best['weights_share']:.1%} of "
            f"the memory."
        )
    trains = fine[(fine["does"] == "trains") & (fine["parameters"] > 0)]
    for (technique, by), some in trains.groupby(["technique", "by"], sort=False):
        alone, most = some[some["processes"] == 1], some.loc[some["processes"].idxmax()]
        if len(alone) and most["processes"] > 1:
            ratio = most["parameters"] / alone.iloc[0]["parameters"]
            text.append(
                f"*{technique}, by {by}:* {most['processes']} processes train a model {ratio:.2f} times as large as one does "
                f"({run_link(size_of(most['parameters']), most['key'])} against {run_link(size_of(alone.iloc[0]['parameters']), alone.iloc[0]['key'])})."
            )
    text += _checkpointing(trains)
    for limit, some in trains.groupby("limit"):
        if "host" in str(limit):
            names = ", ".join(dict.fromkeys(some["label"]))
            text.append(f"*{names}:* the search was bounded by {limit}.")
    if trains["states_gib"].isna().any():
        text.append(f"*First steps:* {_first_steps(trains)}")
    off = (fine["estimated_size"] / fine["largest_size"] - 1)[fine["largest_size"] > 0]
    if len(off):
        text.append(
            f"*Estimates:* the sizes at which the searches began lie {off.abs().median():.0%} (median) and at most {off.abs().max():.0%} from the answers; "
            f"a search took {fine['tries'].median():.0f} tries in the median."
        )
    for row in fine.itertuples():
        name = run_link(f"{row.label}, {row.does}, by {row.by}, on {row.processes}", str(row.key))
        if row.search_capped:
            text.append(f"{name}: the search ended at its largest size, so that the answer is a lower bound.")
        if row.search_out_of_time:
            text.append(f"{name}: the search ran out of time, so that the answer is a lower bound.")
        if row.odd:
            text.append(f"{name}: a try ended otherwise than by memory ({row.odd}); the answer may be higher.")
    return text


def _first_steps(trains: pd.DataFrame) -> str:
    """What is to be known of searches of older code, which took a model's very first step."""
    older = trains[trains["states_gib"].isna()]
    which = (
        "these training steps were"
        if len(older) == len(trains)
        else f"of {len(trains)} training steps {len(older)} were"
    )
    return (
        f"{which} a model's very first, in whose backward pass AdamW's states did not exist yet. Without checkpointing, whose saved activations count, "
        "a second step needs more memory, so that the largest model that goes on training may be smaller."
    )


def _checkpointing(trains: pd.DataFrame) -> list[str]:
    """How much larger a model checkpointing lets train, over all techniques that were searched with it and without."""
    sizes = trains[["processes", "by", "parameters"]].assign(
        base=[str(v).rpartition("_")[0] for v in trains["variant"]]
    )
    saving = sizes.assign(base=sizes["base"].map(_CHECKPOINTED))
    pairs = saving.merge(sizes, on=["processes", "by", "base"], suffixes=("", "_without"))
    text = []
    for processes, ratios in (pairs["parameters"] / pairs["parameters_without"]).groupby(pairs["processes"]):
        states = " What fills the memory is weights, gradients and optimizer states, not activations."
        text.append(
            f"*Checkpointing on {processes}:* the largest model is {ratios.min():.2f} to {ratios.max():.2f} times as large with it."
            + (states if ratios.max() < 1.1 else "")
        )
    return text


def _odd(tries: list[dict[str, object]]) -> str:
    """How the first try that neither fitted nor ran out of memory ended; empty if none."""
    return next((f"{t['outcome']}: {t['note']}" for t in tries if t["outcome"] not in ("ok", "oom")), "")


def _figure(rows: pd.DataFrame) -> Figure:
    best = (
        rows.pivot_table(index="technique", columns="processes", values="parameters", aggfunc="max", sort=False) / 1e9
    )
    unit, best = ("billion", best) if best.max().max() >= 1 else ("million", best * 1e3)
    fig, axes = plt.subplots(figsize=(6.3, 0.9 + 0.22 * best.size))
    height = 0.8 / len(best.columns)
    for index, processes in enumerate(best.columns):
        places = [row + index * height for row in range(len(best))]
        bars = axes.barh(
            places, best[processes], height=height * 0.92, color=PALETTE[index], hatch=HATCHES[index], edgecolor="#222222", linewidth=0.6,
            label="one process" if processes == 1 else f"{processes} processes",
        )  # fmt: skip
        axes.bar_label(
            bars, [f"{value:.3g}" if value == value else "" for value in best[processes]], padding=3, fontsize=8
        )
    axes.set_yticks([row + height * (len(best.columns) - 1) / 2 for row in range(len(best))], list(best.index))
    axes.set(xlabel=f"parameters ({unit})", xlim=(0, best.max().max() * 1.15))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    fig.legend(loc="outside lower center", ncols=4)
    return fig
