"""What this process may use: CPU cores and memory, as seen from inside a container, a Slurm job or
a plain shell.

A scheduler pins it to cores (the affinity mask), and control groups cap CPU time and memory, on any
ancestor group: all are read, in both layouts, and the smallest wins. A virtual machine that is
given memory as it uses it does not tell how much it will be; who knows says so:
`LSAI_MEMORY_GIB=560`.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from lsai_core.base.errors import UserError

MEMORY = "LSAI_MEMORY_GIB"
THREADS = "OMP_NUM_THREADS"
_HOST_SHARE = 0.85
_GIB = 2**30


def cpu_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: the affinity mask, cut by the cgroup's CPU quota (rounded
    up), at least 1."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min([cores, *(math.ceil(quota) for quota in _cpu_quotas(root))]))


def memory_gib(root: Path = Path("/")) -> float:
    """GiB that this process may use: the machine's, or $LSAI_MEMORY_GIB (UserError if that is no
    positive number), cut by the cgroup's limit."""
    given = os.environ.get(MEMORY)
    machine = _positive(given) if given else _machine_bytes() / _GIB
    return min([machine, *(limit / _GIB for limit in _memory_limits(root))])


def threads_wanted() -> int | None:
    """How many threads $OMP_NUM_THREADS asks for, None if it does not say. It may be a list, one
    number for each level of nested parallelism (OpenMP 5.2, section 21.2.2); the first counts.
    UserError for anything else."""
    given = os.environ.get(THREADS, "").strip()
    words = [word.strip() for word in given.split(",")]
    if given and not all(
        word.isascii() and word.isdigit() and 0 < int(word[:10]) <= 2**20 for word in words
    ):
        raise UserError(
            f"{THREADS}={given[:60]!r} is no number of threads; set it to one, such as 8, or unset "
            f"it"
        )
    return int(words[0]) if given else None


def host_limit_gib() -> float:
    """Of `memory_gib`, in GiB, what weights or block inputs that live on the host may take: 85
    %."""
    return _HOST_SHARE * memory_gib()


def _machine_bytes() -> int:
    """The machine's memory. Windows has no `sysconf`; there the package depends on psutil."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.virtual_memory().total)


def _positive(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{MEMORY}={given!r} must be this machine's memory in GiB, such as 512")
    return value


def _cpu_quotas(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu"):
        words = _read(folder / "cpu.max").split()  # version 2: "<quota or max> <period>"
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
            yield int(words[0]) / int(words[1])


def _memory_limits(root: Path) -> Iterator[int]:
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            # No limit reads "max" in version 2, in version 1 a number near 2^63, which the
            # machine's own memory cuts.
            if (text := _read(folder / name)).isdigit() and int(text) > 0:
                yield int(text)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and all its ancestors, in both layouts."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            tops = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            tops = [mount / controller, mount / controllers]
        else:
            continue
        group = Path(path.strip("/"))
        for top in tops:
            for folder in (group, *group.parents) if group.parts else (group,):
                yield top / folder


def _read(path: Path) -> str:
    """A small kernel file, or nothing where the kernel has none (or hides it): then it states no
    limit."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
