"""`lsai claims`, `attention-table`: what follows from the records, headline by headline and kernel
by kernel.

A fallen claim is shown, never dropped, and one without data counts as fallen, because a headline
without evidence must not stand.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console

from lsai_core.attention.measured import TABLE, table_text
from lsai_core.base.files import write_json, write_text
from lsai_lab.benches.attention_table import recorded_rankings
from lsai_lab.claims.declared import Claim, load_claims
from lsai_lab.claims.evaluate import VERDICTS, evaluate
from lsai_lab.claims.words import claims_table
from lsai_lab.project.files import repo_root
from lsai_lab.report.load import load
from lsai_lab.runs.records import recorded_runs


def claims(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON, with every run behind each.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Refresh reports/recorded/claims.json.")
    ] = False,
) -> None:
    """Recompute every headline statement of params/claims.yaml; exit 1 if one falls."""
    runs, declared = load(), load_claims()
    if any(claim.kind == "estimators" for claim in declared.values()):
        _predict_new()
    found = evaluate(runs[~runs["own"].astype(bool)], declared)
    if write:
        write_json(claims_file(repo_root()), as_records(found))
    if as_json:
        print(json.dumps(as_records(found), indent=1, ensure_ascii=False))
    else:
        _show(found, declared)
    if not found["held"].all():
        raise typer.Exit(1)


def _predict_new() -> None:
    """Predict the committed runs that nobody has predicted yet, some seconds each, and say how far
    it is, on stderr."""
    from lsai_lab.predictions.recorded import predicted_runs  # with torch

    def progress(done: int, of: int) -> None:
        print(f"predicting a new run: {done} of {of} runs are done", file=sys.stderr, flush=True)

    reports = repo_root() / "reports"
    predicted_runs(recorded_runs(reports), reports, progress)


def claims_file(root: Path) -> Path:
    """The committed verdicts."""
    return root / "reports" / "recorded" / "claims.json"


def as_records(found: pd.DataFrame) -> dict[str, Any]:
    """What `--json` prints and `--write` keeps: plain lists, strings and numbers; null where there
    is none."""
    return {"claims": json.loads(found.to_json(orient="records", double_precision=15))}


def _show(found: pd.DataFrame, declared: dict[str, Claim]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    measured = claims_table(found[found["value"].notna()], declared).set_index("name")["measured"]
    for row in found.itertuples():
        said = f"{row.sentence} ({row.note})" if row.note else row.sentence
        console.print(f"{row.verdict} ({row.bound}): {said}", style="" if row.held else "bold red")
        figures = f"{row.name} on {row.machine}, measured {measured.get(row.name, 'nothing')}"
        console.print(f"  {figures}; {', '.join(row.runs)}", style="dim")
    counts = found["verdict"].value_counts()
    console.print(", ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in VERDICTS))


def attention_table(
    write: Annotated[
        bool, typer.Option("--write", help="Refresh the table that ships with the package.")
    ] = False,
) -> None:
    """Show which backend `auto` takes at every measured shape; exit 1 if the shipped table is not
    what the records give."""
    found = recorded_rankings(recorded_runs(repo_root() / "reports"))
    if write:
        write_text(TABLE, table_text(found))
    best = [
        {"training": " > ".join([*r.training][:3]), "inference": " > ".join([*r.inference][:3])}
        for r in found
    ]
    table = pd.DataFrame(
        [vars(r) | names for r, names in zip(found, best, strict=True)], dtype=object
    )
    nothing = "no attention run on a GPU is recorded: auto follows its fixed order everywhere"
    print(table.to_string(index=False) if found else nothing)
    if TABLE.read_text(encoding="utf-8") != table_text(found):
        print(
            "the table that ships differs from the records: run `lsai attention-table --write` and "
            "commit it"
        )
        raise typer.Exit(1)
