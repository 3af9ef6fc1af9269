"""Whether a run fits, in words and numbers: what `lsai predict` prints, as plain JSON, so that it
can be kept on disk. And the longest sequence that fits: a step's memory is near a straight line
over tokens (`aim.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lsai_core.base.errors import UserError
from lsai_core.config.model import MOST_TOKENS, GradCheckpoint
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.kernel import (
    PACKAGES,
    kernel_on,
    not_there,
    packages_named,
    packages_on,
)
from lsai_core.prediction.largest import largest_within
from lsai_core.prediction.memory import Prediction, predict, predict_ranks, verdict
from lsai_core.prediction.roofline import estimate, untimed
from lsai_core.profiling.gpus import OUTSIDE_GIB, Gpu, usable_gib
from lsai_lab.peers.settings import Peer
from lsai_lab.peers.trainer_memory import TrainerMemory, predict_as, trainer_memory_of

# Tokens: where the search begins, per GPU, and where it ends. Positions up to 2^24 are exact in the
# fp32 of rotary tables.
FIRST, LAST = 2**16, 2**24
_STEP = 1024
_DIFFERS = 0.03  # a share by which another kernel's answer is told, too
SDPA, SLICES = "torch's fused one", "a fused one for slices"
# from the first to the second length: wide enough that the line has the slope of long sequences
_STRIDE = 4


def will_fit(
    config: TrainConfig,
    gpus: Sequence[Gpu],
    trainer: Peer | None = None,
    trainer_memory: Mapping[str, Any] | None = None,
    packages: str | None = None,
) -> dict[str, Any]:
    """Memory (GiB) and time (s) of a step of `config` on `gpus`, as `lsai predict` prints them.

    `trainer`: the step is that trainer's, and ours stands beside it. `trainer_memory`: the fields
    of `TrainerMemory` that the trainer's own file sets; the others are its defaults. `packages`:
    the packages with attention kernels that are installed there (`kernel.py`); without it, those
    that are installed here.

    Raises UserError for a run that cannot be predicted.
    """

    def needed(asked: TrainConfig, kernel: str | None = None) -> Prediction:
        if trainer is None:
            return predict(asked, kernel, on=gpus[0].on)
        own = trainer_memory_of(trainer, asked).model_dump() | dict(trainer_memory or {})
        return predict_as(asked, TrainerMemory.model_validate(own))

    kernels = [expected_kernel(config, gpu, packages, trainer) for gpu in gpus]
    by_kernel = {kernel: needed(config, kernel) for kernel in dict.fromkeys(kernels)}
    found = by_kernel[kernels[0]]
    ours = (
        predict(config.model_copy(update={"loss": "fused", "blocks": "fused"}))
        if trainer
        else found
    )
    rows: list[dict[str, Any]] = []
    otherwise: list[dict[str, Any]] = []
    for gpu, kernel in zip(gpus, kernels, strict=True):
        row = _row(by_kernel[kernel], gpu)
        if trainer is None:
            row |= {"attention": kernel or SLICES, **timed(config, gpu, kernel)}
            otherwise += _otherwise(config, gpu, kernel, row)
        rows.append(row)
    fits = [row["GPU"] for row in rows if row["verdict"] == "fits"]
    attention = kernels[0] or (SLICES if trainer is None else SDPA)
    return {
        "answer": _answer(config, found, lambda asked: needed(asked, kernels[0]), gpus[0])
        if len(gpus) == 1
        else f"Fits {', '.join(fits) or 'none of these'}.",
        "as": trainer,
        "peak_gib": found.peak,
        "needs_gib": found.needs,
        "reserved_gib": found.reserved,
        "phases_gib": found.phases,
        "parts_gib": found.parts,
        "rank": found.rank,
        "ranks": [] if trainer else _ranks(config, kernels[0], gpus[0].on),
        "ours_gib": ours.parts,
        "host_gib": found.host,
        "attention": attention,
        "otherwise": otherwise,
        "gpus": rows,
        "remarks": not_there(config, gpus) if trainer is None else [],
    }


def _ranks(
    config: TrainConfig, kernel: str | None, on: Literal["gpu", "cpu"]
) -> list[dict[str, Any]]:
    """A row per process that differs from others in memory, rank 0 first; none if all are alike."""
    found = predict_ranks(config, kernel, on=on)
    return [
        {
            "rank": one.rank,
            "peak GiB": one.peak,
            "needs GiB": one.needs,
            "reserved GiB": one.reserved,
            **{f"{name} GiB": size for name, size in one.parts.items()},
        }
        for one in found
        if len(found) > 1
    ]


def _row(found: Prediction, gpu: Gpu) -> dict[str, Any]:
    return {
        "GPU": gpu.name,
        "memory GiB": gpu.memory_gib,
        "share": found.needs / gpu.memory_gib,
        "verdict": verdict(found, gpu),
    }


def expected_kernel(
    config: TrainConfig, gpu: Gpu, packages: str | None, trainer: Peer | None = None
) -> str | None:
    """The attention kernel to predict with, where `packages` are installed (None: as the GPU's
    passport says, or as here).

    None: fused kernels that all keep the same, torch's own in another trainer, or those of slices
    of a sequence. UserError where the kernel that the config names cannot serve the run.
    """
    there = packages_on(gpu) if packages is None else packages_named(packages)
    if config.parallel.cp > 1 or (trainer is not None and config.attention.backend == "auto"):
        return None
    kernel = kernel_on(gpu, config, there)
    return kernel if trainer is None else None


def _otherwise(
    config: TrainConfig, gpu: Gpu, kernel: str | None, answer: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The answers with no package of attention kernels and with all of them, where one differs
    from `answer`, a row of `will_fit`, by more than `_DIFFERS` in memory or in time."""
    if kernel is None or config.attention.backend != "auto" or gpu.is_cpu:
        return []
    rows: list[dict[str, Any]] = []
    for packages in (frozenset[str](), frozenset(PACKAGES)):
        other = kernel_on(gpu, config, packages)
        if other == kernel or other in {row["attention"] for row in rows}:
            continue
        one, time = predict(config, other), timed(config, gpu, other)
        pairs = [(one.needs, answer["share"] * gpu.memory_gib)]
        if time["step s"] and answer["step s"]:
            pairs.append((time["step s"], answer["step s"]))
        if any(abs(new / old - 1) > _DIFFERS for new, old in pairs):
            row = {"GPU": gpu.name, "attention": other, "needs GiB": one.needs}
            rows.append(row | {"verdict": verdict(one, gpu)} | time)
    return rows


def timed(config: TrainConfig, gpu: Gpu, kernel: str | None = None) -> dict[str, Any]:
    """Columns of an estimated step, its speed that of all GPUs together. `kernel`: of attention;
    the one that the config names, or else the fastest."""
    named = config.attention.backend
    time = estimate(config, gpu, kernel or (None if named == "auto" else named))
    unknown = (None, None, untimed(config, gpu) or "none known")
    known = (time.step_s, time.tokens_per_s, time.source) if time else unknown
    return dict(zip(("step s", "tokens/s", "rates"), known, strict=True))


def _answer(
    config: TrainConfig, found: Prediction, needed: Callable[[TrainConfig], Prediction], gpu: Gpu
) -> str:
    """Whether it fits, in words, and whether it would with the other kind of checkpointing, unless
    it fits without."""
    spare = gpu.memory_gib - OUTSIDE_GIB - found.needs
    other: GradCheckpoint = "full" if config.grad_checkpoint == "none" else "none"
    name = f"a {gpu.name}" if gpu.name.startswith("GPU ") else gpu.name
    itself = "the program" if gpu.is_cpu else "ROCm" if gpu.is_amd else "CUDA"
    answer = {
        "fits": f"Fits {name} with {spare:.1f} GiB to spare, beside {OUTSIDE_GIB:g} GiB that "
        f"{itself} itself takes",
        "tight": f"Tight on {name}: {spare:.1f} GiB to spare, less than predictions are sure of"
        if spare > 0
        else f"Tight on {name}, and slow: {-spare:.1f} GiB of cached memory go back in every step",
        "too large": f"Does not fit {name}: {-spare:.1f} GiB are missing",
    }[verdict(found, gpu)]
    if verdict(found, gpu) == "fits" and other == "full":
        return f"{answer}."
    without = config.in_every_block(other).model_copy(
        update={"saved_inputs": "gpu", "inputs_on_gpu": 0}
    )
    neither = "does not fit" + " either" * (spare < 0)
    then = {"fits": "fits", "tight": "is tight", "too large": neither}[
        verdict(needed(without), gpu)
    ]
    return f"{answer}; {'with full' if other == 'full' else 'without'} checkpointing it {then}."


def longest(
    config: TrainConfig, gpu: Gpu, kernel_of: Callable[[TrainConfig], str | None] = lambda _: None
) -> tuple[TrainConfig, Prediction, bool]:
    """`config` with the largest `seq_len` whose peak `fits` each of its GPUs, what it is predicted
    to need, and whether memory (not `LAST`) ends it there; host memory is stated, not bounded.

    Lengths are multiples of 1,024 tokens, times 2 x cp where GPUs share a sequence: every method
    can cut these. UserError if the shortest is too long. `kernel_of`: the attention kernel of a
    config, if it is known.
    """
    unit, limit = _STEP * (2 * config.parallel.cp if config.parallel.cp > 1 else 1), usable_gib(gpu)
    smallest, largest = -(-(config.attention.window or 1) // unit), LAST // unit

    def at(units: int) -> TrainConfig:
        return config.model_copy(update={"seq_len": units * unit})

    fits, seen = largest_within(
        lambda units: predict(at(units), kernel_of(at(units))).needs,
        limit,
        first=smallest,
        last=largest,
        begin=FIRST * config.parallel.cp // unit,
        stride=_STRIDE,
    )
    if fits not in seen:
        sizes = f"{seen[smallest]:.1f} GiB, and {limit:.1f} of {gpu.memory_gib:g} GiB may be used"
        raise UserError(f"not even {smallest * unit:,} tokens fit {gpu.name}: {sizes}")
    return at(fits), predict(at(fits), kernel_of(at(fits))), fits < largest


def largest_batch(
    config: TrainConfig, gpu: Gpu, kernel_of: Callable[[TrainConfig], str | None] = lambda _: None
) -> TrainConfig:
    """`config` with the largest `batch_size` whose peak fits each of its GPUs. UserError if not
    even one sequence does. `kernel_of`: the attention kernel of a config, if it is known."""
    limit, last = usable_gib(gpu), MOST_TOKENS // config.seq_len

    def at(sequences: int) -> TrainConfig:
        return config.model_copy(update={"batch_size": sequences})

    fits, seen = largest_within(
        lambda sequences: predict(at(sequences), kernel_of(at(sequences))).needs,
        limit,
        first=1,
        last=last,
        begin=max(1, FIRST // 16 // config.seq_len),
        stride=_STRIDE,
    )
    if fits < 1:
        sizes = f"{seen[1]:.1f} GiB, and {limit:.1f} of {gpu.memory_gib:g} GiB may be used"
        raise UserError(f"not even one sequence of {config.seq_len:,} fits {gpu.name}: {sizes}")
    return at(fits)
