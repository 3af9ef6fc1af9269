"""Which run a person means: by its folder, its key, the name that it was given, or `study.variant`;
own runs first, then the recorded ones, which a machine's label tells apart (`h100/memory.bf16`).

A run that goes on, or was stopped before it could end, is found, too; its outcome is `unfinished`.
"""

import contextlib
import functools
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lsai_core.base.errors import UserError, hint
from lsai_lab.project.files import PAGE_FOLDER, one_line, shown_path
from lsai_lab.runs import schema
from lsai_lab.runs.difference import settings_apart
from lsai_lab.runs.records import Run, RunId, Summary, damaged_run, names_in, read_run
from lsai_lab.runs.schema import read_as
from lsai_lab.runs.writer import holder_of

_TOLD = 8  # runs of which a word may be any
SHORTEST_KEY = 3  # so many letters of a key, at least


@dataclass(frozen=True)
class Found:
    """A run's folder and the words that mean it."""

    folder: Path
    names: tuple[str, ...]
    key: str
    given: frozenset[str] = frozenset()  # those of the names that a person gave


def find_folder(
    text: str, runs_root: Path, reports: Path | None = None, newest: bool = True
) -> Path:
    """The folder of the one run that `text` means; `reports`: also among the committed ones there.

    Of several runs that a person gave this name it is, after a line that says so, the `newest` of
    those that were executed, or, where none was, of those that are planned. UserError says what
    there is instead.
    """
    own = [_own(folder) for folder in begun(runs_root)]
    named = [run.folder for run in own if text in run.given]
    if newest:
        named = [folder for folder in named if has_begun(folder)] or named
    if len(named) > 1 and newest:
        return _newest(text, named)
    if (found := _only(text, own)) is not None:
        return found
    recorded = [] if reports is None else [*_recorded(reports)]
    if (found := _only(text, recorded)) is not None:
        return found
    known = [name for one in [*own, *recorded] for name in one.names]
    there = _within(text, known)
    said = f"; there are {', '.join(there)}" if there else hint(text, known)
    raise UserError(f"no run {text!r}{said}")


def _within(text: str, names: list[str]) -> list[str]:
    """Of a machine its studies, `h100/memory`, of its study the variants, `h100/memory.bf16`."""
    parts = (re.match(re.escape(text) + r"[/.][^/.]+", name) for name in names)
    return sorted({part[0] for part in parts if part})


def begun(runs_root: Path) -> list[Path]:
    """The folders of all own runs that were planned or have ended, sorted."""
    names = ("run.json", "summary.json")
    return sorted({path.parent for name in names for path in runs_root.glob(f"*/*/{name}")})


def opened(folder: Path, machine: str | None = None) -> Run:
    """The record in `folder` as far as it is there: without a summary its outcome is
    `unfinished`."""
    try:
        return read_run(folder, machine)
    except FileNotFoundError:
        pass
    try:
        plan = read_as(folder / "run.json", schema.Plan).model_dump()
        known = schema.read_as(folder / "run.json", _Begun)
    except FileNotFoundError:
        raise UserError(f"{one_line(str(folder))} is no run: there is no run.json") from None
    except UserError as error:
        return damaged_run(folder, str(error))
    summary = Summary(
        known.id, known.kind, "unfinished", _reason(folder), "", 0.0, plan["command"], {}
    )
    run = Run(folder, machine or "this machine", summary)
    if machine is None:
        with contextlib.suppress(UserError):  # it may be half written
            run.machine = run.env.get("machine") or run.machine
    return run


def _since(folder: Path) -> float:
    """When a run was started, which looking at it does not change; of one that was not, when it was
    planned."""
    started = opened(folder).summary.started if has_begun(folder) else ""
    with contextlib.suppress(TypeError, ValueError):
        return datetime.fromisoformat(started).timestamp()
    return (folder / "run.json").stat().st_mtime


def _newest(text: str, folders: list[Path]) -> Path:
    """The run of these that was started, or else planned, last, after a line that says so."""
    newest = max(folders, key=_since)
    tell_once(f"{len(folders)} runs are called {text!r}; this is the newest, {newest.name}")
    return newest


@functools.cache
def tell_once(line: str) -> None:
    """Print a line, once in this process: in a notebook below the cell, else as a warning."""
    print(line, file=sys.stdout if "IPython" in sys.modules else sys.stderr)


def say(line: str) -> None:
    """Print a line, once; not where a notebook is executed as a page."""
    if PAGE_FOLDER not in os.environ:
        tell_once(line)


@dataclass
class _Begun:
    """What `run.json` says of which run it is."""

    id: RunId
    kind: str


def machine_of(folder: Path) -> str | None:
    """The label of the machine whose recorded run this is; None for an own run."""
    return folder.parts[-3] if "recorded" in folder.parts[-4:-3] else None


def repeats_of(run: Run) -> list[Run]:
    """The runs beside this one that ended ok and are repeats of it, itself among them: the same
    study, variant, part and settings but for the seed. This one alone if it did not end ok."""
    if run.summary.outcome != "ok":
        return [run]
    one, found = run.summary.id, []
    for path in sorted(run.folder.parent.glob(f"{one.variant}*/summary.json")):
        other = opened(path.parent, machine_of(path.parent))
        same = _repeated(other.summary.id) == _repeated(one) and other.summary.outcome == "ok"
        if same and _unseeded(other) == _unseeded(run):
            found.append(other)
    return sorted(found, key=lambda each: each.summary.id.repeat)


def which_repeat(run: Run, repeats: list[Run]) -> str:
    """Which of these repeats the run is, `, seed 0, one of 3 repeats`; empty if it is the only
    one."""
    return f", {seed_of(run)}, one of {len(repeats)} repeats" if len(repeats) > 1 else ""


def seed_of(run: Run) -> str:
    """What tells a run from its repeats: `seed 0`; of one without a seed `repeat 0`, as the column
    counts."""
    seed = run.config.get("seed")
    return f"repeat {run.summary.id.repeat}" if seed is None else f"seed {seed}"


def _repeated(which: RunId) -> tuple[str, str, str]:
    return which.study, which.variant, which.part


def _unseeded(run: Run) -> dict[str, object]:
    return {key: value for key, value in run.config.items() if key != "seed"}


def going_on(folder: Path) -> bool:
    """Whether a process on this machine is executing the run in `folder`."""
    if (folder / "summary.json").exists() or not has_begun(folder):
        return False
    holder = holder_of(folder)
    pid = holder.get("pid")
    if holder.get("host") != platform.node() or type(pid) is not int:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def has_begun(folder: Path) -> bool:
    """Whether the run in `folder` was executed, not only planned: its machine is known then."""
    return any((folder / name).exists() for name in ("env.json", "summary.json"))


def _reason(folder: Path) -> str:
    if not has_begun(folder):
        return "it was planned and never executed"
    return "it goes on" if going_on(folder) else "it was stopped before it could end"


def given_names(folder: Path) -> list[str]:
    """What a person called the run in `folder`."""
    try:
        return names_in(read_as(folder / "run.json", schema.Plan).model_dump())
    except (FileNotFoundError, UserError):
        return []


def _own(folder: Path) -> Found:
    name, _, key = folder.name.rpartition("-")
    # Older versions let a person call a run as a recorded one is addressed.
    given = [called for called in given_names(folder) if "/" not in called]
    others = [", ".join(given)] if len(given) > 1 else []
    names = (*given, *others, f"{folder.parent.name}.{name}", folder.name)
    return Found(folder, names, key, frozenset((*given, *others)))


def _recorded(reports: Path) -> Iterator[Found]:
    for path in sorted((reports / "recorded").glob("*/*/*/summary.json")):
        folder = path.parent
        (machine, study), (name, _, key) = folder.parts[-3:-1], folder.name.rpartition("-")
        yield Found(folder, (f"{machine}/{study}.{name}", f"{study}.{name}", folder.name), key)


def _told_apart(runs: list[Found]) -> list[str]:
    """The keys of the newest of these own runs, those with a name first, each with its name and the
    settings that most of the others do not have."""
    records = {run: opened(run.folder) for run in runs}
    apart = settings_apart(records.values())
    counts = Counter(item for settings in apart.values() for item in settings.items())
    told = []
    by_age = sorted(runs, key=lambda run: records[run].summary.started, reverse=True)
    for run in sorted(by_age, key=lambda run: not run.given)[:_TOLD]:
        settings = apart[run.folder].items()
        rare = [f"{k}={value}" for k, value in settings if counts[k, value] <= len(runs) / 2]
        about = ", ".join([*sorted(run.given), *rare])
        told.append(f"{run.key} ({about})" if about else run.key)
    return [*told, *([f"{len(runs) - _TOLD} more"] if len(runs) > _TOLD else [])]


def _only(text: str, runs: list[Found]) -> Path | None:
    """The run that `text` names, else the one whose key begins so; UserError if several do."""
    here = shown_path(Path(text).absolute())
    found = [run for run in runs if text in run.names or shown_path(run.folder.absolute()) == here]
    if not found and len(text) >= SHORTEST_KEY:
        found = [run for run in runs if run.key.startswith(text)]
    if len(found) > 1:  # what was only planned stands behind what was executed
        found = [run for run in found if has_begun(run.folder)] or found
    if len(found) > 1:
        recorded = any("/" in run.names[0] for run in found)
        others = [run.names[0] for run in found] if recorded else _told_apart(found)
        by = "its machine" if recorded else "its key"
        lines = "".join(f"\n  {other}" for other in others)
        raise UserError(f"{text!r} means several runs; choose one by {by}:{lines}")
    return found[0].folder if found else None
