"""Fully sharded data parallelism (FSDP2: Zhao et al. 2023, arXiv:2304.11277, rebuilt on DTensor).

Every process keeps a slice of each parameter, of its gradient and of its optimizer states. Before a
block runs, its slices are gathered into full weights, after it they are freed; the backward pass
gathers once more, and scatters the summed gradients back into slices. While one block computes, the
next one's weights are on their way.

Units that are gathered together: the embedding, each block, and the last norm with the output
layer. What the backward pass needs at once, the last block and the output layer, stays whole after
the forward pass: the fused loss has its gradients already, so nothing would hide the gathering. The
embedding's gradient does without the table. A tied embedding serves both ends and stays in the
root. With `fp8_gather` the weights of fp8 layers travel in fp8 (`lsai_core.fp8.gather`).

Precision: `bf16_autocast` keeps fp32 shards, gathers and computes in bf16 and sums gradients in
fp32. Unlike autocast in a single process it also carries the residual stream between blocks in
bf16. `bf16` keeps bf16 shards, and sums gradients in fp32.
"""

import logging

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from lsai_core.config.precision import compute_dtype, weight_dtype
from lsai_core.config.train import Precision, TrainConfig
from lsai_core.model.transformer import Transformer
from lsai_core.parallel.mesh import data_mesh
from lsai_core.parallel.way import Way

# The loss multiplies by the output layer's weight itself, so that layer's `forward` never runs. It
# is gathered with the norm before it and stays whole until its gradient is there, which PyTorch up
# to 2.11 cannot know and warns of, once per model and process.
logging.getLogger("torch.distributed.fsdp.fully_shard").addFilter(
    lambda record: "did not run forward before backward" not in record.getMessage()
)


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """What is gathered and computed in, and what gradients are summed in (see this file's
    introduction).

    Inputs stay as they are: cast to bf16, the tables of the rotary embedding would lose the
    position.
    """
    if (compute := compute_dtype(precision)) != weight_dtype(precision):
        return MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)


def share(model: Transformer, config: TrainConfig, mesh: DeviceMesh) -> None:
    """Turn the parameters of `model` (on the meta device) into sharded ones, in place."""
    parallel, precision = config.parallel, config.precision
    data, policy = data_mesh(mesh), mixed_precision(precision)
    # Pinned memory exists for copies to a GPU only.
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if parallel.cpu_offload
        else OffloadPolicy()
    )

    def unit(modules: torch.nn.Module | list[torch.nn.Module], reshard: bool) -> None:
        fully_shard(
            modules,
            mesh=data,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard,
        )  # type: ignore[call-overload]

    # The schedules of pipelines keep weights whole after the first backward pass (`pipeline.py`).
    free = parallel.reshard_after_forward and parallel.pp == 1
    for index, block in enumerate(model.blocks, 1):
        unit(block, free and index < len(model.blocks))
    if model.output is not None:
        unit(model.embedding, free)
        model.embedding.set_unshard_in_backward(False)  # type: ignore[operator]  # its gradient needs no table
        unit([model.norm, model.output], False)
    if parallel.pp == 1:  # a pipeline's stages are called instead of the model
        unit(model, False)
    if mesh.device_type == "cpu":  # gloo sums, but cannot average while it sums
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def gather_narrow(model: Transformer, config: TrainConfig) -> None:
    """Let the weights of fp8 layers travel in fp8 if `fp8_gather` asks for it."""
    if config.parallel.fp8_gather:
        from lsai_core.fp8.gather import gather_in_fp8

        gather_in_fp8(model, config.parallel.shards)


WAY = Way(share, gather_narrow)
