"""A container on the steps of a real Slurm's jobs, with a stand-in that records what it was given.

The batch script runs outside, the study and all workers inside, where srun does not work.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Project, losses
from slurm_cluster import NODES, container_stand_in, running_cluster, why_not
from test_slurm import CLUSTER, Jobs, ended, wait

from lsai_lab.runs.records import Summary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(800),
]

NICE = 7
BOXED: dict[str, Any] = {
    **CLUSTER,
    "python": sys.executable,
    "environment": "envs/box.toml",
    "prefix": ["nice", f"-n{NICE}"],
    "warning_s": 60,
}
SPREAD = {"parallel": {"fsdp": 4}, "batch_size": 2}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with running_cluster(tmp_path_factory.mktemp("slurm")):
        yield


class Boxed(Jobs):
    """A project whose cluster has a container."""

    def __init__(self, project: Project, folder: Path, **changes: Any) -> None:
        super().__init__(project)
        self.box = container_stand_in(folder / "box")
        project.environment["PATH"] = f"{self.box}:{os.environ['PATH']}"
        project.write_yaml("params/clusters/ci.yaml", {**BOXED, **changes})

    def calls(self) -> list[tuple[str, list[str]]]:
        """Every call of srun but those that only asked for an option: from where, its words."""
        path = self.box / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [(words[0], words[1:]) for words in map(shlex.split, lines)]
        return [(place, words) for place, words in found if "--help" not in words]


@dataclasses.dataclass
class Process:
    """What the system says of a process."""

    nice: int
    container: str
    cores: set[int]

    @classmethod
    def of(cls, pid: int) -> Process:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
        variables = dict(pair.partition("=")[::2] for pair in pairs)
        return cls(int(fields[16]), variables.get("IN_CONTAINER", ""), os.sched_getaffinity(pid))


@dataclasses.dataclass
class Preempted:
    """A run over two nodes that was warned in its middle, requeued, and went on."""

    jobs: Boxed
    job: str
    twin: Project
    ranks: dict[int, Process]
    script: Process
    interrupted: Summary


@pytest.fixture(scope="module")
def preempted(
    cluster: None, new_project: Callable[..., Project], tmp_path_factory: pytest.TempPathFactory
) -> Preempted:
    long = {"steps": 120, "log_every": 1, **SPREAD}
    jobs = Boxed(new_project(**long), tmp_path_factory.mktemp("boxed"))
    twin = new_project(**long)
    (job,) = jobs.submit("--nodes", "2", "--gpus", "2")
    jobs.wait_for_steps("baseline", 20)
    logs = jobs.folder("baseline") / "logs"
    pids = {int(path.stem[5:]): int(path.read_text()) for path in logs.glob("rank-*.pid")}
    ranks = {rank: Process.of(pid) for rank, pid in sorted(pids.items())}
    shown = subprocess.run(
        ["pgrep", "-f", f"job0*{job}/slurm_script"], capture_output=True, text=True
    )
    script = Process.of(int(shown.stdout.split()[0]))
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    wait((jobs.folder("baseline") / "summary.json").exists, "record of the interrupted run", 60)
    interrupted = Summary.read(jobs.folder("baseline"))
    state = ended(job)
    assert (state.state, state.restarts) == ("COMPLETED", 1), jobs.log(job)
    process = twin.start("study", "memory", "--parts", "train", "--profile", "cpu")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return Preempted(jobs, job, twin, ranks, script, interrupted)


def test_workers_are_inside_and_the_batch_script_is_outside(preempted: Preempted) -> None:
    box = str(preempted.jobs.project.root / "envs/box.toml")
    assert set(preempted.ranks) == {0, 1, 2, 3}
    assert {process.container for process in preempted.ranks.values()} == {box}
    assert preempted.script.container == ""


def test_every_step_was_started_by_the_host_with_the_container(preempted: Preempted) -> None:
    box = f"--environment={preempted.jobs.project.root / 'envs/box.toml'}"
    calls = preempted.jobs.calls()
    assert len(calls) == 4  # the study and its workers, before and after the requeue
    for place, words in calls:
        assert (place, box in words, "--overlap" in words) == ("host", True, True)
    study, workers = calls[0][1], calls[1][1]
    assert {"--nodes=1", "--ntasks=1"} <= set(study) and "lsai_lab.cli" in study
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2"} <= set(workers)
    assert "lsai_lab.runs.worker" in workers
    for node in NODES:
        log = Path(os.environ["SLURM_CONF"]).with_name(f"slurmd-{node}.log").read_text()
        assert f"launch task StepId={preempted.job}.1" in log


def test_the_prefix_and_the_binding_reach_every_rank(preempted: Preempted) -> None:
    """Both nodes are this machine, so that rank 0 and rank 2 have the same cores here."""
    here = sorted(os.sched_getaffinity(0))
    each = len(here) // 2
    assert {process.nice for process in preempted.ranks.values()} == {NICE}
    for rank, process in preempted.ranks.items():
        own = set(here[rank % 2 * each : (rank % 2 + 1) * each]) or set(here)
        assert process.cores == own
        log = preempted.jobs.folder("baseline") / f"logs/rank-{rank}.log"
        assert ("bound to cores" in log.read_text()) == bool(each)


def test_a_warned_run_is_requeued_and_goes_on_to_the_last_bit(preempted: Preempted) -> None:
    folder = preempted.jobs.folder("baseline")
    assert preempted.interrupted.outcome == "preempted"
    assert "SIGUSR1" in str(preempted.interrupted.reason)
    final, twin = Summary.read(folder), preempted.twin.found()["baseline"]
    assert final.outcome == "ok"
    assert 20 <= final.results["resumed_at"] < 120
    assert losses(folder) == losses(twin.folder)
    assert final.results["validation_loss"] == twin.summary.results["validation_loss"]
