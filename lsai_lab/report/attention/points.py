"""The points of one attention run as tables, for the run's own page."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lsai_lab.benches.attention_table import read_points
from lsai_lab.report.show import show_table
from lsai_lab.runs.records import Run


def show_points(run: Run) -> None:
    """Every point as it was measured: times by shape and backend, errors, and what could not be measured and why."""
    _, rows = read_points(run)
    timed = [row for row in rows if row["measure"] == "time"]
    columns = ["mask", "length", "backend", "forward ms", "backward ms", "TFLOP/s", "MiB", "repeats", "first call s"]
    good = [_timed(row) for row in timed if row["outcome"] == "ok"]
    if good:
        show_table(
            pd.DataFrame(good)[columns],
            "tbl-times",
            "Every timed point: the median of the repeats (on a CPU the fastest), the quartiles in brackets, TFLOP/s of forward plus backward (of the forward pass "
            "where there are no gradients), peak memory beyond the inputs.",
            formats={"MiB": "{:,.1f}", "TFLOP/s": "{:,.3g}", "first call s": ".2f"},
        )
    errors = [
        {"mask": _mask(row), "length": row["length"], "backend": row["backend"]}
        | {name: row.get(name) for name in ("out", "dq", "dk", "dv")}
        | {"eager's worst": max(row[key] for key in row if key.startswith("bound_"))}
        for row in rows
        if row["measure"] == "error" and row["outcome"] == "ok"
    ]
    if errors:
        numbers = dict.fromkeys(("out", "dq", "dk", "dv", "eager's worst"), ".1e")
        show_table(pd.DataFrame(errors), "tbl-errors", "Relative errors against float64.", formats=numbers)
    missing: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["outcome"] != "ok":
            where = f"{_mask(row)} at {row['length']:,}" if "mask" in row else "everywhere"
            missing.setdefault((row["backend"], row["outcome"], row["reason"]), []).append(where)
    if missing:
        table = [
            {"backend": backend, "outcome": outcome, "why": why, "where": ", ".join(dict.fromkeys(places))}
            for (backend, outcome, why), places in missing.items()
        ]
        show_table(pd.DataFrame(table), "tbl-missing", "What was not measured, and why.")


def _mask(row: dict[str, Any]) -> str:
    return f"window {row['window']}" if row["window"] is not None else row["mask"]


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "mask": _mask(row),
        "length": row["length"],
        "backend": row["backend"],
        "forward ms": _ms(row, "forward"),
        "backward ms": _ms(row, "backward"),
        "TFLOP/s": row.get("training_tflops", row["forward_tflops"]),
        "MiB": row.get("memory_training_mib", row.get("memory_forward_mib")),
        "repeats": row["repeats"],
        "first call s": row["first_call_s"],
    }


def _ms(row: dict[str, Any], name: str) -> str | None:
    if f"{name}_ms" not in row:
        return None
    return f"{row[f'{name}_ms']:.3g} ({row[f'{name}_ms_p25']:.3g} to {row[f'{name}_ms_p75']:.3g})"
