"""What is allocated after each operator of a simulated program."""

from dataclasses import dataclass

from lsai_core.profiling.memory import Phase


@dataclass(frozen=True)
class Moment:
    """GiB that are allocated after one operator."""

    phase: Phase
    operator: str
    allocated_gib: float


class Moments(list[Moment]):
    """A list that shows itself in a line."""

    def __repr__(self) -> str:
        return f"{len(self):,} moments, [0] the first: phase, operator, allocated_gib"
