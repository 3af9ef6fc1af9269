"""Studies as jobs of a real Slurm: submitted, watched, warned, requeued, cancelled, and their
records at the end.

Everything that may run at the same time is submitted by one fixture; the tests then wait for what
they are about.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CHECKOUT, Project, losses
from slurm_cluster import NODES, running_cluster, why_not

from lsai_lab.cluster import slurm
from lsai_lab.runs.records import Summary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(800),
]

CLUSTER: dict[str, Any] = {
    "cluster": "ci",
    "description": "two nodes on this machine",
    "profile": "cpu",
    "partition": "normal",
    "time": "00:10:00",
    "gpus_per_node": 4,
    "cpus_per_node": 4,
    "requeue": True,
    "warning_s": 60,
}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with running_cluster(tmp_path_factory.mktemp("slurm")):
        yield


class Jobs:
    """A project with a cluster, and what its jobs are doing."""

    def __init__(self, project: Project) -> None:
        self.project = project
        shutil.copytree(CHECKOUT / "envs", project.root / "envs")
        project.write_yaml("params/clusters/ci.yaml", {**CLUSTER, "python": sys.executable})

    def submit(self, *options: str, report: bool = False) -> list[str]:
        """Submit the memory study's training; the numbers of its jobs."""
        words = [
            "submit",
            "memory",
            "--cluster",
            "ci",
            "--parts",
            "train",
            *([] if report else ["--no-report"]),
            *options,
        ]
        code, out, err = self.project.lsai(*words)
        assert code == 0, err
        return [
            line.split()[2].rstrip(":")
            for line in out.splitlines()
            if line.startswith("submitted job")
        ]

    def rows(self) -> dict[str, dict[str, Any]]:
        """`lsai jobs`, by job."""
        code, out, err = self.project.lsai("jobs", "--json")
        assert code == 0, err
        return {row["job"]: row for row in json.loads(out)}

    def log(self, job: str) -> str:
        """All output of a job's logs; empty if there is none yet."""
        return "".join(
            path.read_text()
            for path in sorted((self.project.runs / "jobs/logs").glob(f"*-{job}.out"))
        )

    def folder(self, variant: str) -> Path:
        return next((self.project.runs / "memory").glob(f"{variant}-*"))

    def wait_for_steps(self, variant: str, count: int = 1) -> None:
        """Return when the variant has recorded that many steps."""

        def recorded() -> bool:
            paths = list((self.project.runs / "memory").glob(f"{variant}-*/metrics.jsonl"))
            return bool(paths) and len(paths[0].read_text().splitlines()) >= count

        wait(recorded, f"{count} steps of {variant}", 300)


def wait(condition: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.25)


def ended(job: str) -> slurm.JobState:
    """Wait until a job has ended for good, starting it at once whenever it was put back into the
    queue."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        (state,) = slurm.show(job)
        if state.ended:
            return state
        if state.state == "PENDING" and state.restarts:
            subprocess.run(
                ["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True
            )
        time.sleep(0.3)
    raise AssertionError(f"job {job} did not end; it is {state}")


@pytest.fixture(scope="session")
def warned(cluster: None, new_project: Callable[..., Project]) -> tuple[Jobs, str]:
    """A job that is warned in its second minute, when it has started on a busy machine, too, not to
    be requeued, in the middle of a long run."""
    jobs = Jobs(new_project(steps=100_000, log_every=10))
    path = "params/clusters/ci.yaml"
    jobs.project.write_yaml(
        path, {**CLUSTER, "python": sys.executable, "time": "3", "warning_s": 90, "requeue": False}
    )
    return jobs, jobs.submit()[0]


@pytest.fixture(scope="session")
def array(cluster: None, warned: object, new_project: Callable[..., Project]) -> tuple[Jobs, str]:
    """One array task for each of two variants; the second's data are missing."""
    variants = {"baseline": {}, "broken": {"config": {"optim": {"lr": 1e9}, "steps": 200}}}
    jobs = Jobs(new_project(variants))
    return jobs, jobs.submit("--per-variant", "--gpus", "1")[0]


@pytest.fixture(scope="session")
def preempted(array: object, new_project: Callable[..., Project]) -> tuple[Jobs, str, str, Project]:
    """A study of a short and a long variant whose job was warned in the middle of the long one; the
    report's job follows it.

    Also the same study's uninterrupted twin, run here.
    """
    variants = {"baseline": {"config": {"steps": 12}}, "long": {}}
    jobs = Jobs(new_project(variants, steps=1500, log_every=10))
    twin = new_project(variants, steps=1500, log_every=10)
    twin.environment["OMP_NUM_THREADS"] = "1"  # as in the job: sums in the same order
    job, report = jobs.submit(report=True)
    jobs.wait_for_steps("long", 20)
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    process = twin.start("study", "memory", "--parts", "train", "--profile", "cpu")
    wait(
        lambda: (jobs.folder("long") / "summary.json").exists(), "record of the interrupted run", 60
    )
    jobs.preempted_summary = Summary.read(jobs.folder("long"))  # type: ignore[attr-defined]
    jobs.finished_at = (jobs.folder("baseline") / "summary.json").stat().st_mtime_ns  # type: ignore[attr-defined]
    ended(job)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return jobs, job, report, twin


def test_a_warned_job_is_requeued_and_goes_on_where_it_was(
    preempted: tuple[Jobs, str, str, Project],
) -> None:
    jobs, job, _, twin = preempted
    assert jobs.preempted_summary.outcome == "preempted"  # type: ignore[attr-defined]
    assert "SIGUSR1" in str(jobs.preempted_summary.reason)  # type: ignore[attr-defined]
    state, final = ended(job), Summary.read(jobs.folder("long"))
    assert (state.state, state.exit_code, state.restarts) == ("COMPLETED", "0:0", 1)
    assert final.outcome == "ok"
    assert 20 <= final.results["resumed_at"] < 1500
    other = twin.found()["long"]
    assert losses(jobs.folder("long")) == losses(other.folder)
    assert final.results["validation_loss"] == other.summary.results["validation_loss"]


def test_no_variant_runs_twice(preempted: tuple[Jobs, str, str, Project]) -> None:
    jobs, job, _, _ = preempted
    log = jobs.log(job)
    assert log.count("memory.baseline started") == 1
    assert "reusing 1 of 2 runs" in log
    assert (jobs.folder("baseline") / "summary.json").stat().st_mtime_ns == jobs.finished_at  # type: ignore[attr-defined]


def test_the_report_is_rendered_when_the_study_has_ended(
    preempted: tuple[Jobs, str, str, Project],
) -> None:
    jobs, job, report, _ = preempted
    state = ended(report)
    assert state.exit_code == "0:0", jobs.log(report)
    assert "long" in (jobs.project.root / "reports/_output/65-yours.html").read_text()
    row = jobs.rows()[report]
    assert (row["what"], row["state"], row["outcome"]) == ("report", "COMPLETED", "ok")
    row = jobs.rows()[job]
    assert (row["state"], row["outcome"], row["restarts"]) == ("COMPLETED", "ok", 1)


def test_jobs_are_listed_without_slurm(
    preempted: tuple[Jobs, str, str, Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the controller has forgotten a job, or on another machine: its own record says how it
    ended."""
    jobs, job, _, _ = preempted
    path = jobs.project.runs / "jobs" / f"{job}.json"
    record = path.read_text()
    monkeypatch.setenv("PATH", "")
    path.write_text(json.dumps({**json.loads(record), "seen": []}))
    row = jobs.rows()[job]
    path.write_text(record)
    assert (row["state"], row["outcome"]) == ("GONE", "ok")
    assert row["elapsed"].startswith("00:0")


def test_an_array_has_one_task_for_each_variant(array: tuple[Jobs, str]) -> None:
    jobs, job = array
    wait(lambda: all(state.ended for state in slurm.show(job)), "end of the array", 120)
    rows = jobs.rows()
    assert {name: row["what"] for name, row in rows.items()} == {
        f"{job}_0": "memory.baseline",
        f"{job}_1": "memory.broken",
    }
    assert (rows[f"{job}_0"]["state"], rows[f"{job}_0"]["outcome"]) == ("COMPLETED", "ok")
    assert (rows[f"{job}_1"]["state"], rows[f"{job}_1"]["outcome"]) == (
        "FAILED",
        "a run did not end well",
    )
    log = jobs.log(f"{job}_0")
    assert "memory.baseline ok" in log
    assert "broken" not in log


def test_the_time_limit_warns_first(warned: tuple[Jobs, str]) -> None:
    jobs, job = warned
    state = ended(job)
    assert (state.state, state.exit_code, state.restarts) == ("FAILED", "75:0", 0), jobs.log(job)
    assert jobs.rows()[job]["outcome"] == "preempted; submit again to resume"
    assert Summary.read(jobs.folder("baseline")).outcome == "preempted"
    assert list(jobs.folder("baseline").glob("checkpoint-*.json"))


def test_two_nodes_train_like_this_machine(
    cluster: None, new_project: Callable[..., Project]
) -> None:
    """FSDP over two nodes x two ranks through srun, against one process here that sees the same
    batches."""
    jobs, twin = (
        Jobs(new_project(parallel={"fsdp": 4}, steps=8, batch_size=4)),
        new_project(steps=8, batch_size=16),
    )
    twin.environment["OMP_NUM_THREADS"] = "1"
    (job,) = jobs.submit("--nodes", "2", "--gpus", "2")
    process = twin.start("study", "memory", "--parts", "train", "--profile", "cpu")
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, out + err
    assert ended(job).exit_code == "0:0", jobs.log(job)
    summary, other = Summary.read(jobs.folder("baseline")), twin.found()["baseline"]
    assert (summary.outcome, summary.results["world_size"]) == ("ok", 4)
    assert losses(jobs.folder("baseline")) == pytest.approx(losses(other.folder), rel=1e-5)
    ranks = {path.stem for path in (jobs.folder("baseline") / "logs").glob("rank-*.log")}
    assert ranks == {f"rank-{number}" for number in range(4)}
    for node in NODES:  # both took part: the step ran on each
        log = Path(os.environ["SLURM_CONF"]).with_name(f"slurmd-{node}.log").read_text()
        assert f"launch task StepId={job}.0" in log


@pytest.fixture(scope="session")
def cancelled(
    array: tuple[Jobs, str], new_project: Callable[..., Project]
) -> tuple[Jobs, str, str, str]:
    """A job that was cancelled in the middle of a run, its report job, and a job that was to follow
    its success."""
    jobs = Jobs(new_project(steps=100_000, log_every=10))
    job, report = jobs.submit(report=True)
    (after,) = jobs.submit("--again", "--after", job)
    jobs.wait_for_steps("baseline", 20)
    code, out, err = jobs.project.lsai("cancel", job)
    assert (code, out.strip()) == (0, f"cancelled {job}, {report}"), err
    return jobs, job, report, after


def test_a_cancelled_job_leaves_a_run_that_is_recognizably_unfinished(
    cancelled: tuple[Jobs, str, str, str],
) -> None:
    jobs, job, report, _ = cancelled
    assert ended(job).state == ended(report).state == "CANCELLED"
    rows = jobs.rows()
    assert (rows[job]["outcome"], rows[report]["outcome"]) == ("cancelled", "never started")
    summary = Summary.read(jobs.folder("baseline"))
    assert (summary.outcome, "SIGTERM" in str(summary.reason)) == ("preempted", True)
    code, out, _ = jobs.project.lsai("cancel", job)
    assert (code, out.strip()) == (0, f"{job} had ended already")


def test_a_job_whose_dependency_failed_does_not_wait_for_ever(
    cancelled: tuple[Jobs, str, str, str],
) -> None:
    jobs, *_, after = cancelled
    assert ended(after).state == "CANCELLED"
    assert jobs.rows()[after]["outcome"] == "never started (its dependency failed)"


def test_a_second_submission_is_refused_while_the_first_one_is_there(
    cancelled: tuple[Jobs, str, str, str], new_project: Callable[..., Project]
) -> None:
    jobs = Jobs(new_project())
    (job,) = jobs.submit()
    code, _, err = jobs.project.lsai("submit", "memory", "--cluster", "ci")
    assert code == 2
    assert f"job {job} of study memory is waiting or running" in err
    code, out, _ = jobs.project.lsai("cancel", "--all")
    assert (code, out.strip()) == (0, f"cancelled {job}")
    ended(job)  # Slurm takes a moment
    assert jobs.project.lsai("cancel", "--all")[1].strip() == "no job waits or runs"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--partition", "debug"],
            "invalid partition specified: debug; Invalid partition name specified; partitions "
            "here: normal",
        ),
        (["--nodes", "3"], "Requested node configuration is not available"),
        (["--after", "999"], "--after: Slurm knows no job 999"),
    ],
)
def test_what_slurm_refuses_is_one_line_and_leaves_nothing(
    cluster: None, new_project: Callable[..., Project], options: list[str], message: str
) -> None:
    jobs = Jobs(new_project())
    code, _, err = jobs.project.lsai("submit", "memory", "--cluster", "ci", *options)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert jobs.rows() == {}
    assert not list((jobs.project.runs / "jobs").glob("*.json"))
