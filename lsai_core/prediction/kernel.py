"""Which attention kernel a run takes on a GPU that is not here: what `auto` would choose there.

Memory and time of a step follow from the kernel, and the kernel from the GPU's architecture and
from the packages that are installed: with a sliding window torch alone masks S x S scores.
"""

import functools
import re
from collections.abc import Collection, Iterable, Sequence

import torch

from lsai_core.attention.choice import BACKENDS, choose, get_backend, nearest_power_of_two
from lsai_core.attention.measured import Ranking, select_rankings, shipped
from lsai_core.attention.registry import Case
from lsai_core.base.errors import Unavailable, UserError, hint
from lsai_core.config.precision import compute_dtype
from lsai_core.config.train import TrainConfig
from lsai_core.kernels import AMPERE
from lsai_core.profiling.gpus import Gpu

# Kernels of packages of their own; the others come with torch.
PACKAGES = tuple(name for name, backend in BACKENDS.items() if backend.load is not None)
_USUAL = "8.0"  # what a GPU is taken for of which only the memory is known


def packages_named(text: str) -> frozenset[str]:
    """Kernels as `--installed fa2,fa4` names them, `none` for no package. UserError for others."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["none"]:
        return frozenset()
    for name in names:
        if name not in PACKAGES:
            known = (
                f"{hint(name, PACKAGES)}, or none"
                if name not in BACKENDS
                else ": it comes with torch"
            )
            raise UserError(f"--installed {name!r} is no package with attention kernels{known}")
    if not names:
        raise UserError(f"--installed expects some of {', '.join(PACKAGES)}, or none")
    return frozenset(names)


@functools.cache
def packages_here() -> frozenset[str]:
    """Kernels whose packages can be imported in this environment."""
    found = set()
    for name in PACKAGES:
        try:
            BACKENDS[name].load()  # type: ignore[misc]
        except Exception:  # a broken binary package fails in any way it likes
            continue
        found.add(name)
    return frozenset(found)


def packages_on(gpu: Gpu) -> frozenset[str]:
    """Kernels whose packages are installed where `gpu` is: those that its passport measured, else
    those that are installed here."""
    if gpu.passport is None or not gpu.passport.attention:
        return packages_here()
    measured = {name for row in gpu.passport.attention for name in row.inference}
    return frozenset(PACKAGES) & measured


def kernel_on(gpu: Gpu, config: TrainConfig, packages: Collection[str]) -> str:
    """The kernel of `config` on `gpu` where `packages` are installed, `auto` resolved as it would
    be there.

    A kernel that the config names is taken to be installed. UserError where it cannot serve the
    run: its GPU, its head dimension, its window.
    """
    model, window = config.model, config.attention.window
    case = Case(
        "cpu" if gpu.is_cpu else "cuda",
        compute_dtype(config.precision),
        model.head_dim,
        None if window is not None and window >= config.seq_len else window,
        grouped=model.n_heads != model.n_kv_heads,
        length=nearest_power_of_two(config.seq_len),
    )
    missing = {name: _missing(gpu, name, packages) for name in BACKENDS}
    named = config.attention.backend
    if named != "auto":
        backend = get_backend(named)
        reason = _missing(gpu, named, PACKAGES) or backend.unsupported(case)
        if reason is not None:
            raise UserError(f"attention backend {named} {reason}; use another backend, or auto")
        return named
    capability = gpu.capability or _USUAL
    rankings: Sequence[Ranking] = ()
    if not gpu.is_cpu:
        rankings = select_rankings(shipped(), gpu.driver_name, capability, missing)
    try:
        return choose(case, missing, rankings)
    except Unavailable as error:
        raise UserError(str(error)) from None


def _missing(gpu: Gpu, name: str, packages: Collection[str]) -> str | None:
    """Why `gpu` cannot run the kernel with `packages`; None if it can."""
    backend = get_backend(name)
    if gpu.is_cpu:
        return backend.missing(torch.device("cpu"))
    if "cuda" not in backend.dtypes:
        return "exists for no GPU"
    if name in PACKAGES and name not in packages:
        return "is not installed"
    if gpu.is_amd:
        is_there = backend.rocm or not backend.fused
        return None if is_there else f"is for NVIDIA's GPUs, and {gpu.name} is AMD's"
    if backend.compute_capability is not None:
        low, high = backend.compute_capability
        if not low <= _capability(gpu) <= high:
            return f"needs another architecture than that of {gpu.name}"
    return None


def _capability(gpu: Gpu) -> tuple[int, int]:
    major, minor = re.fullmatch(r"(\d+)\.(\d+)", gpu.capability or _USUAL).groups()  # type: ignore[union-attr]
    return int(major), int(minor)


def not_there(config: TrainConfig, gpus: Iterable[Gpu]) -> list[str]:
    """What of the run some of these GPUs lack, a line each: the package's kernels, of which memory
    and time are predicted, and fp8. UserError where the only GPU has no fp8, and the run needs
    it."""
    asked = [gpu for gpu in gpus if not gpu.is_cpu]
    lack = [gpu.name for gpu in asked if gpu.is_amd or _capability(gpu) < AMPERE]
    found = []
    if lack:
        found.append(
            f"{', '.join(lack)}: PyTorch's own operations run there in place of this package's "
            "kernels, with more memory and time than predicted"
        )
    known = [gpu for gpu in asked if gpu.capability or gpu.is_amd]
    without = [gpu.name for gpu in known if not gpu.runs_our_fp8]
    if config.fp8.recipe != "none" and without:
        said = f"fp8.recipe {config.fp8.recipe} does not run on {', '.join(without)}"
        if len(asked) == 1:
            raise UserError(f"{said}; leave it out, or name another GPU")
        found.append(said)
    return found
