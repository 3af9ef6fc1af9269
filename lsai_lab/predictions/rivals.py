"""Other projects' programs that predict a training step's memory, beside `lsai predict`.

`params/rivals.yaml` names them with their versions, `tests/rivals.py` runs them, and what they said
is committed (`rivals.csv`). A program is held against what its number means, and this package
against the same runs: only where both spoke.

Four samples (`SAMPLES`). A figure of reserved memory is held against the program's reserved number
if it has one, all others are of active memory. Our predictions of `programs` were made before they
ran; those of `megatron` with the figures in view.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_lab.predictions.programs import program_errors
from lsai_lab.predictions.recorded import predicted_runs, run_name, table_path
from lsai_lab.project.files import load_yaml, repo_root
from lsai_lab.runs.records import recorded_runs

SAMPLES = {
    "recorded": "this package's runs",
    "published": "other trainers' figures",
    "megatron": "SimuMax's measurements of Megatron-LM",
    "programs": "other people's programs",
}
ROWS = ["rival", "sample", "run", "gib", "reserved", "failed"]
NEAR = 0.05


def said(root: Path | None = None) -> pd.DataFrame:
    """What the programs said (`ROWS`): GiB of tensors, of reserved memory where there is such a
    number, or why the program failed."""
    return pd.read_csv(table_path(root, "rivals"), dtype={"failed": str})


def rivals(root: Path | None = None) -> dict[str, Any]:
    """The programs by name: version, how each is run, what its number means (`rivals`), and those
    that did not run (`not_run`)."""
    return load_yaml((root or repo_root()) / "params" / "rivals.yaml")


@functools.cache
def rival_errors(root: Path | None = None) -> pd.DataFrame:
    """Relative errors of each program (`error`) and of this package (`ours`): a row per program and
    run that it spoke of."""
    root = root or repo_root()
    known = pd.concat([_recorded(root), _published(root), _programs(root)], ignore_index=True)
    frame = said(root).query("failed.isna()").merge(known, on=["sample", "run"], validate="m:1")
    reserved = frame["of_reserved"] & frame["reserved"].notna()
    gib = frame["gib"].where(~reserved, frame["reserved"])
    frame = frame.assign(error=gib / frame["measured"] - 1)
    return frame[["rival", "sample", "run", "measured", "error", "ours"]]


def rival_table(root: Path | None = None) -> pd.DataFrame:
    """A row per program and sample: how many runs it spoke of, the median size of its error and the
    share of errors of at most 5 %, and of ours for the same runs."""
    rows = []
    for (rival, sample), group in rival_errors(root).groupby(["rival", "sample"], sort=False):
        row = {"rival": rival, "sample": sample, "runs": len(group)}
        for name in ("error", "ours"):
            off = group[name].abs()
            row |= {f"{name}_median": off.median(), f"{name}_near": (off <= NEAR).mean()}
        rows.append(row)
    return pd.DataFrame(rows)


def worst() -> tuple[float, list[float], dict[str, Any]]:
    """The largest of our median errors over that of a program in a sample, all of these ratios,
    and the facts of the claim: both errors of that sample, the program, how many there are."""
    table = rival_table()
    each = table["ours_median"] / table["error_median"]
    row = table.loc[each.idxmax()]
    facts = {"of": row["ours_median"], "over": row["error_median"], "best": row["rival"]}
    return float(each.max()), each.tolist(), facts | {"total": table["rival"].nunique()}


def published_name(source: str, row: int) -> str:
    """What names a published figure."""
    return f"{source}, row {row}"


def published_sample(trainer: str) -> str:
    """The sample of a published figure of that trainer."""
    return "megatron" if trainer == "megatron" else "published"


def _recorded(root: Path) -> pd.DataFrame:
    runs = recorded_runs(root / "reports")
    frame = predicted_runs(runs, root / "reports").dropna(subset=["error", "predicted_reserved"])
    names = frame["run"].map({str(run.folder): run_name(run) for run in runs})
    return _known("recorded", names, frame["measured"], frame["error"], False)


def _published(root: Path) -> pd.DataFrame:
    frame = pd.read_csv(table_path(root, "published"))
    names = [published_name(*pair) for pair in zip(frame["source"], frame["row"], strict=True)]
    figures = load_yaml(root / "params" / "published.yaml")["figures"]
    sample = frame["source"].map(lambda source: published_sample(figures[source]["as"]))
    reserved = frame["memory"] == "reserved"
    off = frame["predicted"] / frame["published"] - 1
    return _known(sample, names, frame["published"], off, reserved)


def _programs(root: Path) -> pd.DataFrame:
    frame = program_errors(root).query("set == 'anybody'")
    return _known("programs", frame["name"], frame["measured"], frame["active"], False)


def _known(sample: Any, names: Any, measured: Any, ours: Any, of_reserved: Any) -> pd.DataFrame:
    """What was measured, by run; `of_reserved`: of reserved memory."""
    frame = pd.DataFrame({"run": list(names), "measured": list(measured), "ours": list(ours)})
    for name, value in (("sample", sample), ("of_reserved", of_reserved)):
        frame[name] = list(value) if isinstance(value, pd.Series) else value
    return frame
