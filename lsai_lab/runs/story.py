"""Which of a study's recorded runs tell its story, and in which order rows of runs stand."""

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_lab.runs.study import Study, load_study, study_names


def tells(frame: pd.DataFrame, root: Path) -> pd.Series:
    """Whether each run (a row of `lab.load`) is of the machine that tells its part: the one that
    the study names, or, where it names none that has runs, the one with the most runs; without
    committed runs, all."""
    recorded = ~frame["own"].astype(bool) & (frame["outcome"] != "damaged")
    if not recorded.any():
        return ~recorded
    places = pd.MultiIndex.from_frame(frame[["study", "part", "machine"]])
    runs = Counter(places[recorded])
    told: dict[tuple[str, str], str] = {}
    for name, part, machine in sorted(runs, key=runs.__getitem__):
        study = _study(root, name)
        named = study.recorded_on.get(part) if study else None
        if told.get((name, part)) != named or named is None:
            told[name, part] = machine
    return recorded & places.isin([(*where, machine) for where, machine in told.items()])


def place(root: Path, row: dict[str, Any]) -> tuple[Any, ...]:
    """What rows are sorted by: machine, study, part and variant in the study's order, repeat."""
    study = _study(root, row["study"])
    parts, variants = (list(study.parts), list(study.variants)) if study else ([], [])
    which = (_at(parts, row["part"]), row["part"], _at(variants, row["variant"]))
    return (row["machine"], row["study"], *which, row["repeat"])


def _at(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


@functools.cache
def _study(root: Path, name: str) -> Study | None:
    """A study as it is written; None of records that outlived theirs."""
    return load_study(root, name) if name in study_names(root) else None
