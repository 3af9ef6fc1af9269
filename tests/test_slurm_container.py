"""A container on the steps of a real Slurm's jobs, with a stand-in that records what it was given.

The batch script runs outside, the study and all workers inside, where srun does not work.
"""

from __future__ import annotations

import dataclasses
import datetime
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

from lsai_lab.cluster import slurm
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
        (project.root / "envs/box.toml").write_text('image = "box.sqsh"\n')

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


# A prefix that writes down what it was given, and goes on with it.
_RECORDER = """\
#!/bin/bash
echo "$CUDA_VISIBLE_DEVICES $LSAI_BESIDE $*" >> "$(dirname "$0")/steps"
exec "$@"
"""


@pytest.fixture(scope="module")
def sharing(
    cluster: None, new_project: Callable[..., Project], tmp_path_factory: pytest.TempPathFactory
) -> Boxed:
    """Four variants of a study with a search and a timing, on one node, in a container of pyxis."""
    folder = tmp_path_factory.mktemp("sharing")
    (folder / "recorder").write_text(_RECORDER)
    (folder / "recorder").chmod(0o755)
    widths = {"baseline": 64, "wide": 96, "wider": 128, "widest": 160}
    wide = {name: {"config": {"model": {"d_ff": d_ff}}} for name, d_ff in widths.items()}
    site = {"environment": None, "container_image": "lsai.sqsh", "whole_nodes": True}
    jobs = Boxed(new_project(wide), folder, **site, prefix=[str(folder / "recorder")])
    words = ("--cluster", "ci", "--per-variant", "--gpus", "1", "--no-report")
    code, out, err = jobs.project.lsai("submit", "memory", *words)
    assert code == 0, err
    job = out.split()[2].rstrip(":")
    wait(lambda: all(state.ended for state in slurm.show(job)), "end of the task", 400)
    assert [state.exit_code for state in slurm.show(job)] == ["0:0"], jobs.log(f"{job}_0")
    return jobs


def test_four_variants_share_a_node_each_with_its_own_gpu(sharing: Boxed) -> None:
    lines = (sharing.box.parent / "steps").read_text().splitlines()
    steps = [line.split() for line in lines]
    searches = [words for words in steps if "batch" in words]
    assert sorted(words[0] for words in searches) == ["0", "1", "2", "3"]
    assert {words[1] for words in searches} == {"3"}
    found = sharing.project.found()
    ends = {name: run for name, run in found.items() if name.endswith(".batch")}
    assert len(ends) == 4
    assert {run.summary.results["ran_beside"] for run in ends.values()} == {3}
    spans = [span(run.summary) for run in ends.values()]
    assert max(first for first, _ in spans) < min(last for _, last in spans)
    assert all("3 other runs shared" in run.summary.results["disturbed"] for run in ends.values())


def test_timings_then_have_the_node_to_themselves(sharing: Boxed) -> None:
    found = sharing.project.found()
    timings = [run.summary for name, run in found.items() if not name.endswith(".batch")]
    spans = sorted(span(summary) for summary in timings if summary.kind == "train")
    assert len(spans) == 4
    assert all("ran_beside" not in summary.results for summary in timings)
    searched = max(span(run.summary)[1] for name, run in found.items() if name.endswith(".batch"))
    ends = [searched, *(last for _, last in spans)]
    # Times of starts are whole seconds.
    assert all(first > before - 1.5 for (first, _), before in zip(spans, ends[:-1], strict=True))


def span(summary: Summary) -> tuple[float, float]:
    """When a run started and ended."""
    began = datetime.datetime.fromisoformat(summary.started).timestamp()
    return began, began + summary.wall_s


def test_pyxis_gets_its_image_on_every_step(sharing: Boxed) -> None:
    calls = sharing.calls()
    assert len(calls) == 5  # four searches at a time, then the timings
    assert all("--container-image=lsai.sqsh" in words for _, words in calls)
    assert all({"--exact", "--gpus-per-node=1"} <= set(words) for _, words in calls)


def test_a_cancelled_job_in_a_container_leaves_an_unfinished_run(
    cluster: None, new_project: Callable[..., Project], tmp_path_factory: pytest.TempPathFactory
) -> None:
    jobs = Boxed(new_project(steps=100_000, log_every=10), tmp_path_factory.mktemp("cancelled"))
    (job,) = jobs.submit()
    jobs.wait_for_steps("baseline", 5)
    code, out, err = jobs.project.lsai("cancel", job)
    assert (code, out.strip()) == (0, f"cancelled {job}"), err
    assert ended(job).state == "CANCELLED"
    assert jobs.rows()[job]["outcome"] == "cancelled"
    summary = Summary.read(jobs.folder("baseline"))
    assert (summary.outcome, "SIGTERM" in str(summary.reason)) == ("preempted", True)


def test_a_cluster_without_the_plugin_refuses_in_one_line(
    cluster: None, new_project: Callable[..., Project]
) -> None:
    jobs = Jobs(new_project())
    jobs.project.write_yaml("params/clusters/ci.yaml", {**BOXED, "environment": "envs/alps.toml"})
    code, _, err = jobs.project.lsai("submit", "memory", "--cluster", "ci")
    message = "srun of this cluster lacks the plugin for --environment"
    assert (code, message in err, len(err.strip().splitlines())) == (2, True, 1)
    assert jobs.rows() == {}
