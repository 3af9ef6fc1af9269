"""How one value is written for a reader: digits, commas, what is missing, and what would break a
table."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

Format = str | Callable[[Any], str]

MISSING = "–"
_FIGURE = "\u2007"  # a space as wide as a digit
_PARTS = re.compile(r"([+−]?\d[\d,]*(?:\.\d+)?)")


def digits(column: pd.Series) -> str | None:
    """One number of decimals for a column of floats, so that they line up: three significant digits
    for the smallest, none for whole numbers. None (four significant digits each) for other columns
    and for values over more than three decades."""
    floats = [abs(float(value)) for value in column if isinstance(value, (float, np.floating))]
    sizes = [size for size in floats if 0 < size < math.inf]
    if sizes and all(size == round(size) for size in sizes):
        return ",.0f"  # counts, which stand beside missing ones as floats
    if not sizes or max(sizes) > 1e3 * min(sizes) or max(sizes) >= 1e4:
        return None
    return f".{min(6, max(0, 2 - math.floor(math.log10(min(sizes)))))}f"


def shown(value: Any, spec: Format | None = None) -> str:
    """A value as a reader sees it: by `spec`, else numbers with four significant digits and whole
    ones with commas."""
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return MISSING
    if callable(spec):
        text = str(spec(value))
    elif spec and not isinstance(value, (str, bool)):
        text = spec.format(value) if "{" in spec else format(value, spec)
    elif isinstance(value, (float, np.floating)):
        text = f"{value:,.0f}" if abs(float(value)) >= 1e4 else f"{value:.4g}"
    elif isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        text = f"{value:,}"
    else:
        text = str(value)
    return " ".join(text.split())


def aligned(cells: Sequence[str]) -> list[str] | None:
    """A column of values of one kind, each with its range or interval or alone, `0.79x (0.78 to
    0.81)`, `−11 ± 51`, `−0.02`: the values one below the other on their decimal points, and without
    a break. None for a column of anything else."""
    parts = {text: _PARTS.split(text) for text in cells if text != MISSING}
    shapes = {(*split[::2],) for split in parts.values()}
    longest = max(shapes, key=len, default=())
    is_range = any(word in "".join(longest[1:]) for word in ("±", " to "))
    if not is_range or longest[0] or shapes - {longest, ("", "")}:
        return None
    numbers = [split for split in parts.values() if len(split) > 1]
    before = [split[1].partition(".")[0] for split in numbers]
    for split, whole in zip(numbers, before, strict=True):
        split[1] = _FIGURE * (max(map(len, before)) - len(whole)) + split[1]
    return ["".join(parts.get(text, [text])).replace(" ", "\u00a0") for text in cells]


def cell(value: Any, spec: Format | None) -> str:
    return shown(value, spec).replace("|", r"\|").replace("<", r"\<")
