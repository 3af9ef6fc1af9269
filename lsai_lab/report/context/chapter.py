"""What the chapter on distributed attention shows: conclusions, and for each machine rates, scaling, communication, timelines, memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from lsai_lab.benches.attention.errors import ALLOWED, NAMES
from lsai_lab.kit.style import apply_style
from lsai_lab.report.context import figures
from lsai_lab.report.context.analysis import (
    error_rows,
    error_sentence,
    in_short,
    scaling_sentences,
    sentences,
    strong,
    weak,
)
from lsai_lab.report.context.data import Group, Shared, load_shared, present
from lsai_lab.report.context.longest import show_longest
from lsai_lab.report.context.missing import show_missing
from lsai_lab.report.context.training import load_trained, show_training
from lsai_lab.report.show import run_link, show_figure, show_table, show_text

_METHODS = {
    "ring": "contiguous slices; keys and values pass every GPU; under a causal mask the first GPUs soon idle",
    "zigzag": "the same, each GPU with one early and one late piece of the sequence: equal work",
    "lightseq": "contiguous slices; GPUs that would idle compute for those with too much",
    "ulysses": "slices of the sequence are exchanged for heads before attention, and back after it",
    "usp": "Ulysses among neighbours, zigzag rings among the groups",
    "torch": "PyTorch's own context parallelism (zigzag, keys and values gathered at once), the peer",
}


__all__ = [
    "load",
    "load_trained",
    "show_conclusions",
    "show_longest",
    "show_machine",
    "show_methods",
    "show_missing",
    "show_training",
]


def load(own_runs: list[str], profile: str | None) -> list[Shared]:
    """The study's results on every machine; a sentence if there are none."""
    apply_style()
    found = load_shared(own_runs, profile)
    if not found:
        show_text("There are no records of this study yet: `make run STUDY=context` makes them.")
    return found


def show_methods(machines: list[Shared]) -> None:
    """What the methods do, what each machine measured, and what followed."""
    table = pd.DataFrame({"method": [f"`{name}`" for name in _METHODS], "what it does": list(_METHODS.values())})
    show_table(table, "tbl-context-methods", "The methods.")
    rows = []
    for shared in machines:
        timed = [group for group in shared.groups if len(group.points)]
        lengths = [int(n) for group in timed for n in group.points["length"]]
        config = shared.runs[0].config
        rows.append(
            {
                "machine": shared.machine,
                "device": shared.device,
                "PyTorch": shared.runs[0].env.get("torch"),
                "exchange by": "NCCL" if shared.on_gpu else "gloo, through this processor's memory",
                "heads": ", ".join(dict.fromkeys(group.heads for group in timed)) or None,
                "processes": ", ".join(map(str, sorted({group.processes for group in timed}))) or None,
                "format": config["dtype"],
                "lengths": f"{min(lengths):,} to {max(lengths):,}" if lengths else None,
            }
        )
    if rows:
        show_table(
            pd.DataFrame(rows), "tbl-context-machines", "What was measured, on each machine. Heads x head dimension."
        )


def show_conclusions(machines: list[Shared]) -> None:
    """What follows on each machine in short, computed from its records."""
    for shared in machines:
        if lines := in_short(shared):
            caution = (
                ""
                if shared.on_gpu
                else "\n\nProcesses here share one processor and its memory; what they exchange passes no link. It shows that the methods work, not how fast they are on GPUs."
            )
            show_text(f"**{shared.machine}**\n\n" + "\n".join(f"- {line}" for line in lines) + caution)


def show_machine(shared: Shared) -> None:
    """Everything about the study on one machine."""
    groups = shared.shared
    if not groups:
        return
    show_text(f"## Results on {shared.machine} {{#sec-context-{shared.slug}}}")
    for heads in dict.fromkeys(group.heads for group in groups):
        some = [group for group in groups if group.heads == heads]
        _rates(shared, some)
        _scaling(shared, some)
        _memory(shared, some)
    for group in groups:
        _cost(shared, group)
    for group in _traced_most(groups):
        _communication(shared, group)
    for group in _traced_most(groups)[:1]:
        _timeline(shared, group)
    _errors(shared, groups)


def _rates(shared: Shared, groups: list[Group]) -> None:
    first = groups[0]
    unit, factor = shared.rate
    slug = first.label.rsplit(f"-{first.processes}-", 1)[0]
    show_figure(
        figures.rates(shared, groups),
        f"fig-context-rate-{slug}-{shared.slug}",
        f"Forward plus backward on {shared.machine}, {first.heads} heads: {unit} of one {_one(shared)} over the length of the whole sequence. "
        "The black line is one alone, on the whole sequence.",
    )
    for group in groups:
        lines = "\n".join(f"- {sentence}" for sentence in sentences(shared, group))
        show_text(f"**{group.heads} heads on {_on(shared, group)}.**\n\n{lines}")
        show_table(
            rate_table(group, factor),
            f"tbl-context-rate-{group.label}",
            f"{unit} of one {_one(shared)}, forward plus backward, and the efficiency in brackets, on {_on(shared, group)} of {shared.machine}, {group.heads} "
            f"heads ({run_link('run', group.key)}); of each length the best in bold. A word instead of a number says how the point ended. "
            + (
                f"One alone reaches {factor * group.alone_rate():,.4g} {unit} at its best length."
                if pd.notna(group.alone_rate())
                else "Nothing was timed alone, so there is no efficiency."
            ),
        )


def rate_table(group: Group, factor: float) -> pd.DataFrame:
    """Lengths by methods: rate and efficiency, the best of a length in bold, or the outcome where there is no rate."""
    points = group.points[(group.points["measure"] == "time") & (group.points["processes"] == group.processes)]
    names = [name for name in present(points) if name in _METHODS]
    timed = group.timed.set_index(["length", "method"])
    alone = group.alone.groupby("length")["training_tflops"].max()
    table: dict[str, list[Any]] = {"tokens": []}
    for length in sorted(points[points["method"].isin(names)]["length"].unique()):
        table["tokens"].append(f"{length:,}")
        best = group.at(length)
        for name in names:
            cell = None
            if (length, name) in timed.index:
                row = timed.loc[(length, name)]
                share = f" ({row['efficiency']:.0%})" if pd.notna(row["efficiency"]) else ""
                cell = f"{factor * row['training_tflops']:,.3g}{share}"
                cell = f"**{cell}**" if best.index[0] == name and len(best) > 1 else cell
            elif len(found := points[(points["length"] == length) & (points["method"] == name)]):
                cell = str(found["outcome"].iloc[0])
            table.setdefault(name, []).append(cell)
        table.setdefault("one alone", []).append(f"{factor * alone[length]:,.3g}" if length in alone.index else None)
    return pd.DataFrame(table)


def _scaling(shared: Shared, groups: list[Group]) -> None:
    fig = figures.scaling(shared, strong(groups), weak(groups))
    if fig is None:
        return
    slug = groups[0].label.rsplit(f"-{groups[0].processes}-", 1)[0]
    show_figure(
        fig,
        f"fig-context-scaling-{slug}-{shared.slug}",
        f"Efficiency on {shared.machine}, {groups[0].heads} heads, over the number of {'GPUs' if shared.on_gpu else 'processes'}: strong, the same sequence; weak, the "
        "same slice of a sequence for each, so that work per slice grows with the sequence.",
    )
    show_text("\n".join(f"- {sentence}" for sentence in scaling_sentences(shared, groups)))


def _memory(shared: Shared, groups: list[Group]) -> None:
    if (fig := figures.memory(groups)) is not None:
        slug = groups[0].label.rsplit(f"-{groups[0].processes}-", 1)[0]
        show_figure(
            fig,
            f"fig-context-memory-{slug}-{shared.slug}",
            f"Peak memory of the fullest GPU on {shared.machine}, {groups[0].heads} heads: inputs, output, gradients and what the method keeps on top.",
        )


def _cost(shared: Shared, group: Group) -> None:
    """Everything that was measured of each method at one length."""
    length = group.compared_length
    if length is None:
        return
    rows = group.at(length).reset_index()
    traces = group.of("trace")
    traces = traces[traces["length"] == length].set_index("method")
    table = pd.DataFrame(
        {
            "method": "`" + rows["method"] + "`",
            "kernel": rows["kernel"],
            "forward (ms)": rows["forward_ms"],
            "both (ms)": rows["training_ms"],
            "quartiles": _ranges(zip(rows["training_ms_p25"], rows["training_ms_p75"], strict=True)),
            f"each {_one(shared)}": _ranges((min(each), max(each)) for each in rows["rank_training_ms"]),
            "sent (MiB)": rows["sent_training_mib"],
            "GB/s": rows["method"].map(traces["sent_gb_per_s"]),
            "exposed (%)": 100 * rows["method"].map(traces["exposed_share"]).astype(float),
            "memory (GiB)": rows["memory_gib"],
            "balance": rows["method"].map(traces["busy_balance"]),
            "planned": rows["plan_imbalance"],
        }
    ).dropna(axis="columns", how="all")
    formats = {
        "sent (MiB)": "{:,.4g}",
        "GB/s": "{:,.0f}",
        "exposed (%)": ".1f",
        "memory (GiB)": ".3g",
        "balance": ".2f",
        "planned": ".2f",
    }
    show_table(
        table,
        f"tbl-context-cost-{group.label}",
        f"At {length:,} tokens on {_on(shared, group)} of {shared.machine}, {group.heads} heads: the slowest {_one(shared)} of each step, from the fastest to the slowest "
        f"{_one(shared)}'s own time, and what the one that sends most sends in both passes; *planned* is the largest over the smallest number of pairs in the plan, "
        "*balance* the same of computing time in a traced step.",
        formats={name: form for name, form in formats.items() if name in table},
    )


def _ranges(ends: Iterable[tuple[float, float]]) -> list[str]:
    return [f"{low:,.4g} to {high:,.4g}" for low, high in ends]


def _traced_most(groups: list[Group]) -> list[Group]:
    """Of each shape of heads the traced group with the most processes."""
    most = {group.heads: group for group in groups if len(group.of("trace"))}
    return list(most.values())


def _communication(shared: Shared, group: Group) -> None:
    if (fig := figures.communication(group)) is not None:
        show_figure(
            fig,
            f"fig-context-exposed-{group.label}",
            f"Communication of traced steps on {_on(shared, group)} of {shared.machine}, {group.heads} heads: what a GPU sent over the time in which its "
            "communication kernels ran, waiting included, and the share of the step in which nothing else ran.",
        )


def _timeline(shared: Shared, group: Group) -> None:
    length = int(group.of("trace")["length"].max())
    unknown = (
        ""
        if shared.on_gpu
        else " On a CPU the profiler sees computing only: a gap is waiting, copying or Python. The profiler makes the step longer than it is."
    )
    show_figure(
        figures.timeline(group, length),
        f"fig-context-timeline-{group.label}",
        f"When each process computed and communicated in one traced forward and backward pass of {length:,} tokens, {group.heads} heads, on {_on(shared, group)} of "
        f"{shared.machine}; above when it computed{', below when communication kernels ran' if shared.on_gpu else ''}.{unknown}",
    )


def _errors(shared: Shared, groups: list[Group]) -> None:
    rows = [error_rows(group).assign(processes=group.processes, heads=group.heads) for group in groups]
    rows = [some for some in rows if len(some)]
    if not rows:
        return
    frame = pd.concat(rows)
    table = frame[["heads", "processes", "method", "key", *NAMES, "ratio"]].rename(columns={"ratio": "of eager's"})
    worst = table.loc[table.groupby(["method"], sort=False)["of eager's"].idxmax()] if len(groups) > 3 else table
    which = "; of each method the worst" if len(groups) > 3 else ""
    show_table(
        worst,
        f"tbl-context-error-{shared.slug}",
        f"‖value - exact‖ / ‖exact‖ against float64 on {shared.machine}, {shared.runs[0].config['dtype']}, at "
        f"{', '.join(f'{int(n):,}' for n in sorted(frame['length'].unique()))} tokens{which}. Correct is what is at most {ALLOWED:g} times as far off as eager attention.",
        formats={**dict.fromkeys(NAMES, ".1e"), "of eager's": ".2f"},
        links={"method": "key"},
    )
    show_text(error_sentence(frame))


def _on(shared: Shared, group: Group) -> str:
    return f"{group.processes} {'GPUs' if shared.on_gpu else 'processes'}"


def _one(shared: Shared) -> str:
    return "GPU" if shared.on_gpu else "process"
