"""`lsai claims`, `attention-table`: what follows from the records, headline by headline and kernel
by kernel.

A failed claim is shown, never dropped, and one without data counts as failed, because a headline
without evidence must not stand.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console

from lsai_core.attention.measured import TABLE, table_text
from lsai_core.base.files import write_json, write_text
from lsai_core.base.tables import wrapped
from lsai_lab.analysis.losses import LAST_STEPS
from lsai_lab.benches.attention_table import recorded_rankings
from lsai_lab.claims.bounds import (
    BoundSet,
    bounds_by_history,
    date_of_bound,
    read_bounds,
    write_bounds,
)
from lsai_lab.claims.declared import Claim, load_claims
from lsai_lab.claims.evaluate import VERDICTS, evaluate
from lsai_lab.claims.words import claims_table
from lsai_lab.cli import options as opt
from lsai_lab.cli.tables import counts, table
from lsai_lab.project.files import repo_root
from lsai_lab.report.load import load
from lsai_lab.runs.records import recorded_runs


def claims(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON, with every run behind each.")
    ] = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="Refresh claims.json and bounds.json of reports/recorded."),
    ] = False,
    full: opt.FullOption = False,
) -> None:
    """Recompute every headline statement of params/claims.yaml; exit 1 unless all hold."""
    runs, declared, root = load(), load_claims(), repo_root()
    if any(claim.kind in ("estimators", "rivals") for claim in declared.values()):
        _predict_new()
    bounds = _dated(root, declared) if write else read_bounds(root)
    found = evaluate(runs[~runs["own"].astype(bool)], declared, bounds)
    if write:
        write_bounds(root, bounds)
        write_json(claims_file(root), as_records(found))
    if as_json:
        print(json.dumps(as_records(found), indent=1, ensure_ascii=False))
    else:
        _show(found, declared, full)
    if absent := sorted({claim.machine for claim in declared.values()} - {*runs["machine"]}):
        gone = f"no record of {', '.join(absent)} in reports/recorded; git restores what is gone"
        print(wrapped(gone, "  "), file=sys.stderr)
    if not found["held"].all():
        raise typer.Exit(1)


def _dated(root: Path, declared: dict[str, Claim]) -> dict[str, BoundSet]:
    """When each bound was set: by git's history, and by what is committed where that lacks it."""
    committed = read_bounds(root)
    known = {
        name: committed[name]
        for name, claim in declared.items()
        if date_of_bound(committed, name, claim) is not None
    }
    found = known | (bounds_by_history(root, declared) or {})
    return {name: found[name] for name in declared if name in found}


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
    is none. Without `pair`, two of the `runs`, whose folders are this machine's."""
    told = found.drop(columns="pair").to_json(orient="records", double_precision=15)
    return {"claims": json.loads(told)}


def _show(found: pd.DataFrame, declared: dict[str, Claim], full: bool) -> None:
    """The counts, then a line a claim; `full`: its sentence and the runs behind it, too."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    told = claims_table(found, declared).set_index("name")
    rows = [
        {
            "verdict": row.verdict,
            "claim": row.name,
            "machine": row.machine,
            "measured": told["measured"][row.name],
            "bound": told["bound"][row.name],
        }
        for row in found.itertuples()
    ]
    heading, *lines = table(rows).splitlines()
    more = "" if full else " (--full: their sentences and runs)"
    console.print(counts(found["verdict"], "claims", VERDICTS) + more)
    if found["set_after"].any():
        console.print("late: a bound that was set after a run that decides the claim")
    console.print(f"\n{heading}")
    for row, line in zip(found.itertuples(), lines, strict=True):
        console.print(line, style="" if row.held else "bold red")
        if full:
            said = f"{row.sentence} ({row.note})" if row.note else row.sentence
            console.print(wrapped(f"  {said}", "  "))
            for more in _more(row, told.loc[row.name]):
                console.print(wrapped(f"  {more}", "  "), style="dim")
            console.print(wrapped(f"  runs: {', '.join(row.runs)}", "  "), style="dim")


def _more(row: Any, told: pd.Series) -> list[str]:
    """When a claim's bound was set and its first run began, to the minute; of losses, how much
    text was read, and what the training loss says."""
    times = (
        f"{what} of {time[:16].replace('T', ' ')}"
        for what, time in (("bound", row.bound_set), ("first run", row.first_run))
        if isinstance(time, str)
    )
    sets = "not recorded" if pd.isna(row.gpu_sets) else f"{row.gpu_sets:.0f}"
    lines = [f"{', '.join(times)} (UTC); sets of GPUs, by UUID: {sets}"]
    if told["text"]:
        lines.append(f"each run read {told['text']}")
    if told["training"]:
        lines.append(f"training loss, means of the last {LAST_STEPS} steps: {told['training']}")
    return lines


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
    print(f"{len(found)} shapes; `auto` takes the first kernel that can run there")
    by_gpu = itertools.groupby(found, key=lambda r: (r.gpu, r.capability, r.dtype))
    for (gpu, capability, dtype), rankings in by_gpu:
        print(f"\n{gpu} ({capability}), {dtype}")
        print(table([_ranking(ranking) for ranking in rankings]))
    if TABLE.read_text(encoding="utf-8") != table_text(found):
        print(
            "the table that ships differs from the records: run `lsai attention-table --write` and "
            "commit it"
        )
        raise typer.Exit(1)


def _ranking(found: Any) -> dict[str, Any]:
    """A shape's line in the table: the three fastest kernels, where a step trains and without."""
    return {
        "dim": found.head_dim,
        "grouped": found.grouped,
        "causal": found.causal,
        "window": found.window,
        "length": found.length,
        "training": " > ".join([*found.training][:3]),
        "inference": " > ".join([*found.inference][:3]),
    }
