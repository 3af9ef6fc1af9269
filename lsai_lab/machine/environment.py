"""The machine and its software, recorded beside every run: a number without its environment is no
evidence.

Reading it takes milliseconds and leaves CUDA uninitialized: a process that once touched the GPU
holds memory there and cannot fork workers that use it. What is told of GPUs comes from NVML, the
library under `nvidia-smi`; which of them are this process's is CUDA's to say
(`lsai_lab.machine.cuda_devices`).
"""

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from lsai_core.base.errors import UserError
from lsai_core.base.limits import cpu_cores, memory_gib, threads_wanted
from lsai_lab.machine.cuda_devices import cuda_devices
from lsai_lab.project.files import named

# Where kernels come from: a run takes what is installed, and another version can change its result.
KERNELS = ("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "transformer-engine", "torchao")
_NAMED_WHOLE = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
PACKAGES = (
    "lsai",
    "torch",
    "numpy",
    *KERNELS,
    "transformers",
    "accelerate",
    "liger-kernel",
    "torchtitan",
    "megatron-core",
    "tokenizers",
    "safetensors",
    "papermill",
)


def environment() -> dict[str, Any]:
    """Everything about machine and software that a reader needs beside a result; JSON-able, units
    in the names.

    `machine`: see `machine_label`. `gpu` is the name that the driver reports, or None. Cores and
    memory are those that this process may use (affinity, cgroup).
    """
    import torch  # takes seconds, and not every command asks where it is

    threads_wanted()  # refuses what no run could begin with
    cores, gpu = cpu_cores(), gpu_facts()
    # torch.backends.cudnn.version() also asks the GPU whether it is supported, which would
    # initialize CUDA.
    cudnn = getattr(torch._C, "_cudnn", None)
    nccl = torch.version.cuda is not None and torch.distributed.is_nccl_available()
    return {
        "machine": machine_label(gpu["gpu"], cores),
        "host": platform.node(),
        "os": _os_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _dotted(cudnn.getRuntimeVersion() if cudnn else None),
        "nccl": _dotted(torch.cuda.nccl.version() if nccl else None),
        **gpu,
        "cpu": cpu_model(),
        "cpu_cores": cores,
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "memory_gib": round(memory_gib(), 1),
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
    }


def fingerprint(env: dict[str, Any]) -> str:
    """The part of an `environment()` that can change timings, as one line; it goes into the run
    key."""
    gpu = f"{env['gpu']} x{env['gpu_count']}" if env["gpu"] else f"{env['cpu_cores']} cores"
    used = "".join(
        f" | {name} {env['packages'][name]}" for name in KERNELS if name in env["packages"]
    )
    threads = f" | threads {env['omp_num_threads']}" if env["omp_num_threads"] else ""
    return f"{env['cpu']} | {gpu} | torch {env['torch']} | cuda {env['cuda']}{used}{threads}"


def machine_label(gpu: str | None, cores: int) -> str:
    """Slug of a machine: $LSAI_MACHINE (UserError if it is no name), else from the GPU's name, else
    from Apple's chip and the core count."""
    if label := os.environ.get("LSAI_MACHINE"):
        try:
            return named(label)
        except ValueError as error:
            raise UserError(f"LSAI_MACHINE: {error}") from None
    return device_label(gpu, cpu_model(), cores)


def device_label(gpu: str | None, cpu: str, cores: int) -> str:
    """Slug of a GPU, or where there is none of a processor, by their names."""
    if gpu is None:
        # "Apple M4 Pro" -> m4pro: of one core count there are several Macs; other processors go by
        # their cores
        apple = re.fullmatch(r"Apple (M\d+(?: \w+)?)", cpu)
        return f"{apple[1].lower().replace(' ', '') if apple else 'cpu'}-{cores}core"
    # "NVIDIA GeForce RTX 5090" -> rtx5090, "NVIDIA A100-SXM4-80GB" -> a100, "NVIDIA GH200 480GB" ->
    # gh200
    short = re.sub(
        r"(?i)\b(nvidia|amd|tesla|geforce|graphics|generation|gpu|hbm\w*|sxm\w*|\d+gb?)\b",
        " ",
        f"{gpu} ",
    )
    if not re.search(r"\d", short):  # the number was the name: "NVIDIA TITAN 80"
        short = gpu
    return re.sub(r"[^a-z0-9]+", "", short.lower()) or "gpu"


def package_version(name: str) -> str | None:
    """Installed version of a distribution, or None; nothing is imported."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def gpu_facts() -> dict[str, Any]:
    """`gpu`, `gpu_count`, `gpu_memory_gib`, `driver`, `gpu_uuids` of the GPUs this process may use,
    in CUDA's order; the first, on which a run of one GPU takes place, stands for all."""
    import torch

    count = torch.cuda.device_count()  # reads NVML and CUDA_VISIBLE_DEVICES
    facts: dict[str, Any] = {
        "gpu": None,
        "gpu_count": count,
        "gpu_memory_gib": None,
        "driver": None,
        "gpu_uuids": [],
    }
    if not count:
        return facts
    with visible_gpus(count) as (nvml, gpus):
        if gpus:
            name, driver = nvml.nvmlDeviceGetName(gpus[0]), nvml.nvmlSystemGetDriverVersion()
            memory = round(int(nvml.nvmlDeviceGetMemoryInfo(gpus[0]).total) / 2**30, 1)
            facts["gpu_uuids"] = [nvml.nvmlDeviceGetUUID(gpu) for gpu in gpus]
            return facts | {"gpu": name, "gpu_memory_gib": memory, "driver": driver}
    if devices := cuda_devices():
        facts["gpu_uuids"] = [device.uuid for device in devices]
        memory = round(devices[0].memory / 2**30, 1)
        return facts | {"gpu": devices[0].name, "gpu_memory_gib": memory}
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
    }


def gpu_neighbours() -> int | None:
    """How many other processes compute on the GPUs that this one may use; None where NVML cannot
    tell. CUDA stays untouched.

    In a container NVML names processes by numbers that mean nothing there: then this process is one
    of them if it has used CUDA.
    """
    torch = sys.modules.get("torch")
    if torch is None or not (count := torch.cuda.device_count()):
        return None
    with visible_gpus(count) as (nvml, gpus):
        if not gpus:
            return None
        pids = {
            process.pid
            for gpu in gpus
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        }
        family = {process.pid for process in psutil.Process().children(recursive=True)} | {
            os.getpid()
        }
        own = len(pids & family) or int(torch.cuda.is_initialized())
        return max(0, len(pids) - own)
    return None


@contextlib.contextmanager
def visible_gpus(count: int) -> Iterator[tuple[Any, list[Any]]]:
    """NVML and the handles of the visible GPUs in CUDA's order; no handles where NVML is missing or
    refuses (ROCm)."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(count)]
    names = [name.strip() for name in names[:count]]
    try:
        import pynvml

        pynvml.nvmlInit()
        if not _means_the_same(pynvml, names):
            names = [device.uuid for device in cuda_devices()] or names
        gpus = [_handle(pynvml, name) for name in names]
    except Exception:  # ImportError, or NVML's own
        yield None, []
        return
    try:
        with contextlib.suppress(pynvml.NVMLError):
            yield pynvml, gpus
    finally:
        pynvml.nvmlShutdown()


def _means_the_same(nvml: Any, names: list[str]) -> bool:
    """Whether the visible GPUs are the same to NVML as to CUDA: named whole, or the only one, and
    none that is cut into slices."""
    with contextlib.suppress(Exception):
        if all(_NAMED_WHOLE.fullmatch(name) for name in names) or nvml.nvmlDeviceGetCount() == 1:
            return not any(_is_cut(nvml, _handle(nvml, name)) for name in names)
    return False


def _is_cut(nvml: Any, gpu: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0])
    except nvml.NVMLError:  # a slice, or a GPU that cannot be cut
        return False


def _handle(nvml: Any, name: str) -> Any:
    """NVML's handle of a GPU or slice, by its number or UUID, also a UUID without its prefix."""
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    if name.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{name}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{name}")


def _dotted(version: Iterable[int] | None) -> str | None:
    return None if version is None else ".".join(map(str, version))


def _os_name() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    return f"{platform.system()} {platform.release()}"


@functools.cache
def cpu_model() -> str:
    """Name of the processor, as far as the system tells it."""
    if sys.platform == "darwin":  # `platform` knows the architecture only
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            words = ["sysctl", "-n", "machdep.cpu.brand_string"]
            told = subprocess.run(
                words, capture_output=True, text=True, timeout=5, check=True
            ).stdout.strip()
            return told or platform.machine()
    text = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        # Arm kernels list numbers only; lscpu knows the names (Neoverse-V2)
        if "model name" not in text:
            text = subprocess.run(
                ["lscpu"], capture_output=True, text=True, timeout=5, check=True
            ).stdout
    found = re.search(r"(?im)^\s*model name\s*:\s*(.+)$", text)
    return found[1].strip() if found else platform.processor() or platform.machine()
