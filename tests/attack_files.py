"""Random files of other trainers and of Hugging Face, thrown at what reads them.

Each function draws `number` files and yields of each its name and what went wrong, or None. A file
survives where it ends in a prediction's settings that say what the file says, or in one line that
names the file. A traceback, several lines, or settings that do not follow a key are faults.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lsai_core.base.errors import UserError
from lsai_core.config.strict import validated
from lsai_core.config.train import TrainConfig
from lsai_core.model.hf_config import describe, read_config
from lsai_lab.peers.titan_file import TitanRun
from lsai_lab.peers.titan_keys import BOOL, INT, KEYS, NUMBER, READ, TEXT, TEXTS
from lsai_lab.peers.trainer_file import read_trainer_file

Attempts = Iterator[tuple[str, str | None]]

# Values that the right run of a key may have, and values that are wrong for any key.
_SIZES = (1, 2, 3, 4, 8, 16, 64)
_ODD: tuple[str, ...] = (
    "true",
    "false",
    "-1",
    "0",
    "-7",
    "3.5",
    "nan",
    "-inf",
    "'auto'",
    "''",
    "[]",
    "[1]",
    "['a']",
    "{}",
    "{a = 1}",
    "1979-05-27",
    "07:32:00",
    "9223372036854775807",
    "0x" + "f" * 5000,
    "'\\u0000'",
    "'''a\nb'''",
    "[[['x']]]",
    "1e400",
    "'\\uFEFF'",
)
_GOOD = {
    "model.name": ("'llama3'",),
    "model.flavor": ("'8B'", "'70B'", "'debugmodel'", "'8B_flex'"),
    "optimizer.name": ("'AdamW'", "'Adam'"),
    "optimizer.implementation": ("'fused'", "'foreach'"),
    "activation_checkpoint.mode": ("'none'", "'full'", "'selective'"),
    "activation_checkpoint.selective_ac_option": ("'op'", "'2'", "'3'"),
    "compile.components": ("['model']", "['loss']", "['model', 'loss']"),
    "training.dtype": ("'float32'", "'bfloat16'"),
    "training.mixed_precision_param": ("'bfloat16'",),
    "parallelism.fsdp_reshard_after_forward": ("'default'", "'always'", "'never'"),
    "parallelism.data_parallel_shard_degree": ("-1", "8"),
    "model.converters": ("['quantize.linear.float8']",),
    "quantize.linear.float8.recipe_name": ("'rowwise'", "'tensorwise'"),
    "quantize.linear.float8.filter_fqns": ("['output']",),
    "training.global_batch_size": ("-1", "64"),
}


def titan_files(chance: random.Random, number: int, folder: Path) -> Attempts:
    """TOML files: right ones of random keys, and ones with wrong types, keys, tables and bytes."""
    return _attempts(chance, number, _toml, _read_titan, folder / "run.toml")


def hf_configs(chance: random.Random, number: int, folder: Path) -> Attempts:
    """config.json files: right ones of several families, and ones with wrong values and bytes."""
    return _attempts(chance, number, _config, _read_hf, folder / "config.json")


def _attempts(
    chance: random.Random,
    number: int,
    draw: Callable[[random.Random], tuple[bytes, Any]],
    read: Callable[[Path, Any], str | None],
    path: Path,
) -> Attempts:
    for at in range(number):
        content, told = draw(chance)
        path.write_bytes(content)
        try:
            wrong = read(path, told)
        except UserError as error:
            line = str(error)
            fine = len(line.splitlines()) == 1 and str(path) in line and len(line) < 1200
            wrong = None if fine else f"ends in {line[:200]!r}"
        except BaseException as error:  # whatever it is, a user would see it
            wrong = f"{type(error).__name__}: {str(error)[:200]}"
        yield f"{path.name} {at}", wrong and f"{wrong}; {content[:300]!r}"


def _right(path: str, drawn: random.Random) -> str:
    """A value of the key's own kind."""
    key = KEYS[path]
    if path in _GOOD:
        return drawn.choice(_GOOD[path])
    if key.only:
        return _toml_value(drawn.choice(key.only))
    kinds = {
        BOOL: drawn.choice(("true", "false")),
        INT: str(drawn.choice(_SIZES)),
        NUMBER: f"{drawn.random():.3f}",
        TEXT: "'text'",
        TEXTS: "['text']",
    }
    return kinds.get(key.kind, "[]")


def _toml_value(value: Any) -> str:
    return json.dumps(value)


def _toml(drawn: random.Random) -> tuple[bytes, dict[str, str]]:
    """A file, and the keys whose values it gives rightly; empty where it was spoiled."""
    newest = [path for path, key in KEYS.items() if not key.until]
    settings = {path: _right(path, drawn) for path in drawn.sample(newest, drawn.randint(1, 25))}
    lines = [f"{path} = {value}" for path, value in settings.items()]
    spoil = drawn.randrange(7)
    path = drawn.choice(list(KEYS))
    if spoil == 1:
        return "\n".join([f"{path} = {drawn.choice(_ODD)}"]).encode(), {}
    if spoil == 2:
        return f"{path}{drawn.choice('xs_')} = 1".encode(), {}
    if spoil == 3:
        return f"{path.split('.')[0]} = {drawn.choice(_ODD)}".encode(), {}
    if spoil == 4:
        content = bytearray("\n".join(lines).encode())
        for _ in range(drawn.randint(1, 5)):
            content[drawn.randrange(len(content))] = drawn.randrange(256)
        return bytes(content), {}
    if spoil == 5:
        return f"{path} = {'[' * drawn.randint(100, 20_000)}".encode(), {}
    mark = b"\xef\xbb\xbf" if drawn.random() < 0.3 else b""
    return mark + "\n".join(lines).encode(), settings


def _read_titan(path: Path, told: dict[str, str]) -> str | None:
    run = read_trainer_file(path, 8)
    config = validated(TrainConfig, run.config, f"--config {path}")
    return _unfollowed(config, run, told)


def _unfollowed(config: TrainConfig, run: TitanRun, told: dict[str, str]) -> str | None:
    """A key of a right file that the settings do not follow; None if they follow all of them."""
    read = {path: value.strip("'") for path, value in told.items() if KEYS[path].use == READ}
    found: dict[str, Any] = {
        "training.seq_len": str(config.seq_len),
        "training.local_batch_size": str(config.batch_size),
        "activation_checkpoint.mode": config.grad_checkpoint,
        "training.enable_cpu_offload": str(config.parallel.cpu_offload).lower(),
    }
    if read.get("activation_checkpoint.selective_ac_option") == "op":
        found["activation_checkpoint.selective_ac_option"] = (
            "2" if "full_every" in run.trainer_memory else "op"
        )
    if read.get("parallelism.fsdp_reshard_after_forward") == "never":
        sharded_again = config.parallel.reshard_after_forward
        found["parallelism.fsdp_reshard_after_forward"] = "default" if sharded_again else "never"
    if read.get("optimizer.implementation") == "foreach" and not config.parallel.cpu_offload:
        early = run.trainer_memory.get("step_in_backward")
        found["optimizer.implementation"] = (
            "foreach" if early else run.trainer_memory.get("update", "fused")
        )
    for path, value in read.items():
        if path in found and found[path] != value:
            return f"{path} = {value} became {found[path]}"
    return None


_FAMILIES = (
    "llama",
    "mistral",
    "phi3",
    "smollm3",
    "qwen2",
    "qwen3",
    "gemma2",
    "gpt2",
    "mixtral",
    "x",
)
_JSON_ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    3.5,
    float("nan"),
    float("inf"),
    10**30,
    "auto",
    "",
    [],
    [1],
    {},
    {"a": 1},
    "\ud800",
    "a\nb",
)


def _config(drawn: random.Random) -> tuple[bytes, dict[str, Any]]:
    """A file, and its keys; empty where it was spoiled."""
    heads = drawn.choice((4, 8, 16))
    data: dict[str, Any] = {
        "model_type": drawn.choice(_FAMILIES),
        "hidden_size": heads * drawn.choice((32, 64, 128)),
        "intermediate_size": 64 * drawn.randint(1, 200),
        "num_hidden_layers": drawn.randint(1, 40),
        "num_attention_heads": heads,
        "num_key_value_heads": drawn.choice((1, 2, heads)),
        "vocab_size": drawn.randint(100, 200_000),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    }
    extras: dict[str, Any] = {
        "tie_word_embeddings": drawn.random() < 0.5,
        "rope_theta": 5e5,
        "rope_scaling": {"type": drawn.choice(("linear", "dynamic", "yarn")), "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_window": drawn.choice((None, 64, 4096)),
        "quantization_config": {"bits": 4},
        "head_dim": data["hidden_size"] // heads,
        "attention_bias": drawn.random() < 0.3,
        "torch_dtype": "bfloat16",
    }
    data |= {key: extras[key] for key in drawn.sample(sorted(extras), drawn.randint(0, 5))}
    spoil = drawn.randrange(6)
    if spoil == 1:
        data[drawn.choice(sorted(data))] = drawn.choice(_JSON_ODD)
        return json.dumps(data).encode(), {}
    if spoil == 2:
        del data[drawn.choice(sorted(data))]
        return json.dumps(data).encode(), {}
    if spoil == 3:
        content = bytearray(json.dumps(data).encode())
        content[drawn.randrange(len(content))] = drawn.randrange(256)
        return bytes(content), {}
    if spoil == 4:
        rope = {"rope_type": "llama3", "factor": drawn.choice((8.0, *_JSON_ODD))}
        data["rope_scaling"] = rope | {
            "low_freq_factor": 1.0,
            "high_freq_factor": drawn.choice((4.0, *_JSON_ODD)),
        }
        return json.dumps(data).encode(), {}
    return json.dumps(data).encode(), data


def _read_hf(path: Path, told: dict[str, Any]) -> str | None:
    """Both readers: what is wrong with what they make of the file."""
    wrong = None
    for read in (describe, lambda file: describe(file.parent), read_config):
        try:
            found = read(path)
        except UserError as error:
            if len(str(error).splitlines()) != 1 or str(path) not in str(error):
                wrong = f"said {str(error)[:200]!r}"
            continue
        model = getattr(found, "model", found)
        shape = {
            "hidden_size": model.d_model,
            "num_hidden_layers": model.n_layers,
            "vocab_size": model.vocab_size,
        }
        shape |= {"num_key_value_heads": model.n_kv_heads, "intermediate_size": model.d_ff}
        if told and shape != {key: told[key] for key in shape}:
            wrong = f"became {shape}"
        if told and told["model_type"] not in ("llama", "mistral", "phi3", "smollm3"):
            wrong = f"{told['model_type']} was taken for a Llama"
        scaled = {"rope_scaling", "rope_parameters"} <= told.keys()
        if scaled or told.get("attention_bias"):
            wrong = "rotary embeddings that contradict each other, or biases, were read"
        if told.get("quantization_config") and not getattr(found, "differs", ()):
            wrong = "a quantization was dropped"
    return wrong
