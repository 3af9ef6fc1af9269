"""What the attention chapter shows: setting, backends, and for each machine speed, memory, windows, errors and `auto`."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lsai_core.attention import BACKENDS
from lsai_lab.benches.attention.errors import ALLOWED, NAMES
from lsai_lab.kit.style import apply_style
from lsai_lab.report.attention import figures
from lsai_lab.report.attention.analysis import ACCEPTED, analysis, auto_sentence, pair_share, window_length
from lsai_lab.report.attention.data import MachineResults, Variant, load_results
from lsai_lab.report.show import run_link, show_figure, show_table, show_text

_WHAT = {name: BACKENDS[name].about for name in reversed(figures.ORDER)}


def load(own_runs: list[str], profile: str | None) -> list[MachineResults]:
    """The study's results on every machine that there are records of."""
    apply_style()
    return load_results(own_runs, profile)


def show_setting(all_results: list[MachineResults]) -> None:
    """What was measured, where, and which backends there are."""
    if not all_results:
        show_text("There are no records of this study yet: `lsai study attention` makes them.")
        return
    rows = []
    for results in all_results:
        first = results.variants[0]
        lengths = first.timed["length"]
        rows.append(
            {
                "machine": results.machine,
                "device": results.device,
                "heads": ", ".join(variant.label for variant in results.variants),
                "format": first.config.dtype,
                "tokens in a batch": f"{first.config.tokens:,}, at least one sequence",
                "lengths": f"{lengths.min():,} to {lengths.max():,}",
            }
        )
    show_table(
        pd.DataFrame(rows), "tbl-attention-setting", "What was measured, on each machine. Heads x head dimension."
    )
    table = pd.DataFrame({"backend": [f"`{name}`" for name in _WHAT], "what it is": list(_WHAT.values())})
    for results in all_results:
        known = results.backends
        table[results.machine] = [_state(known.get(name)) for name in _WHAT]
    show_table(table, "tbl-attention-backends", "The backends, and what each machine can run of them.")


def _state(row: dict[str, Any] | None) -> str | None:
    if row is None:
        return None
    return "runs" if row["outcome"] == "ok" else f"{row['outcome']}: {row['reason'][:90]}"


def show_machine(results: MachineResults) -> None:
    """Everything about the study on one machine."""
    show_text(f"## Results on {results.machine} {{#sec-attention-{results.slug}}}")
    for variant in results.variants:
        if variant.run.summary.outcome != "ok":
            show_text(
                f"The run of {variant.label} heads ended as **{variant.run.summary.outcome}** "
                f"({variant.run.summary.reason}); its points up to there are shown."
            )
    for sentence in analysis(results):
        show_text(f"- {sentence}")
    _speed(results)
    _memory(results)
    _windows(results)
    _errors(results)
    _auto(results)


def _speed(results: MachineResults) -> None:
    where, slug, first = results.machine, results.slug, results.variants[0]
    show_figure(
        figures.speed(results),
        f"fig-attention-speed-{slug}",
        f"Speed under a causal mask on {where}, {first.label} heads, {first.config.dtype}. {'Medians' if results.gpu else 'The fastest'} of the repeats; "
        "only pairs that the mask lets through count as work.",
    )
    show_table(
        _rates(first, results.rate[1]),
        f"tbl-attention-speed-{slug}",
        f"{results.rate[0]} of forward plus backward under a causal mask on {where}, {first.label} heads "
        f"({run_link('run', first.run.summary.id.key)}). A word instead of a number says how the point ended.",
    )
    fig = figures.heads(results)
    if fig:
        show_figure(
            fig,
            f"fig-attention-heads-{slug}",
            f"Forward plus backward under a causal mask on {where}, for every shape of heads (kv: key-value heads).",
        )


def _rates(variant: Variant, factor: float) -> pd.DataFrame:
    """Backends by lengths: rates under the causal mask, or the outcome where there is none."""
    frame = variant.timed[variant.timed["mask"] == "causal"]
    table: dict[str, list[Any]] = {"backend": []}
    names = [name for name in figures.ORDER if name in set(frame["backend"])]
    for name in names:
        table["backend"].append(f"`{name}`")
        for length in sorted(frame["length"].unique()):
            found = frame[(frame["backend"] == name) & (frame["length"] == length)]
            table.setdefault(f"{length:,}", []).append(_rate(found.iloc[0], factor) if len(found) else None)
    return pd.DataFrame(table)


def _rate(row: pd.Series, factor: float) -> str:
    if row["outcome"] != "ok":
        return str(row["outcome"])
    rate = row.get("training_tflops")
    return "no gradient" if rate is None or pd.isna(rate) else f"{factor * rate:,.3g}"


def _memory(results: MachineResults) -> None:
    fig = figures.memory(results)
    if fig:
        first = results.variants[0]
        how = (
            "the caching allocator's peak"
            if results.gpu
            else "the peak of live tensors, without scratch memory in operators"
        )
        show_figure(
            fig,
            f"fig-attention-memory-{results.slug}",
            f"Memory of forward plus backward beyond inputs and the output's gradient on {results.machine}, causal, "
            f"{first.label} heads, {first.config.tokens:,} tokens or one sequence: {how}.",
        )


def _windows(results: MachineResults) -> None:
    variant = results.variants[0]
    length = window_length(variant)
    if length is None:
        return
    show_figure(
        figures.windows(variant, length),
        f"fig-attention-window-{results.slug}",
        f"Time over the window at {length:,} tokens on {results.machine}, {variant.label} heads. The rightmost point is the "
        "causal mask without a window.",
    )
    frame = variant.good[(variant.good["length"] == length) & variant.good["training_ms"].notna()]
    reaches = sorted(frame["window"].dropna().astype(int).unique())
    whole = variant.at("causal", length)["training_ms"]
    table: dict[str, list[Any]] = {"backend": ["*pairs*"], "causal (ms)": [None]}
    for reach in reaches:
        table[str(reach)] = [f"{pair_share(variant, length, reach):.1%}"]
    for name in (name for name in figures.ORDER if name in set(frame[frame["mask"] == "window"]["backend"])):
        table["backend"].append(f"`{name}`")
        table["causal (ms)"].append(f"{whole[name]:.3g}" if name in whole.index else None)
        for reach in reaches:
            ms = variant.at("window", length, reach)["training_ms"]
            table[str(reach)].append(_share(ms.get(name), whole.get(name)))
    show_table(
        pd.DataFrame(table),
        f"tbl-attention-window-{results.slug}",
        f"Milliseconds of forward plus backward with a window, at {length:,} tokens on {results.machine} ({variant.label} heads), "
        "and as a share of the same backend's causal time. First row: the share of the causal pairs that a window leaves.",
    )


def _share(ms: float | None, whole: float | None) -> str | None:
    if ms is None or pd.isna(ms):
        return None
    return f"{ms:.3g}" if whole is None or pd.isna(whole) else f"{ms:.3g} ({ms / whole:.0%})"


def _errors(results: MachineResults) -> None:
    rows = []
    for mask in ("causal", "full", "window"):
        for name in reversed(figures.ORDER):
            worst = [v for v in results.variants if v.ratio(name, mask) is not None]
            if not worst:
                continue
            variant = max(worst, key=lambda v: v.ratio(name, mask) or 0.0)
            frame = variant.errors[(variant.errors["backend"] == name) & (variant.errors["mask"] == mask)]
            ratio = variant.ratio(name, mask) or 0.0
            found = {value: frame[value].max() if value in frame else None for value in NAMES}
            verdict = "correct" if ratio <= ALLOWED else "too far"
            rows.append({"mask": mask, "backend": name, "key": variant.run.summary.id.key, "heads": variant.label}
                        | found | {"of eager's": ratio, "verdict": verdict})  # fmt: skip
    if not rows:
        return
    table = pd.DataFrame(rows)
    lengths = sorted({int(n) for v in results.variants if len(v.errors) for n in v.errors["length"]})
    windows = sorted({int(n) for v in results.variants if len(v.errors) for n in v.errors["window"].dropna()})
    show_table(
        table,
        f"tbl-attention-error-{results.slug}",
        f"‖value - exact‖ / ‖exact‖ against float64 on {results.machine}, {results.variants[0].config.dtype}, at "
        f"{' and '.join(f'{n:,}' for n in lengths)} tokens (window {', '.join(map(str, windows)) or 'none'}); of all shapes of heads "
        f"the worst. *Of eager's*: the largest of its errors over that of eager attention in the same format. A backend is correct if no error exceeds {ALLOWED:g} times eager's.",
        formats={**dict.fromkeys(NAMES, ".1e"), "of eager's": ".2f"},
        links={"backend": "key"},
    )


def _auto(results: MachineResults) -> None:
    auto = results.auto(results.rankings)
    if auto.empty:
        return
    show_text(auto_sentence(results))
    rows = []
    for (label, key, purpose), some in auto.groupby(["variant", "key", "purpose"], sort=False):
        known = some.dropna(subset=["share"])
        counts = some["chosen"].value_counts()
        rows.append(
            {
                "heads": label,
                "key": key,
                "for": "forward + backward" if purpose == "training" else "forward",
                "shapes": len(some),
                "the fastest at": int((some["chosen"] == some["fastest"]).sum()),
                "worst share": known["share"].min() if len(known) else None,
                "chosen": ", ".join(f"`{name}` {count}" for name, count in counts.items()),
            }
        )
    show_table(
        pd.DataFrame(rows),
        f"tbl-attention-auto-{results.slug}",
        f"What `auto` takes on {results.machine}, and its speed as a share of the fastest correct backend's at the same shape "
        f"(wanted: {ACCEPTED:.0%} everywhere).",
        formats={"worst share": ".1%"},
        links={"heads": "key"},
    )
