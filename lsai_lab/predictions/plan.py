"""What should I run? The fastest setting whose predicted step fits, found with few predictions.

A kind of step (`plan_space.py`) is fastest in one micro-batch, and within a chain of kinds each is
slower than the one before. So the time of the whole step as one micro-batch bounds a kind from
below, and so does the bound of the kind before. The kind with the lowest bound is looked at first:
its bound is predicted, then the largest micro-batch that fits. Once enough kinds are known that are
faster than every bound left, the others are never predicted.

Times are not true to `TIE`. Settings within it count as equally fast, and of these the one is
chosen whose numerics are nearest to fp32.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lsai_core.base.errors import UserError
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.memory import predict
from lsai_core.prediction.roofline import estimate
from lsai_core.profiling.gpus import MARGIN, OUTSIDE_GIB, Gpu, find_gpu, usable_gib
from lsai_lab.predictions.plan_space import (
    OFFLOADS,
    Chain,
    Numerics,
    Settings,
    batch_words,
    batches,
    chains,
    kept_gib,
    kind_words,
    with_batch,
)
from lsai_lab.predictions.will_fit import expected_kernel

TIE = 0.02  # a share of a step's time: nearer than estimates of different settings are true
KNOWN = 4  # settings that are told: the fastest, and the three next best
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
        return min(usable, (1 - self.margin) * self.budget_gib)

    def budget_for(self, reserved_gib: float) -> float:
        """The smallest budget with which so much would be usable."""
        return reserved_gib / (1 - self.margin)

    def memory_for(self, reserved_gib: float) -> float:
        """The smallest GPU's memory with which so much would be usable."""
        return (reserved_gib + OUTSIDE_GIB) / (1 - self.margin)


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
            reserved_gib=found.reserved,
            host_gib=found.host,
            step_s=time.step_s,
            attention=kernel,
            rates=rates,
        )

    def fits(self, tried: Tried) -> bool:
        """Whether its predicted reserved memory is usable."""
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

    def possible(self, chain: Chain) -> bool:
        """Whether the smallest kind of `chain` fits in any micro-batch."""
        if chain.kept_gib > self.room.usable_gib:
            return False
        ends = dict.fromkeys((self.sizes[0], self.sizes[-1]))
        return any(self.fits_in(chain.kinds[-1], batch, chain.rank) for batch in ends)


@dataclass(order=True)
class _Open:
    """A kind in the queue: no faster than `bound_s`. `at`: its place in its chain; `state`: what is
    known of it."""

    bound_s: float
    number: int
    chain: Chain = field(compare=False)
    at: int = field(compare=False)
    state: str = field(compare=False)
    found: Tried | None = field(compare=False, default=None)

    @property
    def kinds(self) -> int:
        """How many kinds are still to be predicted for it: with a new one all behind it."""
        return len(self.chain.kinds) - self.at if self.state == "new" else self.state == "bound"


def best(search: Search, of: Sequence[Chain]) -> list[Tried]:
    """The fastest kinds that fit, each in its best micro-batch, the fastest first: `KNOWN` of them
    (or all there are), and those that are as fast as the first and nearer to fp32."""
    numbers = itertools.count()
    search.left = sum(len(chain.kinds) for chain in of if chain.loss == of[0].loss)
    # Small states first: they say something of larger ones (`surely_beyond`).
    small_first = sorted(of, key=lambda chain: -chain.rank)
    fast = _with_fast_losses(search, small_first)
    queue = [_Open(0.0, next(numbers), c, 0, "new") for c in fast if search.possible(c)]
    known: list[Tried] = []
    while queue:
        one = heapq.heappop(queue)
        if not _may_be_told(one, known):
            continue
        if one.state == "solved" and one.found is not None:
            known.append(one.found)
            continue
        search.left = sum(each.kinds for each in queue if _may_be_told(each, known))
        for more in _looked_at(search, one, numbers):
            heapq.heappush(queue, more)
    return known


def _may_be_told(one: _Open, known: list[Tried]) -> bool:
    """Whether few are known, or `one` may be as fast as the fastest, and nearer to fp32 than all
    known that are."""
    if len(known) < KNOWN:
        return True
    as_fast_s = known[0].step_s * (1 + TIE)
    nearest = min(tried.rank for tried in known if tried.step_s <= as_fast_s)
    return one.bound_s <= as_fast_s and one.chain.rank < nearest


def _with_fast_losses(search: Search, of: list[Chain]) -> list[Chain]:
    """Without the losses that are not faster than the first one, which takes least memory."""
    alike = [chain for chain in of if chain.rank == of[0].rank]
    if len(alike) < 2 or alike[0].kept_gib > search.room.usable_gib:
        return of
    whole_s = {
        chain.loss: search.look(chain.kinds[0], search.sizes[-1], chain.rank).step_s
        for chain in alike
    }
    least = alike[0].loss
    return [c for c in of if c.loss == least or whole_s.get(c.loss, 0.0) < whole_s[least]]


def _looked_at(search: Search, one: _Open, numbers: Iterator[int]) -> Iterator[_Open]:
    """What is known once one more thing about `one` is predicted."""
    chain, kind, whole = one.chain, one.chain.kinds[one.at], search.sizes[-1]
    if one.state == "new":
        beyond = search.surely_beyond(kind, whole)
        bound_s = (beyond or search.look(kind, whole, chain.rank)).step_s
        yield _Open(bound_s, next(numbers), chain, one.at, "bound")
        if one.at + 1 < len(chain.kinds):
            yield _Open(bound_s, next(numbers), chain, one.at + 1, "new")
    elif (found := search.fastest(kind, chain.rank)) is not None:
        yield _Open(found.step_s, next(numbers), chain, one.at, "solved", found)


@dataclass(frozen=True)
class Plan:
    """What was found for `asked` among `chains`, those `on_gpu` or, where nothing of these fits,
    those that use host memory: `known`, the fastest first; none: nothing fits."""

    asked: TrainConfig
    search: Search
    on_gpu: list[Chain]
    chains: list[Chain]
    known: list[Tried]
    allowed: Numerics

    @property
    def offloaded(self) -> bool:
        """Whether nothing fits without host memory."""
        return self.chains is not self.on_gpu

    @property
    def room(self) -> Room:
        return self.search.room

    @property
    def chosen(self) -> Tried | None:
        """Of those as fast as the fastest, the one nearest to fp32."""
        if not self.known:
            return None
        as_fast = [t for t in self.known if t.step_s <= self.known[0].step_s * (1 + TIE)]
        return min(as_fast, key=lambda tried: (tried.rank, tried.step_s))

    @property
    def others(self) -> list[Tried]:
        """The three next best."""
        return [tried for tried in self.known if tried is not self.chosen][: KNOWN - 1]

    @property
    def nearest(self) -> Tried:
        """Of all that was predicted, what takes least."""
        return min(self.search.tried.values(), key=lambda tried: tried.reserved_gib)


def make_plan(
    asked: TrainConfig,
    tokens: int,
    room: Room,
    *,
    allowed: Numerics = "harmless",
    fixed: Settings | None = None,
    packages: str | None = None,
    on_next: OnNext = lambda words, left: None,
) -> Plan:
    """The fastest setting of `asked` within `room`, with `tokens` in an optimizer step.

    `fixed`: settings (nested) that are no choice. `allowed`: how far numerics may go. `packages`:
    of attention kernels, as in `will_fit`. `on_next` is told what `Search` tells it.
    UserError for tokens that cannot be cut into sequences, and for a run that nothing can predict.
    """
    fixed = fixed or {}
    sizes, sequences = batches(asked, tokens, fixed)
    search = Search(room, sizes, sequences, packages, on_next)
    here = chains(asked, fixed, allowed, fp8=room.gpu.fp8)
    if not here:
        raise UserError("no setting is possible with what is set; leave some of it to the plan")
    if known := best(search, here):
        return Plan(asked, search, here, here, known, allowed)
    away = [
        chain
        for chain in chains(asked, fixed, allowed, OFFLOADS, room.gpu.fp8)
        if chain.loss == here[0].loss
    ]
    known = best(search, away)
    for chain in [] if known else [chain for chain in here if chain.loss == here[0].loss]:
        search.look(chain.kinds[-1], sizes[0], chain.rank)  # may be nearest
    return Plan(asked, search, here, away, known, allowed)
