"""A Hugging Face `config.json` in this package's words: the shape of a Llama, and what is no Llama.

Two questions are asked of such a file. `read_config` asks whether the weights beside it can be
read: then the model must be ours exactly. `describe` asks what a training step of it needs: then
what changes neither memory nor time (another scaling of the rotary embeddings) is a remark. Both
refuse what is another model, and say in which respect. Nothing here imports torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsai_core.base.errors import UserError
from lsai_core.config.model import ModelConfig
from lsai_core.config.strict import validated

CONFIG = "config.json"
KEYS = {
    "n_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
LLAMA = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
# Models that are a Llama up to names and windows, with those defaults of transformers that are not
# Llama's.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "phi3": {},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
}
_EXPERTS = "is a mixture of experts"
_NEOX = "has LayerNorm, GELU, biases, and rotates a part of each head only"
_ENCODER = "is no decoder of text alone"
# In which respect other models are no Llama.
OTHERS = {
    "qwen2": "adds biases to queries, keys and values",
    "qwen3": "normalizes queries and keys in each head",
    "gemma": "has GELU in its MLP and heads wider than hidden_size / heads",
    "gemma2": "has GELU, norms after each layer, and caps attention's scores and logits",
    "gemma3_text": "has GELU, norms after each layer, and normalizes queries and keys",
    "gemma3": "has GELU, norms after each layer, normalizes queries and keys, and may see images",
    "olmo": "has norms without weights",
    "olmo2": "normalizes queries and keys, and norms follow each layer",
    "olmo3": "normalizes queries and keys, and norms follow each layer",
    "gpt_neox": _NEOX,
    "phi": _NEOX,
    "gpt2": "has LayerNorm, GELU, biases and learned positions",
    "gpt_neo": "has LayerNorm, GELU and learned positions",
    "gptj": "has LayerNorm and GELU, with attention beside the MLP",
    "opt": "has LayerNorm, ReLU and learned positions",
    "bloom": "has LayerNorm, GELU and ALiBi",
    "mpt": "has LayerNorm, GELU and ALiBi",
    "falcon": "has LayerNorm and GELU, with attention beside the MLP",
    "stablelm": "has LayerNorm, and rotates a part of each head only",
    "starcoder2": "has LayerNorm, GELU and biases",
    "gpt_bigcode": "has LayerNorm, GELU and learned positions",
    "cohere": "has LayerNorm, with attention beside the MLP",
    "granite": "multiplies what its layers add by factors of its own",
    "glm": "rotates a part of each head only",
    "glm4": "has norms after each layer, and rotates a part of each head only",
    "nemotron": "has LayerNorm and a squared ReLU",
    "exaone4": "normalizes queries and keys",
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "phimoe": _EXPERTS,
    "gpt_oss": _EXPERTS,
    "dbrx": _EXPERTS,
    "llama4": _EXPERTS,
    "llama4_text": _EXPERTS,
    "deepseek_v2": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "granitemoe": _EXPERTS,
    "glm4_moe": _EXPERTS,
    "mamba": "has no attention",
    "mamba2": "has no attention",
    "rwkv": "has no attention",
    "t5": _ENCODER,
    "mt5": _ENCODER,
    "bart": _ENCODER,
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "vit": _ENCODER,
    "whisper": _ENCODER,
    "llava": _ENCODER,
    "mllama": _ENCODER,
    "qwen2_vl": _ENCODER,
    "qwen2_5_vl": _ENCODER,
}
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "hidden_dropout")
_LARGEST = 16 * 2**20  # bytes of a file that is read


class AnotherModel(UserError):
    """A file that can be read, of a model that this package has not."""


@dataclass(frozen=True)
class Described:
    """The shape, and how far attention looks back (None: to the beginning).

    `differs`: in which respects it is another model, with the same memory and time of a step;
    `notes`: what else is not predicted.
    """

    model: ModelConfig
    window: int | None
    differs: tuple[str, ...]
    notes: tuple[str, ...]


def describe(path: Path) -> Described:
    """What the config.json at `path`, or in the folder `path`, describes, for a prediction.

    Raises UserError, one line, for a file that cannot be read, lacks a key or holds a value that
    is none; AnotherModel for another than a Llama, with the respect in which it is one.
    """
    path = path / CONFIG if path.is_dir() else path
    data = read_json(path)
    if not isinstance(kind := data.get("model_type"), str):
        raise UserError(f"{path}: missing key model_type, which says what model it is")
    if kind not in FAMILIES or (data.get("num_local_experts") and kind == "llama"):
        raise AnotherModel(
            f"{path}: model_type {kind[:60]!r} {_respect(kind, data)}; this package has Llamas only"
        )
    return _described(FAMILIES[kind] | data, path)


def read_config(folder: Path) -> ModelConfig:
    """The `ModelConfig` of the Llama checkpoint in `folder`; UserError if no `Transformer` is
    exactly that model."""
    path = folder if folder.is_file() else folder / CONFIG
    data = read_json(path)
    if (kind := data.get("model_type")) != LLAMA["model_type"]:
        raise UserError(
            f"{path}: model_type is {str(kind)[:60]!r}; only weights of 'llama' can be read"
        )
    found = _described(data, path)
    if found.differs:
        raise UserError(f"{path}: {found.differs[0]}; such weights cannot be read")
    return found.model


def max_positions(folder: Path) -> int:
    """The context length that the checkpoint in `folder` states; 0 if it states none."""
    return _max_positions(read_json(folder / CONFIG), folder / CONFIG)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; UserError, one line, if there is none at `path`."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        value = json.loads(content.decode("utf-8-sig")) if len(content) <= _LARGEST else None
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: cannot be read as JSON: {' '.join(str(error).split())[:300]}"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object of at most 16 MiB")
    return value


def _respect(kind: str, data: dict[str, Any]) -> str:
    """In which respect the model is no Llama."""
    if kind in OTHERS:
        return OTHERS[kind]
    if any(data.get(key) for key in _EXPERT_KEYS):
        return _EXPERTS
    return "is not known to be a Llama" if "text_config" not in data else _ENCODER


def _described(data: dict[str, Any], path: Path) -> Described:
    for key, value in LLAMA.items():
        if key != "model_type" and data.get(key, value) != value:
            raise AnotherModel(
                f"{path}: {key} is {str(data[key])[:60]!r}; this package's Llama has {value!r}"
            )
    if absent := [theirs for theirs in KEYS.values() if theirs not in data]:
        raise UserError(f"{path}: missing key {', '.join(absent)}")
    shape: dict[str, Any] = {ours: data[theirs] for ours, theirs in KEYS.items()}
    heads = data.get("num_key_value_heads")
    shape["n_kv_heads"] = data["num_attention_heads"] if heads is None else heads
    shape["tie_embeddings"] = data.get("tie_word_embeddings", False)
    theta, scaling, remarks = _rope(data, path)
    shape |= {"rope_theta": theta, "rope_scaling": scaling}
    config = validated(ModelConfig, shape, str(path))
    if data.get("head_dim") not in (None, config.head_dim):
        raise AnotherModel(
            f"{path}: head_dim {str(data['head_dim'])[:60]} is not hidden_size / heads = "
            f"{config.head_dim}"
        )
    _max_positions(data, path)
    for key in _DROPOUTS:
        if data.get(key):
            raise AnotherModel(
                f"{path}: {key} keeps masks, and this package's Llama has no dropout"
            )
    if data.get("quantization_config"):
        remarks.append(
            "quantization_config is left out: this is training of all weights, not quantized"
        )
    if data["model_type"] == "smollm3":
        remarks.append("every layer is taken to rotate its queries and keys (no_rope_layers)")
    notes = ("attention_dropout is left out",) if data.get("attention_dropout") else ()
    return Described(config, _window(data, path), tuple(remarks), notes)


def _window(data: dict[str, Any], path: Path) -> int | None:
    """How far attention looks back; UserError where that differs from layer to layer."""
    window = data.get("sliding_window")
    if window is None or data["model_type"] == "llama" or data.get("use_sliding_window") is False:
        return None
    kinds = data.get("layer_types") or ["sliding_attention"]
    if type(window) is not int or window < 1 or not isinstance(kinds, list):
        raise UserError(
            f"{path}: sliding_window: expected a number of positions, got {str(window)[:60]!r}"
        )
    if any(kind != "sliding_attention" for kind in kinds):
        raise AnotherModel(f"{path}: layer_types: a window in some layers only is not predicted")
    return window


def _max_positions(data: dict[str, Any], path: Path) -> int:
    found = data.get("max_position_embeddings", 0)
    if (
        type(found) is not int
        or (found < 1 and "max_position_embeddings" in data)
        or found >= 2**63
    ):
        raise UserError(
            f"{path}: max_position_embeddings: expected a length, got {str(found)[:60]!r}"
        )
    return found


def _rope(data: dict[str, Any], path: Path) -> tuple[Any, dict[str, Any] | None, list[str]]:
    """The base of the rotary embeddings' angles, their scaling, and what is left out of it.

    transformers 5 keeps all in `rope_parameters`, older versions in `rope_scaling` and
    `rope_theta`. Which of two mappings wins depends on the version, so two that differ are refused.
    """
    given = {key: data[key] for key in ("rope_parameters", "rope_scaling") if data.get(key)}
    if wrong := [key for key, rope in given.items() if not isinstance(rope, dict)]:
        raise UserError(f"{path}: {wrong[0]} is no mapping")
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise UserError(
            f"{path}: rope_parameters and rope_scaling contradict each other; leave one of them out"
        )
    rope: dict[str, Any] = next(iter(given.values()), {})
    theta = rope.get("rope_theta", data.get("rope_theta", 1e4))
    kind = rope.get("rope_type", rope.get("type", "default"))
    part = rope.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    remarks = (
        []
        if part in (None, 1.0)
        else ["every channel is taken to be rotated (partial_rotary_factor)"]
    )
    if not isinstance(kind, str):
        raise UserError(f"{path}: rope_type: expected a name, got {str(kind)[:60]!r}")
    if kind == "default":
        return theta, None, remarks
    if kind != "llama3":
        return (
            theta,
            None,
            [
                *remarks,
                f"rope scaling {kind[:60]!r} is left out, which changes no step's memory or time",
            ],
        )
    needed = ("factor", "low_freq_factor", "high_freq_factor")
    if absent := [key for key in needed if key not in rope]:
        raise UserError(f"{path}: rope scaling 'llama3' lacks {', '.join(absent)}")
    original = "original_max_position_embeddings"
    # As transformers: what the config says beside the mapping, what the mapping says, the context
    # length.
    length = data.get(original) or rope.get(original) or data.get("max_position_embeddings", 2048)
    return theta, {key: rope[key] for key in needed} | {original: length}, remarks
