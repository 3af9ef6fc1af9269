"""The longest sequence whose predicted peak still fits a GPU.

Beyond the chunks of loss and feed-forward layer every moment of a step needs memory in proportion to the tokens, so the peak, the
largest of these moments, is a convex curve made of straight lines. Two predictions give a line; where it meets the limit
is the next one made. A line through two lengths that fit aims too far if another moment takes over in between, and a line across
the limit falls short; so the bracket closes after three or four predictions. What is returned has itself been
predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from lsai_core.config import TrainConfig
from lsai_core.errors import UserError
from lsai_core.profiling.predict.gpus import Gpu
from lsai_core.profiling.predict.prediction import SURE, Prediction, predict

# Tokens: where the search begins, per GPU, and where it ends. Positions up to 2^24 are exact in the fp32 of rotary tables.
FIRST, LAST = 2**16, 2**24
CLOSE = 0.01  # of the limit: nearer than predictions are true
_STEP = 1024
_STRIDE = 4  # from the first to the second length: wide enough that the line has the slope of long sequences


@dataclass(frozen=True)
class Longest:
    """The run at its longest sequence, what it is predicted to need, and whether memory (not `LAST`) ends it there."""

    config: TrainConfig
    prediction: Prediction
    limited: bool

    @property
    def tokens(self) -> int:
        return self.config.seq_len

    @property
    def host_gib(self) -> float:
        """Of all processes together."""
        return self.prediction.host * self.config.parallel.world_size


def longest(config: TrainConfig, gpu: Gpu) -> Longest:
    """`config` with the largest `seq_len` whose peak `fits` each of its GPUs; host memory is stated, not bounded.

    Lengths are multiples of 1,024 tokens, times 2 x cp where GPUs share a sequence: every method can cut these. UserError if
    the shortest is too long.
    """
    unit = _STEP * (2 * config.parallel.cp if config.parallel.cp > 1 else 1)
    limit = SURE * gpu.memory_gib
    smallest, largest = -(-(config.attention.window or 1) // unit), LAST // unit
    fits, too_long = smallest - 1, largest + 1
    seen: dict[int, Prediction] = {}
    units = min(max(smallest, FIRST * config.parallel.cp // unit), largest)
    while True:
        seen[units] = predict(_at(config, units * unit))
        if seen[units].peak <= limit:
            fits = units
        else:
            too_long = units
        if too_long - fits <= 1 or (fits in seen and seen[fits].peak >= (1 - CLOSE) * limit):
            break
        units = _next(seen, limit, fits, too_long)
    if fits not in seen:
        raise UserError(
            f"not even {smallest * unit:,} tokens fit {gpu.name}: {seen[smallest].peak:.1f} GiB, and {limit:.1f} of "
            f"{gpu.memory_gib:g} GiB may be used"
        )
    return Longest(_at(config, fits * unit), seen[fits], fits < largest)


def _at(config: TrainConfig, tokens: int) -> TrainConfig:
    return config.model_copy(update={"seq_len": tokens})


def _next(seen: dict[int, Prediction], limit: float, fits: int, too_long: int) -> int:
    """Where the line through the two predictions nearest to the limit meets it, inside of the bracket."""
    near = sorted(seen, key=lambda units: abs(seen[units].peak - limit))[:2]
    if len(near) < 2 or (rise := seen[near[1]].peak - seen[near[0]].peak) / (near[1] - near[0]) <= 0:
        guess = _STRIDE * max(seen) if fits in seen else min(seen) // _STRIDE
    else:
        guess = int(near[0] + (limit - seen[near[0]].peak) * (near[1] - near[0]) / rise)
    return min(max(guess, fits + 1), too_long - 1)
