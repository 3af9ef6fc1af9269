"""Who computes which tile when: the schedules of sequence-parallel attention as data.

A plan is a list of steps; in each, a rank (the worker) has at most a few tasks: the queries of one
rank's shard against the keys of another's. What must be sent follows from it: queries and keys to
the worker, results back to their owners. Every rank makes the whole plan, so that nobody has to
ask, and the work per rank is a number before anything runs.

ring      step s: rank r's queries against the keys of rank r - s (Liu et al. 2023,
          arXiv:2310.01889). With contiguous shards and a causal mask the first ranks soon have
          nothing to do.
zigzag    the same steps over the zigzag layout (Zhu, github.com/zhuzilin/ring-flash-attention):
          half a shard's work in each.
lightseq  contiguous shards; ranks that would be idle compute for those that have too much (Li et
          al. 2023, DistFlashAttn, arXiv:2310.03294). In step s the ranks r < s take the queries of
          rank r + R - s against their own keys. For an even number of ranks the paper leaves half
          of them idle in the last step; here both ends of a pair take half of it.

Blocks do not travel around the ring: each is sent by its owner straight to the worker of the step,
and gradients straight back. No rank waits for a block to be passed on, only the needed part is
sent, and gradients travel once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lsai_core.context.layout import Layout, Tile

Schedule = Literal["ring", "lightseq"]


@dataclass(frozen=True)
class Task:
    """`worker` computes the tiles of `q_owner`'s queries against `k_owner`'s keys (all three ring
    ranks)."""

    worker: int
    q_owner: int
    k_owner: int
    tiles: tuple[Tile, ...]

    @property
    def q_range(self) -> tuple[int, int]:
        """The queries that the tiles touch, as a range of the owner's shard."""
        return min(t.q0 for t in self.tiles), max(t.q1 for t in self.tiles)

    @property
    def k_range(self) -> tuple[int, int]:
        """The keys that the tiles touch, as a range of the owner's shard."""
        return min(t.k0 for t in self.tiles), max(t.k1 for t in self.tiles)


@dataclass(frozen=True)
class Plan:
    """Steps of tasks for a ring of `size` ranks; equal on all ranks."""

    size: int
    steps: tuple[tuple[Task, ...], ...]

    def pairs(self) -> list[int]:
        """(query, key) pairs that each rank computes."""
        counts = [0] * self.size
        for step in self.steps:
            for task in step:
                counts[task.worker] += sum(tile.pairs for tile in task.tiles)
        return counts

    def imbalance(self) -> float:
        """Largest over smallest work of a rank; inf where a rank has none."""
        counts = self.pairs()
        return max(counts) / min(counts) if min(counts) else float("inf")


def make_plan(layout: Layout, window: int | None, schedule: Schedule) -> Plan:
    """The plan of a schedule over a layout, without steps and tasks that a window leaves empty."""
    size = len(layout.chunks)
    places = _lightseq(size) if schedule == "lightseq" else _ring(size)
    steps: dict[int, list[Task]] = {}
    for step, worker, q_owner, k_owner in places:
        tiles = layout.tiles(q_owner, k_owner, window)
        if schedule == "lightseq" and 2 * step == size and tiles and tiles[0].left is None:
            _split_between_both_ends(steps.setdefault(step, []), q_owner, k_owner, tiles[0])
        elif tiles:
            steps.setdefault(step, []).append(Task(worker, q_owner, k_owner, tiles))
    return Plan(size, tuple(tuple(steps[step]) for step in sorted(steps)))


def _ring(size: int) -> Iterator[tuple[int, int, int, int]]:
    for step in range(size):
        for rank in range(size):
            yield step, rank, rank, (rank - step) % size


def _lightseq(size: int) -> Iterator[tuple[int, int, int, int]]:
    for step in range(size // 2 + 1):
        for rank in range(size):
            if rank >= step:
                yield step, rank, rank, rank - step
            elif 2 * step < size:
                yield step, rank, rank + size - step, rank


def _split_between_both_ends(tasks: list[Task], q_owner: int, k_owner: int, tile: Tile) -> None:
    middle = (tile.q0 + tile.q1 + 1) // 2
    tasks.append(Task(q_owner, q_owner, k_owner, (Tile(tile.q0, middle, tile.k0, tile.k1),)))
    if middle < tile.q1:
        tasks.append(Task(k_owner, q_owner, k_owner, (Tile(middle, tile.q1, tile.k0, tile.k1),)))
