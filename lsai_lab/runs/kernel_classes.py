"""Classes of recorded kernels, as traces of today have them.

Until 28 November 2026 what `torch.compile` fused (`triton_...`) counted as copies of FSDP where a
split was among its operators, as in rotary positions. Every such kernel in the records is
pointwise. Where a record names it, its class and both sums are put right as the record is read.
Records of 25 kernels do not name all: up to 1.6 ms a step of one GPU stay where they were.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WAS, IS = "fsdp copies", "norm/pointwise"
_SUMS = ("kernel_fsdp_copies_ms", "kernel_norm_pointwise_ms")


def in_todays_classes(kernels: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a `kernels.json`."""
    return [{**row, "class": IS} if _is_fused(row) else dict(row) for row in kernels]


def in_todays_sums(results: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The results of the run in `folder`, whose `kernels.json` says what is to be moved."""
    copies, pointwise = (results.get(name) for name in _SUMS)
    if not copies:
        return dict(results)
    try:
        kernels = json.loads((folder / "kernels.json").read_bytes())["kernels"]
        named = sum(row["ms"] for row in kernels if row["class"] == WAS)
        moved = sum(row["ms"] for row in kernels if _is_fused(row))
    except (OSError, ValueError, KeyError, TypeError):  # whoever reads the kernels is told
        return dict(results)
    if named > copies * (1 + 1e-6):  # a copy of a record that was put right
        return dict(results)
    left = copies - moved
    sums = (left if left > 1e-6 * copies else 0.0, (pointwise or 0.0) + moved)
    return {**results, **dict(zip(_SUMS, sums, strict=True))}


def _is_fused(row: Mapping[str, Any]) -> bool:
    return row.get("class") == WAS and str(row.get("name")).startswith("triton_")
