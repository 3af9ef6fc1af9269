"""The processes of a run as a mesh, and what each of its dimensions shares.

Ranks are numbered with the processes that talk most as neighbours, so that they lie in one node:
rank = (copy x shards + shard) x tp + place in the tensor-parallel group.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lsai_core.config.parallel import ParallelConfig


def mesh_of(parallel: ParallelConfig, device: torch.device) -> DeviceMesh:
    """All processes: `shard` hold one copy of the model together, `replicate` are its copies, `tp`
    share each matrix, `pp` the blocks. A dimension of one process is left out, but for `shard`."""
    sizes = {
        "replicate": parallel.replicate,
        "shard": parallel.shards,
        "tp": parallel.tp,
        "pp": parallel.pp,
    }
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Of `mesh_of` the processes over which FSDP shards and replicates: (shard,) or (replicate,
    shard)."""
    names = [name for name in mesh.mesh_dim_names or () if name in ("replicate", "shard")]
    return mesh[tuple(names)]
