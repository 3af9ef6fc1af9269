"""Records: the plain files in which a run keeps what it was and what it found.

    runs/<study>/<name>-<key>/config.json     the resolved config (what was asked)
                              env.json        machine and software (where it ran)
                              metrics.jsonl   one line per step (how it went)
                              kernels.json    the kernels with the most time (traced runs)
                              summary.json    outcome and results (what came out); written last
                              notebook.ipynb  the executed run notebook: this run's own page

`<name>` is the variant, with `.<part>` for parts other than `train` and `.r<N>` for repeats after the first. `<key>` is the
run key (see `run_key`). A folder without `summary.json` is a run that has not ended. Results are one flat mapping of names
to numbers or short strings, with the unit in the name (`_gib`, `_s`, `_ms`), so that a table is one line of pandas.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from lsai_core.errors import UserError
from lsai_core.files import read_jsonl, write_json

Outcome = Literal["ok", "oom", "failed", "timeout", "preempted", "unavailable"]
SCHEMA = 1
_REMEDY = "restore it from a copy, or delete its folder and run it again"


@dataclass(frozen=True)
class RunId:
    """Which run of which study: the names that a reader sees."""

    study: str
    variant: str
    part: str = "train"
    repeat: int = 0
    key: str = ""

    @property
    def name(self) -> str:
        part = "" if self.part == "train" else f".{self.part}"
        return f"{self.variant}{part}" + (f".r{self.repeat}" if self.repeat else "")

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.key}"


@dataclass
class Summary:
    """`summary.json`: one finished run. `reason` says in one line why an outcome is not `ok`, `measured_as` (`study.name`) for
    which other study the run was executed, if it is a copy."""

    id: RunId
    kind: str
    outcome: Outcome
    reason: str | None
    started: str
    wall_s: float
    command: str
    code: dict[str, Any]
    results: dict[str, Any] = field(default_factory=dict)
    measured_as: str | None = None

    def write(self, folder: Path) -> None:
        value = {"schema": SCHEMA, **self.__dict__, "id": self.id.__dict__}
        write_json(folder / "summary.json", value)

    @staticmethod
    def read(folder: Path) -> Summary:
        """The summary in `folder`. Raises FileNotFoundError if the run has not ended, UserError if the file is damaged."""
        path = folder / "summary.json"
        value = _read_object(path)
        try:
            value.pop("schema")
            return Summary(**{**value, "id": RunId(**value["id"])})
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is no run summary of this version ({error}); {_REMEDY}") from None


# A run that ended like this is finished; any other is tried again, from its checkpoint if it has one.
FINAL: frozenset[Outcome] = frozenset({"ok", "oom"})
EARLIER = "earlier"  # in a run's folder: what it had found before it was repeated


def is_finished(folder: Path) -> bool:
    """True if the record in `folder` is complete and its outcome is one that a repetition would not change."""
    try:
        return Summary.read(folder).outcome in FINAL
    except (FileNotFoundError, NotADirectoryError, UserError):
        return False


def set_aside(folder: Path) -> None:
    """Make room for another attempt: a finished record moves into a folder below, the summary of another one goes.

    Checkpoints stay, so that an attempt that was stopped goes on.
    """
    if is_finished(folder):
        target = folder / EARLIER / Summary.read(folder).started.replace(":", "")
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name != "summary.json"):
            if path.name not in (EARLIER, ".lock"):
                path.rename(target / path.name)
    (folder / "summary.json").unlink(missing_ok=True)


@dataclass
class Run:
    """A finished run on disk, with its files read when asked for."""

    folder: Path
    machine: str
    summary: Summary

    @property
    def config(self) -> dict[str, Any]:
        return _read_object(self.folder / "config.json")

    @property
    def env(self) -> dict[str, Any]:
        return _read_object(self.folder / "env.json")

    @property
    def plan(self) -> dict[str, Any]:
        """`run.json`: how the run was planned; empty for a record without it."""
        path = self.folder / "run.json"
        return _read_object(path) if path.exists() else {}

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per training step (empty if the run wrote none); a torn last line is left out."""
        path = self.folder / "metrics.jsonl"
        return pd.DataFrame(read_jsonl(path) if path.exists() else [])

    @property
    def kernels(self) -> pd.DataFrame:
        """The kernels with the most time: name, class, ms and calls per step, longest first (empty if nothing was traced)."""
        path = self.folder / "kernels.json"
        return pd.DataFrame(_read_object(path)["kernels"] if path.exists() else [])

    @property
    def page(self) -> Path | None:
        path = self.folder / "notebook.ipynb"
        return path if path.exists() else None


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a record. Raises FileNotFoundError if there is none, UserError if it cannot be read as one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); {_REMEDY}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged (it holds no JSON object); {_REMEDY}")
    return value


def run_key(config: dict[str, Any], *facts: str) -> str:
    """Twelve hex digits over the resolved config and every other fact that can change the result (code, data, machine)."""
    text = json.dumps([config, *facts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def find_runs(root: Path, machine: str | None = None, study: str = "*") -> list[Run]:
    """All finished runs (of one study, or all) below `root` (`runs/` or `reports/recorded/<machine>/`), sorted by folder.

    `machine` is the label of the recorded folder; without it each run's own `env.json` names its machine.
    """
    runs = []
    for path in sorted(root.glob(f"{study}/*/summary.json")):
        run = Run(path.parent, machine or "", Summary.read(path.parent))
        run.machine = machine or run.env.get("machine", "this machine")
        runs.append(run)
    return runs


def recorded_runs(reports: Path) -> list[Run]:
    """Every committed run: `reports/recorded/<machine>/<study>/<run>/`."""
    return [
        run
        for folder in sorted((reports / "recorded").glob("*"))
        if folder.is_dir()
        for run in find_runs(folder, folder.name)
    ]


def runs_frame(runs: Iterable[Run]) -> pd.DataFrame:
    """One row per run: identity, outcome, `path`, and every result as a column."""
    return pd.DataFrame(
        [
            {
                "machine": run.machine,
                "study": run.summary.id.study,
                "variant": run.summary.id.variant,
                "part": run.summary.id.part,
                "repeat": run.summary.id.repeat,
                "key": run.summary.id.key,
                "kind": run.summary.kind,
                "outcome": run.summary.outcome,
                "reason": run.summary.reason,
                "started": run.summary.started,
                "wall_s": run.summary.wall_s,
                "path": str(run.folder),
                **run.summary.results,
            }
            for run in runs
        ]
    )


def over_repeats(metric: str, values: pd.Series) -> float:
    """One figure for a variant from its repeats: the mean for losses and perplexities, the median for everything else.

    Repeats differ in their seed. For quality the question is what to expect over seeds; for speed and memory it is the
    typical run, which one disturbed repeat must not move.
    """
    quality = metric.endswith(("_loss", "_perplexity"))
    return float(values.mean() if quality else values.median())
