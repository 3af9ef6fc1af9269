"""The claim on other projects' programs a second time: their committed answers held against runs,
published figures and measured programs (see `recompute.py`)."""

import csv
import json

import numpy as np
import yaml
from recompute_estimators import measured_gib


def rivals(runs, recorded):
    """The largest ratio of our median error to a program's, and all of these ratios, by program and
    sample."""
    known = _runs(runs, recorded) | _figures(recorded) | _programs(recorded)
    errors = {}
    for row in _table(recorded, "rivals"):
        if row["failed"]:
            continue
        measured, ours, reserved = known[row["sample"], row["run"]]
        said = float((reserved and row["reserved"]) or row["gib"])
        pair = (abs(ours / measured - 1), abs(said / measured - 1))
        errors.setdefault((row["rival"], row["sample"]), []).append(pair)
    ratios = [np.divide(*np.median(pairs, axis=0)) for pairs in errors.values()]
    return float(max(ratios)), [float(ratio) for ratio in ratios]


def _runs(runs, recorded):
    kept = {row["run"]: row for row in _table(recorded, "recorded")}
    found = {}
    for run in runs:
        measured = measured_gib(run)
        if measured and kept[run.name]["predicted_reserved"]:
            found["recorded", run.name] = (measured, float(kept[run.name]["predicted"]), False)
    return found


def _figures(recorded):
    told = yaml.safe_load((recorded.parents[1] / "params" / "published.yaml").read_text())
    found = {}
    for row in _table(recorded, "published"):
        trainer = told["figures"][row["source"]]["as"]
        sample = "megatron" if trainer == "megatron" else "published"
        sizes = (float(row["published"]), float(row["predicted"]))
        name = f"{row['source']}, row {row['row']}"
        found[sample, name] = (*sizes, row["memory"] == "reserved")
    return found


def _programs(recorded):
    folder = recorded.parent / "predictions"
    ours, measured = (
        json.loads((folder / name).read_text())
        for name in ("anybody.json", "anybody.measured.json")
    )
    return {
        ("programs", name): (found["active"], ours[name]["allocated"], False)
        for name, found in measured.items()
    }


def _table(recorded, name):
    with (recorded / "predictions" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))
