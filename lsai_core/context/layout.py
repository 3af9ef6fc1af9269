"""Which positions of a sequence each rank holds, and which pairs of two ranks' positions attention
has to compute.

A sequence of S positions is cut into equal chunks, and each rank of the ring holds one (contiguous
shards) or two (zigzag) of them. `pieces` > 1 cuts each ring shard once more, into the slices of the
ranks that exchange heads (Ulysses) before the ring sees the shard whole.

Between two shards the causal mask, with or without a window, leaves a few rectangles of pairs, the
tiles. Inside a tile only a band may be missing, which kernels know how to skip: key j of query i is
allowed for i - left <= j <= i + right.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lsai_core.base.errors import UserError


@dataclass(frozen=True)
class Tile:
    """Queries [q0, q1) against keys [k0, k1) of two shards; a bound is None where it excludes
    nothing.

    With a bound the tile is square and every query has at least one key: `right` is 0 (causal) or
    None, `left` >= 0.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    left: int | None = None
    right: int | None = None

    @property
    def pairs(self) -> int:
        """Allowed (query, key) pairs, counted exactly: what the tile costs."""
        side = self.k1 - self.k0
        outside = 0
        for bound in (self.left, self.right):
            if bound is not None:
                beyond = max(0, side - 1 - bound)  # a triangle of this side is cut off
                outside += beyond * (beyond + 1) // 2
        return (self.q1 - self.q0) * side - outside


@dataclass(frozen=True)
class Layout:
    """Chunks of a sequence by ring rank: `chunks[r]` in ascending order, each `length // n_chunks`
    positions long."""

    length: int
    chunks: tuple[tuple[int, ...], ...]
    pieces: int = 1

    def __post_init__(self) -> None:
        if self.length % (self.n_chunks * self.pieces):
            unit = self.n_chunks * self.pieces
            below = self.length - self.length % unit
            near = f"{below} or {below + unit}" if below else str(unit)
            raise UserError(
                f"a sequence of {self.length} cannot be cut into {unit} equal parts over "
                f"{self.n_ranks} ranks; use {near}"
            )

    @property
    def n_chunks(self) -> int:
        """How many chunks the whole sequence has."""
        return sum(len(own) for own in self.chunks)

    @property
    def chunk(self) -> int:
        """How many positions one chunk has."""
        return self.length // self.n_chunks

    @property
    def n_ranks(self) -> int:
        """Ranks that hold a slice: ring ranks times pieces."""
        return len(self.chunks) * self.pieces

    def ring_positions(self, ring_rank: int) -> Tensor:
        """int64 (S / ring ranks,): absolute positions of a ring shard, ascending."""
        c = self.chunk
        return torch.cat([torch.arange(i * c, (i + 1) * c) for i in self.chunks[ring_rank]])

    def positions(self, rank: int) -> Tensor:
        """int64 (S / ranks,): absolute positions of a rank's slice. Rank = ring rank x pieces +
        piece."""
        return self.ring_positions(rank // self.pieces).chunk(self.pieces)[rank % self.pieces]

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """`rank`'s slice of a whole sequence along `dim`; UserError if `x` is not `length` long."""
        if x.shape[dim] != self.length:
            raise UserError(
                f"the sequence has {x.shape[dim]} positions, the layout was made for {self.length}"
            )
        return x.index_select(dim, self.positions(rank).to(x.device))

    def unshard(self, parts: list[Tensor], dim: int = 1) -> Tensor:
        """The whole sequence from the slices of all ranks, in the order of ranks."""
        order = torch.cat([self.positions(rank) for rank in range(self.n_ranks)]).argsort()
        return torch.cat(parts, dim).index_select(dim, order.to(parts[0].device))

    def tiles(self, q_rank: int, k_rank: int, window: int | None) -> tuple[Tile, ...]:
        """What the queries of ring shard `q_rank` need of the keys of `k_rank`: causal, and i -
        window < j.

        Few and large: neighbouring rectangles without a band are one tile.
        """
        c, size = self.chunk, self.length // len(self.chunks)
        if q_rank == k_rank and (window is None or window >= self.length):
            # positions ascend, so one causal mask serves all chunks
            return (Tile(0, size, 0, size, right=0),)
        found = [
            shifted
            for i, a in enumerate(self.chunks[q_rank])
            for j, b in enumerate(self.chunks[k_rank])
            if (shifted := _between(a * c - b * c, c, i * c, j * c, window)) is not None
        ]
        return tuple(_joined(found))


def contiguous(length: int, ranks: int, pieces: int = 1) -> Layout:
    """Rank r holds the r-th part. Under a causal mask the last rank computes most."""
    return Layout(length, tuple((r,) for r in range(ranks)), pieces)


def zigzag(length: int, ranks: int, pieces: int = 1) -> Layout:
    """Of 2 R chunks rank r holds r and 2 R - 1 - r: one cheap and one dear, the same work for every
    rank."""
    return Layout(length, tuple((r, 2 * ranks - 1 - r) for r in range(ranks)), pieces)


def _between(distance: int, c: int, q0: int, k0: int, window: int | None) -> Tile | None:
    """The tile of two chunks of `c` positions, the queries' `distance` positions after the keys';
    None if it is empty."""
    if distance < 0 or (window is not None and distance - (c - 1) >= window):
        return None
    whole = window is None or distance + c - 1 < window
    right = 0 if distance == 0 else None
    if window is None or whole:
        return Tile(q0, q0 + c, k0, k0 + c, None, right)
    left = window - 1 - distance
    if left >= 0:
        return Tile(q0, q0 + c, k0, k0 + c, left, right)
    # Only the first queries reach back into this chunk, and only to its last keys.
    side = c + left
    return Tile(q0, q0 + side, k0 + c - side, k0 + c, 0, None)


def _joined(tiles: list[Tile]) -> list[Tile]:
    joined: list[Tile] = []
    for tile in tiles:
        last = joined[-1] if joined else None
        if last and {last.left, last.right, tile.left, tile.right} == {None}:
            if (last.k0, last.k1) == (tile.k0, tile.k1) and last.q1 == tile.q0:
                joined[-1] = Tile(last.q0, tile.q1, tile.k0, tile.k1)
                continue
            if (last.q0, last.q1) == (tile.q0, tile.q1) and last.k1 == tile.k0:
                joined[-1] = Tile(tile.q0, tile.q1, last.k0, tile.k1)
                continue
        joined.append(tile)
    return joined
