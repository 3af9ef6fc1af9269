"""Find the largest size that fits, with few tries.

Doubling from `start` brackets the answer, bisection narrows it; from a start that is an estimate the first steps are smaller. Where the peak memory of two successful tries and the
capacity are known, the next try is taken where the straight line through them reaches the capacity, because memory is
linear in the batch size; the bracket is kept, so a bad guess costs a try and never a wrong answer. After two guesses in a
row comes a plain step, so readings that mislead cost at most three times the tries of a search without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

_GUESSES_IN_A_ROW = 2


@dataclass(frozen=True)
class Try:
    """One attempt: its size, how it ended (`ok`, `oom`, `failed`, `timeout`), and what was seen; `measured`: what else, by name."""

    size: int
    outcome: str
    peak_gib: float | None = None
    seconds: float = 0.0
    note: str | None = None
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """As it stands in records, `measured` beside the rest."""
        fields = asdict(self)
        return fields | fields.pop("measured")


def search_largest(
    attempt: Callable[[int], Try], *, start: int = 1, limit: int = 1 << 20, resolution: float = 0.0,
    capacity_gib: float | None = None, first_step: float = 2.0,
) -> tuple[int, list[Try]]:  # fmt: skip
    """Largest size in 1..limit whose try is `ok` (0 if none), and every try in order.

    `resolution`: stop when the bracket is narrower than this share of the largest success (0: exact).
    `first_step`: the factor by which the second try lies above or below `start`, if nothing better is known; later ones are
    larger, up to 2.
    Any outcome but `ok` counts as "does not fit".
    """
    tries: list[Try] = []
    fits, fails = 0, limit + 1
    size, guesses = min(start, limit), 0
    while True:
        tries.append(attempt(size))
        good = tries[-1].outcome == "ok"
        fits, fails = (max(fits, size), fails) if good else (fits, min(fails, size))
        if fails - fits <= max(1, int(resolution * fits)):
            return fits, tries
        guess = _predict(tries, capacity_gib, fails - fits)
        if guess is not None and fits < guess < fails and guesses < _GUESSES_IN_A_ROW:
            size, guesses = guess, guesses + 1
        else:
            size, guesses = _plain_step(fits, fails, limit, min(2.0, first_step ** min(64, 2 ** (len(tries) - 1)))), 0


def _plain_step(fits: int, fails: int, limit: int, factor: float) -> int:
    if fails == limit + 1:  # nothing has failed yet
        return min(max(fits + 1, int(factor * fits)), limit)
    if fits == 0:
        return max(1, min(fails - 1, int(fails / factor)))
    return (fits + fails) // 2


def _predict(tries: list[Try], capacity_gib: float | None, gap: int) -> int | None:
    """Where the line through the two largest successes meets the capacity; None when it cannot be told or was tried."""
    seen = sorted({(t.size, t.peak_gib) for t in tries if t.outcome == "ok" and t.peak_gib})[-2:]
    if capacity_gib is None or len(seen) < 2:
        return None
    (size_a, peak_a), (size_b, peak_b) = seen
    slope = ((peak_b or 0) - (peak_a or 0)) / (size_b - size_a)
    if slope <= 0:
        return None
    size = int(size_b + (capacity_gib - (peak_b or 0)) / slope)
    # A prediction that was tried already tells its error: look a few percent on, towards the answer.
    tried = {t.size: t.outcome for t in tries}
    step = max(1, min(size // 50, gap // 2))
    while size in tried and step:
        size += step if tried[size] == "ok" else -step
    return size
