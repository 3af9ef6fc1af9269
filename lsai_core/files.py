"""Small file habits that everything else relies on: atomic writes, honest YAML, one folder for what can be rebuilt.

A file appears under its final name only when it is complete: it is written beside it under a temporary name, flushed to
disk and renamed. A crash, a kill or a full disk leaves either the old file or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from lsai_core.errors import UserError


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that becomes `path` when the block ends without an exception, and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_writer(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinities are refused: JSON has none."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats (`3e-4` is a number) and no silently repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9_]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$"
    ),
    list("-+0123456789."),
)


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; a missing or malformed file is a `UserError` that names the file and the line."""
    try:
        value = yaml.load(path.read_text(), Loader=_Loader)
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a mapping of keys to values at the top level")
    return value


def parse_value(text: str) -> Any:
    """One YAML scalar or flow value, as given on a command line (`--set optim.lr=3e-4`); UserError if it is none."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{text!r} cannot be read as a YAML value: {' '.join(str(error).split())}") from None


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """`["optim.lr=3e-4", "steps=10"]` as a nested mapping; UserError for anything that is not key=value."""
    overrides: dict[str, Any] = {}
    for pair in pairs:
        path, separator, text = pair.partition("=")
        if not separator or not path:
            raise UserError(f"--set wants key=value (for example optim.lr=3e-4), got {pair!r}")
        overrides = deep_merge(overrides, nested(path, parse_value(text)))
    return overrides


def nested(path: str, value: Any) -> dict[str, Any]:
    """`value` at a path with dots: `("optim.lr", 1)` is `{"optim": {"lr": 1}}`."""
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, its keys with dots: the reverse of `nested`."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= flatten(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
    return flat


def deep_merge(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """`override` laid over `base`, mapping by mapping; neither argument is changed."""
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        merged[key] = deep_merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def repo_root() -> Path:
    """The folder that holds `params/` and `notebooks/`: $LSAI_ROOT, else the nearest one above the current folder, else
    the source checkout."""
    if given := os.environ.get("LSAI_ROOT"):
        if not (Path(given) / "params").is_dir():
            raise UserError(f"LSAI_ROOT={given} holds no params/ folder; set it to the project's folder")
        return Path(given)
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parent.parent):
        if (folder / "params").is_dir() and (folder / "notebooks").is_dir():
            return folder
    raise UserError(f"no params/ and notebooks/ at or above {here}; change into the checkout or set LSAI_ROOT")
