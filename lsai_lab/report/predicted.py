"""What a notebook asks about predictions: those of recorded runs, of configurations that were
measured afterwards, and of published figures, as frames."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_core.config.train import TrainConfig
from lsai_lab.predictions.recorded import config_of, predicted_runs, table_path
from lsai_lab.report.load import folder_of, session
from lsai_lab.runs.find import machine_of, opened
from lsai_lab.runs.records import recorded_runs


def config(run: str | Path | Mapping[str, Any]) -> TrainConfig:
    """What a training run trained (a row of `lab.load`, or its folder), or will train; of a search,
    with the model or batch that it found. UserError if it trained nothing.

    >>> lab.config("h100/memory.bf16").precision
    'bf16_autocast'
    """
    folder = folder_of(run)
    return config_of(opened(folder, machine_of(folder)))


def run_predictions() -> pd.DataFrame:
    """One row per committed training run or search whose peak memory (GiB) or step time (s) was
    predicted: `predicted`, `measured`, `error`, `predicted_reserved`, `reserved`, `estimated_s`,
    `step_s`, `run` and who it is (`machine`, `study`, `variant`, `part`)."""
    reports = session().root / "reports"
    return predicted_runs(recorded_runs(reports), reports)


def prediction_table(name: str = "fits") -> pd.DataFrame:
    """A committed table: `fits`, each model and technique with its parts of memory (GiB) and its
    step time on each GPU (s), or `published`, figures of others with the error of their
    predictions. Empty if there is none."""
    path = table_path(session().root, name)
    return pd.read_csv(path) if path.exists() else pd.DataFrame()


def tried_predictions() -> pd.DataFrame:
    """One row per configuration that was predicted first and measured afterwards: `set` (the file
    that holds it), `predicted.<what>`, `measured.<what>`, and `cap_gib`, the memory that it was
    given, where that was the question."""
    folder = session().root / "reports" / "recorded" / "predictions"
    rows = [
        {"set": path.name.removesuffix(".jsonl")} | json.loads(line)
        for path in sorted(folder.glob("*.*.jsonl"))
        for line in path.open(encoding="utf-8")
    ]
    return pd.json_normalize(rows)
