"""The front page's claims, recomputed from the records."""

from __future__ import annotations

from lsai_lab.claims import evaluate, readable
from lsai_lab.kit.load import load
from lsai_lab.report.show import show_table, show_text


def show_claims() -> None:
    """Every headline statement with its bound and verdict, recomputed now from the committed records."""
    runs = load()
    runs = runs[~runs["own"].astype(bool)]
    if runs.empty:
        show_text("No recorded results are committed yet, so no claim can be checked.")
        return
    found = evaluate(runs)
    show_table(
        readable(found),
        "tbl-claims",
        f"Every headline statement, recomputed from the committed records: {found['held'].sum()} of {len(found)} hold.",
    )
