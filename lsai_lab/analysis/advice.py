"""Which technique to take: the best of a study's variants by memory, by speed and by both, and what
each gains over the baseline."""

from collections.abc import Iterator

import pandas as pd

from lsai_lab.analysis.summary import equal_to_best, pareto

SPEED, MEMORY, LOSS = "tokens_per_s", "mem_peak_allocated_gib", "validation_loss"


def gains(rows: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """`rows` (one per variant, with `SPEED` and `MEMORY`) with `speed` and `memory` as multiples
    of the baseline's, and `both`, speed over memory; empty if the baseline has no row."""
    found = rows[rows["variant"] == baseline]
    base = found.iloc[0] if len(found) else pd.Series({SPEED: float("nan"), MEMORY: float("nan")})
    speed, memory = rows[SPEED] / base[SPEED], rows[MEMORY] / base[MEMORY]
    compared = rows.assign(speed=speed, memory=memory, both=speed / memory)
    return compared.dropna(subset=["speed", "memory"])


def advice(rows: pd.DataFrame, baseline: str) -> Iterator[str]:
    """Lines for a terminal; nothing if there is no baseline to compare with."""
    compared = gains(rows, baseline)
    if len(compared) < 2:
        return
    base = compared[compared["variant"] == baseline].iloc[0]
    yield f"Best against {base['label']} (speed and peak memory as multiples of its own):"
    for name, column, larger in (
        ("memory", "memory", False),
        ("speed", "speed", True),
        ("both", "both", True),
    ):
        best = equal_to_best(compared, column, larger=larger)
        also = f"; equal: {', '.join(best['label'][1:])}" if len(best) > 1 else ""
        yield f"  {name:7} {_row(best.iloc[0])}{also}"
    yield "When to use which:"
    front = pareto(compared, "memory", "speed", larger=True).sort_values("memory")
    for _, row in front.iterrows():
        yield f"  from {row['memory']:4.0%} of the memory on: {_row(row)}{_loss(row, base)}"
    others = compared[~compared["variant"].isin([*front["variant"], baseline])]
    if len(others):
        yield f"  another is at least as good in both: {', '.join(others['label'])}"


def _row(row: pd.Series) -> str:
    return f"{row['label']}, {row['speed']:.2f}x as fast, {row['memory']:.0%} of the memory"


def _loss(row: pd.Series, base: pd.Series) -> str:
    if row["variant"] == base["variant"] or pd.isna(row.get(LOSS)) or pd.isna(base.get(LOSS)):
        return ""
    return f", validation loss {row[LOSS] - base[LOSS]:+.3f}"
