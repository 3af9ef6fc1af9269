"""What is allocated after each operator of a simulated program, and why, in the words of
`lsai_core.profiling.watch`."""

import functools
from collections import Counter
from collections.abc import Mapping

from lsai_core.profiling.memory import Moment, cause_of_results


class Moments(list[Moment]):
    """A list that shows itself in a line."""

    def __repr__(self) -> str:
        return f"{len(self):,} moments, [0] the first: phase, operator, bytes_of, allocated_gib"


@functools.cache
def _cause_of(purpose: str) -> str:
    """Of an operator's results as their phase says; all else is its own cause."""
    phase, of_operator, _ = purpose.partition(": ")
    return cause_of_results(phase) if of_operator else purpose


def by_cause(bytes_of: Mapping[str, int]) -> Counter[str]:
    """Bytes by purpose, summed up by cause."""
    found: Counter[str] = Counter()
    for purpose, size in bytes_of.items():
        if size:
            found[_cause_of(purpose)] += size
    return found
