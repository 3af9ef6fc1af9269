"""What a study becomes as cluster jobs: each shipped study on each shipped cluster, what it costs,
how variants share a node, and what a site cannot do (no Slurm needed).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CHECKOUT, Project

import lsai_core
from lsai_core.base.errors import UserError
from lsai_lab.cluster.site import load_cluster, seconds
from lsai_lab.launch import binding, host_step
from lsai_lab.launch.srun import srun_command
from lsai_lab.runs.study import study_names

CLUSTERS = [path.stem for path in (CHECKOUT / "params/clusters").glob("*.yaml")]
# What does not fit one node: the runs that are named, and the way out.
ONE_NODE = {
    ("alps", "ablation"): "variants fsdp8, bf16_fsdp8, fp8_fsdp8 want 8 GPUs",
    ("alps", "context"): "variants mha128_8, gqa128_8, gqa64_8 want 8 GPUs",
    ("alps", "fsdp"): "variants weak_8, weak_8_kept, strong_8,",
    ("slurm", "ablation"): "variants fsdp2, fsdp4, fsdp8, bf16_fsdp4,",
    ("slurm", "context"): "variants mha128_2, mha128_4, mha128_8,",
    ("slurm", "fsdp"): "variants all_1_eager_2, all_1_eager_4,",
    ("slurm", "messages"): "variants between_2, between_4 want 2 to 4 GPUs",
    ("slurm", "sharing"): "variants hsdp_4, tp_2, tp_4, tpfsdp_4,",
    ("slurm", "longcontext"): "variants llama2_7b_128k_4, llama1b_128k_4,",
}
# What no number of nodes serves: the others of the study run.
NEVER = {
    ("alps", "fsdp"): "Recorded as unavailable: variants titan_8, titan_8_selective, titan_8_fp8",
    ("alps", "longcontext"): "Recorded as unavailable: variants longest_8b_8, longest_1b_8",
}
GENERIC = {
    "cluster": "plain",
    "description": "test",
    "profile": "cpu",
    "gpus_per_node": 4,
    "cpus_per_node": 16,
    "memory": "64G",
    "whole_nodes": True,
    "python": "python",
}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(CHECKOUT, {"LSAI_RUNS": str(tmp_path_factory.mktemp("runs"))})


@pytest.fixture(scope="module")
def project(new_project: Callable[..., Project]) -> Project:
    made = new_project({name: {} for name in ("baseline", *"abcde")}, device="auto")
    shutil.copytree(CHECKOUT / "envs", made.root / "envs")
    return made


def submitted(project: Project, *words: str, **site: Any) -> tuple[str, str]:
    """The study's script and the report's, as `--dry-run` shows them."""
    project.write_yaml("params/clusters/plain.yaml", {**GENERIC, **site})
    code, out, err = project.lsai("submit", "memory", "--cluster", "plain", "--dry-run", *words)
    assert (code, err) == (0, ""), err
    study, _, report = out.partition("# ---- and then")
    return study, report


def refused(project: Project, *words: str, **site: Any) -> str:
    project.write_yaml("params/clusters/plain.yaml", {**GENERIC, **site})
    code, out, err = project.lsai("submit", "memory", "--cluster", "plain", "--dry-run", *words)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    return err


@pytest.mark.parametrize("study", study_names(CHECKOUT))
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_study_on_every_cluster(shipped: Project, cluster: str, study: str) -> None:
    """With one node and eight: a script, or one line with the true reason."""
    words = ("submit", study, "--cluster", cluster, "--account", "a", "--dry-run")
    code, out, err = shipped.lsai(*words, "--nodes", "8")
    assert (code, err) == (0, "")
    assert out.startswith("#!/bin/bash\n") and "#SBATCH --nodes=8\n" in out
    assert NEVER.get((cluster, study), "") in out
    code, out, err = shipped.lsai(*words)
    if reason := ONE_NODE.get((cluster, study)):
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert reason in err and "submit with --nodes " in err
    else:
        assert (code, err) == (0, "")
        assert "#SBATCH --nodes=1\n" in out


def test_what_is_too_large_is_left_out_as_the_refusal_says(shipped: Project) -> None:
    words = ("submit", "ablation", "--cluster", "alps", "--account", "a", "--dry-run")
    skipped = shipped.lsai(*words)[2].strip().rpartition(" ")[2]
    code, out, _ = shipped.lsai(*words, "--skip", skipped)
    assert code == 0
    assert "  --only fp32,bf16," in out.replace("'", "") or "--only" in out


def test_a_selection_that_measures_nothing_is_refused(shipped: Project) -> None:
    words = ("submit", "peers", "--cluster", "alps", "--account", "a", "--dry-run")
    code, _, err = shipped.lsai(*words, "--parts", "peer", "--only", "ours_2048")
    assert (code, "measure none of the chosen variants" in err) == (2, True)


def test_variants_with_one_gpu_share_a_node_that_is_given_whole(project: Project) -> None:
    script, _ = submitted(project, "--per-variant", "--gpus", "1")
    groups = '("baseline,a,b,c" "d,e")\n'
    assert f"\nsharing={groups}alone={groups}" in script
    assert "#SBATCH --array=0-1\n" in script and "#SBATCH --gpus-per-node=4\n" in script
    assert "--exact --gpus-per-node=1 --cpus-per-task=4 " in script
    assert "--mem=$((SLURM_MEM_PER_NODE / 4))" in script
    assert "At most 2 node-hours: 1 node x 1 h x 2 tasks. 4 of 4 GPUs work" in script


def test_variants_without_a_part_are_not_asked_for_it(shipped: Project) -> None:
    """`lsai study` refuses a selection that measures nothing."""
    words = ("--cluster", "alps", "--account", "a", "--per-variant", "--gpus", "1", "--dry-run")
    code, out, _ = shipped.lsai("submit", "largest", *words)
    sharing = next(line for line in out.splitlines() if line.startswith("sharing="))
    alone = next(line for line in out.splitlines() if line.startswith("alone="))
    assert (code, "weights_1" in sharing, "weights_1" in alone) == (0, True, False)
    assert sharing.count('"') == alone.count('"')
    assert f"#SBATCH --array=0-{sharing.count(chr(34)) // 2 - 1}\n" in out


def test_fewer_gpus_than_a_node_has_are_named_as_the_way_out(shipped: Project) -> None:
    words = ("--cluster", "alps", "--account", "a", "--gpus", "1", "--dry-run")
    code, _, err = shipped.lsai("submit", "fsdp", "--parts", "grid", *words)
    assert (code, "submit with --gpus 4, or leave out" in err) == (2, True)


def test_timings_have_a_node_to_themselves(project: Project) -> None:
    script, _ = submitted(project, "--per-variant", "--gpus", "1", "--parts", "train")
    assert "variants=(baseline a b c d e)\n" in script and "#SBATCH --array=0-5\n" in script
    assert "6 tasks. The largest run works on 1 of 4 GPUs" in script
    script, _ = submitted(project, "--per-variant", "--gpus", "1", "--parts", "batch")
    assert "Timings" not in script and "--parts batch" in script


def test_a_node_that_is_not_given_whole_is_not_shared(project: Project) -> None:
    script, _ = submitted(project, "--per-variant", "--gpus", "1", whole_nodes=False)
    assert "#SBATCH --gpus-per-node=1\n" in script and "#SBATCH --array=0-5\n" in script
    assert "1 of 1 GPUs" in script


def test_tasks_are_throttled_on_wish(project: Project) -> None:
    words = ("--per-variant", "--at-once", "2")
    assert "#SBATCH --array=0-5%2\n" in submitted(project, *words)[0]
    assert "--at-once bounds the tasks of --per-variant" in refused(project, "--at-once", "2")


def test_the_report_takes_no_node_with_gpus_where_there_are_others(project: Project) -> None:
    study, report = submitted(project, partition="gpu", report_partition="cpu", report_cpus=3)
    assert "--partition=gpu\n" in study and "--gpus-per-node=4\n" in study
    assert "--partition=cpu\n" in report and "--cpus-per-task=3\n" in report
    assert "gpus-per" not in report and "--mem=" not in report
    assert "# At most 0.5 node-hours: 1 node x 0.5 h.\n" in report
    assert "--gpus-per-node=1\n" in submitted(project)[1]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("01:00:05", 3605),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("2-00:00:01", 172801),
    ],
)
def test_time_limits_are_read_as_slurm_does(limit: str, expected: int) -> None:
    assert seconds(limit) == expected


def test_a_warning_longer_than_the_job_is_refused(project: Project) -> None:
    told = refused(project, "--time", "00:01:00")
    assert "the time limit 00:01:00 is 60 s" in told and "change time or warning_s" in told
    assert "180 s" in refused(project, "--time", "3")
    submitted(project, "--time", "4")
    submitted(project, "--time", "00:01:20", warning_s=10)


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({"sbatch": ["--environment=x"]}, "srun does not work inside of a container"),
        ({"sbatch": ["--container-image=x"]}, "environment or container_image"),
        ({"environment": "x", "container_image": "y"}, "two ways to the same"),
        ({"container_mounts": ["/a"]}, "container_mounts belong to container_image"),
        ({"step": ["--mpi=pmix"]}, "options of steps in a container, and none is given"),
    ],
)
def test_what_a_site_cannot_do_is_refused(
    project: Project, site: dict[str, Any], message: str
) -> None:
    assert message in refused(project, **site)


def test_extra_options_are_on_every_step_in_the_container(project: Project) -> None:
    """As CSCS's extended images want them."""
    own = ["--network=disable_rdzv_get", "--mpi=pmix"]
    script, report = submitted(project, "--nodes", "2", environment="envs/alps.toml", step=own)
    container = f"(--environment={project.root}/envs/alps.toml {' '.join(own)})"
    assert f"\ncontainer={container}\n" in script and f"\ncontainer={container}\n" in report
    assert 'srun "${container[@]}" "${words[@]}"' in script


def test_a_plugin_that_is_missing_is_told_at_submission(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "sbatch": "exit 1",
        "srun": """echo "srun: unrecognized option '$1'" >&2; exit 1""",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    project.write_yaml("params/clusters/plain.yaml", {**GENERIC, "environment": "box"})
    code, _, err = project.lsai("submit", "memory", "--cluster", "plain")
    assert (code, "srun of this cluster lacks the plugin for --environment" in err) == (2, True)
    project.write_yaml("params/clusters/plain.yaml", {**GENERIC, "environment": "envs/x.toml"})
    code, _, err = project.lsai("submit", "memory", "--cluster", "plain")
    assert (code, f"there is no environment file {project.root}/envs/x.toml" in err) == (2, True)


def test_an_installed_package_names_a_python_that_exists(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a laboratory's folder made from a wheel there is no .venv, and no code beside it."""
    package = tmp_path / "site-packages/lsai_core/__init__.py"
    monkeypatch.setattr(lsai_core, "__file__", str(package))
    script, _ = submitted(project, python=".venv/bin/python")
    assert f"command=({sys.executable} -m lsai_lab.cli\n" in script
    assert "a container wants a checkout" in refused(project, environment="box")


def job_of(nodes: int, gpus: int, **more: str) -> dict[str, str]:
    own = {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_GPUS_ON_NODE": str(gpus)}
    return {**own, "SLURM_CPUS_PER_TASK": "288", "MASTER_ADDR": "nid001", **more}


def test_the_prefix_is_before_every_worker() -> None:
    words = srun_command(8, job_of(2, 4, LSAI_PREFIX="numactl --membind=0-3")) or []
    assert words[-3:] == ["numactl", "--membind=0-3", sys.executable]
    assert words[words.index("srun") + 1] == "--nodes=2"


def test_in_a_container_the_host_is_asked_for_the_step(tmp_path: Path) -> None:
    words = srun_command(8, job_of(2, 4, LSAI_PREFIX="nice", LSAI_STEPS=str(tmp_path))) or []
    assert "srun" not in words and words[1] == "--ignore-signal=USR1"
    assert words[words.index("-m") + 1] == "lsai_lab.launch.host_step"
    assert words[-3:] == ["--", "nice", sys.executable]
    told = host_step.words_of(
        ["--nodes=2", "--", "python", "-m", "x"],
        {"LSAI_LAUNCHER": "1@n", "LSAI_STEPS": "/s", "MASTER_PORT": "5", "HOME": "/h"},
        "/lab",
    )
    step = ["env", "--chdir=/lab", "LSAI_LAUNCHER=1@n", "MASTER_PORT=5", "python", "-m", "x"]
    assert told == ["--nodes=2", *step]


def test_the_host_s_answer_is_the_step_s(tmp_path: Path) -> None:
    """The asker waits, passes a signal on, and ends as the step did."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lsai_lab.launch.host_step", "--nodes=2", "--", "work"],
        env={**os.environ, "LSAI_STEPS": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    asked = next_file(tmp_path, "*.asked")
    assert asked.read_text().split("\0")[0] == "--nodes=2"
    process.send_signal(10)
    assert next_file(tmp_path, "*.USR1").stem == asked.stem
    asked.with_suffix(".out").write_text("task 3: Killed\n")
    asked.with_suffix(".code").write_text("137\n")
    assert process.communicate(timeout=30)[0] == "task 3: Killed\n"
    assert process.returncode == 137


def next_file(folder: Path, pattern: str) -> Path:
    """Wait for a file."""
    import time

    deadline = time.monotonic() + 30
    while not (found := list(folder.glob(pattern))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found[0]


def test_eight_gpus_need_as_many_on_every_node(project: Project) -> None:
    seven = ("--set", "parallel.fsdp=7", "--set", "device=auto", "--parts", "train")
    message = "7 processes cannot be spread evenly over 2 nodes"
    assert message in refused(project, *seven, "--nodes", "2")
    with pytest.raises(UserError, match=message):
        srun_command(7, job_of(2, 4))


class Nvml:
    """Four GPUs with 72 cores each, as NVML tells them."""

    def nvmlDeviceGetCpuAffinity(self, gpu: int, words: int) -> list[int]:
        cores = range(72 * gpu, 72 * (gpu + 1))
        return [sum(1 << core % 64 for core in cores if core // 64 == word) for word in range(5)]


def test_a_rank_is_bound_to_the_cores_of_its_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GH200 node as the system describes it: four sockets, each with the cores of one GPU."""
    import contextlib

    bound: list[set[int]] = []
    monkeypatch.setattr(binding.os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    monkeypatch.setattr(binding.os, "sched_getaffinity", lambda pid: set(range(288)))
    gpus = contextlib.nullcontext((Nvml(), [0, 1, 2, 3]))
    monkeypatch.setattr(binding, "visible_gpus", lambda count: gpus)
    monkeypatch.setattr(binding, "_NODES", tmp_path)
    for node, cores in enumerate(["0-71", "72-143", "144-215", "216-287", ""]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(cores + "\n")
    told = binding.bind({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"})
    assert told == "bound to cores 144-215 (of GPU 2), memory of nodes 2"
    assert binding.bind({"SLURM_LOCALID": "3"}).startswith("bound to cores 216-287 ")
    assert bound == [set(range(144, 216)), set(range(216, 288))]


def test_processes_without_gpus_share_a_step_but_not_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(binding.os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    monkeypatch.setattr(binding.os, "sched_getaffinity", lambda pid: set(range(8)))
    step = {"SLURM_STEP_ID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    assert binding.bind({**step, "LOCAL_RANK": "1"}).startswith("bound to cores 4-7 (share 1 of")
    torchrun = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert binding.bind({**step, **torchrun}).startswith("not bound to cores")
    assert bound == [{4, 5, 6, 7}]


def test_cores_of_a_step_are_shared_evenly() -> None:
    assert [binding.share({0, 2, 4, 6, 8}, local, 2) for local in (0, 1)] == [{0, 2}, {4, 6}]
    assert binding.share({3}, 0, 2) == set()
    assert binding.ranges(binding.numbers("0-2,7")) == "0-2,7"


def test_load_cluster_knows_every_key_of_the_shipped_files() -> None:
    for name in CLUSTERS:
        assert load_cluster(CHECKOUT, name, {"account": "a"}).cluster == name
