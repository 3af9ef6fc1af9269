"""What a run's config does to a model once it has its shape: fp8 layers, fused blocks, offload,
compilation; in this order."""

import functools
from collections.abc import Callable

from torch import Tensor

from lsai_core.config.train import Fp8Config, TrainConfig
from lsai_core.fp8.recipes import convert as convert_to_fp8
from lsai_core.model.saved_inputs import HostInputs, blocks_on_host, host_buffer
from lsai_core.model.transformer import Transformer


def adapt(
    model: Transformer,
    config: TrainConfig,
    convert: Callable[[Transformer, Fp8Config], None] = convert_to_fp8,
    new_buffer: Callable[[Tensor], Tensor] = host_buffer,
) -> None:
    """Convert, fuse and mark for compilation, in place; before the model is sharded.

    `convert` replaces the layers that run in fp8, `new_buffer` makes host memory for a tensor.
    """
    convert(model, config.fp8)
    if config.blocks == "fused":
        model.fuse(config.mlp_chunk)
    if config.loss_chunk is not None:
        model.loss = functools.partial(model.loss, chunk=config.loss_chunk)
    model.bf16_residual = config.precision == "bf16_residual"
    if config.saved_inputs == "host":
        model.around_block = HostInputs(blocks_on_host(config), new_buffer).of_block
    if config.compile:
        for block in model.blocks:
            block.compile()
