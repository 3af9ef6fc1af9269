"""What this process may use: CPU cores and memory, as seen from inside a container, a Slurm job or a plain shell.

`os.cpu_count()` and `/proc/meminfo` describe the host. A container or a job sees less: the scheduler pins it to some
cores (the affinity mask), and control groups cap its CPU time and its memory. The cap can sit on any ancestor group
(Slurm sets it on the job, the process lives in a step below), so all ancestors are read and the smallest cap wins.
Both versions of the cgroup file layout are read; a machine without them (macOS) has no caps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_GIB = 2**30


def cpu_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: the affinity mask, cut by the cgroup's CPU quota (rounded up), at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _cpu_quotas(root))]))


def memory_gib(root: Path = Path("/")) -> float:
    """Memory in GiB that this process may use: the machine's, cut by the cgroup's limit."""
    return min([psutil.virtual_memory().total, *_memory_limits(root)]) / _GIB


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
            # No limit reads "max" in version 2 and a number near 2^63 in version 1, which the machine's own memory
            # cuts.
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
    """A small kernel file, or nothing where the kernel has none (or hides it): then it states no limit."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
