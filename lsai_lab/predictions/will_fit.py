"""Whether a run fits, in words and numbers: what `lsai predict` prints, as plain JSON, so that it
can be remembered. And the longest sequence that does: a step's memory is near a straight line over
tokens (`aim.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

from lsai_core.base.errors import UserError
from lsai_core.config.train import TrainConfig
from lsai_core.prediction import Prediction, estimate, predict, verdict
from lsai_core.prediction.memory import OUTSIDE_GIB, usable_gib
from lsai_core.profiling.gpus import Gpu
from lsai_lab.peers.settings import Peer
from lsai_lab.peers.trainer_memory import habits_of, predict_as
from lsai_lab.searches.predicted_start import largest_within

# Tokens: where the search begins, per GPU, and where it ends. Positions up to 2^24 are exact in the
# fp32 of rotary tables.
FIRST, LAST = 2**16, 2**24
_STEP = 1024
# from the first to the second length: wide enough that the line has the slope of long sequences
_STRIDE = 4


def told(config: TrainConfig, gpus: Sequence[Gpu], trainer: Peer | None = None) -> dict[str, Any]:
    """Memory (GiB) and time (s) of a step of `config` on `gpus`; with `trainer`, of that trainer's
    step, and ours beside it.

    Raises UserError for a run that cannot be predicted.
    """

    def needed(asked: TrainConfig) -> Prediction:
        return predict_as(asked, habits_of(trainer, asked)) if trainer else predict(asked)

    found = needed(config)
    ours = (
        predict(config.model_copy(update={"loss": "fused", "blocks": "fused"}))
        if trainer
        else found
    )
    rows = [
        {
            "GPU": gpu.name,
            "memory GiB": gpu.memory_gib,
            "share": found.needs / gpu.memory_gib,
            "verdict": verdict(found, gpu),
            **({} if trainer else timed(config, gpu)),
        }
        for gpu in gpus
    ]
    fits = [row["GPU"] for row in rows if row["verdict"] == "fits"]
    return {
        "answer": _answer(config, found, needed, gpus[0])
        if len(gpus) == 1
        else f"Fits {', '.join(fits) or 'none of these'}.",
        "as": trainer,
        "peak_gib": found.peak,
        "needs_gib": found.needs,
        "reserved_gib": found.reserved,
        "phases_gib": found.phases,
        "parts_gib": found.parts,
        "ours_gib": ours.parts,
        "host_gib": found.host,
        "gpus": rows,
    }


def timed(config: TrainConfig, gpu: Gpu) -> dict[str, Any]:
    """Columns of an estimated step."""
    time = estimate(config, gpu)
    known = (time.step_s, time.tokens_per_s, time.source) if time else (None, None, "none known")
    return dict(zip(("step s", "tokens/s", "rates"), known, strict=True))


def _answer(
    config: TrainConfig, found: Prediction, needed: Callable[[TrainConfig], Prediction], gpu: Gpu
) -> str:
    """Whether it fits, in words, and whether it would with the other kind of checkpointing."""
    spare, other = (
        gpu.memory_gib - OUTSIDE_GIB - found.needs,
        "full" if config.grad_checkpoint == "none" else "none",
    )
    said = {
        "fits": f"Fits {gpu.name} with {spare:.1f} GiB to spare",
        "tight": f"May fit {gpu.name}: {spare:.1f} GiB to spare, less than predictions are sure of"
        if spare > 0
        else f"May fit {gpu.name}, slowly: {-spare:.1f} GiB of cached memory go back in every step",
        "too large": f"Does not fit {gpu.name}: {-spare:.1f} GiB are missing",
    }[verdict(found, gpu)]
    without = config.model_copy(
        update={"grad_checkpoint": other, "saved_inputs": "gpu", "inputs_on_gpu": 0}
    )
    then = {"fits": "fits", "tight": "may fit", "too large": "does not"}[
        verdict(needed(without), gpu)
    ]
    return f"{said}; {'with full' if other == 'full' else 'without'} checkpointing it {then}."


def longest(config: TrainConfig, gpu: Gpu) -> tuple[TrainConfig, Prediction, bool]:
    """`config` with the largest `seq_len` whose peak `fits` each of its GPUs, what it is predicted
    to need, and whether memory (not `LAST`) ends it there; host memory is stated, not bounded.

    Lengths are multiples of 1,024 tokens, times 2 x cp where GPUs share a sequence: every method
    can cut these. UserError if the shortest is too long.
    """
    unit, limit = _STEP * (2 * config.parallel.cp if config.parallel.cp > 1 else 1), usable_gib(gpu)
    smallest, largest = -(-(config.attention.window or 1) // unit), LAST // unit

    def at(units: int) -> TrainConfig:
        return config.model_copy(update={"seq_len": units * unit})

    fits, seen = largest_within(
        lambda units: predict(at(units)).needs,
        limit,
        first=smallest,
        last=largest,
        begin=FIRST * config.parallel.cp // unit,
        stride=_STRIDE,
    )
    if fits not in seen:
        sizes = f"{seen[smallest]:.1f} GiB, and {limit:.1f} of {gpu.memory_gib:g} GiB may be used"
        raise UserError(f"not even {smallest * unit:,} tokens fit {gpu.name}: {sizes}")
    return at(fits), predict(at(fits)), fits < largest
