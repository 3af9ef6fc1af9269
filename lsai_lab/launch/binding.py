"""A process of a run and the cores of its GPU: the driver names them, the system keeps it on them.

A process on the cores of another socket reaches its GPU and what it has in host memory over the
link between sockets. Memory needs no word of its own: Linux takes a page from the node of the core
that first writes to it, as long as that node has room, also within the nodes that `numactl
--membind` allows. Without GPUs, processes that srun started share the step's cores evenly; those of
torchrun, which are one machine's, stay where they are.
"""

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from lsai_lab.machine.environment import visible_gpus

_NODES = Path("/sys/devices/system/node")


def bind(environment: Mapping[str, str] = os.environ) -> str:
    """Keep this process, and all that it starts from now on, on its cores.

    Who is who comes from LOCAL_RANK and LOCAL_WORLD_SIZE (torchrun) or from Slurm's variables.
    Returns what was done, in words, for the process's log. Threads that run already stay where they
    are, so this comes before torch is imported.
    """
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return "not bound to cores: this system cannot"
    local, allowed = _local_rank(environment), os.sched_getaffinity(0)
    if gpu := _cores_of_gpu(local):
        own, whose = gpu & allowed, f"of GPU {local}"
    elif "SLURM_STEP_ID" in environment and "TORCHELASTIC_RUN_ID" not in environment:
        own, whose = share(allowed, local, _local_size(environment)), f"share {local} of the step"
    else:
        own, whose = set[int](), ""
    if not own:
        return f"not bound to cores; on {socket.gethostname()} it may use {ranges(allowed)}"
    os.sched_setaffinity(0, own)
    return f"bound to cores {ranges(own)} ({whose}), memory of nodes {ranges(memory_nodes(own))}"


def _local_rank(environment: Mapping[str, str]) -> int:
    return int(environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or 0)


def _local_size(environment: Mapping[str, str]) -> int:
    """Processes of this run on this node; Slurm writes `2(x3)` for three nodes with two each."""
    given = environment.get("LOCAL_WORLD_SIZE") or environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    return int(given.partition("(")[0].partition(",")[0])


def _cores_of_gpu(local: int) -> set[int]:
    """The cores that the driver calls ideal for the GPU of local rank `local`; none without it."""
    with visible_gpus(local + 1) as (nvml, gpus):
        if len(gpus) > local:
            words = nvml.nvmlDeviceGetCpuAffinity(gpus[local], -(-(os.cpu_count() or 1) // 64))
            return {
                64 * place + bit
                for place, word in enumerate(words)
                for bit in range(64)
                if word >> bit & 1
            }
    return set()


def share(cores: set[int], local: int, size: int) -> set[int]:
    """The part of `cores`, in their order, of process `local` of `size`; none if it has too few."""
    each = len(cores) // size
    return set(sorted(cores)[local * each : (local + 1) * each])


def memory_nodes(cores: set[int]) -> set[int]:
    """The memory nodes that `cores` belong to, as far as the system tells them."""
    found = set()
    for path in _NODES.glob("node[0-9]*/cpulist"):
        with contextlib.suppress(OSError):
            if numbers(path.read_text(encoding="ascii")) & cores:
                found.add(int(path.parent.name.removeprefix("node")))
    return found


def numbers(text: str) -> set[int]:
    """`0-2,7` as numbers; the form of Linux's lists of cores and nodes."""
    found = set[int]()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def ranges(found: set[int]) -> str:
    """Numbers as `0-2,7`."""
    parts = list[list[int]]()
    for number in sorted(found):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][-1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
