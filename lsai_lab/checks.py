"""What this machine can and cannot run: a list of small checks, each with its reason and the command that would fix it.

A check answers one of three things. `ok=True`: it is there. `ok=False`: something is missing that this machine could
have. `ok=None`: this machine has no use for it (FP8 kernels without a GPU), which is no fault. Only a failed
*essential* check means that nothing will work; everything else narrows what can be run, and such runs are recorded as
`unavailable`. Nothing here imports an optional package: installed versions come from its metadata.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from lsai_core.errors import UserError
from lsai_core.profiling.limits import cpu_cores, memory_gib
from lsai_lab.environment import cpu_model, gpu_facts, package_version
from lsai_lab.files import repo_root

# The CUDA build of torch for a recent driver; https://pytorch.org/get-started/locally lists the others.
_CUDA_TORCH = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table; `fix` is a command or an instruction, only where `ok` is False."""

    name: str
    ok: bool | None
    detail: str
    fix: str | None = None
    essential: bool = False

    @property
    def status(self) -> str:
        return "not needed" if self.ok is None else "ok" if self.ok else "missing"


def run_checks() -> list[Check]:
    """All checks, in the order in which a reader needs them. Initializes CUDA if there is a GPU."""
    return [check for group in CHECKS for check in group()]


def check_python() -> Iterator[Check]:
    good = sys.version_info >= (3, 11)
    fix = None if good else "create the environment with Python 3.11 or newer"
    yield Check("Python", good, f"{platform.python_version()} at {sys.executable}", fix, essential=True)


def check_torch() -> Iterator[Check]:
    good = Version("2.11") <= Version(Version(torch.__version__).public) < Version("2.14")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    fix = None if good else "pip install 'torch>=2.11,<2.14'"
    yield Check("torch", good, f"{torch.__version__} ({build})", fix, essential=True)


def check_packages() -> Iterator[Check]:
    try:
        lines = importlib.metadata.requires("lsai") or []
    except importlib.metadata.PackageNotFoundError:
        # Used from its source folder, as on a machine that nothing can be installed on.
        lines = tomllib.loads((repo_root() / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    required = [need for need in map(Requirement, lines) if need.marker is None or need.marker.evaluate({"extra": ""})]
    wrong = [str(need) for need in required if not _satisfied(need)]
    detail = f"missing or of another version: {', '.join(wrong)}" if wrong else f"all {len(required)} requirements"
    yield Check("Python packages", not wrong, detail, "pip install -e ." if wrong else None, essential=True)


def check_processor() -> Iterator[Check]:
    detail = f"{cpu_model()}, {cpu_cores()} cores and {memory_gib():.0f} GiB for this process"
    good = memory_gib() >= 4
    yield Check("CPU and memory", good, detail, None if good else "4 GiB is the least; ask for more memory")


def check_disk() -> Iterator[Check]:
    try:
        folder = repo_root()
    except UserError:
        folder = Path.cwd()
    free = shutil.disk_usage(folder).free / 2**30
    writable = os.access(folder, os.W_OK)
    detail = f"{free:.1f} GiB free in {folder}" + ("" if writable else ", not writable")
    fix = "free some disk space, or set LSAI_ROOT to a checkout on a larger disk; 5 GiB hold data, runs and checkpoints"
    if free < 0.5 or not writable:
        yield Check("Disk", False, detail, fix, essential=True)
    else:
        yield Check("Disk", free >= 5, detail, None if free >= 5 else fix)


def check_gpu() -> Iterator[Check]:
    if torch.cuda.is_available():
        facts = gpu_facts()
        detail = f"{facts['gpu_count']} x {facts['gpu']}, {facts['gpu_memory_gib']} GiB, driver {facts['driver']}"
        yield Check("GPU", True, detail)
    elif not _has_nvidia_device():
        yield Check("GPU", None, "no NVIDIA GPU; the studies run at CPU size, and recorded GPU results can be read")
    elif torch.version.cuda is None:
        yield Check("GPU", False, "there is an NVIDIA GPU, but torch is a CPU build", _CUDA_TORCH)
    else:
        detail = f"there is an NVIDIA GPU, but torch (CUDA {torch.version.cuda}) cannot use it"
        fix = "see what nvidia-smi says: update the driver, or install a torch built for its CUDA version"
        yield Check("GPU", False, detail, fix)


def check_fp8() -> Iterator[Check]:
    """The hardware, then every recipe, asked of the GPU where there is one."""
    from lsai_core.fp8 import available_recipes

    on_gpu = torch.cuda.is_available()
    capable = on_gpu and torch.cuda.get_device_capability() >= (8, 9)
    if not on_gpu:
        yield Check("FP8 hardware", None, "needs a GPU")
    else:
        detail = "compute capability {}.{}".format(*torch.cuda.get_device_capability())
        wanted = "" if capable else "; FP8 tensor cores begin with 8.9 (Ada, Hopper)"
        yield Check("FP8 hardware", True if capable else None, detail + wanted)
    for name, reason in available_recipes("cuda" if on_gpu else "cpu").items():
        if reason is None:
            yield Check(f"fp8 {name}", True, f"runs on this machine's {'GPU' if on_gpu else 'CPU, slowly'}")
        elif capable and "package" in reason:
            yield Check(f"fp8 {name}", False, reason, "pip install 'lsai[fp8]'")
        else:  # no command adds what the hardware lacks
            yield Check(f"fp8 {name}", None, reason)


def check_attention() -> Iterator[Check]:
    from lsai_core.attention import available_backends

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, reason in available_backends(device).items():
        package = next((package for package in _KERNEL_PACKAGES if package.backend == name), None)
        if reason is None:
            yield Check(f"attention {name}", True, f"runs on this machine's {'GPU' if device == 'cuda' else 'CPU'}")
        elif package and _can_use(package):
            yield Check(f"attention {name}", False, reason, package.fix)
        else:  # no command adds what the hardware lacks
            yield Check(f"attention {name}", None, reason)


def check_kernel_packages() -> Iterator[Check]:
    for package in _KERNEL_PACKAGES:
        version = next((found for name in package.distributions if (found := package_version(name))), None)
        if version:
            yield Check(package.label, True, f"version {version}")
        elif _can_use(package):
            yield Check(package.label, False, "not installed", package.fix)
        else:
            major, minor = package.capability
            yield Check(package.label, None, f"needs a GPU of compute capability {major}.{minor} or newer")


class _KernelPackage(NamedTuple):
    label: str
    distributions: tuple[str, ...]
    capability: tuple[int, int]
    fix: str
    backend: str | None = None


_KERNEL_PACKAGES = (
    _KernelPackage("FlashAttention 2", ("flash-attn",), (8, 0), "pip install flash-attn --no-build-isolation", "fa2"),
    _KernelPackage("FlashAttention 3", ("flash-attn-3",), (9, 0),
                   "build the folder hopper/ of https://github.com/Dao-AILab/flash-attention", "fa3"),
    _KernelPackage("FlashAttention 4", ("flash-attn-4",), (9, 0), "pip install --pre flash-attn-4", "fa4"),
    _KernelPackage("Transformer Engine", ("transformer-engine", "transformer-engine-torch"), (8, 9),
                   "pip install --no-build-isolation 'transformer-engine[pytorch]'"),
    _KernelPackage("torchao", ("torchao",), (8, 9), "pip install torchao"),
)  # fmt: skip


def _can_use(package: _KernelPackage) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= package.capability


def check_compiler() -> Iterator[Check]:
    """torch.compile writes C++ on a CPU and Triton on a GPU; both need a compiler and Python's headers."""
    missing = []
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        missing.append("a C++ compiler")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append("Python's headers")
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        missing.append("Triton")
    if not missing:
        yield Check("torch.compile", True, "compiler and headers" + (", Triton" if torch.cuda.is_available() else ""))
        return
    triton = "pip install triton; " if "Triton" in missing else ""
    fix = f"{triton}apt-get install g++ python3-dev (or your system's equal)"
    yield Check("torch.compile", False, f"no {' and no '.join(missing)}", fix)


def check_report() -> Iterator[Check]:
    if quarto := shutil.which("quarto"):
        yield Check("report engine", True, f"Quarto at {quarto}")
    elif all(importlib.util.find_spec(name) for name in ("pypandoc", "typst")):
        yield Check("report engine", True, "pandoc and typst from their Python packages (Quarto is not installed)")
    else:
        fix = "pip install pypandoc-binary typst (or quarto-cli)"
        yield Check("report engine", False, "neither Quarto nor pandoc with typst", fix)


def check_cluster() -> Iterator[Check]:
    tools = [name for name in ("sbatch", "srun") if shutil.which(name)]
    if len(tools) == 2:
        yield Check("Slurm", True, "sbatch and srun")
    elif tools:
        yield Check("Slurm", False, f"only {tools[0]} is on the PATH", "load the cluster's Slurm module")
    else:
        yield Check("Slurm", None, "no Slurm here; studies run one after the other on this machine")
    containers = [name for name in ("enroot", "podman", "apptainer", "docker") if shutil.which(name)]
    if containers:
        yield Check("containers", True, ", ".join(containers))
    else:
        yield Check(
            "containers", None, "no enroot, podman, apptainer or docker; the Python environment is used as it is"
        )


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    check_python, check_torch, check_packages, check_processor, check_disk, check_gpu, check_fp8, check_attention,
    check_kernel_packages, check_compiler, check_report, check_cluster,
)  # fmt: skip


def _satisfied(need: Requirement) -> bool:
    version = package_version(need.name)
    return version is not None and need.specifier.contains(version, prereleases=True)


def _has_nvidia_device() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
