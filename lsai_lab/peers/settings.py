"""How other trainers are set: what all of them do, and a configuration of torchtitan in this
package's words."""

import tomllib
from pathlib import Path
from typing import Any, Literal

from lsai_core.base.errors import UserError
from lsai_core.config.presets import PRESETS

Peer = Literal["torchtitan", "torchtune", "hf", "nanotron"]
# What all of them do: logits as a whole, torch's operations and optimizer. Of the text nothing
# matters.
PLAIN: dict[str, Any] = {
    "loss": "full",
    "blocks": "plain",
    "optim": {"kernel": "torch"},
    "data": {"vocab_size": 257},
}
# torchtitan's of Llama 3.
FLAVORS: dict[str, dict[str, Any]] = {
    "8B": {"preset": "llama3-8b"},
    "70B": {"preset": "custom", "n_layers": 80, "d_model": 8192, "n_heads": 64, "d_ff": 28_672},
    "405B": {
        "preset": "custom",
        "n_layers": 126,
        "d_model": 16_384,
        "n_heads": 128,
        "d_ff": 53_248,
    },
}


def read_toml(path: Path, gpus: int | None) -> dict[str, Any]:
    """The keys of `TrainConfig` that torchtitan's configuration stands for (TOML, to 0.2); `gpus`:
    where it says all. UserError: it cannot."""
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as TOML: {' '.join(str(error).split())}") from None
    model, keeps = (
        told.get("model", {}),
        {"mode": "selective"} | told.get("activation_checkpoint", {}),
    )
    # older ones mix them
    run = told.get("training", {}) | told.get("parallelism", {}) | told.get("experimental", {})
    shards, copies = (
        run.get("data_parallel_shard_degree", -1),
        run.get("data_parallel_replicate_degree", 1),
    )
    unsaid = [
        name
        for name in map("{}_parallel_degree".format, ("tensor", "pipeline", "context"))
        if run.get(name, 1) > 1
    ]
    if keeps["mode"] == "selective" and keeps.get("selective_ac_option", "op") != "op":
        unsaid.append("selective_ac_option")
    if unsaid:
        raise UserError(f"{path}: {unsaid[0]} is not predicted")
    if shards < 0 and gpus is None:
        raise UserError(f"{path}: data_parallel_shard_degree is all GPUs: say with --gpus how many")
    flavor = str(model.get("flavor"))
    fp8 = told.get("float8", {}).get("enable_float8_linear") or "float8" in str(
        model.get("converters", "")
    )
    return PLAIN | {
        "model": PRESETS["llama3-8b"] | FLAVORS.get(flavor, {"preset": flavor}),
        "seq_len": run.get("seq_len", 2048),
        "batch_size": run.get("local_batch_size", run.get("batch_size", 8)),
        "grad_checkpoint": keeps["mode"],
        "compile": bool(told.get("compile", {}).get("enable", run.get("compile", False))),
        "precision": "bf16" if run.get("dtype") == "bfloat16" else "bf16_autocast",
        "fp8": {"recipe": "tensorwise" if fp8 else "none"},
        "parallel": {"fsdp": (gpus or 1) // copies if shards < 0 else shards, "replicate": copies},
    }
