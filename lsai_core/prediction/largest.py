"""The largest size of something whose predicted peak stays within a limit, found with few
predictions.

Each of a step's moments takes memory near a straight line over tokens or over layers, so the peak
is a convex curve made of lines. Two predictions give a line; where it meets the limit is the next
one made. It aims too far if another moment takes over in between, and falls short across the limit,
so the bracket closes after three or four predictions, and what is returned has itself been
predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lsai_core.base.errors import UserError
from lsai_core.prediction.gpu_context import SimulatedGpu
from lsai_core.prediction.memory import usable_gib
from lsai_core.profiling.gpus import Gpu, find_gpu

CLOSE = 0.01  # of the limit: nearer than predictions are true


def largest_within(
    peak: Callable[[int], float], limit: float, *, first: int, last: int, begin: int, stride: float
) -> tuple[int, dict[int, float]]:
    """Largest size in `first`..`last` whose `peak` is at most `limit` (or one within 1 % of it),
    and every peak by size.

    `first - 1` if not even the first fits. `begin`: the first size predicted; `stride`: the factor
    to the second, wide enough that the line between them has the slope that holds at the limit.
    """
    fits, too_large = first - 1, last + 1
    seen: dict[int, float] = {}
    size = min(max(first, begin), last)
    while True:
        seen[size] = peak(size)
        if seen[size] <= limit:
            fits = size
        else:
            too_large = size
        if too_large - fits <= 1 or (fits in seen and seen[fits] >= (1 - CLOSE) * limit):
            return fits, seen
        size = min(max(_next(seen, limit, fits, stride), fits + 1), too_large - 1)


def _next(seen: dict[int, float], limit: float, fits: int, stride: float) -> int:
    """Where the line through the two predictions nearest to the limit meets it."""
    near = sorted(seen, key=lambda size: abs(seen[size] - limit))[:2]
    if len(near) < 2 or (rise := seen[near[1]] - seen[near[0]]) / (near[1] - near[0]) <= 0:
        return int(stride * max(seen)) if fits in seen else int(min(seen) / stride)
    return int(near[0] + (limit - seen[near[0]]) * (near[1] - near[0]) / rise)


@dataclass(frozen=True)
class LargestBatch:
    """`batch`: the largest that fits, or one within 1 % of the memory that may be used; `limited`:
    whether memory ended it there; `peaks`: reserved GiB of every batch that was simulated."""

    batch: int
    limited: bool
    peaks: dict[int, float]


def largest_batch(
    run: Callable[[int], object], gpu: str | Gpu = "h100", *, last: int = 2**16
) -> LargestBatch:
    """The largest batch, up to `last`, with which `run` fits `gpu` with what `usable_gib` spares.

    `run(batch)` builds a model and an optimizer and makes at least two steps, as in
    `simulated_gpu`; nothing is allocated. Three to six batches are simulated.

    Raises UserError if not even one sequence fits, if the batch changes nothing, and as
    `simulated_gpu`.
    """
    where = find_gpu(gpu) if isinstance(gpu, str) else gpu
    limit = usable_gib(where)

    def peak(batch: int) -> float:
        with SimulatedGpu(where) as found:
            run(batch)
        return found.peak_reserved_gib

    batch, peaks = largest_within(peak, limit, first=1, last=last, begin=1, stride=4)
    if batch < 1:
        raise UserError(
            f"not even a batch of 1 fits {where.name}: {peaks[1]:.1f} GiB, and {limit:.1f} of "
            f"{where.memory_gib:g} GiB may be used"
        )
    if len(peaks) > 1 and len(set(peaks.values())) == 1:
        raise UserError(
            f"a batch of {min(peaks)} and one of {max(peaks)} take the same memory, "
            f"{peaks[min(peaks)]:.2f} GiB: does the step use its batch?"
        )
    return LargestBatch(batch, batch < last, peaks)
