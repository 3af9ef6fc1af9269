"""What the training loop knows of the other processes of its run.

Data parallelism needs little: who am I, what is the mean over all, is everybody ready to stop.
`World` answers for a run of one process, where each answer is trivial;
`lsai_core.parallel.processes` answers for several. The loop is written once, against this class,
and a single process never touches torch.distributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class World:
    """A run of one process. With `size` processes, `rank` counts from 0, and rank 0 writes the
    records."""

    rank: int = 0
    size: int = 1
    launched: bool = False  # whether this process is one of torch.distributed's, be it the only one

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all processes, element by element (same shape, dtype and device; every
        process must call)."""
        return values

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, element by element (same shape, dtype and device; every
        process must call)."""
        return values

    def gather(self, value: T) -> list[T]:
        """Every process's `value`, by rank (any picklable object; every process must call)."""
        return [value]

    def barrier(self) -> None:
        """Return when every process has called."""

    def agree_to_stop(self, asked: bool) -> bool:
        """Whether all processes are to end after this step; called once per step by each, and all
        get the same answer.

        `asked`: this process was asked to stop. With several processes the answer is about the step
        before, so that nobody waits for it.
        """
        return asked
