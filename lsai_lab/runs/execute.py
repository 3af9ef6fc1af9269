"""Execute one run, in this process: the body of every run notebook.

The run's folder already says what to do (`run.json`, `config.json`). Executing writes `env.json`, does the work, turns
whatever ends it into an outcome, and writes `summary.json` last. It does not raise for a failed run: the notebook goes on
to show what there is, and the record says what happened. (A process that dies without writing its summary is recorded by
the driver that started it.)
"""

from __future__ import annotations

import datetime
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lsai_core.code import code_hash
from lsai_core.errors import UserError
from lsai_core.files import write_json
from lsai_core.strict import Strict, validated
from lsai_lab.environment import environment
from lsai_lab.runs.inputs import present_inputs
from lsai_lab.runs.kinds import Context, get_kind
from lsai_lab.runs.outcome import outcome_of
from lsai_lab.runs.quiet import Quiet
from lsai_lab.runs.records import FINAL, Outcome, Run, RunId, Summary, is_finished, set_aside
from lsai_lab.runs.study import PlannedRun
from lsai_lab.runs.writer import only_writer

_SPEEDS = (
    "tokens_per_s",
    "step_ms",
    "mfu",
    "tflops",
    "host_forward",
    "host_backward",
    "host_optimizer",
    "kernel_idle",
    "gpu_busy_share",
)


def write_plan(run: PlannedRun, command: str) -> None:
    """Put into the run's folder what `ActiveRun` needs to execute it. UserError if another process is writing this run."""
    plan = {"id": run.id.__dict__, "kind": run.kind, "label": run.label, "command": command, "code": run.code}
    with only_writer(run.folder, run.name):
        write_json(run.folder / "config.json", run.config.model_dump(mode="json"))
        write_json(run.folder / "run.json", plan | {"machine": run.machine, "inputs": run.inputs})


class ActiveRun:
    """A run that is about to be, or was, executed in `folder`."""

    def __init__(self, folder: Path | str, data_root: Path | str) -> None:
        self.folder, self.data_root = Path(folder), Path(data_root)
        try:
            plan = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
            config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.folder} holds no planned run ({error}); start runs with `lsai study`") from None
        self.id, self.kind, self.label = RunId(**plan["id"]), plan["kind"], plan["label"]
        self.command, self.code = plan["command"], plan["code"]
        self.inputs: dict[str, str] = plan.get("inputs", {})
        self.config: Strict = validated(get_kind(self.kind).config_class(), config, str(self.folder / "config.json"))

    def execute(self, again: bool = False) -> Summary:
        """Do the work unless it is already done; returns the summary that is on disk afterwards.

        `again` repeats a finished run; what it had found moves into `earlier/`. UserError if another process is executing it.
        """
        with only_writer(self.folder, f"{self.id.study}.{self.id.name}"):
            if is_finished(self.folder) and not again:
                print(
                    f"{self.id.folder} is finished already, in {self.folder}; to repeat it: run.execute(again=True), "
                    "or --again on the command line"
                )
                return Summary.read(self.folder)
            kept = [(self.folder / name, (self.folder / name).read_bytes()) for name in ("config.json", "run.json")]
            set_aside(self.folder)
            for path, content in kept:
                path.write_bytes(content)
            return self._execute()

    def _execute(self) -> Summary:
        started, clock, quiet = datetime.datetime.now(datetime.UTC), time.perf_counter(), Quiet()
        write_json(self.folder / "env.json", environment() | quiet.before)
        results: dict[str, Any] = {}
        outcome: Outcome = "ok"
        reason = self._changed("was planned")
        if reason is not None:
            outcome = "failed"
        else:
            outcome, reason, results = self._work()
            if outcome in FINAL and (changed := self._changed("began")):
                outcome, reason, results = "failed", changed, {}
        if quiet.beside:
            results = {name: value for name, value in results.items() if not name.startswith(_SPEEDS)}
            results["ran_beside"] = quiet.beside
        summary = Summary(
            id=self.id,
            kind=self.kind,
            outcome=outcome,
            reason=reason,
            started=started.isoformat(timespec="seconds"),
            wall_s=round(time.perf_counter() - clock, 3),
            command=self.command,
            code=self.code,
            results=results | (quiet.results(results) if results else {}),
        )
        summary.write(self.folder)
        print(f"outcome: {outcome}" + (f" ({reason})" if reason else "") + f", {summary.wall_s:.1f} s")
        if "disturbed" in summary.results:
            print(f"disturbed: {summary.results['disturbed']}")
        return summary

    def _work(self) -> tuple[Outcome, str | None, dict[str, Any]]:
        with _ProgressBar(getattr(self.config, "steps", None) if self.kind == "train" else None) as bar:
            context = Context(self.folder, self.data_root, self.folder.parent.parent, bar.update)
            try:
                return "ok", None, get_kind(self.kind).function()(self.config, context)
            except Exception as error:
                outcome, reason = outcome_of(error)
                if outcome == "failed" and not isinstance(error, UserError):
                    traceback.print_exc(file=sys.stdout)
                return outcome, reason, {}

    def _changed(self, since: str) -> str | None:
        """One line if the code or what the run reads is not what its key says any more, else None."""
        kind = get_kind(self.kind)
        planned = {**self.inputs, **({"code": self.code["hash"]} if "hash" in self.code else {})}
        now = {**present_inputs(self.config, self.data_root, kind.uses_data), "code": code_hash(kind.code)}
        for name, value in planned.items():
            if now.get(name) and value and now[name] != value:
                return (
                    f"the {name} changed since the run {since} ({value}, now {now[name]}); run the same command again"
                )
        return None

    def record(self) -> Run:
        """The finished run, as the report reads it."""
        summary = Summary.read(self.folder)
        return Run(
            self.folder, json.loads((self.folder / "env.json").read_text(encoding="utf-8")).get("machine", ""), summary
        )


class _ProgressBar:
    """Live loss, speed and memory below the notebook cell."""

    def __init__(self, steps: int | None) -> None:
        self.bar = tqdm(total=steps, unit="step", mininterval=1.0, file=sys.stdout, dynamic_ncols=False, ncols=100)

    def update(self, rows: list[dict[str, Any]]) -> None:
        for row in rows[-1:]:
            self.bar.n = row["step"] + 1
            shown = {
                "loss": row.get("loss"),
                "tok/s": row.get("tokens_per_s"),
                "GiB": row.get("memory_allocated_gib"),
                "val": row.get("validation_loss"),
                "batch": row.get("batch"),
            }
            self.bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items() if value is not None})

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
