"""`make` on machines as people have them: half an environment, another `sed`, a system or a Python
that is refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHECKOUT, MAKE_OPTIONS


def make(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`make` in `folder`, as typed in a terminal; nothing is installed: what would call pip does
    nothing."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = ["make", "-s", "pip=:", *words]
    return subprocess.run(command, cwd=folder, env=kept | variables, capture_output=True, text=True)


def has_pip(environment: Path) -> bool:
    words = [str(environment / "bin" / "python"), "-m", "pip", "--version"]
    return subprocess.run(words, capture_output=True).returncode == 0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What `make setup` reads of a checkout."""
    (tmp_path / "lsai_lab" / "machine").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "lsai_lab/machine/platforms.py"):
        shutil.copy(CHECKOUT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def debian(checkout: Path) -> Path:
    """A Python that makes half an environment, as Debian's does, until its venv package is
    there."""
    python = checkout / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'if [ "$1 $2" != "-m venv" ] || [ -e {checkout}/python3-venv ]; then\n'
        f'  exec {sys.executable} "$@"\n'
        "fi\n"
        f'{sys.executable} -m venv --without-pip "$3"\n'
        'echo "The virtual environment was not created successfully: ensurepip is missing" >&2\n'
        "exit 1\n"
    )
    python.chmod(0o755)
    return python


def test_half_an_environment_is_made_again_once_it_can_be(checkout: Path, debian: Path) -> None:
    failed = make(checkout, "setup", f"PYTHON={debian}")
    assert failed.returncode == 2 and "apt-get install python3-venv" in failed.stderr
    assert (checkout / ".venv/bin/python").exists() and not has_pip(checkout / ".venv")
    again = make(checkout, "setup", f"PYTHON={debian}")
    assert again.returncode == 2 and "apt-get install python3-venv" in again.stderr
    (checkout / "python3-venv").touch()
    good = make(checkout, "setup", f"PYTHON={debian}")
    assert good.returncode == 0, good.stderr
    assert has_pip(checkout / ".venv")

    # An environment of somebody else's with pip in it is used, and nothing in it is removed.
    (checkout / ".venv").rename(checkout / "theirs")
    (checkout / "theirs/.made").unlink()
    (checkout / "theirs/.base").unlink()
    (checkout / "theirs/precious").touch()
    assert make(checkout, "setup", f"PYTHON={debian}", "VENV=theirs").returncode == 0
    assert (checkout / "theirs/precious").exists()


@pytest.mark.parametrize("is_environment", [True, False])
def test_what_make_did_not_make_it_does_not_remove(checkout: Path, is_environment: bool) -> None:
    theirs = checkout / "theirs"
    if is_environment:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(theirs)], check=True)
    theirs.mkdir(exist_ok=True)
    (theirs / "precious").touch()
    done = make(checkout, "setup", f"PYTHON={sys.executable}", "VENV=theirs")
    assert done.returncode == 2 and "VENV=" in done.stderr
    assert done.stderr.count("error:") == 1 and (theirs / "precious").exists()


def test_what_make_test_was_given_does_not_reach_the_make_of_a_test(checkout: Path) -> None:
    """Else `make test TORCH_INDEX=...` installs torch, where the tests try how make sets up."""
    program = "import os, conftest; print(*os.environ)"
    python = checkout / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{program}'\n")
    python.chmod(0o755)
    for stamp in (".base", ".test"):
        (checkout / ".venv" / stamp).touch()
    given = ["TORCH_INDEX=https://elsewhere", "LOCK=", f"VENV={checkout}/.venv"]
    done = make(checkout, "test", *given, PYTHONPATH=f"{CHECKOUT}:{CHECKOUT / 'tests'}")
    assert done.returncode == 0, done.stderr
    assert not {"MAKEFLAGS", "MAKELEVEL", *MAKE_OPTIONS} & {*done.stdout.split()}
    assert "PATH" in done.stdout.split()


def test_help_needs_no_tool_of_gnu(tmp_path: Path) -> None:
    """BSD's sed reads \\t as t, and its grep and awk know less, too."""
    sed = shutil.which("sed")
    (tmp_path / "sed").write_text(f'#!/bin/bash\nexec {sed} "${{@//\\\\t/t}}"\n')
    (tmp_path / "sed").chmod(0o755)
    listed = make(CHECKOUT, "help", PATH=f"{tmp_path}:{os.environ['PATH']}").stdout
    targets = re.findall(r"(?m)^([a-z]+):.*?##", (CHECKOUT / "Makefile").read_text())
    assert len(targets) > 8
    for target in targets:
        assert re.search(rf"(?m)^  make {target} +\w", listed), listed


REFUSED = {
    "sys.platform = 'win32'": "WSL2",
    "sys.platform = 'darwin'; platform.machine = lambda: 'x86_64'": "Intel Macs",
    "sys.version_info = (3, 9, 18); platform.python_version = lambda: '3.9.18'": "found 3.9.18",
}


@pytest.mark.parametrize("machine", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_made(checkout: Path, machine: str) -> None:
    (checkout / "sitecustomize.py").write_text(f"import platform, sys\n{machine}\n")
    words = ("setup", f"PYTHON={sys.executable}")
    done = make(checkout, *words, PYTHONPATH=str(checkout))
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make:")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert lines[0].startswith("error:") and REFUSED[machine] in lines[0]
    assert not (checkout / ".venv").exists()


def test_apple_silicon_is_not_refused(checkout: Path) -> None:
    patched = "import platform, sys; sys.platform = 'darwin'; platform.machine = lambda: 'arm64'\n"
    (checkout / "sitecustomize.py").write_text(patched)
    words = [sys.executable, "lsai_lab/machine/platforms.py"]
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(words, cwd=checkout, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
