"""What should I run? The fastest setting whose predicted step fits, found with few predictions.

A kind of step (`plan_space.py`) is fastest in one micro-batch, and within a chain of kinds each is
slower than the one before. So the time of the whole step as one micro-batch bounds a kind from
below, and so does the bound of the kind before. The kind with the lowest bound is looked at first:
its bound is predicted, then the largest micro-batch that fits. Once enough kinds are known that are
faster than every bound left, the others are never predicted.

What is found then fills its memory: as many blocks as fit do what the kind before does, which is
faster and takes more.

Times are not true to `TIE`. Settings within it count as equally fast, and of these the one is
chosen whose numerics are nearest to fp32.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lsai_core.base.errors import UserError
from lsai_core.config.train import TrainConfig
from lsai_lab.predictions.plan_predicted import OnNext, Room, Search, Tried
from lsai_lab.predictions.plan_space import (
    CHECKPOINTS,
    OFFLOADS,
    Chain,
    Numerics,
    Settings,
    batches,
    chains,
    loss_chunk,
)

TIE = 0.02  # a share of a step's time: nearer than estimates of different settings are true
KNOWN = 4  # settings that are told: the fastest, and the three next best


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
        if one.state == "filled" and one.found is not None:
            known.append(one.found)
            continue
        search.left = sum(each.kinds for each in queue if _may_be_told(each, known))
        fastest_s = known[0].step_s if known else math.inf
        for more in _looked_at(search, one, numbers, fastest_s):
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


def _looked_at(
    search: Search, one: _Open, numbers: Iterator[int], fastest_s: float
) -> Iterator[_Open]:
    """What is known once one more thing about `one` is predicted."""
    chain, kind, whole = one.chain, one.chain.kinds[one.at], search.sizes[-1]
    if one.state == "new":
        beyond = search.surely_beyond(kind, whole)
        bound_s = (beyond or search.look(kind, whole, chain.rank)).step_s
        yield _Open(bound_s, next(numbers), chain, one.at, "bound")
        if one.at + 1 < len(chain.kinds):
            yield _Open(bound_s, next(numbers), chain, one.at + 1, "new")
    elif one.state == "bound":
        if (found := search.fastest(kind, chain.rank)) is not None:
            yield _Open(found.step_s, next(numbers), chain, one.at, "solved", found)
    elif one.found is not None:
        found = _filled(search, one.found, chain, one.at, fastest_s)
        yield _Open(found.step_s, next(numbers), chain, one.at, "filled", found)


def _filled(search: Search, found: Tried, chain: Chain, at: int, fastest_s: float) -> Tried:
    """`found` as fast as its memory allows between its kind and the one before, if that may be as
    fast as `fastest_s`."""
    kind, lighter = chain.kinds[at], chain.kinds[max(0, at - 1)]
    on_gpu = kind.saved_inputs == "gpu" and not kind.parallel.cpu_offload
    if at == 0 or kind.checkpoint_blocks is not None or not on_gpu:
        return found
    if search.look(lighter, found.config.batch_size, found.rank).step_s > fastest_s * (1 + TIE):
        return found
    return search.filled(found, kind, lighter)


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
    chunk = asked.loss_chunk or loss_chunk(asked, room.usable_gib)
    fp8 = room.gpu.runs_our_fp8
    here = chains(asked, fixed, allowed, CHECKPOINTS, fp8, chunk)
    if not here:
        raise UserError("no setting is possible with what is set; leave some of it to the plan")
    if known := best(search, here):
        return Plan(asked, search, here, here, known, allowed)
    away = [
        chain
        for chain in chains(asked, fixed, allowed, OFFLOADS, fp8, chunk)
        if chain.loss == here[0].loss
    ]
    known = best(search, away)
    for chain in [] if known else [chain for chain in here if chain.loss == here[0].loss]:
        search.look(chain.kinds[-1], sizes[0], chain.rank)  # may be nearest
    return Plan(asked, search, here, away, known, allowed)
