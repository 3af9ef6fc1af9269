"""The linear layers of a model by name, their shapes, and the requests in fp8 that no machine could
serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lsai_core.config.model import ModelConfig
    from lsai_core.config.train import TrainConfig

# fp8 tensor cores read 16 bytes at a time: every dimension of a product must be a multiple
MULTIPLE = 16


def linear_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(N, K) of each linear layer's weight: N outputs, K inputs. With tied embeddings there is no
    layer `output`."""
    d, ff = model.d_model, model.d_ff
    shapes = {
        "qkv": ((model.n_heads + 2 * model.n_kv_heads) * model.head_dim, d),
        "attention_output": (d, d),
        "gate_up": (2 * ff, d),
        "down": (d, ff),
        "output": (model.vocab_size, d),
    }
    if model.tie_embeddings:
        del shapes["output"]
    return shapes


def parameters_in(model: ModelConfig, layers: tuple[str, ...]) -> int:
    """Parameters of the linear layers `layers`, over all blocks."""
    shapes = linear_shapes(model)
    return sum(
        shapes[name][0] * shapes[name][1] * (1 if name == "output" else model.n_layers)
        for name in layers
    )


def refusal(config: TrainConfig) -> str | None:
    """Why this request is refused on every machine, or None."""
    fp8, shapes = config.fp8, linear_shapes(config.model)
    if "output" in fp8.layers and "output" not in shapes:
        return (
            "fp8.layers names output, but with tied embeddings the model has no output layer "
            "of "
            "its own; leave it out"
        )
    if "output" in fp8.layers and config.loss == "fused":
        return (
            "fp8.layers names output, but loss fused computes the output layer itself, in "
            "bf16; "
            "use loss full"
        )
    for name in fp8.layers:
        if any(size % MULTIPLE for size in shapes[name]):
            rows, columns = shapes[name]
            return (
                f"fp8 products need multiples of {MULTIPLE}, but the layer {name} is {rows} x "
                f"{columns}; leave it out of fp8.layers"
            )
    if config.seq_len % (unit := MULTIPLE * config.parallel.cp):
        return f"fp8 products need a seq_len that is a multiple of {unit}, not {config.seq_len}"
    if fp8.recipe == "fused" and config.parallel.cpu_offload:
        return (
            "fp8.recipe fused keeps its scales on the GPU; use fp8.recipe tensorwise with "
            "parallel.cpu_offload"
        )
    if not fp8.recipe.startswith("te_"):
        return None
    if {config.grad_checkpoint, config.checkpoint_others} != {"none"}:
        return (
            "Transformer Engine's layers do not know their recipe when they are recomputed; "
            "use "
            "grad_checkpoint none, or fp8.recipe tensorwise"
        )
    if config.parallel.distributed:
        return (
            "Transformer Engine's layers are used in a single process only; use fp8.recipe "
            "tensorwise with several processes"
        )
    if fp8.recipe == "te_delayed" and config.checkpoint.every:
        return (
            "te_delayed keeps a history that checkpoints do not hold; use te_current, or "
            "checkpoint.every 0"
        )
    return None
