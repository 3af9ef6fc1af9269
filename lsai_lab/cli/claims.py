"""`lsai claims`: recompute every headline statement from the records, and say which ones stand.

A fallen claim is shown, never dropped. For the committed records a claim without data counts as fallen, because a
headline without evidence must not stand; for your own runs it only says what has not been measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lsai_core.errors import UserError
from lsai_core.files import write_json
from lsai_lab.files import repo_root
from lsai_lab.runs.claims import ClaimResult, evaluate_claims, load_claims, show_spread, show_value
from lsai_lab.runs.records import find_runs, recorded_runs, runs_frame

_STYLES = {"held": "green", "fallen": "bold red", "no data": "yellow"}


def claims(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON, with every run behind each.")
    ] = False,
    runs: Annotated[Path | None, typer.Option(help="Judge these runs instead, on each of their machines.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Refresh reports/recorded/claims.json.")] = False,
) -> None:
    """Recompute every headline statement of params/claims.yaml; exit 1 if one falls."""
    if runs is not None and write:
        raise UserError("--write keeps the verdicts on the committed records; it does not go with --runs")
    root = repo_root()
    results = recorded_claims(root) if runs is None else _own_claims(root, runs)
    if write:
        write_json(claims_file(root), claims_json(results))
    if as_json:
        print(json.dumps(claims_json(results), indent=1, ensure_ascii=False))
    else:
        _show(results)
    fails = {"fallen"} if runs is not None else {"fallen", "no data"}
    if any(result.verdict in fails for result in results):
        raise typer.Exit(1)


def claims_file(root: Path) -> Path:
    """The committed verdicts."""
    return root / "reports" / "recorded" / "claims.json"


def claims_json(results: list[ClaimResult]) -> dict[str, Any]:
    """What `--json` prints and `--write` keeps."""
    return {"claims": [result.as_json() for result in results]}


def recorded_claims(root: Path) -> list[ClaimResult]:
    """Every claim, judged by the committed records of the checkout `root`."""
    return evaluate_claims(load_claims(root), runs_frame(recorded_runs(root / "reports")))


def _own_claims(root: Path, folder: Path) -> list[ClaimResult]:
    if not folder.is_dir():
        raise UserError(f"no such folder of runs: {folder}")
    found = find_runs(folder)
    if not found:
        raise UserError(f"no finished runs in {folder}; expected {folder}/<study>/<run>/summary.json")
    return evaluate_claims(load_claims(root), runs_frame(found), sorted({run.machine for run in found}))


def _show(results: list[ClaimResult]) -> None:
    console = Console()
    table = Table(show_lines=True)
    for name in ("claim", "value", "over repeats", "bound", "verdict", "runs"):
        table.add_column(name, ratio=1 if name == "claim" else None, no_wrap=name in ("value", "bound", "verdict"))
    for result in results:
        claim = Text(result.sentence)
        if result.note:
            claim.append(f"\n{result.note}", style="yellow")
        verdict = Text(result.verdict, style=_STYLES[result.verdict])
        table.add_row(claim, show_value(result), show_spread(result), result.bound, verdict, f"{len(result.runs)}")
    console.print(table)
    for result in results:
        if result.runs:
            console.print(Text(f"{result.name} on {result.machine}: {', '.join(result.runs)}", style="dim"))
    count = {verdict: sum(result.verdict == verdict for result in results) for verdict in _STYLES}
    console.print(", ".join(f"{number} {verdict}" for verdict, number in count.items()))
