"""What the operators of context parallelism work with, under a key: an operator takes no Python
objects."""

from dataclasses import dataclass

from lsai_core.context.exchange import Exchange
from lsai_core.context.plan import Plan


@dataclass(frozen=True, eq=False)
class Parts:
    """What the operators work with. `ulysses`: the ranks that exchange heads; `ring`: those that
    share the plan."""

    plan: Plan
    ring: Exchange
    ulysses: Exchange
    kernel: str
    window: int | None


PARTS: list[Parts] = []


def register(parts: Parts) -> int:
    """The key under which the operators find `parts`, for the rest of the process."""
    PARTS.append(parts)
    return len(PARTS) - 1
