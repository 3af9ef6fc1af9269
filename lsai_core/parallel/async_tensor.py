"""Tensor parallelism whose messages travel while products go on (`parallel.async_tp`), by PyTorch's
compiler ("micro-pipelining", after Wang et al. 2023, doi:10.1145/3567955.3567959).

Of a compiled block the products that stand behind an all-gather or before a reduce-scatter are cut
into parts; while one is computed, others go from GPU to GPU through symmetric memory. Which ones it
is PyTorch decides. What that saves, and what memory it takes beside PyTorch's allocator, was never
measured here: it has run on no GPU.
"""

import warnings

import torch
from torch.distributed.device_mesh import DeviceMesh

from lsai_core import kernels
from lsai_core.base.errors import Unavailable
from lsai_core.config.train import TrainConfig


def require_symmetric_memory(config: TrainConfig, device: torch.device) -> None:
    """Raise Unavailable where the processes that share a matrix cannot write into one another's
    memory, as `parallel.async_tp` needs."""
    if device.type != "cuda" or kernels.on_rocm():
        raise Unavailable("parallel.async_tp needs CUDA GPUs; leave it out here")
    count, here = torch.cuda.device_count(), torch.cuda.current_device()
    if count < config.parallel.tp:
        raise Unavailable(f"parallel.async_tp needs all parallel.tp GPUs in one node, not {count}")
    others = [other for other in range(count) if other != here]
    if not all(torch.cuda.can_device_access_peer(here, other) for other in others):
        raise Unavailable("parallel.async_tp needs GPUs that reach each other's memory (NVLink)")


def hide_messages(mesh: DeviceMesh) -> None:
    """Let the compiler micro-pipeline products and messages among the processes of `mesh`, from now
    on."""
    from torch._inductor import config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    with warnings.catch_warnings():  # PyTorch deprecates what its own compiler still asks for
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)
