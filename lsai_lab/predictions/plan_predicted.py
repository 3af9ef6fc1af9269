"""Settings of a plan as they are predicted: how much memory there is, what one takes of it, and the
largest micro-batch, and the fewest blocks computed again, with which one fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lsai_core.config.train import TrainConfig
from lsai_core.prediction.memory import Prediction, predict
from lsai_core.prediction.roofline import estimate
from lsai_core.profiling.gpus import (
    MARGIN,
    OUTSIDE_GIB,
    Gpu,
    enough_gib,
    find_gpu,
    spare_gib,
    usable_gib,
)
from lsai_lab.predictions.plan_space import (
    Chain,
    batch_words,
    in_some_blocks,
    kept_gib,
    kind_words,
    with_batch,
)
from lsai_lab.predictions.will_fit import expected_kernel

FILLING = 3  # predictions at most, to fill the memory that a setting leaves
OnNext = Callable[[str, int], object]
USUAL = "h100"  # whose speeds compare settings, where the GPU's own are not known


@dataclass(frozen=True)
class Room:
    """What a run may take: `budget_gib` of the allocator's reserved memory on `gpu`, or all of it;
    a share `margin` stays free."""

    gpu: Gpu
    budget_gib: float | None = None
    margin: float = MARGIN

    @property
    def given_gib(self) -> float:
        """What is shared out: the budget, or the GPU's memory."""
        memory = self.gpu.memory_gib
        return memory if self.budget_gib is None else min(self.budget_gib, memory)

    @property
    def usable_gib(self) -> float:
        """What a step may be predicted to reserve."""
        usable = usable_gib(self.gpu, self.margin)
        if self.budget_gib is None:
            return usable
        return min(usable, self.budget_gib - spare_gib(self.budget_gib, self.margin))

    @property
    def reservable_gib(self) -> float:
        """What the allocator may reserve at the most."""
        memory = self.gpu.memory_gib - OUTSIDE_GIB
        return memory if self.budget_gib is None else min(memory, self.budget_gib)

    def budget_for(self, reserved_gib: float) -> float:
        """The smallest budget with which so much would be usable."""
        return enough_gib(reserved_gib, self.margin)

    def memory_for(self, reserved_gib: float) -> float:
        """The smallest GPU's memory with which so much would be usable."""
        return enough_gib(reserved_gib + OUTSIDE_GIB, self.margin)


def gpu_with(budget_gib: float) -> Gpu:
    """Any GPU of which a run may have so much, whatever share of it stays free up to a half."""
    return Gpu("any GPU", "", budget_gib + 2 * OUTSIDE_GIB, 0, 0, fp8=False)


@dataclass(frozen=True)
class Tried:
    """A setting that was predicted: GiB of one GPU (and its host), seconds of a step."""

    config: TrainConfig
    rank: int
    peak_gib: float
    held_gib: float  # the peak before the update
    reserved_gib: float
    host_gib: float
    step_s: float
    attention: str | None
    rates: str

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs together."""
        return self.config.tokens_per_step / self.step_s

    @property
    def words(self) -> str:
        """The setting in words."""
        return f"{batch_words(self.config)}, {kind_words(self.config)}"


@dataclass
class Search:
    """One question: settings of `sequences` a step in micro-batches `sizes`, within `room`.

    `packages` of attention kernels as in `will_fit`. `on_next` is told each setting before it is
    predicted, which takes a second or two, and about how many are `left` after it: the kinds that
    nothing rules out yet.
    """

    room: Room
    sizes: Sequence[int]
    sequences: int
    packages: str | None = None
    on_next: OnNext = lambda words, left: None
    tried: dict[str, Tried] = field(default_factory=dict)
    left: int = 0

    def look(self, kind: TrainConfig, batch: int, rank: int) -> Tried:
        """The prediction of `kind` in micro-batches of `batch` sequences."""
        config = with_batch(kind, batch, self.sequences)
        key = config.model_dump_json()
        if key not in self.tried:
            self.on_next(f"{batch_words(config)}, {kind_words(config)}", self.left)
            self.tried[key] = self._predicted(config, rank)
        return self.tried[key]

    def _predicted(self, config: TrainConfig, rank: int) -> Tried:
        gpu = self.room.gpu
        kernel = expected_kernel(config, gpu, self.packages)
        named = None if config.attention.backend == "auto" else config.attention.backend
        found = predict(config, kernel)
        time = estimate(config, gpu, kernel or named)
        if time is None:
            time = estimate(config, find_gpu(USUAL), kernel or named)
            rates = f"measured rates of an {find_gpu(USUAL).name}, for its own are not known"
        else:
            rates = time.source
        assert time is not None, "the usual GPU has rates for every dtype"
        return Tried(
            config=config,
            rank=rank,
            peak_gib=found.peak,
            held_gib=max(size for name, size in found.phases.items() if name != "optimizer"),
            reserved_gib=self._reserved_gib(found),
            host_gib=found.host,
            step_s=time.step_s,
            attention=kernel,
            rates=rates,
        )

    def _reserved_gib(self, found: Prediction) -> float:
        """As predicted; where that is usable, but all of the room is not enough wherever the driver
        puts segments, the most that is reserved then."""
        room = self.room
        if found.reserved > room.usable_gib or found.surely_fits(room.reservable_gib):
            return found.reserved
        return found.at_worst

    def fits(self, tried: Tried) -> bool:
        """Whether what it may reserve is usable."""
        return tried.reserved_gib <= self.room.usable_gib

    def surely_beyond(self, kind: TrainConfig, batch: int) -> Tried | None:
        """The same with 8-bit states, where its prediction says that `kind` does not fit: it takes
        as long or longer. None where nothing is known.

        What is kept of larger states is there all the time, so also at the peak before the update.
        """
        smaller = self._twin(kind)
        known = self.tried.get(with_batch(smaller, batch, self.sequences).model_dump_json())
        if known is None or kind == smaller:
            return None
        least_gib = known.held_gib + kept_gib(kind) - kept_gib(smaller)
        return known if least_gib > self.room.usable_gib else None

    def _twin(self, kind: TrainConfig) -> TrainConfig:
        """`kind` with 8-bit states."""
        states = kind.optim.model_copy(update={"states": "8bit"})
        return kind.model_copy(update={"optim": states})

    def fits_in(self, kind: TrainConfig, batch: int, rank: int) -> bool:
        """Whether `kind` fits in micro-batches of `batch`; predicted, if it must be."""
        if self.surely_beyond(kind, batch):
            return False
        return self.fits(self.look(kind, batch, rank))

    def fastest(self, kind: TrainConfig, rank: int) -> Tried | None:
        """`kind` in the largest micro-batch that fits: in one, or the largest of several."""
        *several, whole = self.sizes
        if self.fits_in(kind, whole, rank):
            return self.look(kind, whole, rank)
        # With several micro-batches gradients wait from one to the next, so that one in the middle
        # may take more memory than the whole step at once.
        fits, too_large = -1, len(several)
        while too_large - fits > 1:
            middle = self._aim(kind, several, fits, too_large, rank)
            if self.fits_in(kind, several[middle], rank):
                fits = middle
            else:
                too_large = middle
        return self.look(kind, several[fits], rank) if fits >= 0 else None

    def _aim(self, kind: TrainConfig, sizes: list[int], low: int, high: int, rank: int) -> int:
        """Which size between `low` and `high` is the last on this side of where the line through
        these two meets the limit. Below the first size there is what the step keeps anyway."""
        top = self.sizes[high]
        beyond = self.surely_beyond(kind, top)
        more_gib = kept_gib(kind) - kept_gib(self._twin(kind)) if beyond else 0.0
        top_gib = (beyond or self.look(kind, top, rank)).reserved_gib + more_gib
        start, start_gib = 0, kept_gib(kind)
        if low >= 0:
            start, start_gib = sizes[low], self.look(kind, sizes[low], rank).reserved_gib
        slope = max(top_gib - start_gib, 1e-9) / (top - start)
        meets = start + (self.room.usable_gib - start_gib) / slope
        inside = [index for index in range(low + 1, high) if sizes[index] <= meets]
        return inside[-1] if inside else low + 1

    def filled(self, found: Tried, kind: TrainConfig, lighter: TrainConfig) -> Tried:
        """`found`, of `kind`, with the checkpointing of `lighter` in as many blocks as fit."""
        size, rank = found.config.batch_size, found.rank
        beyond, least = 0, found.config.model.n_layers  # blocks of `kind`: too few, enough
        over_gib = self.look(lighter, size, rank).reserved_gib
        fast = found
        for _ in range(FILLING):
            if least - beyond < 2 or over_gib <= self.room.usable_gib:
                break
            each_gib = max(1e-9, (over_gib - fast.reserved_gib) / (least - beyond))
            meets = beyond + math.ceil((over_gib - self.room.usable_gib) / each_gib)
            blocks = min(max(meets, beyond + 1), least - 1)
            tried = self.look(in_some_blocks(kind, blocks, lighter), size, rank)
            if self.fits(tried):
                least, fast = blocks, tried
            else:
                beyond, over_gib = blocks, tried.reserved_gib
        return min(found, fast, key=lambda tried: tried.step_s)

    def possible(self, chain: Chain) -> bool:
        """Whether the smallest kind of `chain` fits in any micro-batch."""
        if chain.kept_gib > self.room.usable_gib:
            return False
        ends = dict.fromkeys((self.sizes[0], self.sizes[-1]))
        return any(self.fits_in(chain.kinds[-1], batch, chain.rank) for batch in ends)
