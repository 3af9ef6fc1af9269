"""The model of one of several processes: shaped on the meta device, shared, and only then given
memory and values, so that a sharded model never exists whole anywhere."""

from __future__ import annotations

import torch

from lsai_core.config.precision import weight_dtype
from lsai_core.config.train import TrainConfig
from lsai_core.model.saved_inputs import require_host_memory
from lsai_core.model.transformer import Transformer, shaped
from lsai_core.parallel.adapt import adapt
from lsai_core.parallel.way import way_of


def build_sharded(config: TrainConfig, device: torch.device) -> Transformer:
    """This process's part of the run's model, initialized from its seed (the same values as in one
    process).

    Parameters are in the weight dtype, on `device`, or on the host with `cpu_offload`; DTensors
    where a process holds slices.
    """
    model = empty_sharded(config, device)
    model.init_weights(config.seed, draw_on=device)
    if model.fp8_scales is not None:
        model.fp8_scales.reset()
    return model


def empty_sharded(config: TrainConfig, device: torch.device) -> Transformer:
    """The same with memory and no values in it. Raises MemoryError as `require_host_memory`."""
    require_host_memory(config)
    way = way_of(config.parallel)
    model = shaped(config.model, config.attention, grad_checkpoint=config.grad_checkpoint)
    model.to(weight_dtype(config.precision))
    adapt(model, config)
    way.share(model, config, device)
    model.to_empty(device="cpu" if config.parallel.cpu_offload else device)
    if config.parallel.cp > 1:
        from lsai_core.parallel.sequence import join

        model.share_sequence(join(config, device))
    way.wrap(model, config, device)
    return model
