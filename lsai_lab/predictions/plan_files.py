"""A plan as files of trainers: a study of ours, torchtitan's TOML, arguments of transformers.

What a trainer cannot express is named in a comment of its file, with what was written instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lsai_core.base.errors import UserError
from lsai_core.base.files import write_text
from lsai_core.config.model import ModelConfig
from lsai_core.config.train import TrainConfig
from lsai_core.training.combinations import checked
from lsai_lab.peers.hf import of_optimizer, of_schedule
from lsai_lab.peers.titan_file import read_titan
from lsai_lab.peers.titan_keys import FLAVORS
from lsai_lab.peers.trainer_memory import TrainerMemory, predict_as, trainer_memory_of
from lsai_lab.project.files import named

VARIANT = "planned"
_BY_TENSOR, _BY_ROW = "tensorwise", "rowwise"


@dataclass(frozen=True)
class PlanFile:
    """Where a plan goes and how it is written; `text` gets the configuration and its first line."""

    path: Path
    text: Callable[[TrainConfig, str], str]
    needed_gib: Callable[[Path], float] | None = None  # by the trainer itself, if that is known

    def write(self, config: TrainConfig, answer: str) -> dict[str, Any]:
        """Write the file, and say where it is and what its trainer reserves with it, GiB."""
        write_text(self.path, self.text(config, answer))
        needed = None if self.needed_gib is None else self.needed_gib(self.path)
        return {"path": str(self.path), "reserved_gib": needed}


def study_file(path: Path) -> PlanFile:
    """A study with one variant. UserError for a name that no study can have."""
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--write-yaml {path}: a study's file ends in .yaml")
    try:
        name = named(path.stem)
    except ValueError as error:
        raise UserError(f"--write-yaml {path}: {error}") from None
    return PlanFile(_writable("--write-yaml", path), lambda *given: _study(name, *given))


def titan_file(path: Path, model: ModelConfig) -> PlanFile:
    """torchtitan's TOML (0.2). UserError for a shape that it has no flavor of."""
    if flavor_of(model) is None:
        known = ", ".join(f"{name} {flavor}" for name in FLAVORS for flavor in FLAVORS[name])
        raise UserError(
            f"--torchtitan: its files name one of its own shapes, and this is none of {known}"
        )
    return PlanFile(_writable("--torchtitan", path), _titan, titan_gib)


def titan_gib(path: Path) -> float:
    """What torchtitan is predicted to reserve with the file at `path`."""
    run = read_titan(path, None)
    config = checked(TrainConfig, run.config, str(path))
    own = trainer_memory_of("torchtitan", config).model_dump() | run.trainer_memory
    return predict_as(config, TrainerMemory.model_validate(own)).reserved


def arguments_file(path: Path) -> PlanFile:
    """Arguments of transformers' Trainer, as Python or, where the name ends so, as JSON."""
    if path.suffix not in (".py", ".json"):
        raise UserError(f"--hf-args {path}: its name ends in .py or .json")
    text = _arguments_json if path.suffix == ".json" else _arguments_python
    return PlanFile(_writable("--hf-args", path), text)


def _writable(option: str, path: Path) -> Path:
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UserError(f"{option} {path}: {what}")
    return path


def _comment(*lines: str) -> str:
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def _study(name: str, config: TrainConfig, answer: str) -> str:
    """The study as YAML."""
    base = config.model_dump(mode="json", exclude_defaults=True)
    study = {
        "study": name,
        "title": "A planned run",
        "question": "Does the plan hold?",
        "parts": {"train": {"kind": "train", "timeout_s": 86_400.0}},
        "base": base,
        "variants": {VARIANT: {"label": VARIANT}},
    }
    told = _comment(
        answer,
        f"Put this file into params/studies, then: lsai train --study {name} --technique {VARIANT}",
        "Text, steps and learning rate are yours to set: data, steps, optim.lr.",
    )
    return told + yaml.safe_dump(study, sort_keys=False, allow_unicode=True)


def flavor_of(model: ModelConfig) -> tuple[str, str] | None:
    """torchtitan's name and flavor of a shape; None if it has none."""
    shape = model.model_dump(exclude={"preset", "rope_scaling"})
    for name, flavors in FLAVORS.items():
        for flavor, keys in flavors.items():
            found = ModelConfig.model_validate(keys).model_dump(exclude={"preset", "rope_scaling"})
            if found == shape and flavor != "debugmodel":
                return name, flavor
    return None


def _titan(config: TrainConfig, answer: str) -> str:
    """torchtitan's TOML. Its tables are in the order in which its own files have them."""
    name, flavor = flavor_of(config.model) or ("", "")
    optim, parallel, fp8 = config.optim, config.parallel, config.fp8.recipe != "none"
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": name, "flavor": flavor}
        | ({"converters": ["quantize.linear.float8"]} if fp8 else {}),
        "optimizer": {"name": "AdamW", "lr": optim.lr, "eps": optim.eps}
        | {"beta1": optim.betas[0], "beta2": optim.betas[1]}
        | {"weight_decay": optim.weight_decay, "implementation": "fused"},
        "lr_scheduler": {"warmup_steps": optim.warmup_steps, "decay_type": "cosine"}
        | {"min_lr_factor": optim.min_lr_ratio},
        "training": {
            "local_batch_size": config.batch_size,
            "global_batch_size": config.batch_size * config.grad_accum * parallel.readers,
            "seq_len": config.seq_len,
            "steps": config.steps,
            "dtype": "bfloat16" if config.precision == "bf16" else "float32",
            "mixed_precision_param": "bfloat16" if config.precision != "fp32" else "float32",
        }
        | ({"max_norm": optim.grad_clip} if optim.grad_clip else {})
        | ({"enable_cpu_offload": True} if parallel.cpu_offload else {}),
        "parallelism": {
            "data_parallel_shard_degree": parallel.fsdp,
            "data_parallel_replicate_degree": parallel.replicate,
            "fsdp_reshard_after_forward": "default" if parallel.reshard_after_forward else "never",
        },
        "activation_checkpoint": {"mode": _mode(config), "selective_ac_option": "op"},
        "compile": {"enable": config.compile, "components": ["model", "loss"]},
    }
    if fp8:
        recipe = _BY_ROW if config.fp8.recipe == "torchao_rowwise" else _BY_TENSOR
        tables["quantize.linear.float8"] = {"filter_fqns": ["output"], "recipe_name": recipe}
    return _comment(
        "For torchtitan 0.2, from this plan for LSAI's own trainer:",
        answer,
        *lost_in_titan(config),
        "What torchtitan itself needs for this file: lsai predict --config FILE",
    ) + "\n".join(f"\n[{name}]\n{_toml(values)}" for name, values in tables.items())


def _toml(values: dict[str, Any]) -> str:
    """A table's lines: numbers, texts and lists of texts are written as in JSON."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()).rstrip("\n")


def _mode(config: TrainConfig) -> str:
    """The checkpointing of torchtitan that keeps at most as much."""
    known = ("none", "selective", "full")
    return config.grad_checkpoint if config.grad_checkpoint in known else "full"


def lost_in_titan(config: TrainConfig) -> Iterator[str]:
    """What of the plan torchtitan does otherwise, a line each."""
    yield from _lost(config, "torchtitan")
    if config.grad_checkpoint == "selective":
        yield "- torchtitan's selective checkpointing computes every second matmul again"
    if _mode(config) != config.grad_checkpoint:
        yield f"- grad_checkpoint {config.grad_checkpoint}: no such mode there; full is written"
    if config.optim.states == "8bit":
        yield "- 8-bit states: torchtitan keeps moments in the dtype of the weights"
    if config.loss == "fused":
        yield "- loss in chunks: torchtitan keeps all logits"
    if config.parallel.cpu_offload and config.parallel.shards == 1:
        yield "- offload to the host: does nothing there on one GPU"
    if config.model.rope_scaling is not None:
        yield "- rope_scaling: torchtitan's flavor has its own"


def _lost(config: TrainConfig, trainer: str) -> Iterator[str]:
    """What neither of the two other trainers has."""
    if config.optim.rounding == "stochastic":
        yield f"- stochastic rounding: {trainer} rounds to nearest, which loses small updates"
    if config.saved_inputs == "host":
        yield f"- block inputs in host memory: {trainer} keeps them on the GPU"
    if config.checkpoint_blocks is not None:
        yield f"- checkpoint_blocks {config.checkpoint_blocks}: {trainer} treats all blocks alike"
    if config.mlp_chunk is not None:
        yield f"- MLPs in chunks: {trainer} computes them whole"
    if config.attention.window is not None:
        yield f"- attention.window {config.attention.window}: set it in the model, if it has one"


def arguments(config: TrainConfig) -> dict[str, Any]:
    """Keyword arguments of `TrainingArguments`."""
    optim, parallel = config.optim, config.parallel
    checkpointed = config.grad_checkpoint != "none"
    found: dict[str, Any] = {
        "output_dir": "out",
        "max_steps": config.steps,
        "per_device_train_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.grad_accum,
        "bf16": config.precision in ("bf16_autocast", "bf16_residual"),
        "optim": "adamw_bnb_8bit" if optim.states == "8bit" else "adamw_torch_fused",
        **of_optimizer(optim),
        **of_schedule(optim),
        "torch_compile": config.compile,
        "use_liger_kernel": config.loss == "fused",
        "seed": config.seed,
    }
    if parallel.world_size == 1:
        return found | {"gradient_checkpointing": checkpointed}
    fsdp: dict[str, Any] = {
        "version": 2,
        "activation_checkpointing": checkpointed,
        "reshard_after_forward": parallel.reshard_after_forward,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }
    if parallel.cpu_offload:
        fsdp["offload_params"] = True
    return found | {"fsdp": True, "fsdp_config": fsdp}


def lost_in_arguments(config: TrainConfig) -> Iterator[str]:
    """What of the plan the arguments do not say, a line each."""
    dtype = "bfloat16" if config.precision == "bf16" else "float32"
    yield f"- the model: load it with dtype=torch.{dtype}, and cut the text into {config.seq_len}"
    yield from _lost(config, "the Trainer")
    if config.optim.states == "8bit":
        yield "- 8-bit states: those of bitsandbytes, which must be installed"
    if config.loss == "fused":
        yield "- loss in chunks: that of Liger's kernels, which must be installed"
    if config.grad_checkpoint not in ("none", "full"):
        yield f"- grad_checkpoint {config.grad_checkpoint}: blocks are checkpointed whole, slower"
    if config.fp8.recipe != "none":
        yield "- fp8 matmuls: no argument, but ACCELERATE_MIXED_PRECISION=fp8 in the environment"
    if config.parallel.cpu_offload and config.parallel.world_size == 1:
        yield "- offload to the host: the Trainer has it with FSDP or DeepSpeed"
    if config.parallel.replicate > 1:
        yield f"- parallel.replicate {config.parallel.replicate}: no argument of the Trainer"


def _arguments_python(config: TrainConfig, answer: str) -> str:
    lines = [f"    {key}={value!r},\n" for key, value in arguments(config).items()]
    return (
        _comment("For transformers' Trainer, from this plan for LSAI's own trainer:", answer)
        + _comment("What these arguments do not say:", *lost_in_arguments(config))
        + "from transformers import TrainingArguments\n\n"
        + f"arguments = TrainingArguments(\n{''.join(lines)})\n"
    )


def _arguments_json(config: TrainConfig, _answer: str) -> str:
    """JSON has no comments; HfArgumentParser refuses keys that are no arguments."""
    return json.dumps(arguments(config), indent=1) + "\n"
