"""Attributes of somebody else's objects that are others for a while: how a simulation answers where
PyTorch would ask a GPU or another process."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def attributes_as(changed: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """While it is open, attribute `name` of `owner` is `value`, for each (owner, name, value)."""
    changed = list(changed)
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    try:
        for owner, name, value in changed:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
