"""One run over several nodes of a Slurm job: srun starts the workers, says who is who, ends all
when one fails, and passes stop signals on. Rank 0 is on the job's first node, where this process
runs, too: the workers meet at this host and a port that is free on it.
"""

import math
import os
import socket
import sys
from collections.abc import Mapping

from torch.distributed.elastic.utils.distributed import get_free_port

from lsai_core.base.errors import UserError


def srun_command(nproc: int, environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """The command that starts `nproc` workers over the nodes of this job, for
    `lsai_lab.launch.launch.launch`.

    None if this is no Slurm job of several nodes, or if one node's GPUs are enough. Raises
    UserError if the job is too small.
    """
    nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
    gpus = int(environment.get("SLURM_GPUS_ON_NODE", "0"))
    if nodes == 1 or (gpus and nproc <= gpus):
        return None
    if gpus and nproc > nodes * gpus:
        had = f"this run wants {nproc} GPUs and the job has {nodes} nodes with {gpus} each"
        raise UserError(f"{had}; submit it with --nodes {math.ceil(nproc / gpus)}")
    per_node = gpus or math.ceil(nproc / nodes)
    used = math.ceil(nproc / per_node)
    if nproc % used:
        raise UserError(f"{nproc} processes cannot be spread evenly over {used} nodes")
    per_node = nproc // used
    cpus = int(environment.get("SLURM_CPUS_PER_TASK", "1"))
    host = environment.get("MASTER_ADDR") or socket.gethostname()
    spread = (
        f"--nodes={used} --ntasks={nproc} --ntasks-per-node={per_node} "
        f"--cpus-per-task={max(1, cpus // per_node)}"
    )
    devices = f"--gpus-per-node={per_node}" if gpus else ""
    srun = (
        f"srun {spread} --distribution=block --overlap --kill-on-bad-exit=1 --unbuffered {devices}"
    )
    return [
        "env",
        f"MASTER_ADDR={host}",
        f"MASTER_PORT={get_free_port()}",
        *srun.split(),
        sys.executable,
    ]
