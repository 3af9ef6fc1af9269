"""YAML as people mean it, settings from a command line, and where the project lies."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from lsai_core.errors import UserError
from lsai_core.files import deep_merge, nested


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
