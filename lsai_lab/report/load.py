"""Records as frames: one row a run, one row a step, one row a kernel.

`load` gives the runs of a current plan on this machine and the committed ones, so that a run by
hand with other settings never slips into a table. It says how many own runs it leaves out.
`load(study, mine=True)` gives every own run instead, with a column that says in which settings it
differs from what its study plans.

Wherever one run is asked for, it can be a row of `load`, a run object, its folder, or words that
mean it (`lsai_lab.runs.find`).

A record may come from anywhere: `lsai_lab.runs.plain` says how its text stands in a frame, and in
the Markdown that is made of one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import pandas as pd

from lsai_core.base.errors import UserError, hint, no_column
from lsai_core.config.strict import flatten
from lsai_core.profiling.gpus import GPUS
from lsai_lab.project.files import listed, reading_root, shown_path
from lsai_lab.runs.departures import departures
from lsai_lab.runs.difference import planned_profile
from lsai_lab.runs.find import begun, find_folder, has_begun, machine_of, opened, say
from lsai_lab.runs.frames import NOTE, Frame
from lsai_lab.runs.plain import in_frame
from lsai_lab.runs.records import (
    Run,
    damaged_run,
    find_runs,
    name_in,
    read_metrics,
    read_run,
    recorded_runs,
)
from lsai_lab.runs.schema import ABOUT, BOTH, DERIVED, FIRST, IDENTITY
from lsai_lab.runs.session import Session, current_runs
from lsai_lab.runs.shown_columns import kept_words
from lsai_lab.runs.story import place, tells
from lsai_lab.runs.study import labels, study_names

OWN = "own"
LAST_STEPS = 10  # whose mean is the training loss
TRAININGS = ("train", "peer", "unknown")  # kinds of runs that take training steps
# What every step has, and the sums over them.
_LATER = {"time": 0, "error": 1, "backend": 2}  # kinds of points: whether it is there comes last
STEPS = ("step", "loss", "step_ms", "tokens_in_step", "tokens", "elapsed_s")
_GPU = {gpu.driver_name: gpu.name for gpu in GPUS}


class SupportsFolder(Protocol):
    """A run object: it knows its folder."""

    @property
    def folder(self) -> Path: ...


# A row of `load`, a run object, a folder, or words that mean a run.
AnyRun: TypeAlias = str | Path | Mapping[str, Any] | pd.Series | SupportsFolder


def all_runs(runs: Sequence[Any]) -> list[AnyRun]:
    """Each of the runs that are named: a list stands for its items, a frame for its rows."""
    found: list[AnyRun] = []
    for one in runs:
        if isinstance(one, pd.DataFrame):
            found += one.to_dict("records")
        else:
            found += one if isinstance(one, list | tuple) else [one]
    return found


@functools.cache
def session() -> Session:
    """This process's session, for reading: `$LSAI_PROFILE`, else the profile of this machine."""
    return Session(os.environ.get("LSAI_PROFILE") or None, reading_root())


def load(*studies: str | Sequence[str], mine: bool = False) -> pd.DataFrame:
    """The runs of `studies` (none: of all), one row each: own runs first, each machine's in the
    order of the study.

    Own runs of every profile are there; one that is not this machine's usual stands in the name of
    the machine, so that runs of two sizes never count as repeats. With $LSAI_PROFILE own runs of
    that profile only. How many own runs are left out is printed.

    Columns: which run it is (`machine`, `own`, `study`, `variant`, `label`, `part`, `repeat`,
    `outcome`, `reason`, `key`, `kind`, `started`, `wall_s`, `run`) and what a person calls it
    (`profile`, `name`, `tags`, `note`); every result by its name, with the unit in it
    (`tokens_per_s`, `mem_peak_allocated_gib`); every config key with its dots (`optim.lr`,
    `model.n_layers`; `config.steps`, where results have such a name); the environment as
    `env.gpu`, `env.torch`. A result "none" is missing: `fp8_recipe.notna()` are the fp8 runs. What
    people look for first is in front.
    `main`: whether the run is one of those that tell the story: of each part of a study the
    committed ones of the machine that the study names (`recorded_on`), else of the one with the
    most runs (without any, all). `gpu` is a short name (`H100`, `CPU`), `label` the variant's name
    for people, `run` the run's folder, for `steps` and `kernels`. `mine=True`: every own run, the
    newest last, whatever its settings, no committed ones, and a column `differs`: in which
    settings, and which profile, from what its study plans on its machine. Raises UserError for an
    unknown study.

    >>> runs = lab.load("memory")
    >>> fast = runs[(runs["tokens_per_s"] > 5e5) & (runs["machine"] == "h200")]
    >>> sorted(fast["variant"].unique())
    ['bf16', 'flash_attn', 'flash_gradcp', 'window_256', 'window_512']
    """
    asked = [name for one in studies for name in listed(one)]
    names = _known(asked)
    every_profile = session().profile_name is None
    if not isinstance(mine, bool):
        raise UserError(f'mine is True or False: lab.load("memory", mine=True), not {mine!r:.80}')
    own = (
        sorted(find_runs(session().runs_root), key=lambda run: run.summary.started or "~")
        if mine
        else [run for name in names for run in current_runs(session(), name, every_profile)]
    )
    own = [run for run in own if not asked or run.summary.id.study in asked]
    _say_what_is_left_out(asked, {run.folder for run in own}, mine)
    committed = [] if mine else _committed_rows(names)
    there = {(row["study"], Path(row["run"]).name) for row in committed}
    own = [run for run in own if (run.summary.id.study, run.folder.name) not in there]
    rows = [_row(run, True) for run in own] + committed
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=[*IDENTITY, *ABOUT])
    more = {"differs": _differs(own, frame)} if mine else {}
    return _first_columns_first(frame.assign(main=tells(frame, session().root), **more))


def recorded(*studies: str | Sequence[str]) -> pd.DataFrame:
    """The committed runs of `studies` (none: of all), as `load` has them, and no run of yours: what
    the chapters tell, the same on every machine.

    >>> runs = lab.recorded("memory")
    >>> len(runs), bool(runs["own"].any())
    (99, False)
    """
    rows = _committed_rows(_known([name for one in studies for name in listed(one)]))
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(IDENTITY))
    return _first_columns_first(frame.assign(main=tells(frame, session().root)))


def _first_columns_first(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with what people look for first in its first columns, which it shows."""
    first = [name for name in FIRST if name in frame]
    return Frame(frame[[*first, *(name for name in frame if name not in first)]])


def _known(studies: Sequence[str]) -> Sequence[str | None]:
    """The names as given, or (None,) for all studies; UserError for one that there is not."""
    known = study_names(session().root)
    if unknown := [name for name in studies if name not in known]:
        raise UserError(f"there is no study {unknown[0]!r}{hint(unknown[0], known)}")
    return studies or (None,)


def _say_what_is_left_out(asked: Sequence[str], shown: set[Path], mine: bool) -> None:
    """Print how many own runs are not among `shown`, and where they are, once as long as that is
    so; not where a notebook is executed as a page."""
    begun_here = filter(has_begun, begun(session().runs_root))
    left = [folder for folder in begun_here if folder not in shown]
    left = [folder for folder in left if not asked or folder.parent.name in asked]
    ended = sum((folder / "summary.json").exists() for folder in left)
    parts = [f"{ended} ended with other settings, code or machine (mine=True)"] * bool(ended)
    parts += [f"{len(left) - ended} have not ended"] * (ended < len(left))
    if left:
        say(f"own runs not shown: {'; '.join(parts)}; lab.find_run(...) opens one")


def names_of_studies() -> list[str]:
    """The names of the laboratory's studies."""
    return study_names(session().root)


def steps(run: AnyRun) -> pd.DataFrame:
    """One row per training step of a run (one that goes on or was stopped has the rows so far):
    loss, step_ms, tokens_per_s, memory; `tokens` and `elapsed_s`,
    both up to the end of the step (the sum of the steps' own times, without validation). UserError
    for a run that is no training; one of many records (`runs.to_dict("records")`) gives an empty
    frame, and a line says why.

    >>> steps = lab.steps("h100/memory.bf16")
    >>> print(len(steps), round(steps["loss"].iloc[0], 3), round(steps["elapsed_s"].iloc[-1], 1))
    400 9.305 16.1
    """
    folder = folder_of(run)
    found = opened(folder)
    frame = _rows(found) if found.summary.outcome != "unfinished" else read_metrics(folder)
    if not {"tokens_in_step", "step_ms"} <= {*frame}:
        if found.summary.kind not in TRAININGS:
            kind = f"of kind {found.summary.kind}, no training"
            said = f"{found.summary.id} is {kind}; lab.points(run) has what it measured"
            _refuse(run, said)
        return Frame(columns=list(STEPS))
    frame["tokens"] = frame["tokens_in_step"].cumsum()
    frame["elapsed_s"] = frame["step_ms"].cumsum() / 1e3
    first = [name for name in STEPS if name in frame]
    return Frame(frame[[*first, *(name for name in frame if name not in first)]])


def points(runs: pd.DataFrame | AnyRun, keep: str | Sequence[str] = ()) -> pd.DataFrame:
    """What the benches (attention, context, gemm) measured in `runs` (rows of `load`, or one run):
    one row per point, good or not, those without a figure (which kernels there are) last. Columns:
    `machine`, `own`, `variant`, `repeat`, `run` and those of `keep` from the run's row; then the
    point's own, as the bench describes them, with its own `outcome` and `reason`. Empty if nothing
    was measured; a line says how many of `runs` are trainings, which have steps. UserError for one
    run that is a training, and for an unknown column.

    >>> points = lab.points("h100/gemm.machine.products")
    >>> print(round(points.query("way == 'bf16'")["tflops"].max()))
    713
    """
    if not isinstance(runs, pd.DataFrame):
        run = finished_run(runs)
        if run.summary.kind in TRAININGS:
            raise UserError(f"{run.summary.id} is a training; lab.steps(run) has its steps")
        runs = pd.DataFrame([_row(run, machine_of(run.folder) is None)])
    names = list(dict.fromkeys(("machine", "own", "variant", "repeat", "run", *listed(keep))))
    if len(runs) and (unknown := [name for name in names if name not in runs]):
        raise UserError(no_column(unknown[0], runs))
    if "kind" in runs and (trained := runs["kind"].isin(TRAININGS)).any():
        say(f"{trained.sum()} of {len(runs)} runs are trainings: lab.steps(run) has their steps")
        runs = runs[~trained]
    found = [
        _rows(finished_run(row)).assign(**{name: row[name] for name in names})
        for row in runs.to_dict("records")
    ]
    frame = pd.concat(
        [frame for frame in found if len(frame)] or [pd.DataFrame(columns=names)], ignore_index=True
    )
    if "measure" in frame:
        frame = frame.sort_values("measure", key=lambda each: each.map(_LATER), kind="stable")
    columns = [*names, *(name for name in frame.columns if name not in names)]
    return Frame(frame[columns].reset_index(drop=True))


def kernels(run: AnyRun) -> pd.DataFrame:
    """The kernels of a traced run: name, class, ms and calls per step, longest first. Records of
    before 27 November 2026 have the 25 with the most time: their classes sum up to less, and their
    `kernel_fsdp_copies_ms` of one GPU (up to 1.6 ms) is of fused kernels that are not among them.
    UserError for a run that was not traced; one of many records (`runs.to_dict("records")`) gives
    an empty frame, and a line says why.

    >>> found = lab.kernels("h200/speed.fp8.levers")
    >>> list(found)
    ['name', 'class', 'ms', 'calls']
    """
    found = finished_run(run)
    if len(found.kernels):
        kept = Frame(found.kernels.map(in_frame))
        kept.attrs[NOTE] = kept_words(kept, found.summary.results.get("gpu_busy_ms"))
        return kept
    how = 'overrides={"profile.trace": True}, or --set profile.trace=true'
    said = f"{found.summary.id} was not traced, so no kernels are known; use {how}"
    if found.config.get("profile", {}).get("trace"):
        note = found.summary.results.get("speed_note") or found.summary.reason
        said = f"{found.summary.id} ended before its traced steps: {note}"
    _refuse(run, said)
    return Frame(columns=["name", "class", "ms", "calls"])


def _refuse(run: AnyRun, why: str) -> None:
    """UserError for a run that was asked for; of one of a frame's records (`to_dict`), where others
    may have what is asked for, a line says why it has none."""
    if not isinstance(run, Mapping):
        raise UserError(why)
    say(why)


def _rows(run: Run) -> pd.DataFrame:
    return pd.DataFrame([in_frame(row) for row in run.rows])


def _committed_rows(names: Sequence[str | None]) -> list[dict[str, Any]]:
    """The rows of the committed runs of these studies, each machine's in the order of the study."""
    rows = (row for name in names for row in _committed(name))
    return sorted(rows, key=functools.partial(place, session().root))


@functools.cache
def _committed(study: str | None = None) -> list[dict[str, Any]]:
    runs = recorded_runs(session().root / "reports", study or "*")
    return [_row(run, False) for run in runs]


def _row(run: Run, own: bool) -> dict[str, Any]:
    summary, name = run.summary, run.summary.id
    # A variant that its study no longer has is called as its run was planned.
    label = labels(session().root, name.study, None).get(name.variant, in_frame(run.label))
    if own:  # a profile may name variants of its own
        here = labels(session().root, name.study, session().profile.profile)
        label = here.get(name.variant, label)
    identity = (
        machine_name(run) if own else run.machine,
        own,
        name.study,
        name.variant,
        label,
        name.part,
        name.repeat,
        summary.outcome,
        summary.reason,
        name.key,
        summary.kind,
        summary.started,
        summary.wall_s,
        str(run.folder),
        planned_profile(run),
        name_in(run.plan),
        " ".join(run.plan.get("tags", [])),
        run.plan.get("note"),
    )
    gpu = run.env.get("gpu") or "CPU"
    done = {} if summary.outcome == "ok" or "steps" in summary.results else _steps_done(run)
    row = (
        {"gpu": _GPU.get(gpu, gpu)}
        | done
        | {name: None if found == "none" else found for name, found in summary.results.items()}
        | dict(zip((*IDENTITY, *ABOUT), identity, strict=True))
    )
    for key, value in flatten(run.config).items():
        row[f"config.{key}" if key in row or key in (*DERIVED, *BOTH) else key] = value
    row |= {f"env.{key}": value for key, value in run.env.items() if key != "packages"}
    # The label is ours; a folder's name can be anything, and a frame holds UTF-8 only.
    return in_frame(row) | {"label": label, "run": shown_path(run.folder)}


def machine_name(run: Run) -> str:
    """What the machine of a run is called wherever one is shown: a label of records, or of an own
    run its name, with the profile where that is not the usual, so that runs of two sizes never
    count as repeats."""
    if machine_of(run.folder) is not None:
        return run.machine
    profile = run.profile or planned_profile(run)
    other = [profile] if profile not in (None, session().profile.profile) else []
    return f"{run.machine} ({', '.join([OWN, *other])})"


def _steps_done(run: Run) -> dict[str, float]:
    """How many steps a training did that did not end well, and its training loss so far: `steps`
    and `train_loss`, as of one that did."""
    if run.summary.kind not in TRAININGS:
        return {}
    losses = [row["loss"] for row in run.rows if isinstance(row.get("loss"), float)]
    last = losses[-LAST_STEPS:]
    return {"steps": len(run.rows)} | ({"train_loss": sum(last) / len(last)} if last else {})


def frame_of_runs(folders: Sequence[Path]) -> pd.DataFrame:
    """Own runs in these folders as rows of `load`, with the column `differs`."""
    runs = [opened(folder) for folder in folders]
    frame = pd.DataFrame([_row(run, True) for run in runs])
    return _first_columns_first(frame.assign(differs=_differs(runs, frame)))


def _differs(runs: Sequence[Run], frame: pd.DataFrame) -> pd.Series:
    """Of each row of these runs: in which settings they differ from what their study plans."""
    told = departures(runs, session())
    found = {str(folder): in_frame(", ".join(said)) for folder, said in told.items()}
    return frame["run"].map(found).fillna("")


def finished_run(run: AnyRun) -> Run:
    """A run as it was recorded. UserError if it has not ended."""
    if isinstance(run, Mapping) and run.get("outcome") == "damaged":
        return damaged_run(Path(run["run"]), str(run.get("reason")))
    folder = folder_of(run)
    if not (folder / "summary.json").exists():
        raise UserError(f"{folder} is no finished run; lab.steps shows what is done")
    return read_run(folder, machine_of(folder))


def folder_of(run: AnyRun) -> Path:
    """The folder of a run, ended or not. UserError if there is none like it."""
    found = run if isinstance(run, pd.DataFrame) else getattr(run, "folder", None) or run
    if isinstance(found, pd.DataFrame):
        if len(found) != 1:
            raise UserError(f"one run is wanted, and the frame has {len(found)} rows")
        found = found.iloc[0]
    if isinstance(found, (Mapping, pd.Series)):
        if "run" not in found:
            raise UserError("a run's row has a column `run`; take a row of lab.load(...)")
        found = found["run"]
    if not isinstance(found, (str, Path)):
        kind = type(found).__name__
        raise UserError(f"a run is a row of lab.load(...), a folder or a name, not {kind}")
    folder = Path(found)
    if any((folder / name).exists() for name in ("run.json", "summary.json")):
        return folder
    if found in names_of_studies():
        raise UserError(f"{found!r} is a study, and a run is wanted: a row of lab.load({found!r})")
    if isinstance(found, Path) or (os.sep in found and folder.exists()):
        words = "take a row of lab.load(...), or its column `run`"
        raise UserError(f"{folder} is no run; {words}")
    return find_folder(found, session().runs_root, session().root / "reports")
