"""What this machine can and cannot run: a list of small checks, each with its reason and the
command that would fix it.

`ok=True`: it is there. `ok=False`: it is missing, and this machine could have it. `ok=None`: this
machine has no use for it (FP8 kernels without a GPU). Only a failed *essential* check means that
nothing will work; without the others some runs are `unavailable`.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

import lsai_core.attention
from lsai_core.base import compiler
from lsai_core.base.errors import UserError
from lsai_core.base.limits import cpu_cores, memory_gib
from lsai_core.kernels import AMPERE, cuda_capability, on_rocm
from lsai_lab.machine.environment import cpu_model, gpu_facts, package_version
from lsai_lab.machine.platforms import refusal, standing
from lsai_lab.project.files import repo_root

# The CUDA build of torch for a recent driver; https://pytorch.org/get-started/locally lists the
# others.
_CUDA_TORCH = (
    "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
)

# What NVIDIA's images bring, built for their torch.
_OF_AN_IMAGE = ("flash-attn", "transformer-engine", "numpy")


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table; `fix` is a command or an instruction for where `ok` is
    False."""

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
    groups = [group for name, group in globals().items() if name.startswith("check_")]
    return [_advised(check) for group in groups for check in group()]


def _advised(check: Check) -> Check:
    """The check with a fix only if one is called for, and none by pip where an image brings its own
    torch: pip would replace the torch that the image's other packages are built for.
    """
    fix, detail, own = check.fix if check.ok is False else None, check.detail, image_torch()
    if own is not None:
        detail = re.sub(r" \(pip install [^)]*\)", "", detail)
        if fix and "pip install" in fix:
            recipe = "add it to the image, by the recipe of envs/Containerfile or on a newer base"
            fix = f"{recipe}; pip in here would replace the image's torch {own}"
    return replace(check, detail=detail, fix=fix)


def image_torch() -> str | None:
    """The version of a torch that an image of NVIDIA brings (2.11.0a0+...nv26.02), else None."""
    version = package_version("torch")
    local = Version(version).local if version else None
    return version if local and re.search(r"(^|\.)nv\d", local) else None


def satisfied(need: Requirement, version: str | None) -> bool:
    """True if the installed `version` is one that `need` allows.

    An image's build counts as the release that it is called after: 2.11.0a0+eb65b36914.nv26.02 as
    2.11.0, which by its order alone (PEP 440) comes before 2.11.
    """
    if not version:
        return False
    counted = Version(version).base_version if Version(version).local else version
    return need.specifier.contains(counted, prereleases=True)


def check_platform() -> Iterator[Check]:
    where = f"{platform.system()} on {platform.machine()}, Python {platform.python_version()}"
    reason = refusal()
    yield Check(
        "Platform",
        reason is None,
        f"{where}: {'refused' if reason else standing()}",
        reason,
        essential=True,
    )


def check_packages() -> Iterator[Check]:
    required = _requirements()
    found = {need: package_version(need.name) for need in required}
    wrong = [str(need) for need, has in found.items() if not satisfied(need, has)]
    detail = (
        f"missing or of another version: {', '.join(wrong)}"
        if wrong
        else f"all {len(required)} requirements"
    )
    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if on_rocm()
        else "CPU build"
    )
    detail += (
        f"; Python {platform.python_version()} at {sys.executable}, torch "
        f"{torch.__version__} ({build})"
    )
    fix = f"pip install {' '.join(map(repr, wrong))}"
    yield Check("Python packages", not wrong, detail, fix, essential=True)


def check_image() -> Iterator[Check]:
    """The versions that an image brings may be others than those that the tests ran with."""
    nothing = "no image with its own torch; packages come from an index"
    brought = {name: package_version(name) for name in _OF_AN_IMAGE}
    told = ", ".join(f"{name} {version or 'missing'}" for name, version in brought.items())
    detail = (
        f"its own torch {image_torch()}, {told}; served as they are, pip is to leave them alone"
    )
    yield Check("image", True if image_torch() else None, detail if image_torch() else nothing)


def _requirements() -> list[Requirement]:
    """What pyproject.toml asks for here, the core and the extra `report`."""
    try:
        lines = importlib.metadata.requires("lsai") or []
    except importlib.metadata.PackageNotFoundError:
        # Used from its source folder, as on a machine that nothing can be installed on.
        project = tomllib.loads((repo_root() / "pyproject.toml").read_text(encoding="utf-8"))[
            "project"
        ]
        lines = project["dependencies"] + project["optional-dependencies"]["report"]
    needs = map(Requirement, lines)
    return [
        need for need in needs if need.marker is None or need.marker.evaluate({"extra": "report"})
    ]


def check_processor() -> Iterator[Check]:
    detail = f"{cpu_model()}, {cpu_cores()} cores and {memory_gib():.0f} GiB for this process"
    yield Check(
        "CPU and memory", memory_gib() >= 4, detail, "4 GiB is the least; ask for more memory"
    )


def check_disk() -> Iterator[Check]:
    try:
        folder = repo_root()
    except UserError:
        folder = Path.cwd()
    free, writable = shutil.disk_usage(folder).free / 2**30, os.access(folder, os.W_OK)
    detail = f"{free:.1f} GiB free in {folder}" + ("" if writable else ", not writable")
    fix = (
        "free some disk space, or set LSAI_ROOT to a checkout on a larger disk; 5 GiB hold "
        "data, "
        "runs and checkpoints"
    )
    yield Check("Disk", free >= 5 and writable, detail, fix, essential=free < 0.5 or not writable)


def check_gpu() -> Iterator[Check]:
    if torch.cuda.is_available():
        facts = gpu_facts()
        detail = (
            f"{facts['gpu_count']} x {facts['gpu']}, {facts['gpu_memory_gib']} GiB, driver "
            f"{facts['driver']}"
        )
        if on_rocm():
            detail += (
                "; AMD's GPUs are untested: PyTorch's own kernels run, fp8, cuDNN and "
                "flash-attn do not"
            )
        elif cuda_capability() < AMPERE:
            detail += (
                "; older than compute capability 8.0, best effort: this project's kernels "
                "do "
                "not run"
            )
        yield Check("GPU", True, detail)
    elif sys.platform == "darwin":
        yield Check(
            "GPU", None, "Apple's GPU (MPS) is not used; the studies run on the CPU at its size"
        )
    elif not _has_nvidia_device():
        yield Check(
            "GPU",
            None,
            "no NVIDIA GPU; the studies run at CPU size, and recorded GPU results can be read",
        )
    elif torch.version.cuda is None:
        yield Check("GPU", False, "there is an NVIDIA GPU, but torch is a CPU build", _CUDA_TORCH)
    else:
        detail = f"there is an NVIDIA GPU, but torch (CUDA {torch.version.cuda}) cannot use it"
        fix = (
            "see what nvidia-smi says: update the driver, or install a torch built for its CUDA "
            "version"
        )
        yield Check("GPU", False, detail, fix)


def check_fp8() -> Iterator[Check]:
    """The hardware, then every recipe, asked of the GPU where there is one."""
    from lsai_core.fp8.recipes import available_recipes

    device, capability = _device(), cuda_capability()
    capable = capability >= (8, 9)
    detail = (
        "compute capability {}.{}".format(*capability)
        if capability > (0, 0)
        else "needs an NVIDIA GPU"
    )
    missing = (
        "" if capable or capability == (0, 0) else "; FP8 tensor cores begin with 8.9 (Ada, Hopper)"
    )
    yield Check("FP8 hardware", capable or None, detail + missing)
    for name, reason in available_recipes(device).items():
        # No command adds what the hardware lacks.
        yield _kernel(
            f"fp8 {name}",
            reason,
            capable and "package" in (reason or ""),
            "pip install 'lsai[fp8]'",
        )


def check_attention() -> Iterator[Check]:
    for name, reason in lsai_core.attention.available_backends(_device()).items():
        backend = lsai_core.attention.get_backend(name)
        low, high = backend.compute_capability or ((0, 0), (0, 0))
        installable = backend.install is not None and low <= cuda_capability() <= high
        yield _kernel(f"attention {name}", reason, installable, f"pip install {backend.install}")


def _kernel(name: str, reason: str | None, installable: bool, fix: str) -> Check:
    ok = True if reason is None else False if installable else None
    return Check(
        name, ok, reason or f"runs on this machine's {'GPU' if _device() == 'cuda' else 'CPU'}", fix
    )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_compiler() -> Iterator[Check]:
    gaps = compiler.missing(_device())
    detail = f"needs {' and '.join(gaps)}" if gaps else "compiler and headers"
    yield Check("torch.compile", not gaps, detail, compiler.fix(gaps))


def check_report() -> Iterator[Check]:
    quarto, pandoc = (
        shutil.which("quarto"),
        all(importlib.util.find_spec(name) for name in ("pypandoc", "typst")),
    )
    other = (
        "pandoc and typst from their Python packages"
        if pandoc
        else "neither Quarto nor pandoc with typst"
    )
    fix = "pip install pypandoc-binary typst (or quarto-cli)"
    yield Check(
        "report engine", bool(quarto or pandoc), f"Quarto at {quarto}" if quarto else other, fix
    )


def check_cluster() -> Iterator[Check]:
    tools = [name for name in ("sbatch", "srun") if shutil.which(name)]
    nothing = "no Slurm here; studies run one after the other on this machine"
    fix = "both are needed; load the cluster's Slurm module"
    yield Check("Slurm", len(tools) == 2 if tools else None, " and ".join(tools) or nothing, fix)
    containers = ", ".join(
        name for name in ("enroot", "podman", "apptainer", "docker") if shutil.which(name)
    )
    nothing = "no enroot, podman, apptainer or docker; the Python environment is used as it is"
    yield Check("containers", bool(containers) or None, containers or nothing)


def _has_nvidia_device() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
