"""One run over several nodes of a Slurm job: srun starts the workers, says who is who, ends all
when one fails, and passes stop signals on. Rank 0 is on the job's first node, where this process
runs, too: the workers meet at this host and a port that is free on it.

In a container, from which srun does not work, the batch script on the host starts the step
(`lsai_lab.launch.host_step`).
"""

import math
import os
import socket
import sys
from collections.abc import Mapping

from torch.distributed.elastic.utils.distributed import get_free_port

from lsai_core.base.errors import UserError
from lsai_lab.launch.host_step import STEPS

PREFIX = "LSAI_PREFIX"  # the cluster's `prefix`, words with blanks between them


def srun_command(nproc: int, environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """The command that starts `nproc` workers over the nodes of this job, for `launch`.

    None if this is no Slurm job of several nodes, or if one node's GPUs are enough. Raises
    UserError if the job is too small.
    """
    nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
    gpus = int(environment.get("SLURM_GPUS_ON_NODE", "0"))
    if nodes == 1 or (gpus and nproc <= gpus):
        return None
    used, per_node = spread(nproc, nodes, gpus)
    cpus = int(environment.get("SLURM_CPUS_PER_TASK", "1"))
    host = environment.get("MASTER_ADDR") or socket.gethostname()
    meet = ["env", f"MASTER_ADDR={host}", f"MASTER_PORT={get_free_port()}"]
    options = [
        f"--nodes={used}",
        f"--ntasks={nproc}",
        f"--ntasks-per-node={per_node}",
        f"--cpus-per-task={max(1, cpus // per_node)}",
        "--relative=0",
        "--distribution=block",
        # Each worker binds itself to the cores of its GPU (lsai_lab.launch.binding).
        "--cpu-bind=none",
        "--overlap",
        "--kill-on-bad-exit=1",
        "--unbuffered",
        *([f"--gpus-per-node={per_node}"] if gpus else []),
    ]
    worker = [*environment.get(PREFIX, "").split(), sys.executable]
    if environment.get(STEPS):
        # A warning that comes before Python has begun is told again, and is not to end it.
        ask = [meet[0], "--ignore-signal=USR1", *meet[1:], sys.executable]
        return [*ask, "-m", "lsai_lab.launch.host_step", *options, "--", *worker]
    return [*meet, "srun", *options, *worker]


def spread(nproc: int, nodes: int, gpus: int) -> tuple[int, int]:
    """Over how many nodes, and how many processes on each. Raises UserError if it cannot be."""
    if gpus and nproc > nodes * gpus:
        had = f"this run wants {nproc} GPUs and the job has {nodes} nodes with {gpus} each"
        raise UserError(f"{had}; submit it with --nodes {math.ceil(nproc / gpus)}")
    used = math.ceil(nproc / (gpus or math.ceil(nproc / nodes)))
    if nproc % used:
        raise UserError(f"{nproc} processes cannot be spread evenly over {used} nodes")
    return used, nproc // used
