"""The written analysis of the memory study: sentences computed from the numbers, so they are as true as the records.

Every function returns Markdown sentences for one machine. Nothing is asserted that a comparison in this file did not find;
differences smaller than the spread between repeats are called what they are.
"""

from __future__ import annotations

import pandas as pd

from lsai_lab.report.memory.figures import SAME_MEMORY, pareto_front
from lsai_lab.report.memory.table import MachineResults
from lsai_lab.report.pandoc import code_span
from lsai_lab.report.show import run_link


def analysis(results: MachineResults) -> list[str]:
    """The statements that this machine's numbers support, most important first."""
    rows = results.ok
    if len(rows) < 2:
        few = f"On {results.machine} fewer than two variants ended well, so nothing can be compared."
        return [few, *_not_ok(results)]
    sentences = [*_memory(rows), *_speed(rows), *_quality(results, rows), *_batch(results, rows), *_advice(rows)]
    return sentences + _not_ok(results)


def _name(row: pd.Series) -> str:
    return f"**{run_link(row['label'], row['key'])}**"


def _memory(rows: pd.DataFrame) -> list[str]:
    measured = rows.dropna(subset=["mem_peak_allocated_gib"])
    if measured.empty or not measured["memory_share"].notna().any():
        return []
    least = measured.loc[measured["mem_peak_allocated_gib"].idxmin()]
    text = (
        f"*Most memory saved:* {_name(least)} trains in {least['mem_peak_allocated_gib']:.2f} GiB, "
        f"{least['memory_share']:.0%} of the baseline's peak, at {least['speedup']:.2f}x its speed."
    )
    single = measured[measured["variant"].isin(["bf16", "flash_attn", "grad_checkpoint"])]
    if len(single) > 1:
        best = single.loc[single["mem_peak_allocated_gib"].idxmin()]
        text += f" Among single steps, {_name(best)} saves the most ({1 - best['memory_share']:.0%})."
    return [text]


def _speed(rows: pd.DataFrame) -> list[str]:
    if not rows["speedup"].notna().any():
        return []
    fastest, slowest = rows.loc[rows["speedup"].idxmax()], rows.loc[rows["speedup"].idxmin()]
    sentence = f"*Fastest:* {_name(fastest)} at {fastest['tokens_per_s']:,.0f} tokens/s, {fastest['speedup']:.2f}x the baseline."
    if slowest["speedup"] < 1:
        sentence += f" Slowest is {_name(slowest)} at {slowest['speedup']:.2f}x: it pays for memory with time."
    return [sentence, *_recomputation(rows)]


def _recomputation(rows: pd.DataFrame) -> list[str]:
    """What gradient checkpointing costs: pairs that differ in nothing else."""
    by_name = rows.set_index("variant")
    costs = []
    for plain, checkpointed in (
        ("baseline", "grad_checkpoint"),
        ("bf16", "bf16_gradcp"),
        ("flash_attn", "flash_gradcp"),
    ):
        if plain in by_name.index and checkpointed in by_name.index:
            time = by_name.loc[checkpointed, "step_ms"] / by_name.loc[plain, "step_ms"] - 1
            memory = (
                1 - by_name.loc[checkpointed, "mem_peak_allocated_gib"] / by_name.loc[plain, "mem_peak_allocated_gib"]
            )
            costs.append(f"{time:+.0%} time for {memory:.0%} less memory on {by_name.loc[plain, 'label']}")
    return [f"*What gradient checkpointing costs:* {'; '.join(costs)}."] if costs else []


def _quality(results: MachineResults, rows: pd.DataFrame) -> list[str]:
    full = rows[rows["variant"] != "window_256"]
    low, high = full["validation_perplexity"].min(), full["validation_perplexity"].max()
    spread = high / low - 1
    sentence = (
        f"*Quality:* the validation perplexities of the {len(full)} variants with full attention lie between {low:.2f} and "
        f"{high:.2f}, {spread:.2%} apart"
    )
    repeats = _repeat_spread(results)
    if repeats is not None:
        relation = "less than" if spread < repeats else "more than"
        sentence += f", {relation} what the seed alone changes ({repeats:.2%} between repeats of one variant)"
    sentence += "."
    window = rows[rows["variant"] == "window_256"]
    if not window.empty:
        change = window.iloc[0]["validation_perplexity"] / full["validation_perplexity"].median() - 1
        sentence += f" A window of 256 {'lowers' if change < 0 else 'raises'} the perplexity by {abs(change):.2%} against their median."
    return [sentence]


def _repeat_spread(results: MachineResults) -> float | None:
    """Median over variants of (max - min) / min of the perplexity between repeats; None without repeats."""
    by_variant: dict[str, list[float]] = {}
    for run in results.runs:
        if run.summary.outcome == "ok" and run.summary.id.part == "train":
            by_variant.setdefault(run.summary.id.variant, []).append(run.summary.results["validation_perplexity"])
    spreads = [max(values) / min(values) - 1 for values in by_variant.values() if len(values) > 1]
    return float(pd.Series(spreads).median()) if spreads else None


def _batch(results: MachineResults, rows: pd.DataFrame) -> list[str]:
    if "largest_batch" not in rows or not rows["largest_batch"].notna().any():
        return []
    best = rows.loc[rows["largest_batch"].idxmax()]
    gain = f", {best['batch_gain']:.1f}x the baseline's" if best["batch_gain"] == best["batch_gain"] else ""
    sentences = [f"*Largest batch:* {_name(best)} fits {best['largest_batch']:,.0f} sequences{gain}."]
    for run in results.runs:
        ends = [t for t in run.summary.results.get("tries") or [] if t["outcome"] not in ("ok", "oom")]
        if ends:
            first = min(ends, key=lambda t: t["size"])
            note = str(first["note"]).split("\n")[0]
            note = note if len(note) <= 90 else note[:90].rsplit(" ", 1)[0] + " …"
            label = results.study.variants[run.summary.id.variant].label
            sentences.append(
                f"The search for {run_link(label, run.summary.id.key)} did not end on an out-of-memory error: at "
                f"{first['size']:,} sequences it ended as *{first['outcome']}* ({code_span(note)}), so its true "
                "limit may be higher."
            )
    return sentences


def _advice(rows: pd.DataFrame) -> list[str]:
    measured = rows.dropna(subset=["mem_peak_allocated_gib"])
    if measured.empty:
        return []
    front = pareto_front(measured, "tokens_per_s", more_is_better=True)
    names = " → ".join(_name(row) for _, row in front.iterrows())
    beaten = [row["label"] for _, row in measured.iterrows() if row["variant"] not in set(front["variant"])]
    advice = (
        f"*What to use when:* from least memory to most speed, only these are worth choosing here (peaks within {SAME_MEMORY:.0%} "
        f"count as equal): {names}."
    )
    if beaten:
        advice += f" Each of the others ({', '.join(beaten)}) is slower than one of these that needs no more memory."
    return [advice]


def _not_ok(results: MachineResults) -> list[str]:
    bad = results.rows[results.rows["outcome"] != "ok"]
    return [f"*{row['label']}* ended as **{row['outcome']}**: {row['reason']}." for _, row in bad.iterrows()]


def headline(results: MachineResults) -> list[dict[str, str]]:
    """The rows of the front page's table for this study on one machine: question, answer, the number."""
    rows = results.ok
    if rows.empty or not rows["speedup"].notna().any():
        return []
    fastest = rows.loc[rows["speedup"].idxmax()]
    speed = run_link(f"{fastest['tokens_per_s']:,.0f}", fastest["key"])
    found = [
        {
            "machine": results.machine,
            "question": "fastest training, equal batch",
            "answer": fastest["label"],
            "result": f"{speed} tokens/s, {fastest['speedup']:.2f}x baseline",
        }
    ]
    measured = rows.dropna(subset=["mem_peak_allocated_gib"])
    if not measured.empty:
        least = measured.loc[measured["mem_peak_allocated_gib"].idxmin()]
        peak = run_link(f"{least['mem_peak_allocated_gib']:.2f}", least["key"])
        found.append(
            {
                "machine": results.machine,
                "question": "least memory, equal batch",
                "answer": least["label"],
                "result": f"{peak} GiB peak, {least['memory_share']:.0%} of baseline",
            }
        )
    if "largest_batch" in rows and rows["largest_batch"].notna().any():
        most = rows.loc[rows["largest_batch"].idxmax()]
        gain = f", {most['batch_gain']:.1f}x baseline" if most["batch_gain"] == most["batch_gain"] else ""
        batch = run_link(f"{most['largest_batch']:,.0f}", most["batch_key"])
        found.append(
            {
                "machine": results.machine,
                "question": "largest batch that trains",
                "answer": most["label"],
                "result": f"{batch} sequences{gain}",
            }
        )
    return found


def readme_table(results: MachineResults) -> str:
    """The README's headline rows for one machine, as Markdown: computed, so that a test can keep the README true."""
    return "\n".join(
        f"| {row['label']} | {row['tokens_per_s']:,.0f} | {row['speedup']:.2f}x | {row['mem_peak_allocated_gib']:.2f} "
        f"({row['memory_share']:.0%}) | {row['largest_batch']:,.0f} | {row['validation_perplexity']:.2f} |"
        for _, row in results.rows.iterrows()
    )


def speed_spread(results: MachineResults) -> float:
    """Largest relative range of tokens/s between the repeats of one variant."""
    rows = results.ok
    return float(((rows["tokens_per_s_high"] - rows["tokens_per_s_low"]) / rows["tokens_per_s"]).max())
