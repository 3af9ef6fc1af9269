"""The longest sequence whose predicted peak still fits a GPU: a step's memory is near a straight line over tokens (`aim.py`)."""

from __future__ import annotations

from lsai_core.config import TrainConfig
from lsai_core.errors import UserError
from lsai_core.profiling.gpus import Gpu
from lsai_core.profiling.predict.aim import largest_within
from lsai_core.profiling.predict.prediction import Prediction, predict, usable_gib

# Tokens: where the search begins, per GPU, and where it ends. Positions up to 2^24 are exact in the fp32 of rotary tables.
FIRST, LAST = 2**16, 2**24
_STEP = 1024
_STRIDE = 4  # from the first to the second length: wide enough that the line has the slope of long sequences


def longest(config: TrainConfig, gpu: Gpu) -> tuple[TrainConfig, Prediction, bool]:
    """`config` with the largest `seq_len` whose peak `fits` each of its GPUs, what it is predicted to need, and whether memory (not
    `LAST`) ends it there; host memory is stated, not bounded.

    Lengths are multiples of 1,024 tokens, times 2 x cp where GPUs share a sequence: every method can cut these. UserError if
    the shortest is too long.
    """
    unit, limit = _STEP * (2 * config.parallel.cp if config.parallel.cp > 1 else 1), usable_gib(gpu)
    smallest, largest = -(-(config.attention.window or 1) // unit), LAST // unit

    def at(units: int) -> TrainConfig:
        return config.model_copy(update={"seq_len": units * unit})

    fits, seen = largest_within(
        lambda units: predict(at(units)).needs, limit,
        first=smallest, last=largest, begin=FIRST * config.parallel.cp // unit, stride=_STRIDE,
    )  # fmt: skip
    if fits not in seen:
        sizes = f"{seen[smallest]:.1f} GiB, and {limit:.1f} of {gpu.memory_gib:g} GiB may be used"
        raise UserError(f"not even {smallest * unit:,} tokens fit {gpu.name}: {sizes}")
    return at(fits), predict(at(fits)), fits < largest
