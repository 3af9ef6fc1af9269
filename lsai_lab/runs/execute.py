"""Execute one run, in this process, which the driver started for it alone.

The run's folder says what to do (`run.json`, `config.json`). Whatever ends the work becomes an
outcome in `summary.json`, written last; a failed run raises nothing.
"""

import contextlib
import datetime
import io
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lsai_core.base.errors import Diverged, UserError
from lsai_core.base.files import write_json
from lsai_core.base.plugins import own_fault
from lsai_core.config.strict import Strict
from lsai_core.training.combinations import checked
from lsai_lab.data.prepare import prepared_id
from lsai_lab.machine.environment import environment
from lsai_lab.runs.disturbance import Quiet
from lsai_lab.runs.inputs import run_inputs
from lsai_lab.runs.kinds import Context, get_kind
from lsai_lab.runs.records import FINAL, Outcome, RunId, Summary, is_finished, outcome_of, set_aside
from lsai_lab.runs.study import PlannedRun
from lsai_lab.runs.writer import only_writer


def write_plan(run: PlannedRun, command: str) -> None:
    """Put into the run's folder what `ActiveRun` needs to execute it. UserError if another process
    is writing this run."""
    plan = {
        "id": run.id.__dict__,
        "kind": run.kind,
        "label": run.label,
        "command": command,
        "code": run.code,
    }
    with only_writer(run.folder, run.name):
        plan = _called(run.folder) | plan | {"machine": run.machine, "inputs": run.inputs}
        write_json(run.folder / "config.json", run.config.model_dump(mode="json"))
        write_json(run.folder / "run.json", plan)


def _called(folder: Path) -> dict[str, Any]:
    """What a person called the run in `folder` before, if it was planned before."""
    try:
        plan = json.loads((folder / "run.json").read_bytes())
        return {key: plan[key] for key in ("name", "also_named", "note", "tags") if key in plan}
    except (OSError, ValueError, TypeError):
        return {}


class ActiveRun:
    """A run that is about to be, or was, executed in `folder`."""

    def __init__(self, folder: Path | str, data_root: Path | str) -> None:
        self.folder, self.data_root = Path(folder), Path(data_root)
        try:
            plan, config = (
                json.loads((self.folder / name).read_bytes())
                for name in ("run.json", "config.json")
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.folder} holds no planned run ({error}); start runs with `lsai study`"
            ) from None
        self.id, self.kind, self.label = RunId(**plan["id"]), plan["kind"], plan["label"]
        self.command, self.code = plan["command"], plan["code"]
        self.machine: str = plan.get("machine", "")
        self.inputs: dict[str, str] = plan.get("inputs", {})
        self._planned_config = config
        where = str(self.folder / "config.json")
        self.config: Strict = checked(get_kind(self.kind).config_class(), config, where)

    def execute(self, again: bool = False) -> Summary:
        """Do the work unless it is already done; returns the summary that is on disk afterwards.

        `again` repeats a finished run; what it had found moves into `earlier/`. UserError if
        another process is executing it.
        """
        with only_writer(self.folder, str(self.id)):
            if not again and (finished := self.finished()):
                return finished
            set_aside(self.folder)
            return self._execute()

    def finished(self) -> Summary | None:
        """The summary of a finished run, after a line that says how to repeat it; else None."""
        if not is_finished(self.folder):
            return None
        repeat = "to repeat it: run.execute(again=True), or --again on the command line"
        print(f"{self.id.folder} is finished already, in {self.folder}; {repeat}")
        return Summary.read(self.folder)

    def _execute(self) -> Summary:
        started, clock, quiet = datetime.datetime.now(datetime.UTC), time.perf_counter(), Quiet()
        write_json(self.folder / "env.json", environment() | quiet.before)
        outcome, reason, results = self._work()
        if quiet.beside:
            results["ran_beside"] = quiet.beside
        results |= quiet.results(results) if results else {}
        seconds, when = round(time.perf_counter() - clock, 3), started.isoformat(timespec="seconds")
        summary = Summary(
            self.id, self.kind, outcome, reason, when, seconds, self.command, self.code, results
        )
        summary.write(self.folder)
        tell(summary)
        return summary

    def _work(self) -> tuple[Outcome, str | None, dict[str, Any]]:
        if changed := self.changed("was planned"):
            return "failed", f"{changed}; run the same command again", {}
        outcome: Outcome = "ok"
        reason, results, cause = None, dict[str, Any](), ""
        with contextlib.closing(Progress(self.kind, self.config)) as bar:
            context = Context(self.folder, self.data_root, self.folder.parent.parent, bar.update)
            try:
                results = get_kind(self.kind).function()(self.config, context)
            except Exception as error:
                outcome, reason = outcome_of(error)
                told = isinstance(error, UserError | Diverged) or own_fault(error)
                if outcome == "failed" and not told:  # the reason says it all
                    cause = traceback.format_exc()
        print(cause, end="")
        if outcome in FINAL and (changed := self.changed("began")):
            return "failed", f"{changed}; run the same command again", {}
        return outcome, reason, results

    def changed(self, since: str) -> str | None:
        """What is not as the run's key says any more, in one line: settings, code or what it reads.

        `since` says when it was: "was planned". None if nothing changed.
        """
        if self._planned_config != self.config.model_dump(mode="json"):
            # A kernel that imported the config before it was edited planned with the old one.
            return (
                "the code that describes the settings changed; restart the kernel, if there is one"
            )
        kind = get_kind(self.kind)
        planned = {**self.inputs, "code": self.code.get("hash")}
        now = run_inputs(
            self.config, kind.uses_data, lambda data: prepared_id(data, self.data_root)
        )
        now["code"] = kind.code
        for name, value in planned.items():
            if now.get(name) and value and now[name] != value:
                return f"the {name} changed since the run {since} ({value}, now {now[name]})"
        return None


def ended(summary: Summary) -> str:
    """How a run ended and why, in words."""
    if summary.outcome == "preempted" and (summary.reason or "").startswith("stopped"):
        return str(summary.reason)
    return f"{summary.outcome} ({summary.reason})" if summary.reason else summary.outcome


def tell(summary: Summary) -> None:
    """Print how a run ended."""
    print(f"outcome: {ended(summary)}, {summary.wall_s:.1f} s")
    for name in ("disturbed", "speed_note"):
        if name in summary.results:
            print(f"{name.replace('_', ' ')}: {summary.results[name]}")


class Progress:
    """Live figures of a run and the time left: a bar where somebody watches (a terminal, a
    notebook), else a line every half minute.

    A search has no total: nobody knows how many tries it needs. An attention run learns its total
    from the backends that it has.
    """

    def __init__(
        self, kind: str, config: Strict, title: str = "", shown: bool = True, live: bool = True
    ) -> None:
        own = not title  # this process is the run's
        points = config.points() if hasattr(type(config), "points") else None
        settings = vars(config)
        self._lengths = sum(len(sweep.lengths) for sweep in settings.get("sweeps", []))
        total = settings.get("steps") if points is None else len(points)
        unit = (
            "try" if kind.endswith("search") else "step" if kind in ("train", "peer") else "point"
        )
        every_s, file = (1, sys.stdout if own else sys.stderr) if live else (30, _Lines())
        self.bar = tqdm(
            total=total,
            desc=title,
            unit=unit,
            file=file,
            disable=not shown,
            leave=own,
            ncols=110 if own else None,
            mininterval=every_s,
            delay=0 if live else every_s,
        )

    def update(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row.get("measure") == "backend":
                self.bar.total = (
                    (self.bar.total or 0) + 1 + (self._lengths if row["outcome"] == "ok" else 0)
                )
        for row in rows[-1:]:
            shown = {
                name: f"{row[key]:,.4g}" for key, name in _LIVE.items() if row.get(key) is not None
            }
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update(row["step"] + 1 - self.bar.n)

    def close(self) -> None:
        self.bar.close()


# Keys of rows that are shown while a run goes on, and as what.
_LIVE = dict(
    loss="loss",
    tokens_per_s="tokens/s",
    memory_allocated_gib="GiB",
    validation_loss="val",
    batch="batch",
    size="size",
)


class _Lines(io.StringIO):
    """Where tqdm writes if nobody watches: each state of the bar is a line of the log."""

    def write(self, text: str) -> int:
        if text.strip():
            print(text.strip(), flush=True)
        return len(text)
