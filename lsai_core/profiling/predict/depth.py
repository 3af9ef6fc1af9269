"""The memory of a deep model's step from those of two shallow ones.

While a step walks through blocks that are alike, what is alive changes by the same bytes from block to block: activations come, or
go while gradients come. So the highest moment of a block's pass is a linear function of the block's index, for a given depth, and of
the depth, for a given index from either end. Blocks near the ends may differ (what FSDP prefetches, the last one's weights); those
further in lie on a line between two that are known, so they are never the highest alone.

Two runs that differ by one block give the slopes (by one period, where blocks take turns). The block in the middle of the deeper one is not needed for that: it must lie on
its neighbours' line, which is checked, and where it does not, the model is run at its depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

# Blocks at each end whose segments are kept: the outermost may be unlike the others, the next one begins the line.
ENDS = 2


@dataclass(frozen=True)
class Segment:
    """A part of a step: the phase of a micro-batch, and within it what follows the entry into a block.

    `way`: into its forward pass, or back into its backward pass; in the backward phase checkpointing goes `into` blocks, too.
    `block`: index from the first one, negative from the last one; None before any.
    """

    phase: str
    micro_batch: int
    way: str = ""
    block: int | None = None


Segments = dict[Segment, Counter[str]]  # bytes by purpose at the highest moment


def at_any_depth(
    run: Callable[[int], Segments], n_layers: int, *, unlike_at_the_end: int = 0, period: int = 1
) -> Segments:
    """What `run(n_layers)` returns, as far as its highest moments go: the segments near both ends.

    `run` must be linear in the sense above, but for the last `unlike_at_the_end` blocks, which are unlike those before.
    `period`: blocks so far apart are alike, and those between them are not.
    """
    first = ENDS * period
    last = first + unlike_at_the_end
    shallow = first + last
    shallow += (n_layers - shallow) % period
    if n_layers <= 2 * shallow + period:  # two runs would be no less work
        return run(n_layers)
    one, two = run(shallow), run(shallow + period)
    if not _middle_on_line(two, range(first, shallow + period - last), period):
        return run(n_layers)
    one, two = _from_ends(one, shallow, first, last), _from_ends(two, shallow + period, first, last)
    periods = (n_layers - shallow) // period
    return {segment: _further(one[segment], two[segment], periods) for segment in one}


def _from_ends(segments: Segments, depth: int, first: int, last: int) -> Segments:
    """The segments of the `first` blocks, and of the `last` ones by negative index."""
    found: Segments = {}
    for segment, highest in segments.items():
        block = segment.block
        if block is not None and block >= depth - last:
            found[replace(segment, block=block - depth)] = highest
        elif block is None or block < first:
            found[segment] = highest
    return found


def _further(one: Counter[str], two: Counter[str], periods: int) -> Counter[str]:
    return Counter({name: one[name] + periods * (two[name] - one[name]) for name in one | two})


def _middle_on_line(segments: Segments, middle: range, period: int) -> bool:
    for segment, highest in segments.items():
        if segment.block is None or segment.block not in middle:
            continue
        before, after = (segments[replace(segment, block=segment.block + side)] for side in (-period, period))
        if 2 * highest.total() != before.total() + after.total():
            return False
    return True
