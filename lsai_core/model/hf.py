"""Hugging Face Llama checkpoints in and out: a folder with `config.json` and safetensors files.

The tensors are the same up to names and packing: query, key and value are rows of one `qkv` matrix
here, gate and up rows of one `gate_up` matrix; rotary layout and norms agree, so nothing is
permuted. `Slot` says which rows of which parameter a published tensor fills, and reading and
writing both follow that one table.

`config.json` is the mark of a complete checkpoint: `save_hf` removes an old one first and writes
the new one last.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lsai_core.base.errors import Unavailable, UserError
from lsai_core.base.files import atomic_writer, write_json
from lsai_core.config.model import ModelConfig
from lsai_core.model.hf_config import CONFIG, KEYS, LLAMA, max_positions, read_config, read_json
from lsai_core.model.transformer import Transformer, fill, shaped

__all__ = [
    "config_json",
    "fill_from",
    "find_checkpoint",
    "load_hf",
    "max_positions",
    "read_config",
    "save_hf",
    "slots",
    "to_hf",
]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATING = ("F64", "F32", "F16", "BF16")  # as safetensors calls them
EMBEDDING = "model.embed_tokens.weight"
# How casts of fp8 layers are scaled; no part of the function that the model is.
SCALES = "fp8_scales."


@dataclass(frozen=True)
class Slot:
    """Rows `start` to `stop` of parameter `name` (all rows for a vector)."""

    name: str
    start: int
    stop: int


def slots(config: ModelConfig) -> dict[str, Slot]:
    """For each tensor name of a Hugging Face Llama of this shape, the place it has in
    `Transformer`."""
    d, ff, q = config.d_model, config.d_ff, config.n_heads * config.head_dim
    kv = config.n_kv_heads * config.head_dim
    table = {
        EMBEDDING: Slot("embedding.weight", 0, config.vocab_size),
        "model.norm.weight": Slot("norm.weight", 0, d),
    }
    if not config.tie_embeddings:
        table["lm_head.weight"] = Slot("output.weight", 0, config.vocab_size)
    for i in range(config.n_layers):
        theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
        table |= {
            f"{theirs}input_layernorm.weight": Slot(f"{ours}attention_norm.weight", 0, d),
            f"{theirs}self_attn.q_proj.weight": Slot(f"{ours}attention.qkv.weight", 0, q),
            f"{theirs}self_attn.k_proj.weight": Slot(f"{ours}attention.qkv.weight", q, q + kv),
            f"{theirs}self_attn.v_proj.weight": Slot(
                f"{ours}attention.qkv.weight", q + kv, q + 2 * kv
            ),
            f"{theirs}self_attn.o_proj.weight": Slot(f"{ours}attention.output.weight", 0, d),
            f"{theirs}post_attention_layernorm.weight": Slot(f"{ours}mlp_norm.weight", 0, d),
            f"{theirs}mlp.gate_proj.weight": Slot(f"{ours}mlp.gate_up.weight", 0, ff),
            f"{theirs}mlp.up_proj.weight": Slot(f"{ours}mlp.gate_up.weight", ff, 2 * ff),
            f"{theirs}mlp.down_proj.weight": Slot(f"{ours}mlp.down.weight", 0, d),
        }
    return table


def to_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The state dict of a `Transformer` under Hugging Face's names: contiguous tensors, views where
    possible. UserError for a tensor that has no name there."""
    # torch.compile's prefix
    state = {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}
    table = slots(config)
    _require_places((name for name in state if not name.startswith(SCALES)), table)
    return {
        name: state[slot.name][slot.start : slot.stop].contiguous() for name, slot in table.items()
    }


def _require_places(names: Iterable[str], table: Mapping[str, Slot]) -> None:
    homeless = sorted(set(names) - {slot.name for slot in table.values()})
    if homeless:
        raise UserError(
            f"a Llama checkpoint has no tensor for {', '.join(homeless[:3])} "
            f"({len(homeless)} in all), and without it would be another model"
        )


def load_hf(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
) -> Transformer:
    """Read a Llama checkpoint from `folder` into a `Transformer` with parameters of `dtype` on
    `device`.

    Parameters are read one at a time. Raises `UserError` that names the file, key or tensor if
    something is missing, damaged, of the wrong shape, or of a kind that `Transformer` cannot
    express (biases, other architectures, other activations).
    """
    model = shaped(read_config(folder))
    model.to(dtype).to_empty(device=device)
    fill_from(model, folder)
    return model


def fill_from(model: Transformer, folder: Path) -> None:
    """Give `model`, sharded or not, the weights of the checkpoint in `folder`; every process of a
    sharded one must call.

    Raises UserError as `load_hf`, and where the checkpoint describes another model, also by its
    rotary embeddings.
    """
    config = model.config
    theirs = read_config(folder).model_dump()
    for key, value in config.model_dump(exclude={"preset"}).items():
        if theirs[key] != value:
            raise UserError(
                f"{folder / CONFIG}: the checkpoint has {key}={theirs[key]}, the model "
                f"{key}={value}"
            )
    files, wanted = _files(folder), slots(config)
    _require_places(
        (name.replace("_orig_mod.", "") for name, _ in model.named_parameters()), wanted
    )
    for name, path in files.items():
        # What has no place is derived from the config, or a copy of the embedding table, or an
        # error.
        derived = name.endswith("rotary_emb.inv_freq") or (
            config.tie_embeddings and name == "lm_head.weight"
        )
        if name not in wanted and not derived:
            raise UserError(
                f"{path}: tensor {name[:200]!r} has no place in a Llama of the shape in {CONFIG}"
            )
    parts: dict[str, list[tuple[str, Slot]]] = {}
    for name, slot in wanted.items():
        parts.setdefault(slot.name, []).append((name, slot))
    _check_tensors(model, files, wanted)
    if missing := sorted(wanted.keys() - files.keys()):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(f"{folder}: missing tensors {', '.join(missing[:3])}{more}")
    head = files.get("lm_head.weight") if config.tie_embeddings else None
    if head and not torch.equal(_read(head, "lm_head.weight"), _read(files[EMBEDDING], EMBEDDING)):
        raise UserError(
            f"{folder}: {CONFIG} says tie_word_embeddings, but lm_head.weight differs from "
            f"{EMBEDDING}"
        )
    for key, parameter in model.named_parameters():
        pieces = [_read(files[name], name) for name, _ in parts[key.replace("_orig_mod.", "")]]
        values = torch.cat(pieces).to(parameter.device, parameter.dtype)
        fill(parameter, values, model.row_order(key))


def find_checkpoint(name: str) -> Path:
    """The folder that `init_from` means: a path, else one below `models/` of the data root.
    Unavailable if there is none."""
    known = Path(os.environ.get("LSAI_DATA", "data")) / "models" / name
    folder = known if known.is_dir() else Path(name).expanduser()
    if not folder.is_dir():
        raise Unavailable(f"needs the weights {name!r}: no such folder, here or in {known.parent}")
    return folder


def _check_tensors(
    model: Transformer, files: Mapping[str, Path], wanted: Mapping[str, Slot]
) -> None:
    parameters = {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}
    for name in wanted.keys() & files.keys():
        slot = wanted[name]
        expected = (slot.stop - slot.start, *parameters[slot.name].shape[1:])
        with _opened(files[name]) as tensors:
            part = tensors.get_slice(name)
            found, dtype = tuple(part.get_shape()), str(part.get_dtype())
        if dtype not in FLOATING:
            known = ", ".join(FLOATING)
            raise UserError(
                f"{files[name]}: tensor {name!r} is {dtype}; only weights of {known} can be read"
            )
        if found != expected:
            raise UserError(
                f"{files[name]}: tensor {name!r} has shape {found}, {CONFIG} implies {expected}"
            )


def save_hf(model: Transformer, folder: Path, *, max_seq_len: int = 2048) -> None:
    """Write `model` so that `transformers.LlamaForCausalLM.from_pretrained(folder)` reads it.

    `max_seq_len` goes into `config.json` as the context length that other tools should assume.
    Raises UserError, and writes nothing, for a model with tensors that a Llama does not have.
    """
    safetensors = _safetensors()
    tensors = {
        name: tensor.detach().cpu()
        for name, tensor in to_hf(model.state_dict(), model.config).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    # without its config.json the folder is no checkpoint, until the last line below
    for stale in (CONFIG, INDEX):
        (folder / stale).unlink(missing_ok=True)
    with atomic_writer(folder / WEIGHTS) as file:
        safetensors.torch.save_file(tensors, file.name, metadata={"format": "pt"})
    write_json(
        folder / CONFIG, config_json(model.config, model.embedding.weight.dtype, max_seq_len)
    )


def config_json(config: ModelConfig, dtype: torch.dtype, max_seq_len: int) -> dict[str, Any]:
    """What `config.json` says of a model, which are also the arguments of
    `transformers.LlamaConfig`."""
    scaling = (
        None
        if config.rope_scaling is None
        else {"rope_type": "llama3", **config.rope_scaling.model_dump()}
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        **LLAMA,
        **{theirs: getattr(config, ours) for ours, theirs in KEYS.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": max_seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
        # Which ids begin and end a text is the tokenizer's knowledge; Llama 2's defaults would be
        # wrong for others.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _files(folder: Path) -> dict[str, Path]:
    """The file of every tensor of the checkpoint, by the tensor's name."""
    if (folder / WEIGHTS).exists():
        files = [WEIGHTS]
    elif (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise UserError(f"{folder / INDEX}: no weight_map of tensor names to files")
        files = sorted(set(weight_map.values()))
        if strange := [
            name
            for name in files
            if Path(name).name != name or not name.isprintable() or len(name) > 255
        ]:
            raise UserError(f"{folder / INDEX}: {strange[0][:200]!r} is no file of this folder")
    else:
        raise UserError(
            f"{folder}: neither {WEIGHTS} nor {INDEX}; only safetensors checkpoints can be read"
        )
    found: dict[str, Path] = {}
    for path in (folder / file for file in files):
        with _opened(path) as tensors:
            names = tensors.keys()
        if twice := sorted(found.keys() & set(names)):
            raise UserError(f"{path}: tensor {twice[0][:200]!r} is also in {found[twice[0]].name}")
        found |= dict.fromkeys(names, path)
    return found


def _read(path: Path, name: str) -> Tensor:
    """One tensor. Raises UserError also where a value is NaN or infinite."""
    with _opened(path) as tensors:
        found: Tensor = tensors.get_tensor(name)
    if not bool(torch.isfinite(found).all()):
        raise UserError(f"{path}: tensor {name!r} holds values that are NaN or infinite")
    return found


def _safetensors() -> Any:
    """The package `safetensors`; Unavailable without it. Only weights need it, a `config.json` does
    not."""
    try:
        import safetensors.torch
    except ImportError:
        raise Unavailable(
            "weights of Hugging Face's format need: pip install safetensors"
        ) from None
    return safetensors


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError:
        raise UserError(f"no such file: {path} (named in {INDEX})") from None
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path}: not a readable safetensors file ({reason}); fetch it again"
        ) from None
