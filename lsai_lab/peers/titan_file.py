"""A configuration file of torchtitan (TOML, April 2024 to 0.2.2) in this package's words.

Every key is known (`titan_keys.py`): it is translated, decides nothing about memory, is told in a
remark, or the file is refused by its name. A file does not say its version. It is taken as written
for the last day on which torchtitan knew all of its keys, and what it leaves out gets the defaults
of that day.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsai_core.base.errors import UserError, hint
from lsai_lab.peers.settings import PLAIN
from lsai_lab.peers.titan_keys import (
    BOOL,
    BOOL_TEXT,
    FLAVORS,
    INT,
    KEYS,
    LIST,
    NUMBER,
    TEST_TOKENIZER,
    TEXT,
    TEXTS,
    Key,
)

LAST_DAY = "2026-02-23"
# Since when torchtitan: has AMP on one GPU, compiles the loss, fuses AdamW unless told otherwise,
# builds its debug model with 6 layers, and knows that model's vocabulary without a tokenizer.
AMP, COMPILED_LOSS, FUSED, SIX_LAYERS = "2025-06-16", "2025-04-02", "2025-02-24", "2025-04-15"
OWN_VOCABULARY = "2025-07-22"

_ATTENTION = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")  # endings of flavors
_SECTIONS = {path[:at] for path in KEYS for at in range(len(path)) if path[at] == "."}
_FP8_TABLES = ("float8.", "quantize.linear.float8.", "quantize.dense.float8.")
_FP8_CONVERTERS = ("float8", "quantize.linear.float8", "quantize.dense.float8")
_FILE_BYTES, _TOKENS, _WORDS = 2**20, 2**40, 60  # a file's size, a micro-batch's, a shown value's


@dataclass
class TitanRun:
    """What a file says: keys of `TrainConfig`, those fields of `TrainerMemory` that it sets, and
    what it says that is not in the prediction, a line each."""

    config: dict[str, Any] = field(default_factory=dict)
    trainer_memory: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def read_titan(path: Path, gpus: int | None) -> TitanRun:
    """The run that the file at `path` describes, on `gpus` GPUs, where it says "all".

    Raises UserError, one line that names the file and the key, for what cannot be read, is no key
    of torchtitan, has a wrong type or value, or belongs to a run that cannot be predicted.
    """
    try:
        return _Reader(_values(parse(path))).run(gpus)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def parse(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises UserError."""
    try:
        return tomllib.loads(read_content(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot be read as TOML: {' '.join(str(error).split())[:300]}") from None


def read_content(path: Path) -> str:
    """The text of a configuration file, with or without a byte order mark. Raises UserError."""
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {' '.join(str(error).split())[:300]}") from None
    if len(content) > _FILE_BYTES:
        raise UserError("larger than 1 MiB, which is no configuration")
    return text


def _values(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values by dotted paths, all of which are keys of torchtitan and of their types."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        path = f"{prefix}{name}"
        if path in KEYS:
            _check(path, value)
            found[path] = value
        elif path not in _SECTIONS:
            near = [key for key in (*KEYS, *_SECTIONS) if key.startswith(prefix)]
            raise UserError(f"{_shown(path)} is no key of torchtitan{hint(path, near)}")
        elif not isinstance(value, dict):
            raise UserError(f"{path}: expected a table, [{path}], got {_shown(value)}")
        else:
            found |= _values(value, f"{path}.")
    return found


def _check(path: str, value: Any) -> None:
    kind = KEYS[path].kind
    texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
    right = {
        BOOL: isinstance(value, bool),
        INT: type(value) is int and abs(value) < 2**63,
        NUMBER: type(value) in (int, float) or value == "inf",
        TEXT: isinstance(value, str),
        TEXTS: isinstance(value, str) or texts,
        LIST: isinstance(value, list),
        BOOL_TEXT: isinstance(value, bool | str),
    }
    if not right[kind]:
        raise UserError(f"{path}: expected {kind}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """A value as an error line shows it."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, bool):
        return str(value).lower()
    if type(value) is int and abs(value) >= 2**63:
        return "a number beyond 64 bits"
    try:
        text = repr(value)
    except ValueError:  # somewhere in a list there is an integer of thousands of digits
        text = "a list"
    return text if len(text) <= _WORDS else f"{text[:_WORDS]}..."


class _Reader:
    """The keys of one file, read one after the other."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.result = TitanRun()
        self.day = self._day()

    def _day(self) -> str:
        """The last day on which torchtitan knew all keys; its very last where there is none."""
        if not self.values:
            return LAST_DAY
        first = max(self.values, key=lambda path: KEYS[path].since)
        last = min(self.values, key=lambda path: KEYS[path].until or LAST_DAY)
        if KEYS[first].since <= (until := KEYS[last].until or LAST_DAY):
            return until
        self.remark(
            f"{first} (from {KEYS[first].since} on) and {last} (until {until}) are of different"
            f" versions; each is taken at its word, and defaults are those of {LAST_DAY}"
        )
        return LAST_DAY

    def remark(self, text: str) -> None:
        self.result.remarks.append(text)

    def said(self, default: Any, *paths: str) -> Any:
        """The value under one of several names that it had; UserError if two contradict."""
        given = {path: self.values[path] for path in paths if path in self.values}
        if len({repr(value) for value in given.values()}) > 1:
            raise UserError(f"{' and '.join(given)} contradict each other")
        return next(iter(given.values()), default)

    def name(self, paths: Sequence[str]) -> str:
        """Of the several names that a key had, the one that the file uses; else the first."""
        return next((path for path in paths if path in self.values), paths[0])

    def choice(self, default: str, *paths: str, known: tuple[str, ...]) -> str:
        """`said` for a text; UserError unless it is one of `known`."""
        value = self.said(default, *paths)
        if value not in known:
            raise UserError(
                f"{self.name(paths)}: {_shown(value)} is not predicted, only {' or '.join(known)}"
            )
        return str(value)

    def count(self, default: int, *paths: str) -> int:
        """`said` for a number; UserError unless it is at least 1."""
        value = self.said(default, *paths)
        if value < 1:
            raise UserError(f"{self.name(paths)}: expected at least 1, got {value}")
        return int(value)

    def run(self, gpus: int | None) -> TitanRun:
        result = self.result
        fp8 = self.fp8()
        self.others(with_fp8=fp8 != "none")
        parallel = self.parallel(gpus)
        seq_len = self.count(2048, "training.seq_len")
        batch = self.count(8, "training.local_batch_size", "training.batch_size")
        if seq_len * batch > _TOKENS:
            raise UserError(f"training.seq_len x batch is {seq_len * batch:.0e} tokens")
        config: dict[str, Any] = {
            "model": self.model(),
            "seq_len": seq_len,
            "batch_size": batch,
            "grad_accum": self.accumulated(batch * parallel["fsdp"] * parallel["replicate"]),
            "grad_checkpoint": self.checkpointing(),
            "compile": self.compiled(),
            "precision": self.precision(alone=parallel["fsdp"] == 1),
            "fp8": {"recipe": fp8},
            "parallel": parallel,
        }
        result.config = PLAIN | result.config | config
        self.optimizer(config["grad_accum"], bool(parallel.get("cpu_offload")))
        self.validation(seq_len * batch)
        return result

    def others(self, with_fp8: bool) -> None:
        """What only one value is predicted of, and what is told where it is another."""
        for path, value in self.values.items():
            key: Key = KEYS[path]
            if not key.only or value in key.only or ("float8" in path and not with_fp8):
                continue
            if not key.remark:
                raise UserError(
                    f"{path} = {_shown(value)} is not predicted, only {_shown(key.only[0])}"
                )
            self.remark(f"{path} = {_shown(value)}: {key.remark}")

    def model(self) -> dict[str, Any]:
        name, flavor = self.said("llama3", "model.name"), self.said("debugmodel", "model.flavor")
        name = "llama2" if name == "llama" else name  # its name in the first week
        if name not in FLAVORS:
            known = " and ".join(FLAVORS)
            raise UserError(f"model.name = {_shown(name)} is another model; {known} are predicted")
        shape = flavor
        for ending in _ATTENTION:
            shape = shape.removesuffix(ending)
        if shape not in FLAVORS[name] or (shape != flavor and name == "llama2"):
            raise UserError(
                f"model.flavor = {_shown(flavor)} is none of {name}{hint(flavor, FLAVORS[name])}"
            )
        if "_flex" in flavor or self.said(False, "model.use_flex_attn"):
            self.result.config["attention"] = {"backend": "flex"}
        elif "_varlen" not in flavor and self.said("causal", "model.attn_mask_type") != "causal":
            raise UserError("model.attn_mask_type: only causal is predicted without flex attention")
        found = dict(FLAVORS[name][shape])
        if shape == "debugmodel" and name == "llama3":
            found["n_layers"] = 6 if self.day >= SIX_LAYERS else 8
            if self.day < OWN_VOCABULARY:
                found["vocab_size"] = TEST_TOKENIZER
                self.remark(f"the vocabulary is the tokenizer's; {TEST_TOKENIZER} are assumed")
        return found

    def parallel(self, gpus: int | None) -> dict[str, Any]:
        sections = ("parallelism", "training")
        shard, replicate, reshard = (
            [f"{section}.{name}" for section in sections]
            for name in (
                "data_parallel_shard_degree",
                "data_parallel_replicate_degree",
                "fsdp_reshard_after_forward",
            )
        )
        self.choice("fsdp", "training.data_parallel_type", known=("fsdp",))
        copies = self.count(1, *replicate)
        shard.append("training.data_parallel_degree")
        shards = self.said(-1, *shard)
        name, copies_name = self.name(shard), self.name(replicate)
        if shards == -1 and gpus is None:
            raise UserError(f"{name} is all GPUs: say with --gpus how many")
        if shards == -1 and gpus is not None:
            if gpus % copies:
                raise UserError(f"--gpus {gpus} is no multiple of {copies_name} = {copies}")
            shards = gpus // copies
        elif shards < 1:
            raise UserError(f"{name}: expected at least 1, or -1 for all GPUs, got {shards}")
        if gpus is not None and gpus != shards * copies:
            raise UserError(
                f"--gpus {gpus}, but the file shares the work among {shards} x {copies} ({name})"
            )
        if shards == 1 and copies > 1:
            raise UserError(f"{copies_name} = {copies} without sharding is DDP, not predicted")
        found: dict[str, Any] = {"fsdp": shards, "replicate": copies}
        policy = self.choice("default", *reshard, known=("default", "always", "never"))
        if shards > 1 and policy == "never":
            found["reshard_after_forward"] = False
        if self.said(False, "training.enable_cpu_offload"):
            if shards > 1:
                found["cpu_offload"] = True
            else:
                self.remark("training.enable_cpu_offload: does nothing where nothing is sharded")
        return found

    def accumulated(self, sequences: int) -> int:
        """Micro-batches of a step, each of `sequences` over all GPUs."""
        together = self.said(-1, "training.global_batch_size")
        if together < 0:
            return 1
        if not together or together % sequences:
            raise UserError(
                f"training.global_batch_size = {together} is no multiple of {sequences}"
            )
        return int(together) // sequences

    def checkpointing(self) -> str:
        known = ("none", "selective", "full")
        mode = self.choice("selective", "activation_checkpoint.mode", known=known)
        if mode != "selective":
            return mode
        path = "activation_checkpoint.selective_ac_option"
        option = self.said("2", path)
        if option == "op":
            return mode
        if not (option.isascii() and option.isdigit() and len(option) < 5):
            raise UserError(f"{path}: expected 'op' or a number of blocks, got {_shown(option)}")
        if int(option) <= 1:
            return "full"
        self.result.trainer_memory["full_every"] = int(option)
        return mode

    def compiled(self) -> bool:
        """Whether the blocks are compiled; the loss goes to `trainer_memory`."""
        enabled = self.said(False, "compile.enable", "training.compile")
        parts = _texts(self.said(["model", "loss"], "compile.components"))
        if unknown := [part for part in parts if part not in ("model", "loss")]:
            raise UserError(f"compile.components: {_shown(unknown[0])} is none of model, loss")
        blocks, loss = (bool(enabled and part in parts) for part in ("model", "loss"))
        loss = loss and self.day >= COMPILED_LOSS
        if loss != blocks:  # usually both are
            self.result.trainer_memory["loss"] = "in place" if loss else "eager"
        return blocks

    def precision(self, alone: bool) -> str:
        types = ("float32", "bfloat16")
        stored = self.choice("float32", "training.dtype", known=types)
        computed = self.choice("bfloat16", "training.mixed_precision_param", known=types)
        if alone and self.day < AMP:
            computed = stored  # nothing casts
        if (stored, computed) == ("bfloat16", "float32"):
            raise UserError(
                "training.mixed_precision_param: float32 with bfloat16 weights is not predicted"
            )
        if stored == "bfloat16":
            return "bf16"
        return "bf16_autocast" if computed == "bfloat16" else "fp32"

    def fp8(self) -> str:
        """The fp8 recipe that the file asks for, or "none"."""
        converters = _texts(self.said([], "model.converters"))
        for name in converters:
            if name not in _FP8_CONVERTERS:
                raise UserError(
                    f"model.converters: {_shown(name)} is not predicted, only {_FP8_CONVERTERS[1]}"
                )
        older = ("enable_float8_linear", "enable_fp8_linear", "fp8_linear")
        flags = [f"training.{name}" for name in older] + ["float8.enable_float8_linear"]
        if not converters and not any(self.values.get(path) for path in flags):
            return "none"
        names = [f"{table}recipe_name" for table in _FP8_TABLES]
        filters = [f"{table}filter_fqns" for table in _FP8_TABLES]
        recipe = self.choice("tensorwise", *names, known=("tensorwise", "rowwise"))
        left_out = _texts(self.said([], *filters))
        if converters and left_out != ["output"]:
            self.remark(
                f"{self.name(filters)} = {_shown(left_out)}: predicted for all linear layers but "
                f"the output"
            )
        return "torchao_rowwise" if recipe == "rowwise" else recipe

    def optimizer(self, grad_accum: int, on_host: bool) -> None:
        self.choice("AdamW", "optimizer.name", known=("AdamW", "Adam"))
        if self.said(False, "optimizer.early_step_in_backward"):
            if grad_accum > 1:
                raise UserError(
                    "optimizer.early_step_in_backward is not predicted for several micro-batches"
                )
            self.result.trainer_memory["step_in_backward"] = True
            return
        fused = self.said(self.day >= FUSED, "optimizer.fused")
        how = self.choice(
            "fused" if fused else "foreach",
            "optimizer.implementation",
            known=("fused", "foreach", "for-loop"),
        )
        if how != "fused" and not on_host:
            self.result.trainer_memory["update"] = how

    def validation(self, tokens: int) -> None:
        """Without gradients a validation batch needs less, unless it is larger."""
        if self.said(False, "validation.enable", "validation.enabled"):
            batch = self.count(8, "validation.local_batch_size")
            length = self.count(2048, "validation.seq_len")
            if batch * length > tokens:
                self.remark(f"validation: batches of {batch} x {length} tokens are not predicted")


def _texts(value: str | list[str]) -> list[str]:
    """A list of texts, which may be written as one with commas."""
    return (
        [one.strip() for one in value.split(",") if one.strip()]
        if isinstance(value, str)
        else value
    )
