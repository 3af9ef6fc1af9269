"""How one value is written for a reader: digits, commas, what is missing, and what would break a
table."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

Format = str | Callable[[Any], str]


def digits(column: pd.Series) -> str | None:
    """One number of decimals for a column of floats, so that they line up: three significant digits
    for the smallest. None (four significant digits each) for other columns and for values over more
    than three decades."""
    floats = [abs(float(value)) for value in column if isinstance(value, (float, np.floating))]
    sizes = [size for size in floats if 0 < size < math.inf]
    if not sizes or max(sizes) > 1e3 * min(sizes) or max(sizes) >= 1e4:
        return None
    return f".{min(6, max(0, 2 - math.floor(math.log10(min(sizes)))))}f"


def shown(value: Any, spec: Format | None = None) -> str:
    """A value as a reader sees it: by `spec`, else numbers with four significant digits and whole
    ones with commas."""
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return "–"
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


def cell(value: Any, spec: Format | None) -> str:
    return shown(value, spec).replace("|", r"\|").replace("<", r"\<")
