"""The Hugging Face Trainer: which machine it needs, how it is started, and the arguments it gets.

The arguments follow its documentation on training speed (https://huggingface.co/docs/transformers/perf_train_gpu_one and the
pages on torch.compile, Liger and FSDP): fused AdamW, pinned memory with copies that do not wait, no look at the loss in
every step, SDPA or FlashAttention 2, torch.compile or Liger's kernels. fp8 is Accelerate's, with torchao.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lsai_core.errors import Unavailable
from lsai_lab.data import Dataset
from lsai_lab.launch.launch import torchrun
from lsai_lab.peers.config import WORKER, PeerConfig


def require(config: PeerConfig, on_gpu: bool) -> None:
    """Raise Unavailable for what the processor in use cannot do."""
    asked = {"liger": config.liger, f"attention: {config.attention}": config.attention != "sdpa"}
    asked["fp8"] = config.fp8 != "none"
    if needs := [name for name, wanted in asked.items() if wanted and not on_gpu]:
        raise Unavailable(f"the Hugging Face Trainer's {needs[0]} needs a CUDA GPU and torch sees none here")


def prepare(config: PeerConfig, dataset: Dataset, folder: Path) -> None:
    """Nothing: the process reads the dataset's token file itself."""


def command(config: PeerConfig, folder: Path) -> list[str]:
    """What starts it. One process runs without torchrun: with it the Trainer would wrap the model for several."""
    start = [sys.executable] if config.world_size == 1 else torchrun(config.world_size)
    return [*start, "-m", WORKER]


def environment(config: PeerConfig) -> dict[str, str]:
    """Variables that are part of how it is meant to be run.

    Accelerate prepares fp8 weights for FSDP's gathers unless told otherwise. That makes new parameters, which the Trainer's
    optimizer does not hold (accelerate 1.15, with and without FSDP2): the linear layers would not be trained.
    """
    if config.fp8 == "none":
        return {}
    return {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "false"}


def model_arguments(config: PeerConfig) -> dict[str, Any]:
    """Keyword arguments of `LlamaConfig`: the same shape as ours."""
    model = config.model
    arguments: dict[str, Any] = {
        "vocab_size": model.vocab_size, "hidden_size": model.d_model, "intermediate_size": model.d_ff,
        "num_hidden_layers": model.n_layers, "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads, "max_position_embeddings": config.seq_len,
        "rms_norm_eps": model.norm_eps, "tie_word_embeddings": model.tie_embeddings, "use_cache": False,
    }  # fmt: skip
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **model.rope_scaling.model_dump()}
    return {**arguments, "rope_parameters": rope}


def training_arguments(config: PeerConfig, output: Path, on_gpu: bool) -> dict[str, Any]:
    """Keyword arguments of `TrainingArguments`."""
    optim = config.optim
    arguments: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": config.steps,
        "per_device_train_batch_size": config.batch_size,
        "optim": "adamw_torch_fused",
        "learning_rate": optim.lr,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.grad_clip,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": optim.min_lr_ratio},
        "warmup_steps": optim.warmup_steps,
        # Asking for both would be answered with bf16 alone; Accelerate's fp8 runs the rest under bf16 autocast.
        "bf16": config.precision == "bf16_autocast" and config.fp8 == "none",
        "torch_compile": config.compile,
        "use_liger_kernel": config.liger,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": on_gpu,
        "accelerator_config": {"non_blocking": on_gpu},
        "use_cpu": not on_gpu,
        "seed": config.seed,
    }
    if config.world_size == 1:
        arguments |= {"gradient_checkpointing": True} if config.grad_checkpoint == "full" else {}
    else:
        fsdp = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        checkpointing, reshard = config.grad_checkpoint == "full", config.parallel.reshard_after_forward
        fsdp |= {"reshard_after_forward": reshard, "activation_checkpointing": checkpointing}
        arguments |= {"fsdp": True, "fsdp_config": fsdp}
    return arguments


def tuning(config: PeerConfig, on_gpu: bool) -> str:
    """The arguments in one line, as a person would write them."""
    arguments = training_arguments(config, Path("out"), on_gpu)
    return "TrainingArguments(" + ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"
