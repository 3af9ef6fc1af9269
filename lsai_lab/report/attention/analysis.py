"""What the attention study's numbers say, machine by machine: sentences whose every number comes from the records."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from lsai_core.profiling.flops import theoretical_peak
from lsai_lab.benches.attention.config import Shape
from lsai_lab.report.attention.data import MachineResults, Variant
from lsai_lab.report.show import run_link
from lsai_lab.report.variants import brief

ACCEPTED = 0.97  # of the fastest backend's speed: what `auto` has to reach at every shape


def analysis(results: MachineResults) -> list[str]:
    """Sentences on speed, the spread of the winners, memory, windows, heads and compilation."""
    first = results.variants[0]
    sentences = [_fastest(results, first), _winners(results), _memory(first), _windows(first), _heads(results)]
    sentences += [_first_calls(results), _missing(first)]
    return [sentence for sentence in sentences if sentence]


def longest(variant: Variant, mask: str = "causal") -> int | None:
    """The longest length at which at least two backends trained under `mask`; None if there is none."""
    frame = variant.good[(variant.good["mask"] == mask) & variant.good["training_ms"].notna()]
    counts = frame.groupby("length")["backend"].nunique()
    many = counts[counts > 1]
    return int(many.index.max()) if len(many) else None


def _fastest(results: MachineResults, variant: Variant) -> str:
    length = longest(variant)
    if length is None:
        return ""
    frame = variant.at("causal", length)["training_ms"].dropna().sort_values()
    points = variant.at("causal", length).loc[frame.index]
    best, second, last = frame.index[0], frame.index[1], frame.index[-1]
    unit, factor = results.rate
    rate = run_link(f"{factor * points['training_tflops'].iloc[0]:,.3g} {unit}", variant.run.summary.id.key)
    peak = theoretical_peak(results.gpu, "bf16") if results.gpu and variant.config.dtype == "bfloat16" else None
    share = (
        f" ({points['training_tflops'].iloc[0] / peak.tflops:.0%} of the data sheet's dense bf16 peak)" if peak else ""
    )
    then = f", {frame.iloc[1] / frame.iloc[0]:.2f} times as fast as `{second}`"
    slowest = f" and {frame.iloc[-1] / frame.iloc[0]:.1f} times as fast as `{last}`" if len(frame) > 2 else ""
    return (
        f"*Speed:* at {length:,} tokens, causal, {variant.label} heads, forward plus backward, `{best}` is the fastest with "
        f"{rate}{share}{then}{slowest}."
    )


def _winners(results: MachineResults) -> str:
    auto = results.auto(results.rankings)
    if auto.empty:
        return ""
    training = auto[auto["purpose"] == "training"]
    counts = Counter(training["fastest"]).most_common()
    named = ", ".join(f"`{name}` at {count}" for name, count in counts)
    return f"*Winners:* of {len(training)} shapes (heads, mask, length), forward plus backward: {named}."


def _memory(variant: Variant) -> str:
    frame = variant.good[(variant.good["mask"] == "causal") & variant.good["memory_training_mib"].notna()]
    eager = frame[frame["backend"] == "eager"]
    fused = frame[~frame["backend"].isin(["eager", "sdpa_math"])]
    shared = sorted(set(eager["length"]) & set(fused["length"]))
    if not shared:
        return ""
    at = shared[-1]
    most = float(eager[eager["length"] == at]["memory_training_mib"].iloc[0])
    smallest = fused[fused["length"] == at].sort_values("memory_training_mib").iloc[0]
    least, name = float(smallest["memory_training_mib"]), smallest["backend"]
    last = int(eager["length"].max())
    ended = variant.timed[(variant.timed["backend"] == "eager") & (variant.timed["outcome"] == "oom")]
    limit = f"; {last:,} tokens is the longest that eager attention fits" if len(ended) else ""
    return (
        f"*Memory:* at {at:,} tokens eager attention needs {most:,.0f} MiB beyond its inputs, `{name}` {least:,.0f} MiB, "
        f"{most / least:.0f} times less{limit}."
    )


def window_length(variant: Variant) -> int | None:
    """The length at which most windows were timed with gradients; None if there is none."""
    frame = variant.good[(variant.good["mask"] == "window") & variant.good["training_ms"].notna()]
    counts = frame.groupby("length")["window"].nunique()
    return int(counts.idxmax()) if len(counts) else None


def pair_share(variant: Variant, length: int, window: int) -> float:
    """Pairs within a window over pairs under the causal mask."""
    c = variant.config
    shapes = [Shape(1, length, c.heads, c.kv_heads, c.head_dim, True, w) for w in (window, None)]
    return shapes[0].forward_flops / shapes[1].forward_flops


def _windows(variant: Variant) -> str:
    length = window_length(variant)
    if length is None:
        return ""
    whole = variant.at("causal", length)["training_ms"].dropna()
    frame = variant.good[(variant.good["length"] == length) & (variant.good["mask"] == "window")]
    frame = frame[frame["backend"].isin(whole.index) & frame["training_ms"].notna()]
    window = int(frame["window"].min())
    ms = frame[frame["window"] == window].set_index("backend")["training_ms"].sort_values()
    if ms.empty:
        return ""
    best, ratio = ms.index[0], ms / whole[ms.index]
    saving = f"{ms.iloc[0]:.3g} ms instead of {whole[best]:.3g} ms, {ratio[best]:.0%}"
    useless = [name for name in ratio.index if ratio[name] >= 0.9]
    masked = (
        " A kernel that only gets a mask computes what is masked and saves little or nothing: "
        f"{', '.join(f'`{n}` takes {ratio[n]:.0%} of its causal time' for n in useless)}."
        if useless
        else ""
    )
    return (
        f"*Windows:* a window of {window} at {length:,} tokens leaves {pair_share(variant, length, window):.1%} of the causal "
        f"pairs; `{best}` takes {saving} of its own causal time.{masked}"
    )


def _heads(results: MachineResults) -> str:
    parts = []
    by_shape = {(v.config.head_dim, v.config.kv_heads == v.config.heads): v for v in results.variants}
    for (dim, own), variant in by_shape.items():
        grouped = by_shape.get((dim, False))
        if own and grouped is not None and (ratio := _best_ratio(grouped, variant)):
            parts.append(
                f"with {grouped.config.kv_heads} instead of {variant.config.kv_heads} key-value heads of {dim}, {ratio}"
            )
    dims = sorted({dim for dim, own in by_shape if own})
    if len(dims) > 1 and (ratio := _best_ratio(by_shape[dims[0], True], by_shape[dims[-1], True], rate=True)):
        parts.append(f"with heads of {dims[0]} instead of {dims[-1]}, {ratio}")
    return f"*Heads:* {'; '.join(parts)}." if parts else ""


def _best_ratio(changed: Variant, base: Variant, rate: bool = False) -> str:
    """How the fastest time (or, for `rate`, the highest TFLOP/s) changes, at the longest common causal length."""
    lengths = [length for length in (longest(changed), longest(base)) if length is not None]
    if len(lengths) < 2:
        return ""
    at = min(lengths)
    frames = [variant.at("causal", at) for variant in (changed, base)]
    if any(frame.empty for frame in frames):
        return ""
    if rate:
        high = [frame["training_tflops"].max() for frame in frames]
        return f"the best rate at {at:,} tokens is {high[0] / high[1]:.0%} of theirs"
    low = [frame["training_ms"].min() for frame in frames]
    return f"the fastest kernel at {at:,} tokens takes {low[0] / low[1]:.0%} of the time that it takes without grouping"


def _first_calls(results: MachineResults) -> str:
    rows = [row for variant in results.variants for row in variant.rows if "first_call_s" in row]
    longest_call: dict[str, float] = {}
    for row in rows:
        longest_call[row["backend"]] = max(longest_call.get(row["backend"], 0.0), row["first_call_s"])
    slow = {name: seconds for name, seconds in longest_call.items() if seconds > 2.0} if results.gpu else {}
    if not slow:
        return ""
    named = ", ".join(f"`{name}` up to {seconds:.0f} s" for name, seconds in sorted(slow.items(), key=lambda x: -x[1]))
    lengths = sorted({int(n) for v in results.variants for n in v.good[v.good["backend"] == "flex"]["length"]})
    few = (
        f" FlexAttention compiles anew for every length and window and was therefore timed at "
        f"{', '.join(f'{n:,}' for n in lengths)} tokens only."
        if 0 < len(lengths) < 3
        else ""
    )
    return f"*Compilation:* the first call of a new kind of shape takes {named}.{few}"


def _missing(variant: Variant) -> str:
    frame = variant.timed[(variant.timed["mask"] == "causal") & (variant.timed["outcome"] != "ok")]
    parts = []
    for name, rows in frame.groupby("backend", sort=False):
        row = rows.sort_values("length").iloc[0]
        parts.append(f"`{name}` at {int(row['length']):,} tokens: {row['outcome']} ({brief(str(row['reason']))})")
    return f"*Where the causal sweep ends* ({variant.label}): {'; '.join(parts)}." if parts else ""


def auto_sentence(results: MachineResults) -> str:
    """How good `auto` is by today's table, by its fixed order, and where a shape's own ranking is hidden."""
    today = _worst(results.auto(results.rankings))
    if today is None:
        return ""
    share, row = today
    text = "`auto` takes the fastest backend at every shape."
    if row["chosen"] != row["fastest"]:
        window = "" if pd.isna(row["window"]) else f" {row['window']:.0f}"
        text = (
            f"`auto` reaches {share:.1%} of the fastest backend's speed at its worst shape ({row['purpose']}, {row['mask']}{window}, "
            f"{row['length']:,} tokens, {row['variant']}: `{row['chosen']}` instead of `{row['fastest']}`), "
            f"{'not less' if share >= ACCEPTED else 'less'} than the {ACCEPTED:.0%} that are wanted."
        )
    if not results.rankings:
        return text + " No table was measured for this kind of device, so it follows its fixed order."
    fixed, hidden = _worst(results.auto(())), _worst(results.auto(results.rankings, from_neighbours=True))
    if fixed:
        text += f" Its fixed order alone would reach {fixed[0]:.1%} at the worst shape"
        text += (
            f", and the nearest other shape's ranking, as for shapes that nobody measured, {hidden[0]:.1%}."
            if hidden
            else "."
        )
    judged = results.auto(results.rankings, again=True)
    if second := _worst(judged):
        heads = ", ".join(dict.fromkeys(judged["variant"]))
        text += (
            f" Measured once more ({heads}; these measurements are not in the table), it reaches at least {second[0]:.1%} of the "
            f"fastest at each of {judged['share'].notna().sum()} shapes, forward passes alone counted as well."
        )
    return text


def _worst(auto: pd.DataFrame) -> tuple[float, pd.Series] | None:
    known = auto.dropna(subset=["share"]) if len(auto) else auto
    if known.empty:
        return None
    row = known.loc[known["share"].idxmin()]
    return float(row["share"]), row
