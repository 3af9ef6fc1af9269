"""Progress bars of long preparations: for a person at a terminal, never for a log file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(wanted: bool, items: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """tqdm's bar on standard error over `items` or by hand; silent if not `wanted` or if that is no terminal."""
    return tqdm(items, disable=None if wanted else True, **options)
