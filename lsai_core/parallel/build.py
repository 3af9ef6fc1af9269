"""The model of one of several processes: shaped on the meta device, shared, and only then given
memory and values, so that a sharded model never exists whole anywhere."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from lsai_core.config.precision import weight_dtype
from lsai_core.config.train import TrainConfig
from lsai_core.model.saved_inputs import require_host_memory
from lsai_core.model.transformer import Transformer, shaped
from lsai_core.parallel.adapt import adapt
from lsai_core.parallel.mesh import mesh_of
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
    if config.saved_inputs == "host":
        require_host_memory(config)
    model = shaped(config.model, config.attention, grad_checkpoint=config.checkpointed)
    model.to(weight_dtype(config.precision))
    adapt(model, config)
    mesh = share(model, config, device)
    model.to_empty(device="cpu" if config.parallel.cpu_offload else device)
    if config.parallel.cp > 1:
        from lsai_core.parallel.sequence import join

        model.share_sequence(join(config, device))
    connect(model, config, mesh)
    if config.parallel.async_tp:
        from lsai_core.parallel.async_tensor import hide_messages

        hide_messages(mesh["tp"])
    return model


def share(model: Transformer, config: TrainConfig, device: torch.device) -> DeviceMesh:
    """Divide the parameters of `model` (on the meta device) among the processes, in place; returns
    the processes."""
    mesh = mesh_of(config.parallel, device)
    if config.parallel.tp > 1:
        from lsai_core.parallel import tensor

        tensor.share(model, mesh["tp"])
    if config.parallel.pp > 1:
        from lsai_core.parallel import pipeline

        pipeline.keep_own(model, config, mesh["pp"])
    if config.parallel.sharded:
        way_of(config.parallel).share(model, config, mesh)
    return mesh


def connect(model: Transformer, config: TrainConfig, mesh: DeviceMesh) -> None:
    """Let the passes of a shared model, which has memory by now, go over all its processes."""
    if config.parallel.tp > 1 and not config.parallel.sharded:
        from lsai_core.parallel.tensor import sum_gradients

        sum_gradients(model)
    if config.parallel.pp > 1:
        from lsai_core.parallel.pipeline import Pipeline

        pipeline = Pipeline(model, config, mesh)
        model.pipeline, model.wrapper = pipeline.step, pipeline.evaluate
        model.pipeline_group = pipeline.group
    way_of(config.parallel).wrap(model, config)
