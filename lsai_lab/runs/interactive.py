"""Runs in a notebook: what `lab.open_run(...)` gives, and how such a run shows itself."""

import contextlib
import itertools
import math
import re
import signal
import sys
from collections.abc import Iterable
from typing import Any

import pandas as pd

from lsai_core.base.errors import UserError, hint
from lsai_core.base.files import deep_merge, flatten, nested
from lsai_core.config.strict import Strict, validated
from lsai_lab.launch.stop import stop_requests
from lsai_lab.machine.environment import environment, fingerprint
from lsai_lab.project.files import parse_value, repo_root
from lsai_lab.runs.driver import run_one
from lsai_lab.runs.execute import ActiveRun, tell, write_plan
from lsai_lab.runs.notebook import RUN_LOG
from lsai_lab.runs.records import Summary, is_finished, read_metrics
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import PlannedRun
from lsai_lab.runs.writer import is_held, require_runs


class _Parameters(Strict):
    """What a run notebook can be given; papermill itself only warns of names that it does not
    know."""

    folder: str
    study: str
    variant: str
    part: str
    profile: str | None
    overrides: dict[str, Any]


class Results(dict[str, Any]):
    """A summary as a mapping; its `results` are a table, tries a second one."""

    def _repr_markdown_(self) -> str:
        end = (
            ""
            if self["outcome"] == "ok"
            else f"This run ended as **{self['outcome']}**: {_text(self['reason'])}\n\n"
        )
        results = {name: value for name, value in self["results"].items() if value is not None}
        text = end + _rows(
            ["result", "value"], [item for item in results.items() if not isinstance(item[1], list)]
        )
        for name, rows in results.items():
            if isinstance(rows, list) and rows and isinstance(rows[0], dict):
                heads = list(dict.fromkeys(key for row in rows for key in row))
                text += f"\n\n{name}:\n\n" + _rows(
                    heads, [[row.get(head) for head in heads] for row in rows]
                )
        return text + "\n"


class OpenRun(ActiveRun):
    """A run in a notebook: shown as its settings and machine, with `steps` as far as it came and
    `results` once it has ended."""

    def execute(self, again: bool = False) -> Summary:
        """Do the work unless it is already done, in a process of its own; returns the summary that
        is on disk afterwards.

        That process reads the code from the files that the run's key names. What this one imported
        before an edit, or changed in its modules, has no part in it. The stop button (Ctrl-C) ends
        a training at its next step, with a checkpoint; pressed twice, at once.

        `again` repeats a finished run; what it had found moves into `earlier/`. Raises UserError
        if another process is executing the run or something changed since it was opened, and
        KeyboardInterrupt once it was stopped.
        """
        if is_held(self.folder):  # by the driver, which did the work and makes the run's page
            summary = Summary.read(self.folder)
            self._say(summary, r"[^\n]*\r")  # of a progress bar the last state
            return summary
        if not again and (finished := self.finished()):
            return finished
        if changed := self.changed("was opened") or self._moved():
            raise UserError(f"{changed}; open the run again")
        run = PlannedRun(
            self.id,
            self.kind,
            self.config,
            self.label,
            math.inf,
            self.folder,
            self.code,
            self.machine,
            self.inputs,
        )
        with stop_requests(signal.SIGINT) as stop:
            summary = run_one(
                run,
                title="",
                root=repo_root(),
                data_root=self.data_root,
                command=self.command,
                stop=stop,
                again=again,
            )
        self._say(summary, r"[^\n]*\r[^\n]*\n?")  # the progress was seen
        if stop.number == signal.SIGINT:
            raise KeyboardInterrupt("execute() again goes on from the last checkpoint, if any")
        return summary

    def _say(self, summary: Summary, hidden: str) -> None:
        """Print what the run's process printed, without what matches `hidden`, and how it ended."""
        with contextlib.suppress(OSError):
            text = (self.folder / RUN_LOG).read_bytes().decode(errors="replace")
            print(said := re.sub(hidden, "", text), end="")
            if "outcome: " in said:
                return
        tell(summary)  # it was killed before it could say so

    def _moved(self) -> str | None:
        """One line if the process of its own would not find the machine that the key names."""
        now = fingerprint(environment())
        same = now == self.machine or not self.machine
        return None if same else f"the machine was {self.machine} and is {now}"

    def _repr_markdown_(self) -> str:
        facts = {
            key: value
            for key, value in flatten(environment()).items()
            if value not in (None, "", [])
        }
        title = (
            f"**{_text(self.label)}**: run `{self.id.folder}` of study `{self.id.study}`. "
            f"Command: `{self.command}`"
        )
        changed = flatten(self.config.model_dump(mode="json", exclude_defaults=True))
        settings, machine = (
            _rows(["setting", "value"], changed.items()),
            _rows(["fact", "value"], facts.items()),
        )
        where = "All other settings have their defaults; `run.config` shows them. Where it runs:"
        return f"{title}\n\n{settings}\n\n{where}\n\n{machine}\n"

    @property
    def steps(self) -> pd.DataFrame:
        """One row for each step, or for each point of a measurement, that is done."""
        return read_metrics(self.folder)

    @property
    def results(self) -> Results:
        """What came out; the notebook shows it as a table. UserError if the run has not ended."""
        try:
            return Results(Summary.read(self.folder).__dict__)
        except FileNotFoundError:
            words = "has no results yet: run.execute() does the work"
            raise UserError(f"{self.id.folder} {words}, run.steps shows what is done") from None

    def plot(self, *columns: str) -> None:
        """Draw columns of `steps` against the step; nothing for a run without steps."""
        steps = self.steps
        if names := [name for name in columns if name in steps]:
            size = (3.3 * len(names), 2.5)
            steps.plot(
                x="step", y=names, subplots=True, layout=(1, len(names)), figsize=size, marker="."
            )


def open_run(
    folder: str = "",
    *,
    study: str,
    variant: str,
    part: str,
    profile: str | None = None,
    overrides: dict[str, Any] | None = None,
) -> OpenRun:
    """The run that the driver planned in `folder` (seen from the project's root); with an empty
    `folder`, one planned here and now.

    `profile`: a name in params/profiles, `""` or None for this machine's. `overrides` are settings
    with dots (`{"optim.lr": 1e-3}`), as `--set` takes them, for a run planned here. Raises
    UserError for a wrong name or value, also of a parameter that papermill passed, and if another
    process is executing the run.
    """
    given = {"folder": folder, "study": study, "variant": variant, "part": part, "profile": profile}
    parameters = validated(
        _Parameters, {**given, "overrides": {} if overrides is None else overrides}, "parameters"
    )
    _refuse_unknown_parameters()
    session = Session(parameters.profile or None)
    require_runs(session.runs_root)
    if folder:
        return OpenRun(repo_root() / folder, session.data_root)
    changes: dict[str, Any] = {}
    for key, value in flatten(parameters.overrides).items():
        # As on the command line: papermill reads `1e-3` as YAML 1.1 does, as a string.
        changes = deep_merge(
            changes, nested(key, parse_value(value) if isinstance(value, str) else value)
        )
    plan = session.plan(study, only=[variant], parts=[part], overrides=changes)
    if not plan:
        known = ", ".join(session.study(study).measured(part))
        raise UserError(
            f"part {part} of study {study} does not measure {variant}; it measures {known}"
        )
    if not is_finished(plan[0].folder):
        changed = f", overrides {overrides}" if overrides else ""
        where = (
            f"study {study}, variant {variant}, part {part}, profile "
            f"{session.profile.profile}{changed}"
        )
        write_plan(plan[0], f"notebook, {where}")
    return OpenRun(plan[0].folder, session.data_root)


def _refuse_unknown_parameters() -> None:
    """UserError if papermill injected a name that the notebook's parameters cell, the one before
    it, does not have."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cells = shell.user_ns.get("In", []) if shell is not None else []
    for before, cell in itertools.pairwise(cells):
        if cell.startswith("# Parameters\n"):
            known, given = (
                re.findall(r"(?m)^(\w+)\s*(?::[^=]*)?=(?!=)", text) for text in (before, cell)
            )
            if unknown := [name for name in given if name not in known]:
                raise UserError(
                    f"the notebook has no parameter {unknown[0]!r}{hint(unknown[0], known)}"
                )


def _rows(heads: list[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *[[_text(item) for item in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Any) -> str:
    """One cell of a Markdown table; nothing in it is markup."""
    form = ",.5g" if isinstance(value, float) else "," if type(value) is int else ""
    short = "" if value is None else f"{value:{form}}" if form else str(value)
    return re.sub(r"([\\`*_{}\[\]<>#|$@~^])", r"\\\1", " ".join(short.split())[:200])
