"""How far off others' formulas are (`params/estimators.yaml`), beside our predictions: against recorded runs and published figures."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_core.config import TrainConfig
from lsai_lab.files import load_yaml, repo_root
from lsai_lab.predicted import config_of, predicted_runs, table_path
from lsai_lab.runs.records import recorded_runs

OURS = "this package"


@functools.cache
def errors(root: Path | None = None) -> pd.DataFrame:
    """Relative errors of this package and each estimator (columns); a row per recorded run on a GPU with a measured peak of active memory
    and per published figure, which the index tells apart (`sample`)."""
    root = root or repo_root()
    runs = {str(run.folder): run for run in recorded_runs(root / "reports")}
    said = predicted_runs([*runs.values()], root / "reports").dropna(subset=["error", "predicted_reserved"])
    kept, told = pd.read_csv(table_path(root, "published")), load_yaml(root / "params" / "estimators.yaml")
    configs = [*(config_of(runs[name]) for name in said["run"]), *map(TrainConfig.model_validate_json, kept["config"])]
    frame = pd.json_normalize([config.model_dump(mode="json") for config in configs])
    frame = frame.assign(masters=[1] * len(said) + kept["masters"].tolist())
    for name, formula in told["names"].items():
        frame[name] = frame.eval(formula, engine="python")
    gib, ours = (
        pd.concat([said[a], kept[b]], ignore_index=True) for a, b in (("measured", "published"), ("error", "error"))
    )
    samples = ["recorded"] * len(said) + ["published"] * len(kept)
    found = pd.DataFrame({OURS: ours})
    for name, other in told["estimators"].items():
        found[name] = frame.eval(other["formula"], engine="python") / 2**30 / gib - 1
    return found.set_index(pd.Index(samples, name="sample"))


def beside() -> tuple[float, list[float], dict[str, Any]]:
    """Our median error over that of the best estimator: for published figures, for both samples, and the facts of the claim."""
    median = errors().abs().groupby("sample").median()
    others = median.drop(columns=OURS)
    each, best = median[OURS] / others.min(axis=1), others.loc["published"].idxmin()
    facts = {"of": median.loc["published", OURS], "over": others.loc["published", best]}
    return each["published"], each.tolist(), facts | {"best": best, "total": others.shape[1]}
