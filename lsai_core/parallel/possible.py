"""What does not go with processes that share each matrix, or the blocks. Apart from the files that
do it, because planning a run needs no torch."""

import functools
from typing import Any

from lsai_core.config.train import TrainConfig


def refusal_of_matrices(config: TrainConfig) -> str | None:
    """Why the processes cannot share each matrix in this run, or None."""
    tp, cp, model = config.parallel.tp, config.parallel.cp, config.model
    sizes = {
        "model.n_heads": model.n_heads,
        "model.n_kv_heads": model.n_kv_heads,
        "model.d_ff": model.d_ff,
        "seq_len" if cp == 1 else "seq_len / parallel.cp": config.seq_len // cp,
    }
    for name, size in sizes.items():
        if size % tp:
            return f"parallel.tp={tp} does not divide {name}={size}"
    needed = {
        "parallel.cpu_offload": False,
        "fp8.recipe": "none",
        "loss": "fused",
        "loss_chunk": None,
        "mlp_chunk": None,
        "saved_inputs": "gpu",
        "optim.name": "adamw",
        "optim.states": "full",
        "optim.rounding": "nearest",
    }
    return _missing(config, "parallel.tp > 1", needed)


def refusal_of_stages(config: TrainConfig) -> str | None:
    """Why the processes cannot share the blocks in this run, or None."""
    parallel, stages = config.parallel, config.parallel.stages
    needed = {
        "parallel.kind": "fsdp",
        "parallel.reshard_after_forward": True,
        "parallel.cp": 1,
        "parallel.tp": 1,
        "parallel.cpu_offload": False,
        "model.tie_embeddings": False,
        "fp8.recipe": "none",
        "loss": "fused",
        "saved_inputs": "gpu",
        "init_from": None,
        "optim.name": "adamw",
        "optim.states": "full",
        "optim.rounding": "nearest",
    }
    if (reason := _missing(config, "parallel.pp > 1", needed)) is not None:
        return reason
    if config.precision not in ("fp32", "tf32", "bf16"):
        return f"parallel.pp > 1 needs precision bf16, fp32 or tf32, not {config.precision}"
    if config.model.n_layers < stages:
        return f"{stages} stages need as many layers, not model.n_layers={config.model.n_layers}"
    if config.grad_accum < stages or config.grad_accum % parallel.pp:
        return (
            f"parallel.pp={parallel.pp}, pp_schedule {parallel.pp_schedule}: grad_accum must be a "
            f"multiple of pp and at least {stages}, so that every stage has work"
        )
    return None


def _missing(config: TrainConfig, asked: str, needed: dict[str, Any]) -> str | None:
    """Which setting of `config`, by its dotted name, is not as `asked` needs it, or None."""
    for name, value in needed.items():
        found = functools.reduce(getattr, name.split("."), config)
        if found != value:
            return f"{asked} needs {name} {value}, not {found}"
    return None
