"""From what benches measured of a device to the rates that predictions take: of a GPU in the
records (`tests/measured_speeds.py`), of the machine at hand (`passports.py`)."""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from lsai_lab.benches.points import Row

_SQUARE = re.compile(r"matmul_(bf16|fp8|fp32|tf32)_(\d+)_tflops")


def rates_of(products: Iterable[Row], ceilings: Mapping[str, Any]) -> dict[str, Any]:
    """Copy rates (GB/s), and by dtype [GFLOP of a product, TFLOP/s], small to large.

    `products`: rows of a `gemm` run; of one size the median counts. `ceilings`: results of a
    `ceilings` run, whose square products stand for the dtypes that `products` has not.
    """
    sizes = defaultdict[str, dict[float, list[float]]](lambda: defaultdict(list))
    for row in products:
        if row["outcome"] == "ok" and row["way"] in ("bf16", "fp8"):
            sizes[row["way"]][2e-9 * row["m"] * row["n"] * row["k"]].append(row["tflops"])
    of_layers = frozenset(sizes)
    for name, rate in ceilings.items():
        if (square := _SQUARE.fullmatch(name)) and square[1] not in of_layers:
            sizes[square[1]][2e-9 * int(square[2]) ** 3].append(rate)
    names = ("copy_gb_per_s", "h2d_gb_per_s")
    copies = {name: short(ceilings[name]) for name in names if name in ceilings}
    return copies | {
        dtype: [
            [short(gflop), short(statistics.median(seen))]
            for gflop, seen in sorted(sizes[dtype].items())
        ]
        for dtype in sorted(sizes)
    }


def messages_of(rows: Iterable[Row], processes: int) -> list[dict[str, Any]]:
    """A row for each operation and size, alone and beside products."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        if row["outcome"] == "ok":
            place = {"operation": row["operation"], "bytes": row["bytes"], "processes": processes}
            one = found.setdefault((row["operation"], row["bytes"]), place)
            if row["beside"]:
                one["beside_gb_per_s"] = row["bus_gb_per_s"]
                one["product_slowdown"] = row["product_slowdown"]
            else:
                one["bus_gb_per_s"] = row["bus_gb_per_s"]
    return [one for one in found.values() if "bus_gb_per_s" in one]


def short(value: float) -> float:
    """A measured number with three digits, and one behind the point if it has more."""
    return round(value, 1) if value >= 10 else float(f"{value:.3g}")
