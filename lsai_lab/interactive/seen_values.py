"""What an expression of a cell stands for, as far as it is there to be read: variables, frames of
them, records. Nothing of the person's own is called."""

import ast
import contextlib
import io
from collections.abc import Mapping
from typing import Any

import pandas as pd
from pydantic import BaseModel

import lsai_core
import lsai_lab
from lsai_core.base.shown import Shown

# Functions of `lab` that only read, and quickly.
_READERS = ("config", "find_run", "kernels", "points", "recorded", "steps", "study")
# Methods of a frame that keep its columns.
_KEEPING = (
    *("copy", "dropna", "drop_duplicates", "head", "query", "reset_index", "sample"),
    *("sort_values", "tail"),
)
# What a property of a shown object may cost: those of a model are not read.
_COSTLY = ("model", "tokenizer")
# Known by their usual names also in a cell that is still to import them.
_PACKAGES = {"lab": lsai_lab, "lsai_core": lsai_core, "lsai_lab": lsai_lab}
Names = Mapping[str, Any]


def value_of(node: ast.AST, names: Names) -> Any:
    """The value of an expression; None where it cannot be read without running anything."""
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
        return _value(node, names)
    return None


def function_of(node: ast.AST, names: Names) -> Any:
    """What a call calls: a function of `lab` or of the core, or a method of what is there; else
    None."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = value_of(node.value, names)
    if owner is lsai_lab or owner is lsai_core:
        return getattr(owner, node.attr, None)
    return getattr(type(owner), node.attr, None) and getattr(owner, node.attr)


def _value(node: ast.AST, names: Names) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id, _PACKAGES.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, names)
        readable = isinstance(owner, Shown | BaseModel) and node.attr not in _COSTLY
        readable |= isinstance(owner, pd.DataFrame) and node.attr in owner
        return getattr(owner, node.attr) if readable else None
    if isinstance(node, ast.Subscript):
        return _item(node, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _called(node, node.func, names)
    return ast.literal_eval(node)


def _item(node: ast.Subscript, names: Names) -> Any:
    """An item: of a frame the columns that are named, its rows' columns for what chooses rows."""
    place = node.value
    rows = isinstance(place, ast.Attribute) and place.attr in ("iloc", "loc")
    owner = _value(place.value if isinstance(place, ast.Attribute) and rows else place, names)
    try:
        key = ast.literal_eval(node.slice)
    except ValueError:
        return owner if isinstance(owner, pd.DataFrame) else None
    if rows and isinstance(owner, pd.DataFrame):
        return owner.iloc[key] if isinstance(key, int) else owner
    return owner[key] if isinstance(owner, pd.DataFrame | dict) else None


def _called(node: ast.Call, function: ast.Attribute, names: Names) -> Any:
    owner = _value(function.value, names)
    if owner is lsai_lab:
        reader = {"load": "recorded"}.get(function.attr, function.attr)
        if reader not in _READERS or (reader == "recorded" and not node.args):
            return None
        return getattr(lsai_lab, reader)(*(_value(each, names) for each in node.args))
    return owner if isinstance(owner, pd.DataFrame) and function.attr in _KEEPING else None
