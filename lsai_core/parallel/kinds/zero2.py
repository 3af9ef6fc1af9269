"""ZeRO stage 2 as FSDP2 does it (Rajbhandari et al. 2020, arXiv:1910.02054).

Gradients and optimizer states are sharded, as in `fsdp`, and weights are between the steps. But
whole weights, once gathered for a step's first forward pass, stay until its last backward pass: one
gathering a step, however many micro-batches it has.
"""

import contextlib
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import Transformer
from lsai_core.parallel.kinds import fsdp
from lsai_core.parallel.way import Way


def share(model: Transformer, config: TrainConfig, mesh: DeviceMesh) -> None:
    """Turn the parameters of `model` (on the meta device) into sharded ones, in place."""
    kept = config.parallel.model_copy(update={"reshard_after_forward": False})
    fsdp.share(model, config.model_copy(update={"parallel": kept}), mesh)
    assert isinstance(model, FSDPModule)

    def micro_batch(last: bool) -> contextlib.AbstractContextManager[Any]:
        model.set_reshard_after_backward(last)
        return contextlib.nullcontext()

    model.micro_batch = micro_batch


def _refusal(config: TrainConfig) -> str | None:
    if config.parallel.shards == 1:
        return "parallel.kind zero2 needs parallel.fsdp > 1 (or cp > 1)"
    if not config.parallel.reshard_after_forward:
        return "parallel.kind zero2 always keeps weights; leave out reshard_after_forward"
    return None


WAY = Way(share, fsdp.gather_narrow, refusal=_refusal)
