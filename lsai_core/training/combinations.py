"""Which settings of a training run cannot go together, and what to change: checked before anything
starts.

A config means the same on every machine, so what a kernel or a recipe demands is refused
everywhere, not only where it would run. A refusal changes no result, so this file is no part of a
run's key (`lsai_lab/runs/kinds.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lsai_core.config.train import TrainConfig


def refusal(config: TrainConfig) -> str | None:
    """Why `config` is impossible, and what would be possible; None if it is not."""
    from lsai_core.config.train import MOST_TOKENS

    if config.batch_size * config.seq_len > MOST_TOKENS:
        tokens = f"{config.batch_size} x {config.seq_len} tokens"
        return (
            f"batch_size x seq_len = {tokens}, and no process can hold more than "
            f"{MOST_TOKENS}; "
            f"use a smaller batch"
        )
    if config.attention.backend != "auto" and config.precision in ("fp32", "tf32"):
        from lsai_core.attention import BACKENDS, get_backend

        if get_backend(config.attention.backend).half_only:
            others = ", ".join(name for name, backend in BACKENDS.items() if not backend.half_only)
            return (
                f"attention backend {config.attention.backend!r} needs 16-bit inputs but precision "
                f"is {config.precision!r}; "
                f"use precision bf16_autocast or bf16, or backend auto, {others}"
            )
    window = config.attention.window
    if window is not None and window > config.seq_len:
        return (
            f"attention.window={window} is longer than seq_len={config.seq_len}; use window: "
            f"null for full attention"
        )
    if config.fp8.recipe != "none" and not config.precision.startswith("bf16"):
        return (
            f"fp8.recipe={config.fp8.recipe!r} converts bf16 matrix products but precision is "
            f"{config.precision!r}; "
            "use precision bf16 or bf16_autocast, or fp8.recipe none"
        )
    if config.fp8.recipe != "none":
        from lsai_core.fp8.shapes import refusal as refusal_of_fp8

        if (reason := refusal_of_fp8(config)) is not None:
            return reason
    if config.saved_inputs == "host" and config.grad_checkpoint == "none":
        return (
            "saved_inputs: host moves what gradient checkpointing keeps; use grad_checkpoint "
            "full or attention"
        )
    if config.inputs_on_gpu and config.saved_inputs == "gpu":
        return (
            "inputs_on_gpu says what saved_inputs: host leaves on the GPU; with saved_inputs "
            "gpu all are"
        )
    if config.inputs_on_gpu >= config.model.n_layers:
        return (
            f"inputs_on_gpu={config.inputs_on_gpu} leaves nothing for the host: the model has "
            f"{config.model.n_layers} layers"
        )
    if config.mlp_chunk is not None and config.blocks != "fused":
        return "mlp_chunk needs blocks: fused"
    if (
        config.mlp_chunk is not None
        and config.fp8.recipe != "none"
        and {"gate_up", "down"} & set(config.fp8.layers)
    ):
        return "mlp_chunk computes gate_up and down without fp8; leave them out of fp8.layers"
    if config.parallel.cp > 1:
        from lsai_core.parallel.sequence import refusal as refusal_of_slices

        if (reason := refusal_of_slices(config)) is not None:
            return reason
    if config.optim.states == "8bit" and config.parallel.cpu_offload:
        return (
            "optim.states 8bit saves GPU memory, and cpu_offload keeps no states there; use "
            "one "
            "of them"
        )
    if config.parallel.fp8_gather and (config.fp8.recipe != "fused" or config.parallel.shards == 1):
        return "parallel.fp8_gather needs fp8.recipe fused and parallel.fsdp > 1 (or cp > 1)"
    if config.data.vocab_size > config.model.vocab_size:
        return (
            f"data.vocab_size={config.data.vocab_size} does not fit "
            f"model.vocab_size={config.model.vocab_size}"
        )
    return None
