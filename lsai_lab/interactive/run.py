"""One run in a notebook, own or recorded, planned, going on or ended: what `lab.open_run` and
`lab.find_run` give, and how it shows itself.

What draws is imported where it is drawn: to open and execute a run takes no plots.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from tokenizers import Tokenizer

from lsai_core.base.errors import UnknownName, UserError
from lsai_core.base.shown import Shown
from lsai_core.base.tables import WIDTH, Part, value, wrapped
from lsai_core.config.strict import Strict, flatten
from lsai_core.model.transformer import Transformer
from lsai_lab.interactive.models import Generated, generate, load_model, load_run_tokenizer
from lsai_lab.interactive.planning import checked_about
from lsai_lab.interactive.results import Ended, Results, unfolded
from lsai_lab.interactive.standing import address, figures, standing
from lsai_lab.launch.stop import Interrupted, stop_requests
from lsai_lab.machine.environment import environment, fingerprint
from lsai_lab.project.files import listed, repo_root
from lsai_lab.report import load
from lsai_lab.report.load import AnyRun, folder_of
from lsai_lab.runs import records
from lsai_lab.runs.described import Facts
from lsai_lab.runs.difference import overrides_in
from lsai_lab.runs.driver import run_one
from lsai_lab.runs.execute import ActiveRun, tell
from lsai_lab.runs.find import opened
from lsai_lab.runs.frames import Frame
from lsai_lab.runs.notebook import RUN_LOG
from lsai_lab.runs.older import config_in_todays_words
from lsai_lab.runs.records import Summary, annotate, name_in
from lsai_lab.runs.session import Session
from lsai_lab.runs.so_far import so_far
from lsai_lab.runs.study import PlannedRun
from lsai_lab.runs.writer import is_held

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lsai_lab.interactive.curves import LiveCurves
    from lsai_lab.report.show import Picture

_PHASES = ("forward", "backward", "optimizer")


class Run(Shown):
    """A run: shown as its settings and machine, with `steps` as far as it came and `results` once
    it has ended.

    What it is: `folder`, `id` (study, variant, part, repeat, key), `label`, `kind`, `name`, `tags`,
    `note`, `config`, `env`. How it went: `outcome`, `reason`, `state`, `steps`, `kernels`,
    `phases`, `results`, `plot()`, `timeline()`. What came out: `model`, `generate()`. To do it:
    `execute()`.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        found = opened(self.folder)
        self.id, self.kind = found.summary.id, found.summary.kind
        plan = found.plan
        self.label: str = plan.get("label") or self.id.variant
        self.command: str = plan.get("command") or found.summary.command

    def __setattr__(self, name: str, value: Any) -> None:
        if "command" in vars(self) and not hasattr(type(self), name) and name not in vars(self):
            said = "run.annotate(name=..., tags=..., note=...) says what it is called"
            raise UnknownName(f"a run has no {name!r} to set; {said}")
        super().__setattr__(name, value)

    def _elsewhere(self, name: str) -> str:
        if name == "memory":
            return "its peaks are by phase run.phases, by cause run.timeline()"
        if "command" in vars(self) and name in self._record.summary.results:
            return f"it is run.results.{name}"
        is_column = name in load.STEPS and name != "step"
        return f'it is run.steps["{name}"], step by step' if is_column else ""

    @property
    def _record(self) -> records.Run:
        """All files of the run as they are now; without an end its outcome is `unfinished`."""
        return opened(self.folder)

    @cached_property
    def config(self) -> Strict:
        """The settings of the run, with their defaults. UserError if today's words cannot say
        them."""
        return config_in_todays_words(self._record)

    @property
    def env(self) -> Facts:
        """The machine and the software that the run had; of one that has not begun, these here."""
        return Facts(self._record.env or environment())

    @property
    def name(self) -> str | None:
        """What a person called it, several names with commas: `lab.find_run(name)` opens it."""
        return name_in(self._record.plan)

    @property
    def tags(self) -> list[str]:
        """A person's tags."""
        return list(self._record.plan.get("tags", []))

    @property
    def note(self) -> str | None:
        """A person's note."""
        return self._record.plan.get("note")

    def annotate(self, *, name: Any = ..., tags: Any = ..., note: Any = ...) -> None:
        """Set `name`, `tags` or `note`; what is left out stays. UserError for anything but texts,
        and for a recorded run."""
        given = {"name": name, "tags": tags, "note": note}
        about = {key: value for key, value in given.items() if value is not ...}
        if self._is_recorded:
            raise UserError(f"{self.folder} is a recorded run; it keeps what it was recorded with")
        annotate(self.folder, **checked_about(about))

    @property
    def outcome(self) -> str:
        """`ok`, `oom`, `failed`, ...; `unfinished` if it has not ended."""
        return self._record.summary.outcome

    @property
    def reason(self) -> str | None:
        """Why it did not end well, or has not ended."""
        return self._record.summary.reason

    @property
    def state(self) -> str:
        """Where the run stands, in words."""
        return standing(self._record, self.steps, self._has_steps)

    @property
    def _has_steps(self) -> bool:
        return self.kind in load.TRAININGS

    @property
    def steps(self) -> pd.DataFrame:
        """One row for each step, as `lab.steps` gives it, or each point of a measurement so far."""
        rows = load.steps if self._has_steps else records.read_metrics
        return Frame(rows(self.folder))

    @property
    def kernels(self) -> pd.DataFrame:
        """The kernels with the most time. UserError if nothing was traced."""
        return load.kernels(self.folder)

    @property
    def phases(self) -> pd.DataFrame:
        """Peak memory (GiB) of each phase of a step and of the whole step. UserError if none was
        measured."""
        if not self._has_steps:
            raise UserError(
                f"{self.id} is of kind {self.kind}: no training, so no phases of a step"
            )
        results = self._record.summary.results
        names = {phase: f"mem_{phase}_peak_gib" for phase in _PHASES}
        names["whole step"] = "mem_peak_allocated_gib"  # all that other trainers' runs have
        rows = [(phase, results[name]) for phase, name in names.items() if name in results]
        if not rows:
            why = self.state
            if self.outcome == "ok":
                asked = self._record.config.get("profile", {}).get("memory_steps")
                why = "too few steps" if asked else "set profile.memory_steps above 0"
            raise UserError(f"{self.id.folder} measured no memory: {why}")
        return Frame(rows, columns=["phase", "peak_gib"])

    @property
    def results(self) -> Results:
        """What came out, by name, with `outcome`, `reason`, `started` and `wall_s`; the notebook
        shows it as a table; of a stopped run as far as it came. UserError for one that goes on."""
        try:
            return Results(Summary.read(self.folder), so_far(self._record))
        except FileNotFoundError:
            words = f"{self.id.folder} has no results yet: {self.state}"
            raise UserError(f"{words}; run.steps shows what is done") from None

    def plot(self, *columns: str, x: str = "step", y: str | Sequence[str] = ()) -> Figure | None:
        """Draw columns of `steps` (default: the loss and the speed), named one by one or as `y`,
        against the step or another column; of a run without training steps a line says so.
        UserError for an unknown column."""
        from lsai_lab.interactive.curves import curves

        if len(self.steps) and self._has_steps:
            return curves(self, y=[*columns, *listed(y)] or ("loss", "tokens_per_s"), x=x)
        why = f"has taken no step; {self.state}"
        if not self._has_steps:
            why = f"is of kind {self.kind}, no training; run.steps and run.results say the rest"
        print(f"nothing to draw: {self.id} {why}")
        return None

    def timeline(self) -> Picture:
        """The memory of a step by cause and its kernels, as far as they were recorded or can be
        simulated."""
        from lsai_lab.interactive.timeline import timeline

        return timeline(self)

    @property
    def model(self) -> Transformer:
        """The trained model. UserError if the run exported none (`checkpoint.export`)."""
        return load_model(self)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that was exported with the model."""
        return load_run_tokenizer(self)

    def generate(
        self,
        prompt: str,
        tokens: int = 40,
        *,
        temperature: float = 0.8,
        seed: int = 0,
        model: Transformer | None = None,
    ) -> Generated:
        """Text that the trained model writes after `prompt`; see `lab.generate`."""
        return generate(self, prompt, tokens, temperature=temperature, seed=seed, model=model)

    def execute(
        self, again: bool = False, live: bool | None = None, beside: Iterable[AnyRun] = ()
    ) -> Ended:
        """Do the work unless it is already done, in a process of its own; returns the summary that
        is on disk afterwards, shown as the table of its results.

        That process reads the code from the files that the run's key names. What this one imported
        before an edit, or changed in its modules, has no part in it. The stop button (Ctrl-C) ends
        a training at its next step, with a checkpoint; pressed twice, at once.

        `live`: draw loss and speed while a training goes on (default: where a notebook can show
        it), with the curves of the runs `beside`. `again` repeats a finished run; what it had found
        moves into `earlier/`. Raises UserError if another process is executing the run, it is a
        recorded one, or something changed since it was opened, and Interrupted (a
        KeyboardInterrupt) once it was stopped.
        """
        active = self._active()
        if is_held(self.folder):  # by the driver, which did the work and makes the run's page
            summary = Summary.read(self.folder)
            self._say(summary, r"[^\n]*\r")  # of a progress bar the last state
            return Ended(**vars(summary))
        if not again and (finished := active.finished()):
            return Ended(**vars(finished))
        if changed := active.changed("was opened") or self._moved(active):
            raise UserError(f"{changed}; open the run again")
        drawn = self._curves(beside) if self._has_steps and live is not False else None
        with stop_requests(signal.SIGINT) as stop, drawn or contextlib.nullcontext():
            summary = run_one(
                self._planned(active),
                title="",
                root=repo_root(),
                data_root=active.data_root,
                command=self.command,
                stop=stop,
                again=again,
                on_rows=drawn.update if drawn else None,
            )
        self._say(summary, r"[^\n]*\r[^\n]*\n?")  # the progress was seen
        if stop.number == signal.SIGINT:
            raise Interrupted(f"{self.state}; run.steps and run.plot() show what is done")
        return Ended(**vars(summary))

    def _curves(self, beside: Iterable[AnyRun]) -> LiveCurves | None:
        """What draws while the run goes on; None where no Jupyter kernel shows it."""
        others = [find_run(other) for other in beside]
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if getattr(shell, "kernel", None) is None:
            return None
        from lsai_lab.interactive.curves import LiveCurves

        return LiveCurves(self, others)

    @property
    def _is_recorded(self) -> bool:
        """Whether it is a record to be read, not a run of this laboratory's own."""
        folder = self.folder.absolute()
        return not (folder / "run.json").exists() or "recorded" in folder.parts[-4:-2]

    def _active(self) -> ActiveRun:
        """What can be executed. UserError for a recorded run."""
        if self._is_recorded:
            raise UserError(
                f"{self.id} is a recorded run, which stays as it is; the same variant in a size "
                f"for this machine: lab.open_run({self.id.study!r}, {self.id.variant!r}, "
                f"part={self.id.part!r}).execute()"
            )
        return self._opened

    @cached_property
    def _opened(self) -> ActiveRun:
        return ActiveRun(self.folder, Session().data_root)

    def _planned(self, active: ActiveRun) -> PlannedRun:
        return PlannedRun(
            self.id,
            self.kind,
            active.config,
            self.label,
            math.inf,
            self.folder,
            active.code,
            active.machine,
            active.inputs,
        )

    def _say(self, summary: Summary, hidden: str) -> None:
        """Print what the run's process printed, without what matches `hidden`, and how it ended."""
        with contextlib.suppress(OSError):
            text = (self.folder / RUN_LOG).read_bytes().decode(errors="replace")
            print(said := re.sub(hidden, "", text), end="")
            if "outcome: " in said:
                return
        tell(summary)  # it was killed before it could say so

    def _moved(self, active: ActiveRun) -> str | None:
        """One line if the process of its own would not find the machine that the key names."""
        now = fingerprint(environment())
        same = now == active.machine or not active.machine
        return None if same else f"the machine was {active.machine} and is {now}"

    def _parts(self) -> Iterable[Part]:
        """What it is and how it stands; settings and machine folded."""
        about: dict[str, Any] = {
            "state": self.state,
            "results": figures(self._record),
            "disturbed": self._record.summary.results.get("disturbed"),
            "overrides": overrides_in(self.command),
            "name": self.name,
            "tags": " ".join(self.tags),
        }
        about |= {"note": self.note, "folder": self.folder, "command": self.command}
        told = [(key, text) for key, text in about.items() if text not in (None, "")]
        yield Part(f"{self._called}: {address(self._record)}", rows=told)
        settings = self._settings()
        heads = ("setting", "value")
        yield Part(f"{len(settings)} settings", heads, settings, folded=True, by_row=True)
        yield replace(self.env._part(), title="The machine", folded=True)

    @property
    def _called(self) -> str:
        """Its label, which says what its variant is, and whether overrides made it another run."""
        return f"{self.label}, changed" if overrides_in(self.command) else self.label

    def _settings(self) -> list[tuple[str, Any]]:
        """The settings that differ from their defaults; all, where today's words differ."""
        try:
            return _given(flatten(self.config.model_dump(mode="json", exclude_defaults=True)))
        except UserError:
            return _given(flatten(self._record.config))

    def __repr__(self) -> str:
        record, changed = self._record, overrides_in(self.command)
        which = address(record) + (f" {self.name!r}" if self.name else "")
        told = (
            changed and f"overrides {changed}",
            value(self.state),
            figures(record),
            (why := record.summary.results.get("disturbed")) and f"disturbed: {why}",
            str(self.folder),
        )
        lines = [f"{which} ({self._called})", *filter(None, told)]
        short = [lines] if changed else [lines, lines[:-1], [which, *lines[1:-1]]]
        for each in map(", ".join, short):
            if len(each) < WIDTH:
                return each
        return wrapped("\n  ".join(lines), "    ")

    def _repr_markdown_(self) -> str:
        return unfolded(self._parts())


def find_run(which: AnyRun) -> Run:
    """The one run that `which` means: a row of `lab.load`, a run, a folder, its key or the
    beginning of it, the name that you gave it, `study.variant`, or with a machine's label a
    recorded one: `lab.find_run("h100/memory.bf16")`. UserError says what there is instead.

    >>> run = lab.find_run("h100/memory.bf16")
    >>> run.outcome, round(run.results.tokens_per_s)
    ('ok', 449552)
    """
    return which if isinstance(which, Run) else Run(folder_of(which))


def _given(facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in facts.items() if value not in (None, "", [])]
