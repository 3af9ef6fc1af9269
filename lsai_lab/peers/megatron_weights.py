"""Our initial weights in Megatron-Core's model: the same tensors under its names, rows in its
order, and of a matrix that processes share the part of this one."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from lsai_core.config.model import ModelConfig
from lsai_lab.peers.start import initial_weights

# A Llama's tensors: Megatron's name with Transformer Engine's layers, where a norm belongs to the
# product behind it, and the name in Megatron's own layers where it is another.
MODEL = {
    "model.embed_tokens": ("embedding.word_embeddings.weight",),
    "model.norm": ("decoder.final_layernorm.weight",),
    "lm_head": ("output_layer.weight",),
}
LAYER = {
    "input_layernorm": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "self_attn.q_proj": ("self_attention.linear_qkv.weight",),
    "self_attn.k_proj": ("self_attention.linear_qkv.weight",),
    "self_attn.v_proj": ("self_attention.linear_qkv.weight",),
    "self_attn.o_proj": ("self_attention.linear_proj.weight",),
    "post_attention_layernorm": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "mlp.gate_proj": ("mlp.linear_fc1.weight",),
    "mlp.up_proj": ("mlp.linear_fc1.weight",),
    "mlp.down_proj": ("mlp.linear_fc2.weight",),
}


@torch.no_grad()
def fill(
    model: nn.Module,
    config: ModelConfig,
    seed: int,
    device: torch.device,
    rank: int = 0,
    tp: int = 1,
) -> None:
    """Give Megatron's `model` the weights that our own training of this seed starts from; where
    `tp` processes share each matrix, the part of process `rank` of them. RuntimeError unless every
    parameter gets some.

    A weight that is kept in fp8 also has the value that its fp32 master is made from.
    """
    parameters: dict[str, Any] = dict(model.named_parameters())
    for tensors in initial_weights(config, seed, device):
        (name,) = [name for name in names(next(iter(tensors))) if name in parameters]
        parameter, parts = parameters.pop(name), list(tensors.values())
        if tp > 1 and getattr(parameter, "tensor_model_parallel", False):
            parts = [values.chunk(tp, parameter.partition_dim)[rank] for values in parts]
        whole = packed(parts, config.n_kv_heads // tp)
        parameter.copy_(whole)
        if hasattr(parameter, "get_high_precision_init_val"):
            parameter.get_high_precision_init_val().copy_(whole)
    if parameters:
        raise RuntimeError(f"no weights for the peer's {', '.join(sorted(parameters)[:3])}")


def names(theirs: str) -> list[str]:
    """What a tensor with this name in a Hugging Face Llama may be called in Megatron."""
    theirs = theirs.removesuffix(".weight")
    if layer := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", theirs):
        return [f"decoder.layers.{layer[1]}.{name}" for name in LAYER[layer[2]]]
    return list(MODEL[theirs])


def packed(parts: list[Tensor], groups: int) -> Tensor:
    """One parameter of tensors: gate above up; queries, keys and values by key head, of which there
    are `groups`: its queries, it, its value."""
    if len(parts) == 3:
        return torch.cat([one.unflatten(0, (groups, -1)) for one in parts], dim=1).flatten(0, 1)
    return torch.cat(parts)
