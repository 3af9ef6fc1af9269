"""Which backend was fastest where: the measured table behind `auto`.

`measured.json` is written by `lsai attention-table --write` from the committed records of the
attention study, one line for each shape: the correct backends, fastest first, with their TFLOP/s,
by forward plus backward time (`training`) and by forward time (`inference`). Which kernel wins
depends on the GPU's architecture, the head dimension, the mask and the length, and changes slowly
with each, so a request that was not measured takes the ranking of the nearest shape that was.
"""

import functools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lsai_core.attention.registry import HALF, Case
from lsai_core.kernels import cuda_capability

TABLE = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Ranking:
    """One measured shape. `gpu` is the driver's name of the GPU, `capability` its architecture
    ("9.0")."""

    gpu: str
    capability: str
    dtype: str
    head_dim: int
    grouped: bool
    causal: bool
    window: int | None
    length: int
    training: dict[str, float]
    inference: dict[str, float]


def read_table(text: str) -> tuple[Ranking, ...]:
    """Read the rankings from the text of a table."""
    rows: list[dict[str, Any]] = json.loads(text)["rankings"]
    return tuple(Ranking(**row) for row in rows)


def table_text(rankings: Sequence[Ranking]) -> str:
    """The text of a table: JSON, one line for each shape."""
    lines = ",\n".join("  " + json.dumps(asdict(ranking)) for ranking in rankings)
    return '{\n "rankings": [' + (f"\n{lines}\n ]" if lines else "]") + "\n}\n"


@functools.cache
def shipped() -> tuple[Ranking, ...]:
    """The table that comes with the package."""
    return read_table(TABLE.read_text(encoding="utf-8"))


def rankings_for(device: torch.device, available: Mapping[str, str | None]) -> tuple[Ranking, ...]:
    """What `select_rankings` takes of the shipped table for this GPU; nothing for other devices."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ()
    name, (major, minor) = torch.cuda.get_device_name(device), cuda_capability(device)
    return select_rankings(shipped(), name, f"{major}.{minor}", available)


def select_rankings(
    rankings: Sequence[Ranking],
    gpu: str,
    capability: str,
    available: Mapping[str, str | None] | None = None,
) -> tuple[Ranking, ...]:
    """The rankings of this GPU, else those of its architecture.

    A GPU that was measured without a backend that is `available` (see `choose`) and, of those that
    are, the fastest somewhere on the architecture counts for less: else `auto` would never take
    that one, and with a window mask S x S values where FlashAttention-2 alone is installed.
    """
    alike = [ranking for ranking in rankings if ranking.capability == capability]
    usable = {name for name, reason in (available or {}).items() if reason is None}
    winners = {name for r in alike for name in [n for n in r.training if n in usable][:1]}
    known: dict[str, set[str]] = defaultdict(set)
    for ranking in alike:
        known[ranking.gpu] |= winners & ranking.training.keys()
    most = max(map(len, known.values()), default=0)
    alike = [ranking for ranking in alike if len(known[ranking.gpu]) == most]
    return tuple(ranking for ranking in alike if ranking.gpu == gpu) or tuple(alike)


def nearest(case: Case, rankings: Sequence[Ranking]) -> Ranking | None:
    """The measured shape that is most like `case`; None if none has its kind of mask and number
    format.

    Head dimension decides first, then whether heads are grouped, then how many doublings of the
    window and of the length lie between. Where neither a length is given nor tiles matter (a single
    token), nothing is near.
    """
    if case.length is None or case.single_token:
        return None
    length = case.length
    dtypes = {
        str(dtype).removeprefix("torch.")
        for dtype in (HALF if case.dtype in HALF else {case.dtype})
    }

    def distance(ranking: Ranking) -> tuple[float, bool, float]:
        doublings = abs(math.log2(ranking.length / length))
        if case.window is not None and ranking.window is not None:
            doublings += abs(math.log2(ranking.window / case.window))
        return (
            abs(math.log2(ranking.head_dim / case.head_dim)),
            ranking.grouped != case.grouped,
            doublings,
        )

    alike = [
        ranking
        for ranking in rankings
        if ranking.dtype in dtypes
        and ranking.causal == case.causal
        and (ranking.window is None) == (case.window is None)
    ]
    return min(alike, key=distance, default=None)
