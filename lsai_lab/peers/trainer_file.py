"""Configuration files of trainers: torchtitan's TOML is read, others are recognized.

Of another trainer's file only so much is read as the line needs that says how to ask instead.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsai_core.base.errors import UserError
from lsai_lab.peers.titan_file import TitanRun, read_content, read_titan
from lsai_lab.project.files import load_yaml


@dataclass(frozen=True)
class Trainer:
    """How a trainer's file is told from others: it has one key of each of `marks`, dotted or not.
    `keys`: what it calls our sizes; `advice`: what else the line says."""

    name: str
    marks: tuple[tuple[str, ...], ...]
    keys: Mapping[str, str]
    advice: str = ""


_HF = {
    "cutoff_len": "seq_len",
    "max_seq_length": "seq_len",
    "max_length": "seq_len",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "grad_accum",
}
_SHARDED = "--gpus N stands for ZeRO-3 or FSDP over N GPUs"
TRAINERS = (
    Trainer(
        "axolotl",
        (("base_model",), ("sequence_len", "micro_batch_size", "datasets", "adapter")),
        {
            "sequence_len": "seq_len",
            "micro_batch_size": "batch_size",
            "gradient_accumulation_steps": "grad_accum",
        },
    ),
    Trainer(
        "LLaMA-Factory", (("model_name_or_path",), ("stage", "finetuning_type", "cutoff_len")), _HF
    ),
    Trainer(
        "DeepSpeed",
        (
            (
                "zero_optimization",
                "train_micro_batch_size_per_gpu",
                "train_batch_size",
                "zero_allow_untested_optimizer",
            ),
        ),
        {
            "train_micro_batch_size_per_gpu": "batch_size",
            "gradient_accumulation_steps": "grad_accum",
        },
        _SHARDED,
    ),
    Trainer(
        "accelerate",
        (("compute_environment", "distributed_type", "fsdp_config", "deepspeed_config"),),
        {},
        _SHARDED,
    ),
    Trainer(
        "litgpt",
        (
            (
                "train.micro_batch_size",
                "train.global_batch_size",
                "train.max_seq_length",
                "train.save_interval",
            ),
        ),
        {"train.micro_batch_size": "batch_size", "train.max_seq_length": "seq_len"},
    ),
    Trainer(
        "torchtune",
        (("model._component_",),),
        {"batch_size": "batch_size", "tokenizer.max_seq_len": "seq_len"},
    ),
    Trainer(
        "nanotron",
        (("parallelism",), ("tokens", "model.model_config")),
        {"tokens.micro_batch_size": "batch_size", "tokens.sequence_length": "seq_len"},
    ),
    Trainer("the Hugging Face Trainer", (("per_device_train_batch_size", "output_dir"),), _HF),
)
_AS = {"torchtune": "torchtune", "nanotron": "nanotron"}


def read_trainer_file(path: Path, gpus: int | None) -> TitanRun:
    """The run that a trainer's file describes, on `gpus` GPUs where it says "all".

    torchtitan's TOML is served. UserError, one line, for what is no run that can be predicted
    (`titan_file.py`), and for another trainer's file, which says how to ask instead.
    """
    if path.is_dir():
        raise UserError(f"{path}: a folder; --config is a file, and a model's folder goes to --hf")
    if path.suffix.lower() == ".py":
        raise UserError(
            f"{path}: torchtitan's configuration in Python (since February 2026) is code, which is "
            f"not"
            " run here; say the same with --model or --hf, --as torchtitan, --gpus and --set"
        )
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        raise UserError(f"{path}: {_foreign(path)}")
    return read_titan(path, gpus)


def _foreign(path: Path) -> str:
    """What the file is, and how to ask for its run."""
    told = _read(path)
    if isinstance(told.get("model_type"), str):
        return "a model's config.json; give it with --hf, and the trainer with --as"
    for trainer in TRAINERS:
        if all(any(_find(told, mark) is not None for mark in marks) for marks in trainer.marks):
            sizes = {
                ours: _find(told, theirs)
                for theirs, ours in trainer.keys.items()
                if _is_size(_find(told, theirs))
            }
            words = [f"--set {ours}={size}" for ours, size in sizes.items()]
            asked = " ".join(
                [
                    "lsai predict --hf CONFIG_JSON_OF_ITS_MODEL",
                    f"--as {_AS.get(trainer.name, 'hf')}",
                    *words,
                ]
            )
            advice = f" ({trainer.advice})" if trainer.advice else ""
            return f"a file of {trainer.name}, which is not read; ask instead: {asked}{advice}"
    return (
        "no file of a known trainer; --config takes torchtitan's TOML, --hf a model's config.json"
    )


def _read(path: Path) -> dict[str, Any]:
    if path.suffix.lower() != ".json":
        return load_yaml(path)
    try:
        told = json.loads(read_content(path))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: cannot be read as JSON: {' '.join(str(error).split())[:200]}"
        ) from None
    return told if isinstance(told, dict) else {}


def _find(told: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None if there is none."""
    value: Any = told
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**63
