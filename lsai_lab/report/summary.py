"""The front page: the headline of every study in one table, and every claim recomputed from its records."""

from __future__ import annotations

import pandas as pd

from lsai_lab.claims import evaluate, readable
from lsai_lab.kit.load import load
from lsai_lab.report.headlines import all_headlines
from lsai_lab.report.show import show_table, show_text


def show_headline(own_runs: list[str], profile: str | None) -> None:
    """One row per machine and question, each number a link to its run."""
    rows = all_headlines(own_runs, profile)
    if not rows:
        show_text("No study has a result yet. `make report` runs them for this machine.")
        return
    frame = pd.DataFrame(rows)
    show_table(
        pd.DataFrame(
            {
                "machine": frame["machine"].where(~frame["machine"].duplicated(), ""),
                "question": frame["question"],
                "answer": "**" + frame["answer"] + "**: " + frame["result"],
            }
        ),
        "tbl-headline",
        "The headline of every study, machine by machine. Every number links to the run that produced it.",
    )


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
