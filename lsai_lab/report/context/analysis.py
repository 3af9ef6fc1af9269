"""What the study on distributed attention says: sentences whose every number comes from the records."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lsai_lab.benches.attention.errors import ALLOWED, NAMES
from lsai_lab.benches.context.config import ONE
from lsai_lab.report.context.data import Group, Shared
from lsai_lab.report.show import run_link

PAYS = 0.8  # efficiency from which on sharing counts as paying off
PEER = "torch"


def sentences(shared: Shared, group: Group) -> list[str]:
    """Sentences on speed, where it pays, torch's, communication, balance, memory of one group."""
    found = [_fastest(shared, group), _pays(shared, group), _against_torch(group), _communication(group)]
    found += [_balance(shared, group), _memory(group)]
    return [sentence for sentence in found if sentence]


def in_short(shared: Shared) -> list[str]:
    """Of each shape of heads, on the most processes: what is fastest, where it pays, and how torch's compares."""
    most = {group.heads: group for group in shared.shared}
    lines = []
    for group in most.values():
        found = [_fastest(shared, group), _pays(shared, group), _against_torch(group)]
        lines.append(f"{_named(shared, group)}: " + " ".join(line for line in found if line))
    return lines


def winners(group: Group) -> list[tuple[int, int, str]]:
    """(first length, last length, fastest method) of every stretch of lengths with the same winner, among several methods."""
    found: list[tuple[int, int, str]] = []
    for length in group.lengths:
        rows = group.at(length)
        if len(rows) < 2:
            continue
        best = str(rows.index[0])
        if found and found[-1][2] == best:
            found[-1] = (found[-1][0], length, best)
        else:
            found.append((length, length, best))
    return found


def _fastest(shared: Shared, group: Group) -> str:
    stretches = winners(group)
    if not stretches:
        return ""
    named = ", ".join(
        f"`{method}` {f'at {first:,}' if first == last else f'from {first:,} to {last:,}'}"
        for first, last, method in stretches
    )
    best = group.timed.loc[group.timed["training_tflops"].idxmax()]
    unit, factor = shared.rate
    rate = run_link(f"{factor * best['training_tflops']:,.3g} {unit}", best["key"])
    share = f", {best['efficiency']:.0%} of what one reaches alone" if pd.notna(best["efficiency"]) else ""
    return (
        f"*Fastest* by tokens, forward plus backward: {named}. The highest rate is {rate} per {_one(shared)} "
        f"(`{best['method']}`, {int(best['length']):,} tokens{share})."
    )


def _pays(shared: Shared, group: Group) -> str:
    """From which length on sharing is faster than one GPU, and from which it is nearly as fast as GPUs can be."""
    best = group.timed.loc[group.timed.groupby("length")["training_tflops"].idxmax()].sort_values("length")
    best = best.dropna(subset=["efficiency"])
    if best.empty:
        return ""
    alone = group.alone[group.alone["method"] == ONE].set_index("length")["training_ms"]
    common = best[best["length"].isin(alone.index)]
    gain = alone[common["length"]].to_numpy() / common["training_ms"].to_numpy()
    faster = common[gain > 1]
    parts = []
    if len(common) and len(faster):
        first = faster.iloc[0]
        parts.append(
            f"of the lengths that were timed both ways, {group.processes} are faster than one from {int(first['length']):,} tokens on "
            f"({gain[common['length'].to_numpy() == first['length']][0]:.2f} times)"
        )
    elif len(common):
        parts.append(f"{group.processes} are slower than one at every length that was timed both ways")
    good = best[best["efficiency"] >= PAYS]
    if len(good):
        parts.append(f"an efficiency of {PAYS:.0%} is reached from {int(good['length'].iloc[0]):,} tokens on")
    else:
        top = best.loc[best["efficiency"].idxmax()]
        parts.append(
            f"no length reaches an efficiency of {PAYS:.0%}; the best is {top['efficiency']:.0%} at {int(top['length']):,} tokens"
        )
    return f"*Where it pays:* {'; '.join(parts)}."


def ratios_to_torch(group: Group) -> pd.DataFrame:
    """length, method (our fastest) and ratio of speeds at every length where torch's was timed, too."""
    found = []
    for length in group.lengths:
        rows = group.at(length)
        ours = rows.drop(index=PEER, errors="ignore")
        if PEER in rows.index and len(ours):
            ratio = rows.loc[PEER, "training_ms"] / ours["training_ms"].iloc[0]
            found.append({"length": length, "method": ours.index[0], "ratio": float(ratio)})
    return pd.DataFrame(found, columns=["length", "method", "ratio"])


def _against_torch(group: Group) -> str:
    rows = ratios_to_torch(group)
    if rows.empty:
        return ""
    last, lost = rows.iloc[-1], rows[rows["ratio"] < 1]
    text = f"*Against torch's own:* at {int(last['length']):,} tokens `{last['method']}` is {last['ratio']:.2f} times as fast"
    if len(rows) > 1:
        text += f"; over {len(rows)} lengths from {int(rows['length'].min()):,} on our fastest is {rows['ratio'].min():.2f} to {rows['ratio'].max():.2f} times"
    verdict = (
        "ahead at every length"
        if lost.empty
        else f"behind at {', '.join(f'{int(n):,}' for n in lost['length'])} tokens"
    )
    return f"{text}, {verdict}."


def _communication(group: Group) -> str:
    rows = group.of("trace").dropna(subset=["exposed_share"])
    if rows.empty:
        return ""
    length = int(rows["length"].max())
    rows = rows[rows["length"] == length].set_index("method").sort_values("exposed_share")
    best, worst = rows.iloc[0], rows.iloc[-1]
    text = f"*Communication* at {length:,} tokens: least exposed is `{best.name}`'s with {best['exposed_share']:.1%} of its step"
    if len(rows) > 1:
        text += f", most `{worst.name}`'s with {worst['exposed_share']:.1%}"
    fast = rows["sent_gb_per_s"].astype(float)
    return f"{text}. A GPU sends at up to {fast.max():,.0f} GB/s while its communication kernels run (`{fast.idxmax()}`; waiting counts)."


def _balance(shared: Shared, group: Group) -> str:
    rows = group.of("trace").dropna(subset=["busy_balance"])
    if rows.empty:
        return ""
    length = int(rows["length"].max())
    rows = rows[rows["length"] == length].sort_values("busy_balance")
    each = ", ".join(f"`{row.method}` {row.busy_balance:.2f} ({row.plan_imbalance:.2f})" for row in rows.itertuples())
    return (
        f"*Balance* at {length:,} tokens, the busiest over the idlest {_one(shared)} as measured (as planned): {each}."
    )


def _memory(group: Group) -> str:
    rows = group.timed.dropna(subset=["memory_gib"])
    if rows.empty:
        return ""
    counts = rows.groupby("length")["method"].nunique()
    length = int(counts[counts == counts.max()].index.max())
    rows = rows[rows["length"] == length].sort_values("memory_gib")
    least, most = rows.iloc[0], rows.iloc[-1]
    text = f"*Memory* at {length:,} tokens: `{least['method']}` takes least, {least['memory_gib']:,.3g} GiB a GPU"
    return f"{text}; `{most['method']}` most, {most['memory_gib']:,.3g} GiB." if len(rows) > 1 else f"{text}."


def strong(groups: Sequence[Group]) -> pd.DataFrame:
    """Efficiency at the longest length that any method was timed at over every number of processes."""
    rows = _over_processes(groups)
    lengths = _complete(rows, "length", len(groups))
    return rows[rows["length"] == lengths[-1]] if lengths else rows.head(0)


def weak(groups: Sequence[Group]) -> pd.DataFrame:
    """Efficiency at the longest slice per process that any method was timed at over every number of processes."""
    rows = _over_processes(groups)
    slices = _complete(rows, "slice", len(groups))
    return rows[rows["slice"] == slices[-1]] if slices else rows.head(0)


def _over_processes(groups: Sequence[Group]) -> pd.DataFrame:
    parts = [group.timed.assign(slice=group.timed["length"] // group.processes) for group in groups]
    rows = pd.concat(parts) if parts else pd.DataFrame(columns=["processes", "method", "length", "slice", "efficiency"])
    return rows.dropna(subset=["efficiency"])


def _complete(rows: pd.DataFrame, column: str, processes: int) -> list[int]:
    """Ascending values of a column that some method has for every number of processes."""
    counts = rows.groupby([column, "method"])["processes"].nunique()
    return sorted({int(value) for (value, _), count in counts.items() if count == processes})


def scaling_sentences(shared: Shared, groups: Sequence[Group]) -> list[str]:
    """What efficiency becomes from the fewest to the most processes, by the method that keeps most of it."""
    found = []
    for name, rows in (("Strong", strong(groups)), ("Weak", weak(groups))):
        if rows["processes"].nunique() < 2:
            continue
        first, last = (
            rows[rows["processes"] == n].set_index("method")["efficiency"]
            for n in (rows["processes"].min(), rows["processes"].max())
        )
        both = [method for method in last.sort_values(ascending=False).index if method in first.index]
        if not both:
            continue
        what = (
            f"{int(rows['length'].max()):,} tokens in all"
            if name == "Strong"
            else f"{int(rows['slice'].max()):,} tokens each"
        )
        found.append(
            f"*{name} scaling*, {what}: `{both[0]}` has an efficiency of {first[both[0]]:.0%} on {rows['processes'].min()} and "
            f"{last[both[0]]:.0%} on {rows['processes'].max()} {'GPUs' if shared.on_gpu else 'processes'}."
        )
    return found


def error_rows(group: Group) -> pd.DataFrame:
    """Errors by method, with `ratio`: the largest over eager attention's own."""
    rows = group.of("error")
    if rows.empty:
        return rows
    ratios = pd.concat([rows[name].astype(float) / rows[f"bound_{name}"].astype(float) for name in NAMES], axis=1)
    return rows.assign(ratio=ratios.max(axis=1))


def error_sentence(rows: pd.DataFrame) -> str:
    """The worst of all groups' `error_rows`, and what is too far from exact."""
    worst = rows.iloc[int(rows["ratio"].argmax())]
    wrong = list(dict.fromkeys(rows[rows["ratio"] > ALLOWED]["method"]))
    verdict = f"too far: {', '.join(f'`{name}`' for name in wrong)}" if wrong else "all are correct"
    return (
        f"*Errors* are at most {worst['ratio']:.2f} times those of eager attention in the same format "
        f"(`{worst['method']}`; {ALLOWED:g} are allowed): {verdict}."
    )


def _named(shared: Shared, group: Group) -> str:
    return f"{group.heads} heads on {group.processes} {'GPUs' if shared.on_gpu else 'processes'}"


def _one(shared: Shared) -> str:
    return "GPU" if shared.on_gpu else "process"
