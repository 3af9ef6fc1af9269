"""Records: the plain files in which a run keeps what it was and what it found.

    runs/<study>/<name>-<key>/config.json     the resolved config (what was asked)
                              env.json        machine and software (where it ran)
                              metrics.jsonl   one line per step (how it went)
                              kernels.json    all kernels of a step (traced runs; until 27 November
                                              2026 the 25 with the most time)
                              summary.json    outcome and results (what came out); written last
                              notebook.ipynb  the executed run notebook: this run's own page

`<name>` is the variant, with `.<part>` for parts other than `train` and `.r<N>` for repeats after
the first. A folder without `summary.json` is a run that has not ended. Results are one flat mapping
of names to numbers or short strings, the unit in the name. What each file may hold is in
`schema.py`. A record is read as a whole: where one of its files is anything else, the run is shown
with the outcome `damaged` and the reason, and all others go on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field

from lsai_core.base.errors import Preempted, Unavailable, UserError
from lsai_core.base.files import write_json
from lsai_core.base.plugins import own_fault
from lsai_lab.project.files import Name, named, one_line
from lsai_lab.runs import schema
from lsai_lab.runs.kernel_classes import in_todays_classes, in_todays_sums
from lsai_lab.runs.schema import Config, Results, Text, read_as, read_rows

if TYPE_CHECKING:  # pandas takes longer to import than most commands that read records take
    import pandas as pd

# The last two are no ends of a run: `damaged` is what a record that cannot be read is shown as,
# `unfinished` one without a summary.
Outcome = Literal[
    "ok", "oom", "failed", "timeout", "preempted", "unavailable", "damaged", "unfinished"
]


@dataclass(frozen=True)
class RunId:
    """Which run of which study: the names that a reader sees."""

    study: Name
    variant: Name
    part: Name = "train"
    repeat: Annotated[int, Field(ge=0)] = 0
    key: Annotated[str, Field(pattern=r"^[0-9A-Za-z]{0,40}$")] = ""

    @property
    def name(self) -> str:
        part = "" if self.part == "train" else f".{self.part}"
        return f"{self.variant}{part}" + (f".r{self.repeat}" if self.repeat else "")

    def __str__(self) -> str:
        return f"{self.study}.{self.name}"

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.key}"


@dataclass
class Summary:
    """`summary.json`: one finished run. `reason` says in one line why an outcome is not `ok`,
    `measured_as` (`study.name`) for which other study the run was executed, if it is a copy."""

    id: RunId
    kind: Name
    outcome: Outcome
    reason: Text | None
    started: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d[-+:T.Z\d]{0,40}$")]
    wall_s: Annotated[float, Field(ge=0, le=1e9)]
    command: Text
    code: Config = field(repr=False)
    results: Results = field(default_factory=dict, repr=False)
    measured_as: Text | None = None

    def write(self, folder: Path) -> None:
        write_json(folder / "summary.json", {"schema": 1, **self.__dict__, "id": self.id.__dict__})

    @staticmethod
    def read(folder: Path) -> Summary:
        """The summary in `folder`. Raises FileNotFoundError if the run has not ended, UserError if
        the file is damaged."""
        summary = read_as(folder / "summary.json", Summary)
        summary.results = in_todays_sums(summary.results, folder)
        return summary


# A run that ended like this is finished; any other is tried again, from its checkpoint if it has
# one.
FINAL: frozenset[Outcome] = frozenset({"ok", "oom"})
# of a folder: that of a run is longer than a name
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,220}")
EARLIER = "earlier"  # in a run's folder: what it had found before it was repeated


def is_finished(folder: Path) -> bool:
    """True if the record in `folder` is complete and its outcome is one that a repetition would not
    change."""
    try:
        return Summary.read(folder).outcome in FINAL
    except (FileNotFoundError, UserError):
        return False


def set_aside(folder: Path) -> None:
    """Make room for another attempt: a finished record moves into a folder below; of another one
    all but the summary stays."""
    if is_finished(folder):
        target = folder / EARLIER / Summary.read(folder).started.replace(":", "")
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name != "summary.json"):
            if path.name in ("config.json", "run.json"):  # what is to be done stays
                shutil.copy2(path, target)
            elif path.name not in (EARLIER, ".lock"):
                path.rename(target / path.name)
    (folder / "summary.json").unlink(missing_ok=True)


@dataclass
class Run:
    """A finished run on disk, with its files read when asked for."""

    folder: Path
    machine: str
    summary: Summary
    profile: str | None = None  # of an own run: whose plan it is in, where that is not the usual

    @property
    def config(self) -> dict[str, Any]:
        return self._object("config.json", Config)

    @property
    def env(self) -> dict[str, Any]:
        return self._object("env.json", schema.Environment)

    @property
    def plan(self) -> dict[str, Any]:
        """`run.json`: how the run was planned, and what a person called it; empty for a record
        without it."""
        return self._object("run.json", schema.Plan)

    @property
    def label(self) -> str:
        """What the study called the run's variant when it was planned."""
        return str(self.plan.get("label") or self.summary.id.variant)

    def _has(self, name: str) -> bool:
        """Whether there is such a file to read: of a damaged record there is none."""
        path = self.folder / name
        return self.summary.outcome != "damaged" and (path.exists() or path.is_symlink())

    def _object(self, name: str, kind: Any) -> dict[str, Any]:
        """A file of the record; empty if there is none, and of a damaged record."""
        if not self._has(name):
            return {}
        found = read_as(self.folder / name, kind)
        return found if isinstance(found, dict) else found.model_dump(exclude_unset=True)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`: none if the run wrote none, or if it is a link, which may
        lead anywhere."""
        path = self.folder / "metrics.jsonl"
        if not self._has(path.name) or path.is_symlink():
            return []
        kind, is_whole = self.summary.kind, self.summary.outcome == "ok"
        return read_rows(
            path, kind if is_whole or kind not in ("train", "peer") else "", not is_whole
        )

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per training step (empty if the run wrote none); a torn last line is left out."""
        return _frame(self.rows)

    @property
    def kernels(self) -> pd.DataFrame:
        """The kernels with the most time: name, class, ms and calls per step, longest first (empty
        if nothing was traced)."""
        there = self._has("kernels.json")
        found = read_as(self.folder / "kernels.json", schema.Kernels).kernels if there else []
        return _frame(in_todays_classes(found))


def read_metrics(folder: Path) -> pd.DataFrame:
    """One row per training step of the run in `folder`, ended or not (empty if it wrote none); a
    torn last line is left out."""
    path = folder / "metrics.jsonl"
    there = path.exists() and not path.is_symlink()
    return _frame(read_rows(path, "", may_be_cut=True) if there else [])


def read_run(folder: Path, machine: str | None = None) -> Run:
    """The record in `folder`; one that cannot be read has the outcome `damaged` and says why.
    `machine`: see `find_runs`.

    Raises FileNotFoundError if the run has not ended.
    """
    try:
        run = Run(folder, named(machine or "none"), Summary.read(folder))
        place = (run.summary.id.study, run.summary.id.folder)
        if place != folder.absolute().parts[-2:]:
            raise UserError(
                f"{one_line(str(folder / 'summary.json'))} is of another run, {'/'.join(place)}"
            )
        run.machine = machine or run.env.get("machine") or "this machine"
        # whoever reads them later need not expect an error
        _ = run.config, run.env, run.plan, run.rows, run.kernels
        return run
    except FileNotFoundError:
        raise
    except (UserError, ValueError, OSError) as error:
        return damaged_run(folder, str(error), machine or "unknown")


def damaged_run(folder: Path, reason: str, machine: str = "unknown") -> Run:
    """What a record that cannot be read is shown as; nothing more is read of it."""
    name, _, key = as_name(folder.name).rpartition("-")
    run_id = RunId(as_name(folder.parent.name), name, key=key)
    return Run(
        folder,
        as_name(machine),
        Summary(run_id, "unknown", "damaged", one_line(reason), "", 0.0, "", {}),
    )


def as_name(text: str) -> str:
    """A folder's name, if it is a name; else something like it that no run has."""
    if _NAME.fullmatch(text):
        return text
    digest = hashlib.sha256(os.fsencode(text)).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', text)[:80]}_{digest}"


def run_key(config: dict[str, Any], *facts: str) -> str:
    """Twelve hex digits over the resolved config and every other fact that can change the result
    (code, data, machine)."""
    text = json.dumps([config, *facts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def annotate(folder: Path, **about: Any) -> None:
    """Set what a person calls the run in `folder` (`name`, `note`, `tags`), if it was begun."""
    path = folder / "run.json"
    if path.exists():
        given = about | ({"also_named": []} if "name" in about else {})
        write_json(path, json.loads(path.read_bytes()) | given)


def call(folder: Path, about: Mapping[str, Any]) -> None:
    """Add to what a person calls the run in `folder`: a run that is used again, under another name
    or with other tags, keeps its own, too; notes become one, `; ` between them."""
    path = folder / "run.json"
    if not about or not path.exists():
        return
    plan = json.loads(path.read_bytes())
    names = list(dict.fromkeys([*names_in(plan), *filter(None, [about.get("name")])]))
    notes = list(dict.fromkeys(filter(None, [plan.get("note"), about.get("note")])))
    plan["name"], plan["also_named"] = (names[0] if names else None), names[1:]
    plan["tags"] = list(dict.fromkeys([*plan.get("tags", []), *about.get("tags", [])]))
    plan["note"] = "; ".join(notes) or None
    write_json(path, plan)


def names_in(plan: Mapping[str, Any]) -> list[str]:
    """The names that a person gave a run, in `run.json`, the first one first."""
    return [name for name in (plan.get("name"), *plan.get("also_named", [])) if name]


def name_in(plan: Mapping[str, Any]) -> str | None:
    """The names that a person gave a run as one text; None without one."""
    return ", ".join(names_in(plan)) or None


def find_runs(root: Path, machine: str | None = None, study: str = "*") -> list[Run]:
    """All finished runs (of one study, or all) below `root` (`runs/` or
    `reports/recorded/<machine>/`), sorted by folder.

    `machine` is the label of the recorded folder; without it each run's own `env.json` names its
    machine.
    """
    folders = [path.parent for path in sorted(root.glob(f"{study}/*/summary.json"))]
    return [replace(_read_once(folder, machine, stamp(folder))) for folder in folders]


Stamp: TypeAlias = tuple[tuple[str, int, int, int], ...]


def stamp(folder: Path) -> Stamp:
    """What changes with any file of the folder: name, size, and when it was written and moved."""
    found = []
    for entry in os.scandir(folder) if folder.is_dir() else ():
        try:
            facts = os.stat(entry.path)
        except OSError:  # a link that leads nowhere
            facts = entry.stat(follow_symlinks=False)
        found.append((entry.name, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns))
    return tuple(sorted(found))


@functools.lru_cache(maxsize=4096)
def _read_once(folder: Path, machine: str | None, _stamp: Stamp) -> Run:
    """`read_run`, which checks every file of the record: once, as long as no file changes."""
    return read_run(folder, machine)


def recorded_runs(reports: Path, study: str = "*") -> list[Run]:
    """Every committed run (of one study, or all): `reports/recorded/<machine>/<study>/<run>/`."""
    folders = [folder for folder in sorted((reports / "recorded").glob("*")) if folder.is_dir()]
    return [run for folder in folders for run in find_runs(folder, folder.name, study)]


def runs_frame(runs: Iterable[Run]) -> pd.DataFrame:
    """One row per run: identity, outcome, `path`, and every result as a column."""
    names = ("kind", "outcome", "reason", "started", "wall_s")
    rows = []
    for run in runs:
        facts = {name: getattr(run.summary, name) for name in names} | {
            "path": one_line(str(run.folder))
        }
        rows.append(
            {"machine": run.machine, **run.summary.id.__dict__, **facts, **run.summary.results}
        )
    return _frame(rows)


def _frame(rows: Iterable[Mapping[Any, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows))


# What allocators say when memory is out and they do not raise an error of their own type.
_MEMORY_WORDS = re.compile(
    r"out of memory|can('|no)t allocate memory|not enough memory|bad_alloc|alloc_failed", re.I
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's, the CPU allocator's and Python's out-of-memory errors, and for what was
    raised from one."""
    return _full_memory(error) is not None


def _full_memory(error: BaseException | None) -> BaseException | None:
    """`error`, or what it was raised from (a pipeline's schedule raises errors of its own), if it
    says that memory is out."""
    while error is not None and not _says_full(error):
        error = error.__cause__
    return error


def _says_full(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # if nothing imported it, nothing raised its error
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    if isinstance(error, SystemError):  # C code that got no memory and did not say so
        return "without exception set" in str(error)
    return isinstance(error, RuntimeError) and bool(_MEMORY_WORDS.search(str(error)))


def outcome_of(error: BaseException) -> tuple[Outcome, str]:
    """The outcome and one line of reason for a run that raised `error`."""
    full = _full_memory(error)
    line = " ".join(str(full or error).split())[:500] or type(error).__name__
    if full is not None:
        return "oom", line
    known: dict[type[Exception], Outcome] = {
        Unavailable: "unavailable",
        Preempted: "preempted",
        UserError: "failed",
    }
    found = next((outcome for cls, outcome in known.items() if isinstance(error, cls)), None)
    if found:
        return found, line
    return "failed", own_fault(error) or f"{type(error).__name__}: {line}"
