"""A sweep by hand: variants of a study under every combination of some settings."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_core.base.errors import UserError
from lsai_core.config.strict import deep_merge
from lsai_lab.interactive.planning import about, as_nested, first_part, plain
from lsai_lab.launch.stop import Interrupted, Stopped
from lsai_lab.project.files import listed
from lsai_lab.report.load import frame_of_runs
from lsai_lab.runs.find import say
from lsai_lab.runs.records import call
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import PlannedRun

MOST = 1000  # runs: more are a slip
_FEW = 5  # timed steps


def sweep(
    study: str,
    variants: str | Sequence[str],
    over: Mapping[str, Any],
    *,
    part: str = "",
    profile: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    name: str | None = None,
    tags: Sequence[str] = (),
    note: str | None = None,
) -> pd.DataFrame:
    """Run the variants under every combination of settings, `over={"seq_len": [128, 256]}` (a
    single value is one), what is finished being reused, and return one row a run: those settings
    first, then the columns of `lab.load` with `mine=True`.

    `variants`: one, several, or patterns of them. The other arguments are those of `lab.open_run`,
    for all. All settings are checked before the first run begins; a run that fails is a row with
    its outcome. Over `seed` the repeats that a study plans are left out: they are the next seeds.
    The stop button ends the training that goes on at its next step; the same call goes on from
    there. Raises UserError for a wrong name or value.

    >>> rates = {"optim.lr": [1e-3, 3e-3]}
    >>> tries = lab.sweep("memory", "bf16", rates, profile="quick", overrides={"steps": 4})
    [1/2] memory.bf16, optim.lr=0.001 started
    ...
    outcomes: 2 ok
    speeds of 2 of 2 runs are of 1 timed step: so few do not compare; set more steps
    >>> tries["optim.lr"].tolist(), tries["outcome"].unique().tolist()
    ([0.001, 0.003], ['ok'])
    """
    session, told = Session(profile or None), about(name, tags, note)
    planned = plan_sweep(session, study, listed(variants), over, part, overrides or {})
    plan = [run for run, _ in planned]
    try:
        session.run(plan, called=called(planned), stopped_by=[signal.SIGINT])
    except Stopped as stopped:
        rest = "lab.sweep with the same arguments goes on from there"
        raise Interrupted(f"stopped; {stopped.left} of {len(plan)} runs are left: {rest}") from None
    finally:
        for run in plan:
            call(run.folder, told)
    return frame_of(planned)


def plan_sweep(
    session: Session,
    study: str,
    variants: Sequence[str],
    over: Mapping[str, Any],
    part: str,
    overrides: Mapping[str, Any],
) -> list[tuple[PlannedRun, dict[str, Any]]]:
    """The planned runs, each with the settings that were varied; of combinations that come to the
    same run the first. UserError for a wrong setting."""
    if not isinstance(over, Mapping):
        raise UserError(
            f'a sweep is over settings with values, {{"seq_len": [128, 256]}}, not {over!r}'
        )
    axes = {key: _values(values) for key, values in over.items()}
    if not axes or not all(axes.values()):
        raise UserError('a sweep wants settings with values, such as {"seq_len": [128, 256]}')
    if (number := math.prod(map(len, axes.values()))) > MOST:
        raise UserError(f"that is {number:,} combinations; a sweep takes at most {MOST:,}")
    part = part or first_part(session.study(study), variants)
    planned: dict[Path, tuple[PlannedRun, dict[str, Any]]] = {}
    for values in itertools.product(*axes.values()):
        varied = dict(zip(axes, values, strict=True))
        changes = deep_merge(as_nested(overrides), as_nested(varied))
        for run in session.plan(study, only=list(variants), parts=[part], overrides=changes):
            if run.id.repeat == 0 or "seed" not in axes:  # repeats are runs with the next seeds
                planned.setdefault(run.folder, (run, varied))
    if not planned:
        raise UserError(f"part {part} of study {study} measures none of {', '.join(variants)}")
    return list(planned.values())


def called(planned: Sequence[tuple[PlannedRun, dict[str, Any]]]) -> dict[Path, str]:
    """What each run is called while it goes on, by its folder: with the settings that vary."""
    return {
        run.folder: ", ".join([run.name, *(f"{key}={value}" for key, value in varied.items())])
        for run, varied in planned
    }


def _values(given: Any) -> list[Any]:
    """The values of a setting; a number or a text is one."""
    many = isinstance(given, Iterable) and not isinstance(given, str | Mapping)
    return [plain(each) for each in given] if many else [plain(given)]


def frame_of(planned: Sequence[tuple[PlannedRun, dict[str, Any]]]) -> pd.DataFrame:
    """One row a run: its label, what was varied, then the columns of `lab.load`."""
    frame = frame_of_runs([run.folder for run, _ in planned])
    for key in reversed(planned[0][1]):
        values = [varied[key] for _, varied in planned]
        frame = frame.drop(columns=key, errors="ignore")
        frame.insert(0, key, pd.Series(values))
    frame.insert(0, "label", frame.pop("label"))
    _say_few_steps(frame)
    return frame


def _say_few_steps(frame: pd.DataFrame) -> None:
    """Print of how few steps speeds are, where these are too few to compare."""
    timed = frame["steps_timed"].dropna() if "steps_timed" in frame else pd.Series(dtype=float)
    few = timed[timed < _FEW]
    if len(few):
        ends = dict.fromkeys((f"{few.min():.0f}", f"{few.max():.0f}"))
        steps = "1 timed step" if [*ends] == ["1"] else f"{' to '.join(ends)} timed steps"
        rest = "so few do not compare; set more steps"
        say(f"speeds of {len(few)} of {len(frame)} runs are of {steps}: {rest}")
