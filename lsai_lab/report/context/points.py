"""The points of one context run as tables, for the run's own page."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lsai_core.files import read_jsonl
from lsai_lab.report.show import show_table
from lsai_lab.runs.records import Run


def show_points(run: Run) -> None:
    """Every point as it was measured: times, traces, errors, and what could not be measured and why."""
    rows = read_jsonl(run.folder / "metrics.jsonl")
    good = [row for row in rows if row["outcome"] == "ok"]
    timed = [_timed(row) for row in good if row["measure"] == "time"]
    if timed:
        show_table(
            pd.DataFrame(timed).dropna(axis="columns", how="all"),
            "tbl-times",
            "Every timed point, the slowest process of each step: the median of the repeats (on a CPU the fastest), the quartiles in brackets; "
            "TFLOP/s of one process, forward plus backward; what the process that sends most sends in both passes; peak memory of the fullest.",
        )
    traced = [_traced(row) for row in good if row["measure"] == "trace"]
    if traced:
        show_table(
            pd.DataFrame(traced).dropna(axis="columns", how="all"),
            "tbl-traces",
            "Every traced step: how long each process computed, the busiest over the idlest as measured and as planned, and, on GPUs, communication.",
        )
    errors = [_error(row) for row in good if row["measure"] == "error"]
    if errors:
        numbers = dict.fromkeys(("out", "dq", "dk", "dv", "eager's worst"), ".1e")
        show_table(pd.DataFrame(errors), "tbl-errors", "Relative errors against float64.", formats=numbers)
    missing: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["outcome"] != "ok":
            place = f"{row['measure']} at {row['length']:,}"
            missing.setdefault((row["method"], row["outcome"], row["reason"]), []).append(place)
    if missing:
        table = [
            {"method": method, "outcome": outcome, "why": why, "where": ", ".join(places)}
            for (method, outcome, why), places in missing.items()
        ]
        show_table(pd.DataFrame(table), "tbl-missing", "What was not measured, and why.")


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": row["method"],
        "length": row["length"],
        "kernel": row["kernel"],
        **{f"{what} ms": _ms(row, name) for what, name in (("forward", "forward"), ("both", "training"))},
        "TFLOP/s": row["training_tflops"],
        "sent MiB": row["sent_training_mib"],
        "GiB": row["memory_gib"],
        "repeats": row["repeats"],
        "first call s": row["first_call_s"],
    }


def _traced(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": row["method"],
        "length": row["length"],
        "compute ms": ", ".join(f"{ms:.4g}" for ms in row["rank_compute_ms"]),
        "balance": row["busy_balance"],
        "planned": row["plan_imbalance"],
        "exposed": row["exposed_share"],
        "GB/s": row["sent_gb_per_s"],
    }


def _error(row: dict[str, Any]) -> dict[str, Any]:
    found = {"method": row["method"], "length": row["length"]} | {name: row[name] for name in ("out", "dq", "dk", "dv")}
    return found | {"eager's worst": max(row[key] for key in row if key.startswith("bound_"))}


def _ms(row: dict[str, Any], name: str) -> str:
    return f"{row[f'{name}_ms']:.4g} ({row[f'{name}_ms_p25']:.4g} to {row[f'{name}_ms_p75']:.4g})"
