"""Where things lie and what this machine is: the few facts that every command needs, found once.

`$LSAI_DATA` and `$LSAI_RUNS` move the data and the records (to a scratch file system, say); the profile is detected from the
GPU unless it is given.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsai_core.config import DataConfig
from lsai_lab.data import prepare
from lsai_lab.data.prepare import prepared_id
from lsai_lab.environment import environment, fingerprint
from lsai_lab.files import repo_root
from lsai_lab.runs.driver import run_plan
from lsai_lab.runs.records import Summary
from lsai_lab.runs.study import PlannedRun, Profile, Study, detect_profile, load_profile, load_study, plan_study


@dataclass
class Session:
    """One command's view of the project: folders, machine, profile."""

    profile_name: str | None = None
    root: Path = field(default_factory=repo_root)

    @functools.cached_property
    def env(self) -> dict[str, Any]:
        return environment()

    @functools.cached_property
    def profile(self) -> Profile:
        return load_profile(self.root, self.profile_name or detect_profile(self.root, self.env["gpu"]))

    @property
    def data_root(self) -> Path:
        return Path(os.environ.get("LSAI_DATA", self.root / "data"))

    @property
    def runs_root(self) -> Path:
        return Path(os.environ.get("LSAI_RUNS", self.root / "runs"))

    @functools.cached_property
    def command(self) -> str:
        """This command line, for the records, with the profile it resolved to."""
        words = ["lsai", *sys.argv[1:]]
        return shlex.join(words if "--profile" in words else [*words, "--profile", self.profile.profile])

    @functools.cache  # noqa: B019  (one session per process)
    def dataset_id(self, config: DataConfig) -> str:
        """Prepare a dataset (or find it prepared) and return the hash of its content."""
        return prepare(config, self.data_root).id

    @functools.cache  # noqa: B019
    def prepared_id(self, config: DataConfig) -> str:
        """The hash of a prepared dataset's content, or nothing: unlike `dataset_id` it prepares none."""
        return prepared_id(config, self.data_root) or ""

    def study(self, name: str) -> Study:
        """A study's description under this session's profile."""
        return load_study(self.root, name, self.profile)

    def plan(self, study: str, **selection: Any) -> list[PlannedRun]:
        """The planned runs of one study under this session's profile (see `plan_study` for the selection)."""
        return plan_study(
            self.study(study),
            root=self.root,
            runs_root=self.runs_root,
            fingerprint=fingerprint(self.env),
            dataset_id=self.dataset_id,
            **selection,
        )

    def run(self, plan: list[PlannedRun], **options: Any) -> list[Summary]:
        """Execute a plan with this session's folders (see `run_plan` for the options)."""
        return run_plan(plan, root=self.root, data_root=self.data_root, command=self.command, **options)

    def __hash__(self) -> int:
        return id(self)
