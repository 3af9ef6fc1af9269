"""What the files beside the code promise: paths that exist, one version, the two commands in public
CI, platforms as the code has them."""

from __future__ import annotations

import platform
import re
import sys
import tomllib

import pytest
import yaml
from conftest import CHECKOUT
from packaging.requirements import Requirement

import lsai_core
from lsai_lab.machine import platforms

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


def read(name: str) -> str:
    return (CHECKOUT / name).read_text(encoding="utf-8")


def test_contributing_is_short_and_names_what_is_there() -> None:
    text = read("CONTRIBUTING.md")
    assert len(text.splitlines()) <= 80
    named = re.findall(r"`((?:lsai_core|lsai_lab|params|tests|reports)/[\w./-]*)", text)
    assert len(named) >= 8
    for path in named:
        assert (CHECKOUT / path).exists(), path
    for command in re.findall(r"`lsai ([\w-]+)", text):
        from lsai_lab.cli.app import COMMANDS

        assert command in COMMANDS


def test_one_version_and_one_license_everywhere() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == PROJECT["version"] == lsai_core.__version__
    assert citation["license"] == PROJECT["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in read("LICENSE")
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]
    assert f"## {PROJECT['version']}" in read("CHANGELOG.md")


def test_public_ci_runs_the_two_commands_on_the_machines_that_people_have() -> None:
    [job] = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    first, second = (command.removesuffix(' TORCH_INDEX="$TORCH_INDEX"') for command in commands)
    assert (first, second) == ("make test", "make report PROFILE=quick ONLY=machine,baseline")
    rows = job["strategy"]["matrix"]["include"]
    assert {row["machine"].split("-")[0] for row in rows} == {"ubuntu", "macos"}
    pythons = {row["python"] for row in rows if row["machine"].startswith("ubuntu")}
    assert pythons == {"3.11", "3.12", "3.13", "3.14"}
    assert {row["torch"] for row in rows} == {"cpu", "cuda"}
    assert len({(row["machine"], row["python"]) for row in rows}) == len(rows)  # their reports


def test_the_readme_has_the_platforms_as_the_code_has_them() -> None:
    rows = {
        words.lower(): text
        for words, text in re.findall(r"(?m)^\| \*\*(.*?)\*\* \| (.*) \|$", read("README.md"))
    }
    names = {
        "linux": "Linux",
        "darwin": "Macs",
        "x86_64": "x86-64",
        "aarch64": "aarch64",
        "arm64": "Apple silicon",
    }
    for system, machine in platforms.SUPPORTED:
        assert names[system] in rows["supported"] and names[machine] in rows["supported"]
    tested = " to ".join(
        ".".join(map(str, version)) for version in sorted({*platforms.TESTED_PYTHON})
    )
    assert f"Python {tested} " in rows["supported"]
    refused = rows["refused, in one line"]
    assert "Windows" in refused and "WSL2" in refused and "Intel Macs" in refused
    assert "ROCm" in rows["best effort"]
    major, minor = platforms.TESTED_PYTHON[1]
    assert f"Python {major}.{minor + 1} and newer" in rows["best effort"]


def test_a_python_newer_than_the_tested_ones_is_best_effort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platforms, "SUPPORTED", {(sys.platform, platform.machine())})
    (_, (major, newest)) = platforms.TESTED_PYTHON
    for version in range(platforms.OLDEST_PYTHON[1], newest + 2):
        monkeypatch.setattr(sys, "version_info", (major, version, 0))
        expected = "supported" if version <= newest else "best effort: tested with Python 3.11 to "
        assert platforms.standing().startswith(expected), version


def test_an_install_without_make_is_in_the_readme_as_the_package_has_it() -> None:
    [line] = re.findall(r"(?m)^- Without `make`: (.*)$", read("README.md"))
    [extra] = re.findall(r"`pip install -e '\.\[(\w+)\]'`", line)
    assert extra in PROJECT["optional-dependencies"]
    assert f"$(pip) \"$(TORCH)\" -e '.[{extra}]'" in read("Makefile")  # what make installs, too
    [command] = re.findall(r"then `(\w+) \w+`", line)
    assert command in PROJECT["scripts"]
    alone = line.partition("`pip install .`: ")[2]
    needs = map(Requirement, PROJECT["dependencies"])
    linux = {"sys_platform": "linux"}
    here = {need.name for need in needs if need.marker is None or need.marker.evaluate(linux)}
    assert set(re.findall(r"\w+", alone)) - {"and"} == here
