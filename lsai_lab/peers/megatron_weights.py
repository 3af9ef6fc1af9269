"""Our weights in Megatron-Core's model: the same tensors under its names, rows in its order, and of
a matrix that processes share the part of this one."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lsai_core.config.train import ModelConfig


@torch.no_grad()
def fill(
    model: nn.Module, ours: nn.Module, config: ModelConfig, rank: int = 0, tp: int = 1
) -> None:
    """Give Megatron's `model` the weights of `ours`, a `Transformer`; where `tp` processes share
    each matrix, the part of process `rank` of them. RuntimeError unless every parameter gets some.

    A weight that is kept in fp8 also has the value that its fp32 master is made from.
    """
    parameters = dict(model.named_parameters())
    for names, whole in named(ours.state_dict(), config):
        (name,) = [name for name in names if name in parameters]
        parameter = parameters.pop(name)
        if tp > 1 and getattr(parameter, "tensor_model_parallel", False):
            packed = 2 if name.endswith("linear_fc1.weight") else 1  # gate and up, a part of each
            whole = part(whole, parameter.partition_dim, packed, rank, tp)
        parameter.copy_(whole)
        if hasattr(parameter, "get_high_precision_init_val"):
            parameter.get_high_precision_init_val().copy_(whole)
    if parameters:
        raise RuntimeError(f"no weights for the peer's {', '.join(sorted(parameters)[:3])}")


def named(state: dict[str, Tensor], config: ModelConfig) -> Iterator[tuple[list[str], Tensor]]:
    """The tensors of a `Transformer`, each with the names that Megatron has for it: a norm belongs
    to the product behind it in Transformer Engine's layers, and stands alone in Megatron's own."""
    yield ["embedding.word_embeddings.weight"], state["embedding.weight"]
    yield ["decoder.final_layernorm.weight"], state["norm.weight"]
    if not config.tie_embeddings:
        yield ["output_layer.weight"], state["output.weight"]
    for i in range(config.n_layers):
        ours, theirs = f"blocks.{i}.", f"decoder.layers.{i}."
        qkv, fc1 = f"{theirs}self_attention.linear_qkv.", f"{theirs}mlp.linear_fc1."
        norms = [f"{qkv}layer_norm_weight", f"{theirs}input_layernorm.weight"]
        yield norms, state[f"{ours}attention_norm.weight"]
        yield [f"{qkv}weight"], by_group(state[f"{ours}attention.qkv.weight"], config)
        output = f"{theirs}self_attention.linear_proj.weight"
        yield [output], state[f"{ours}attention.output.weight"]
        norms = [f"{fc1}layer_norm_weight", f"{theirs}pre_mlp_layernorm.weight"]
        yield norms, state[f"{ours}mlp_norm.weight"]
        yield [f"{fc1}weight"], state[f"{ours}mlp.gate_up.weight"]
        yield [f"{theirs}mlp.linear_fc2.weight"], state[f"{ours}mlp.down.weight"]


def by_group(qkv_OD: Tensor, config: ModelConfig) -> Tensor:
    """Rows of all queries, keys and values in Megatron's order: each key head's queries, its key,
    its value."""
    groups, size = config.n_kv_heads, config.head_dim
    parts = qkv_OD.split([config.n_heads * size, groups * size, groups * size])
    return torch.cat([one.unflatten(0, (groups, -1)) for one in parts], dim=1).flatten(0, 1)


def part(whole: Tensor, dim: int, packed: int, rank: int, tp: int) -> Tensor:
    """The part of process `rank` of `tp` along `dim`, of a matrix that is `packed` matrices."""
    parts = [one.chunk(tp, dim)[rank] for one in whole.chunk(packed, dim)]
    return torch.cat(parts, dim)
