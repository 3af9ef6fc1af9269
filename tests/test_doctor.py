"""`lsai doctor`: the checks tell the truth about a machine that is changed under them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import typer
from packaging.requirements import Requirement
from typer.testing import CliRunner

import lsai_core.attention
from lsai_lab.cli.doctor import doctor
from lsai_lab.machine import checks
from lsai_lab.machine.checks import Check, run_checks

app = typer.Typer()
app.command()(doctor)


def by_name() -> dict[str, Check]:
    found = run_checks()
    assert len({check.name for check in found}) == len(found)
    return {check.name: check for check in found}


def only(name: str, group: str) -> Check:
    return next(check for check in getattr(checks, group)() if check.name == name)


def test_this_machine_is_usable_and_every_gap_has_a_fix() -> None:
    found = by_name()
    assert found["Python packages"].ok and torch.__version__ in found["Python packages"].detail
    for check in found.values():
        assert check.detail
        assert (check.fix is not None) == (check.ok is False), check


def test_json_and_table_agree() -> None:
    runner = CliRunner()
    answer = runner.invoke(app, ["--json"])
    value = json.loads(answer.stdout)
    assert answer.exit_code == (0 if value["usable"] else 1)
    assert value["environment"]["torch"] == torch.__version__
    assert {row["status"] for row in value["checks"]} <= {"ok", "missing", "not needed"}
    table = runner.invoke(app, []).stdout
    for row in value["checks"]:
        assert row["name"] in table


def test_a_broken_essential_exits_with_1_and_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    version = checks.package_version
    monkeypatch.setattr(
        checks, "package_version", lambda name: "2.4.0" if name == "torch" else version(name)
    )
    answer = CliRunner().invoke(app, [])
    assert answer.exit_code == 1
    assert "Not usable until this is fixed: Python packages" in " ".join(answer.stdout.split())
    assert re.search(r"pip install 'torch\S*>=2.11\S*'", answer.stdout.replace("\n", " "))


def test_missing_or_outdated_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["numpy>=99", "no-such-package-lsai>=1", "torch>=2", 'also-missing; extra == "lab"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs)
    check = only("Python packages", "check_packages")
    assert check.ok is False and check.essential
    assert "numpy>=99" in check.detail and "no-such-package-lsai" in check.detail
    assert "torch>" not in check.detail and "also-missing" not in check.detail


def test_requirements_are_checked_where_the_package_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_installed(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", not_installed)
    check = only("Python packages", "check_packages")
    assert check.ok and check.detail.startswith("all ")
    version = checks.package_version
    monkeypatch.setattr(
        checks, "package_version", lambda name: None if name == "papermill" else version(name)
    )
    check = only("Python packages", "check_packages")
    assert check.ok is False and "papermill" in check.detail


def test_gpu_with_a_cpu_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(checks, "_has_nvidia_device", lambda: True)
    check = only("GPU", "check_gpu")
    assert check.ok is False and "CPU build" in check.detail and "pip install" in (check.fix or "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "nvidia-smi" in (only("GPU", "check_gpu").fix or "")
    monkeypatch.setattr(checks, "_has_nvidia_device", lambda: False)
    assert only("GPU", "check_gpu").status == "not needed"


def test_an_older_gpu_does_not_need_fp8_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert only("FP8 hardware", "check_fp8").ok is None
    gaps = {"fa2": "not there", "fa3": "wants Hopper", "sdpa_cudnn": "too old", "eager": None}
    monkeypatch.setattr(lsai_core.attention, "available_backends", lambda device: gaps)
    assert "flash-attn" in (only("attention fa2", "check_attention").fix or "")
    assert only("attention fa3", "check_attention").ok is None
    assert only("attention sdpa_cudnn", "check_attention").ok is None
    assert only("attention eager", "check_attention").ok
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert only("attention fa3", "check_attention").ok is False
    assert only("FP8 hardware", "check_fp8").ok


def test_a_full_disk_is_essential(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(tmp_path))
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 99, 2**20))
    check = only("Disk", "check_disk")
    assert check.ok is False and check.essential
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 0, 2**31))
    check = only("Disk", "check_disk")
    assert check.ok is False and not check.essential and "2.0 GiB" in check.detail


def test_tools_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[str] = set()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in there else None)
    assert only("Slurm", "check_cluster").status == "not needed"
    assert only("torch.compile", "check_compiler").ok is False
    there |= {"sbatch"}
    assert only("Slurm", "check_cluster").ok is False
    there |= {"srun", "quarto", "enroot"}
    assert only("Slurm", "check_cluster").ok
    assert only("report engine", "check_report").detail == "Quarto at /usr/bin/quarto"
    assert only("containers", "check_cluster").detail == "enroot"
    assert "C++ compiler" in only("torch.compile", "check_compiler").detail


# Images of NVIDIA, whose torch is a build of its own between two releases.
IMAGES = {
    "26.02": {
        "torch": "2.11.0a0+eb65b36914.nv26.02",
        "flash-attn": "2.7.4.post1+nv26.2",
        "transformer-engine": "2.12.0+5671fd36",
        "numpy": "1.26.4",
    },
    "26.04": {"torch": "2.12.0a0+0291f960b6.nv26.04", "numpy": "1.26.4"},
    "26.06": {"torch": "2.13.0a0+8145d630e8.nv26.06", "numpy": "2.1.0"},
}


@pytest.mark.parametrize("tag", IMAGES)
def test_an_image_of_nvidia_is_usable_and_its_torch_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    version, brought = checks.package_version, IMAGES[tag]
    monkeypatch.setattr(checks, "package_version", lambda name: brought.get(name) or version(name))
    found = by_name()
    assert found["Python packages"].ok
    assert brought["torch"] in found["image"].detail
    assert f"numpy {brought['numpy']}" in found["image"].detail
    answer = CliRunner().invoke(app, [])
    assert answer.exit_code == 0 and "pip install" not in answer.stdout


def test_a_package_that_an_image_lacks_is_no_errand_for_pip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if it is the torch itself that is too old."""
    version, brought = checks.package_version, IMAGES["26.02"] | {"papermill": None}
    for torch_ in ("2.11.0a0+eb65b36914.nv26.02", "2.9.0a0+50eac811a6.nv25.09"):
        brought = brought | {"torch": torch_}
        monkeypatch.setattr(
            checks,
            "package_version",
            lambda name, brought=brought: brought[name] if name in brought else version(name),
        )
        check = by_name()["Python packages"]
        assert check.ok is False and "papermill" in check.detail
        assert ("torch" in check.detail.split(";")[0]) == torch_.startswith("2.9")
        assert "pip install" not in (check.fix or "") and "envs/Containerfile" in (check.fix or "")
        told = " ".join(CliRunner().invoke(app, []).stdout.split())
        assert "pip install" not in told and f"would replace the image's torch {torch_}" in told


def test_a_release_candidate_is_not_the_release() -> None:
    need = Requirement("torch>=2.11")
    assert not checks.satisfied(need, "2.11.0rc1") and not checks.satisfied(need, "2.10.0+cu130")
    assert checks.satisfied(need, "2.13.0+cpu") and not checks.satisfied(need, None)
    assert checks.image_torch() is None
