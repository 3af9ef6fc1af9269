"""What is allocated after each operator of a simulated program, and why, in the words of
`lsai_core.profiling.watch`."""

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lsai_core.profiling.memory import Phase


@dataclass(frozen=True)
class Moment:
    """Bytes that are allocated after one operator, by cause."""

    phase: Phase
    operator: str
    bytes_of: Mapping[str, int]

    @property
    def allocated_gib(self) -> float:
        """All of them, in GiB."""
        return sum(self.bytes_of.values()) / 2**30


class Moments(list[Moment]):
    """A list that shows itself in a line."""

    def __repr__(self) -> str:
        return f"{len(self):,} moments, [0] the first: phase, operator, bytes_of, allocated_gib"


@functools.cache
def cause_of(purpose: str) -> str:
    """Results of operators wait for the backward pass (`activations`), or are in use there
    (`backward`); all else is its own cause."""
    phase, of_operator, _ = purpose.partition(": ")
    return {"forward": "activations"}.get(phase, phase) if of_operator else purpose


def by_cause(bytes_of: Mapping[str, int]) -> Counter[str]:
    """Bytes by purpose, summed up by cause."""
    found: Counter[str] = Counter()
    for purpose, size in bytes_of.items():
        if size:
            found[cause_of(purpose)] += size
    return found
