"""Where things lie and what this machine is: the few facts that every command needs, found once;
and which runs belong to its plan."""

import contextlib
import functools
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsai_core.base.errors import Unavailable
from lsai_core.config.strict import Strict
from lsai_core.config.train import DataConfig
from lsai_lab.data.checkpoints import require_same_tokenizer
from lsai_lab.data.dataset import Dataset
from lsai_lab.data.prepare import prepare, prepared_id
from lsai_lab.machine.environment import environment, fingerprint
from lsai_lab.project.files import folder_from_environment, repo_root
from lsai_lab.runs import study as studies
from lsai_lab.runs.difference import planned_profile
from lsai_lab.runs.driver import run_plan
from lsai_lab.runs.records import Run, Summary, find_runs
from lsai_lab.runs.study import PlannedRun, Profile, Study


@dataclass(eq=False)
class Session:
    """One command's view of the project: folders, machine, profile."""

    profile_name: str | None = None
    root: Path = field(default_factory=repo_root)

    @functools.cached_property
    def env(self) -> dict[str, Any]:
        return environment()

    @functools.cached_property
    def profile(self) -> Profile:
        return studies.load_profile(
            self.root, self.profile_name or studies.detect_profile(self.root, self.env["gpu"])
        )

    @property
    def data_root(self) -> Path:
        return folder_from_environment("LSAI_DATA", self.root / "data")

    @property
    def runs_root(self) -> Path:
        return folder_from_environment("LSAI_RUNS", self.root / "runs")

    @functools.cached_property
    def command(self) -> str:
        """This command line, for the records, with the profile it resolved to."""
        words = ["lsai", *sys.argv[1:]]
        return shlex.join(
            words if "--profile" in words else [*words, "--profile", self.profile.profile]
        )

    @functools.cache  # noqa: B019  (one session per process)
    def dataset(self, config: DataConfig) -> Dataset:
        """Prepare a dataset, or find it prepared."""
        return prepare(config, self.data_root)

    def dataset_id(self, config: DataConfig) -> str:
        """The hash of a dataset's content; it is prepared if it is not there yet."""
        return self.dataset(config).id

    @functools.cache  # noqa: B019
    def prepared_id(self, config: DataConfig) -> str:
        """The hash of a prepared dataset's content, or nothing: unlike `dataset_id` it prepares
        none."""
        return prepared_id(config, self.data_root)

    @functools.cache  # noqa: B019
    def study(self, name: str) -> Study:
        """A study's description under this session's profile."""
        return studies.load_study(self.root, name, self.profile)

    def plan(self, study: str, **selection: Any) -> list[PlannedRun]:
        """The planned runs of one study under this session's profile (see `plan_study` for the
        selection)."""
        own = "fingerprint" not in selection
        if own:
            selection |= {"fingerprint": fingerprint(self.env), "dataset_id": self.dataset_id}
        plan = studies.plan_study(
            self.study(study), root=self.root, runs_root=self.runs_root, **selection
        )
        for run in plan if own else []:
            self._check_weights(run.config)
        return plan

    def _check_weights(self, config: Strict) -> None:
        """UserError if a run would go on from weights that were trained on another tokenizer's
        tokens."""
        weights, data = getattr(config, "init_from", None), getattr(config, "data", None)
        if weights is not None and isinstance(data, DataConfig):
            # with torch, for which not every command has the time
            from lsai_core.model.hf import find_checkpoint

            with contextlib.suppress(Unavailable):  # as the run will say
                require_same_tokenizer(self.dataset(data), find_checkpoint(weights))

    def run(self, plan: list[PlannedRun], **options: Any) -> list[Summary]:
        """Execute a plan with this session's folders (see `run_plan` for the options)."""
        return run_plan(
            plan, root=self.root, data_root=self.data_root, command=self.command, **options
        )


def current_runs(
    session: Session, study: str | None = None, every_profile: bool = False
) -> list[Run]:
    """The own finished runs of `study` (None: of every study) whose key is in the current plan, in
    the plan's order.

    The plan is that of the machine that executed a run (a compute node's, where this is the login
    node): its fingerprint, the profile of its GPU or the session's, if it was named. With
    `every_profile` it may also be that of the profile that the run itself was planned with. Nothing
    is prepared: of a data set that is not there no run can be. Raises UserError for an unknown
    study or a wrong parameter file.
    """
    found: dict[Path, Run] = {}
    for name in (
        studies.study_names(session.root) if study is None else [session.study(study).study]
    ):
        for (profile, machine), runs in _by_plan(session, name, every_profile).items():
            there = Session(profile, session.root)
            plan = there.plan(name, fingerprint=machine, dataset_id=session.prepared_id)
            for folder in (planned.folder for planned in plan):
                if folder in runs and folder not in found:
                    found[folder] = runs[folder]
                    usual = usual_profile(session, runs[folder].env.get("gpu"))
                    found[folder].profile = profile if profile != usual else None
    return list(found.values())


def usual_profile(session: Session, gpu: str | None) -> str:
    """The profile that is expected of a run on this GPU: the session's, if it was named, else the
    GPU's."""
    return session.profile_name or studies.detect_profile(session.root, gpu)


def _by_plan(
    session: Session, study: str, every_profile: bool
) -> dict[tuple[str, str], dict[Path, Run]]:
    """Own finished runs by the plans in which they may be: a profile and a machine's fingerprint,
    the usual profiles first."""
    known = {path.stem for path in (session.root / "params" / "profiles").glob("*.yaml")}
    usual: dict[tuple[str, str], dict[Path, Run]] = defaultdict(dict)
    others: dict[tuple[str, str], dict[Path, Run]] = defaultdict(dict)
    for run in find_runs(session.runs_root, study=study):
        profile, own = usual_profile(session, run.env.get("gpu")), planned_profile(run)
        machine = run.plan.get("machine", "")
        usual[profile, machine][run.folder] = run
        if every_profile and own in known and own != profile:
            others[str(own), machine][run.folder] = run
    plans = dict(usual)
    for place, runs in others.items():
        plans[place] = plans.get(place, {}) | runs
    return plans
