"""Systems and machines that this one is not, pretended in processes of their own (`pretend.py`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import CHECKOUT, write_run
from packaging.requirements import Requirement

# Calls `lsai` with each list of words, then evaluates each program; prints all answers as JSON.
ASK = """
import contextlib, io, json, sys, pretend
system, commands, programs = json.loads(sys.stdin.read())
exec(system)
from lsai_lab.cli import main

def called(words):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["lsai", *words.split()]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main() or 0
        except SystemExit as end:
            code = int(end.code or 0)
    return [code, out.getvalue(), err.getvalue()]

def evaluated(program):
    names = {}
    try:
        exec(program, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return names["answer"]

answers = {words: called(words) for words in commands}
answers |= {program: evaluated(program) for program in programs}
print("\\n" + json.dumps(answers))
"""


def asked(
    system: str,
    folder: Path,
    commands: list[str],
    programs: list[str],
    where: Path = CHECKOUT,
    **env: str,
) -> dict[str, Any]:
    """What the commands and programs answer on the pretended `system`, runs and data in `folder`,
    and what is compiled: a cache that two systems share would hide what one of them lacks."""
    own = {"LSAI_RUNS": str(folder / "runs"), "LSAI_DATA": str(folder / "data")}
    own["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
    own |= {"PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps([system, commands, programs]),
        cwd=where,
        env={**os.environ, **own, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


EXECUTE = ["train --technique bf16", "find-batch", "study memory", "report", "report --no-run"]
READ = [
    "predict --model lab --gpu 24GB",
    "compare memory --recorded --machine h200",
    "study machine --dry-run",
]
OPEN = "import lsai_lab as lab; answer = lab.open_run(study='memory', variant='bf16', part='train')"
LOAD = """
import lsai_lab as lab
runs = lab.load("memory", "speed")
first = runs[runs["part"] == "train"].iloc[0]
answer = len(runs), len(lab.steps(first)), lab.load(mine=True)["tokens_per_s"].tolist()
"""
PREDICT = """
from lsai_core import TrainConfig, predict
answer = predict(TrainConfig.model_validate({"model": {"preset": "lab-tiny"}})).peak
"""


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("windows")
    write_run(folder / "runs", "memory", "bf16", results={"tokens_per_s": 7.0})
    return asked("pretend.as_windows()", folder, [*EXECUTE, *READ, "doctor"], [OPEN, LOAD, PREDICT])


def test_windows_refuses_what_executes_in_one_line(windows: dict[str, Any]) -> None:
    for words in EXECUTE:
        code, out, err = windows[words]
        assert (code, out, len(err.splitlines())) == (2, "", 1), words
        assert "WSL2" in err
    assert windows[OPEN].startswith("UserError") and "WSL2" in windows[OPEN]


def test_windows_reads_plans_and_predicts(windows: dict[str, Any]) -> None:
    count, steps, own = windows[LOAD]
    assert count > 50 and steps > 50 and own == [7.0]
    assert windows[PREDICT] > 0
    for words in READ:
        code, out, err = windows[words]
        assert code == 0 and out, err


def test_the_doctor_says_that_windows_is_refused(windows: dict[str, Any]) -> None:
    code, out, _ = windows["doctor"]
    assert code == 1 and "Windows on AMD64" in out and "WSL2" in out


# A GPU as torch tells of it, on a machine without one.
GPU = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda device=None: {capability}
torch.cuda.get_device_name = lambda device=None: {name!r}
Properties = type("Properties", (), dict(name={name!r}, total_memory=2**36))
torch.cuda.get_device_properties = lambda device=None: Properties()
torch.version.hip = {hip!r}
torch.version.cuda = None if torch.version.hip else "13.0"
"""
KERNELS = """
import importlib.util, sys, types, torch
sys.modules["triton"] = types.ModuleType("triton")
sys.modules["triton"].__spec__ = importlib.util.spec_from_loader("triton", None)
from lsai_core import attention, kernels
from lsai_core.fp8 import recipes as fp8
cuda = torch.device("cuda")
answer = dict(triton=kernels.available(cuda), fp8=fp8.available_recipes(cuda),
              attention=attention.available_backends(cuda))
"""
DEVICES = {
    "rocm": GPU.format(capability=(9, 4), name="AMD Instinct MI300X", hip="7.1"),
    "t4": GPU.format(capability=(7, 5), name="Tesla T4", hip=None),
    "ampere": GPU.format(capability=(8, 0), name="NVIDIA A100-SXM4-40GB", hip=None),
}
AUTO = """
import torch
from lsai_core.attention import resolve
answer = [resolve("auto", "cuda", dtype, 64, 512) for dtype in (torch.bfloat16, torch.float32)]
"""


@pytest.fixture(scope="module", params=list(DEVICES))
def gpu(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, asked(DEVICES[request.param], folder, ["doctor --json"], [KERNELS, AUTO])


def test_kernels_run_on_the_gpus_that_they_were_written_for(
    gpu: tuple[str, dict[str, Any]],
) -> None:
    name, answers = gpu
    found = answers[KERNELS]
    missing = {backend for backend, reason in found["attention"].items() if reason is not None}
    assert found["triton"] == (name == "ampere")
    assert all(found["fp8"].values()), "fp8 begins with capability 8.9"
    assert {"fa3", "fa4"} <= missing and not {"eager", "sdpa_math"} & missing
    assert ("sdpa_cudnn" in missing) == (name != "ampere")
    assert ("sdpa_flash" in missing) == (name == "t4")
    if name == "rocm":
        reasons = [
            *found["fp8"].values(),
            *(found["attention"][n] for n in ("fa2", "fa3", "fa4", "sdpa_cudnn")),
        ]
        assert all("ROCm" in reason and "untested" in reason for reason in reasons)
    assert (
        answers[AUTO]
        == {
            "rocm": ["sdpa_flash", "sdpa_efficient"],
            "t4": ["sdpa_math", "sdpa_math"],
            "ampere": ["sdpa_cudnn", "sdpa_efficient"],
        }[name]
    )


def test_the_doctor_tells_one_gpu_from_another(gpu: tuple[str, dict[str, Any]]) -> None:
    name, answers = gpu
    code, out, err = answers["doctor --json"]
    assert code == 0, err
    checks = {row["name"]: row for row in json.loads(out)["checks"]}
    said = checks["GPU"]["detail"]
    assert ("untested" in said) == (name == "rocm") and ("best effort" in said) == (name == "t4")
    assert ("ROCm 7.1" in checks["Python packages"]["detail"]) == (name == "rocm")
    assert checks["FP8 hardware"]["ok"] is None
    assert all(check["fix"] is None for label, check in checks.items() if label.startswith("fp8 "))


TRAINS = """
import json, torch
from pathlib import Path
from conftest import tiny
from lsai_core.base.errors import Unavailable
from lsai_core.training.step import prepare_model
answer = "trains"
try:
    prepare_model(tiny(compile=True), torch.device("cpu"))
except Unavailable as error:
    answer = str(error)
"""
DRY = (
    "find-batch --study machines --dry-run",
    "train --study machines --technique compiled --dry-run",
)
ON_MPS = "train --study machines --set device=mps --dry-run"
LABEL = (
    "from lsai_lab.machine.environment import environment, fingerprint; answer = "
    "[environment()['machine'], fingerprint(environment())]"
)


def tools(folder: Path, **programs: str) -> dict[str, str]:
    """A PATH on which there is nothing but these programs, bodies of shell scripts."""
    folder.mkdir()
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder), "CXX": "", "CC": ""}


@pytest.fixture(scope="module")
def study(new_project: Any) -> Path:
    """A project with a study of two variants, one of them compiled."""
    project = new_project({"baseline": {}, "compiled": {"config": {"compile": True}}})
    path = project.root / "params/studies/memory.yaml"
    (path.parent / "machines.yaml").write_text(
        path.read_text().replace("study: memory", "study: machines")
    )
    return project.root


@pytest.fixture(scope="module")
def macs(study: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """An M1 with Apple's tools, an M4 whose `clang++` only says that they are missing."""
    folder, found = tmp_path_factory.mktemp("macs"), {}
    chips = {
        "Apple M1": "echo Apple clang version 17",
        "Apple M4": "echo no developer tools >&2; exit 1",
    }
    for number, (chip, compiler) in enumerate(chips.items()):
        env = tools(folder / f"tools-{number}", sysctl=f"echo {chip}", **{"clang++": compiler})
        env["LSAI_ROOT"] = str(study)
        commands = ["doctor", ON_MPS, *DRY] if chip == "Apple M4" else list(DRY)
        found[chip] = asked(
            "pretend.as_mac()", folder / str(number), commands, [LABEL, TRAINS], **env
        )
    return found


def test_two_macs_are_two_machines(macs: dict[str, dict[str, Any]]) -> None:
    (m1, line1), (m4, line4) = (macs[chip][LABEL] for chip in ("Apple M1", "Apple M4"))
    assert m1.startswith("m1-") and m4.startswith("m4-")
    assert line1.startswith("Apple M1 |") and line4.startswith("Apple M4 |")


def test_what_a_mac_lacks_is_unavailable_with_the_fix_for_a_mac(
    macs: dict[str, dict[str, Any]],
) -> None:
    assert macs["Apple M1"][TRAINS] == "trains"
    said = macs["Apple M4"][TRAINS]
    assert said.startswith("compile=true needs a C++ compiler") and said.endswith(
        "xcode-select --install"
    )
    code, out, _ = macs["Apple M4"]["doctor"]
    assert code == 0 and "xcode-select --install" in out and "apt-get" not in out
    assert "Darwin on arm64, Python" in out and "MPS" in out


def test_a_dry_run_says_what_a_mac_cannot_do(macs: dict[str, dict[str, Any]]) -> None:
    find_batch, train = DRY
    for answers in macs.values():
        code, out, err = answers[find_batch]
        assert code == 0 and "1 unavailable" in out, err
        assert "RLIMIT_DATA" in out
    assert "1 to run" in macs["Apple M1"][train][1]
    assert "xcode-select" in macs["Apple M4"][train][1]


def test_the_gpu_of_a_mac_is_refused_in_one_line(macs: dict[str, dict[str, Any]]) -> None:
    code, out, err = macs["Apple M4"][ON_MPS]
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert "device" in err and "'mps'" in err and "'cpu'" in err


def test_intel_macs_are_refused_by_the_doctor(tmp_path: Path) -> None:
    code, out, _ = asked("pretend.as_mac('x86_64')", tmp_path, ["doctor"], [])["doctor"]
    assert code == 1 and "Intel Macs" in out


@pytest.mark.parametrize("manager", ["apt-get", "dnf"])
def test_without_a_compiler_a_compiled_run_is_unavailable(
    study: Path, tmp_path: Path, manager: str
) -> None:
    env = tools(tmp_path / "tools", **{manager: "exit 0"})
    env["LSAI_ROOT"] = str(study)
    run, dry = "train --study machines --technique compiled --profile cpu", "doctor"
    commands = [run, dry] if manager == "apt-get" else [dry]
    answers = asked("", tmp_path, commands, [TRAINS], **env)
    install = f"{manager} install"
    assert (
        answers[TRAINS].startswith("compile=true needs a C++ compiler")
        and install in answers[TRAINS]
    )
    assert "needs a C++ compiler" in answers["doctor"][1] and install in answers["doctor"][1]
    if run in answers:
        code, out, err = answers[run]
        assert code == 2 and "unavailable (compile=true needs a C++ compiler" in out, err


def test_a_compiled_module_prints_no_warning() -> None:
    """Not on Python 3.13.0 either, of whose guards PyTorch warns; a report would show it."""
    program = """
import lsai_core, torch
torch.compile(torch.nn.RMSNorm(8), backend="eager")(torch.ones(2, 8))
"""
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages as a wheel lays them down: with the records of one study, far from any
    checkout."""
    site = tmp_path_factory.mktemp("site")
    for name in ("lsai_core", "lsai_lab"):
        shutil.copytree(
            CHECKOUT / name, site / name, ignore=shutil.ignore_patterns("__pycache__", "template")
        )
    template = site / "lsai_lab" / "template"
    for name in ("notebooks", "params", "reports/recorded/h200/memory"):
        shutil.copytree(CHECKOUT / name, template / name)
    return site


def test_in_a_notebook_outside_a_laboratory_the_packaged_records_are_read(
    installed: Path, tmp_path: Path
) -> None:
    program = """
import sys, lsai_lab as lab
from pathlib import Path
from lsai_core.base.errors import UserError
runs = lab.load("memory")
row = runs[runs["part"] == "train"].iloc[0]
print(len(runs), set(runs["machine"]), len(lab.steps(row)), lab.study("memory").title)
link = lab.run_link("a run", row["run"])
assert link.startswith("[a run](") and "reports/recorded/h200/memory/" in link
assert Path(link.removeprefix("[a run](").removesuffix(")")).is_file()
try:
    lab.open_run(study="memory", variant="bf16", part="train")
except UserError as error:
    print(error)
"""
    before = set(installed.glob("lsai_lab/project/template/**/*"))
    env = {name: value for name, value in os.environ.items() if not name.startswith("LSAI_")}
    env |= {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert "{'h200'}" in first and int(first.split()[0]) > 20
    assert "`lsai new lab DIR`" in last
    assert set(installed.glob("lsai_lab/project/template/**/*")) == before, (
        "the package is read only"
    )
    assert not list(tmp_path.iterdir())


# What Colab has beside a PyTorch that is new enough.
COLAB = {"torch": "2.11.0+cu128", "ipykernel": "6.17.1", "pandas": "2.2.2", "numpy": "2.0.2"}


def test_the_cell_for_colab_replaces_neither_torch_nor_the_kernel(tmp_path: Path) -> None:
    page = (CHECKOUT / "notebooks/README.md").read_text()
    cell = page.split("```bash\n%%bash\n")[1].split("```")[0]
    there = "".join(f"echo {name}=={version}; " for name, version in COLAB.items())
    pip = (
        f'#!/bin/sh\nif [ "$1" = list ]; then {there}\nelse echo "$@" > asked; cat "$4" > kept; '
        f"fi\n"
    )
    (tmp_path / "pip").write_text(pip)
    (tmp_path / "pip").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-e", "-c", cell], cwd=tmp_path, env=env, check=True)
    assert "[report]" in (tmp_path / "asked").read_text()
    assert (tmp_path / "kept").read_text().split() == [
        f"{name}=={COLAB[name]}" for name in ("torch", "ipykernel")
    ]
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    needs = [
        Requirement(line)
        for line in project["dependencies"] + project["optional-dependencies"]["report"]
    ]
    bounds = {need.name: need.specifier for need in needs}
    for name, version in COLAB.items():
        assert bounds[name].contains(version), (
            f"{name} {bounds[name]} would replace Colab's {version}"
        )
