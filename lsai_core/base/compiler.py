"""What `torch.compile` needs of the machine: Inductor writes C++ for a CPU, Triton C for a GPU's
launcher.

A Mac has `clang++` before it has a compiler: until Apple's tools are installed it only says so. So
a compiler is one that tells its version.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from lsai_core.base.errors import Unavailable

_INSTALL = {
    "apt-get": "apt-get install g++ python3-dev",
    "dnf": "dnf install gcc-c++ python3-devel",
    "zypper": "zypper install gcc-c++ python3-devel",
    "pacman": "pacman -S gcc",
    "apk": "apk add g++ python3-dev",
}


def require(wanted: bool, device: torch.device) -> None:
    """Raise Unavailable if a run that is compiled (`wanted`) cannot be compiled for `device`
    here."""
    if wanted and (gaps := missing(device.type)):
        raise Unavailable(f"compile=true needs {' and '.join(gaps)}: {fix(gaps)}")


def missing(device_type: str) -> list[str]:
    """What is not there of what torch.compile needs for `cpu` or `cuda`; nothing if all is."""
    gaps = [] if any(map(_works, _compilers(device_type))) else ["a C++ compiler"]
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        gaps.append("Python's headers")
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        gaps.append("Triton")
    return gaps


def fix(gaps: list[str]) -> str:
    """The commands that bring what is missing on this platform."""
    commands = ["pip install triton"] if "Triton" in gaps else []
    if gaps != ["Triton"]:
        known = [command for tool, command in _INSTALL.items() if shutil.which(tool)]
        elsewhere = known[0] if known else "install g++ and Python's headers"
        commands.append("xcode-select --install" if sys.platform == "darwin" else elsewhere)
    return "; ".join(commands)


def _compilers(device_type: str) -> list[str]:
    """The compilers that Inductor and Triton look for, in their order."""
    if device_type == "cuda":
        return [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    return [os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")]


def _works(name: str) -> bool:
    path = shutil.which(name)
    return path is not None and _tells_its_version(path)


@functools.cache
def _tells_its_version(path: str) -> bool:
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
