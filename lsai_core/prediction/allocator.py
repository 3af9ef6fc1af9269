"""PyTorch's CUDA caching allocator as arithmetic: what requests and frees make it reserve, and
whether it runs out.

It takes memory from the driver in segments and hands out blocks of them, in multiples of 512 bytes.
Requests up to 1 MiB come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones
get a segment of their own. A request takes the smallest free block of its stream and pool that is
large enough, and splits it if what remains is worth it. A freed block joins its free neighbours.
Segments go back to the driver only when memory runs out. So *reserved* exceeds what is allocated by
the gaps between blocks. Of equal blocks the lower address is taken. Where segments lie is the
driver's choice: here each below those before it, as in recorded traces, with whose addresses the
model reserves exactly what these runs did. There the driver also leaves a gap above the first
segment, which others fill from its end: here from the first forward pass to its first product
(`gap`), in multiples of 32 MiB, the driver's reservations.

With expandable segments each pool and stream has one range of addresses, which grows by pages (2 or
20 MiB). The rules are those of c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.11 to 2.13, with
unlimited `max_split_size`.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

ROUND = 512
SMALL, SMALL_SEGMENT = 2**20, 2 * 2**20
LARGE, LARGE_SEGMENT, ROUND_LARGE = 10 * 2**20, 20 * 2**20, 2 * 2**20
RESERVATION, GAP = 32 * 2**20, 288 * 2**20
_ADDRESSES = 2**20 * LARGE_SEGMENT  # of one range: more than any GPU has
WORKSPACE = 32 * 2**20  # cuBLAS's on a Hopper GPU

Verdict = Literal["fits", "tight", "too large"]


class OutOfMemory(Exception):
    """A request that the GPU's memory cannot serve, even after all cached segments went back."""


@dataclass(eq=False, slots=True)
class Block:
    """`size` bytes at `address`; neighbours in its segment; `mapped`: backed by memory."""

    address: int
    size: int
    pool: _Pool
    before: Block | None = None
    after: Block | None = None
    free: bool = True
    mapped: bool = True
    born: int = 0  # the pool's count of requests when it became free


class _Pool:
    """The free blocks of one stream, small or large, by size and address."""

    def __init__(self, small: bool) -> None:
        self.small, self.requests = small, 0
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        block.free, block.born = True, self.requests
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]


class Allocator:
    """`limit`: bytes that may be reserved. `allocated`, `reserved`, their peaks: bytes; `retries`:
    flushes. `dice`: they say where segments lie.

    Memory that a stream waits for is freed late: the caller's to say, so allocated and active are
    the same here.
    """

    def __init__(
        self,
        limit: int | None = None,
        expandable: bool = False,
        collect_above: float = 0.0,
        dice: random.Random | None = None,
    ) -> None:
        self.limit, self.expandable, self.collect_above = limit, expandable, collect_above
        self.allocated = self.peak_allocated = self.reserved = self.peak_reserved = self.retries = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._ranges = self.gap = 0
        self._dice = dice

    def malloc(self, size: int, stream: int = 0) -> Block:
        """A block of at least `size` bytes. Raises OutOfMemory."""
        size = max(ROUND, -(-size // ROUND) * ROUND)
        small = size <= SMALL
        pool = self._pools.setdefault((stream, small), _Pool(small))
        pool.requests += 1
        block = self._cached(pool, size)
        if block is None:
            self._collect()
            block = self._new(pool, size)
        if block is None:
            self.retries += 1
            self.release()
            block = self._new(pool, size)
        if block is None:
            raise OutOfMemory(
                f"{size} bytes more than {self.reserved} reserved, {self.allocated} of them in use"
            )
        remainder = block.size - size
        if remainder >= ROUND if small or self.expandable else remainder > SMALL:
            pool.add(_cut(block, size))
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give `block` back to the pool, joined with its free neighbours."""
        self.allocated -= block.size
        block.pool.add(_joined(block))

    def release(self) -> None:
        """Give all cached memory that nothing uses back to the driver
        (`torch.cuda.empty_cache`)."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.before is block.after is None:
                    self._give_back(block)

    def _cached(self, pool: _Pool, size: int) -> Block | None:
        at = bisect_left(pool.free, (size,))
        if at == len(pool.free):
            return None
        if self.expandable:  # a block that can grow counts with what it can grow to
            while at + 1 < len(pool.free) and _can_be(pool.free[at + 1][2]) < _can_be(
                pool.free[at][2]
            ):
                at += 1
        return pool.free.pop(at)[2]

    def _new(self, pool: _Pool, size: int) -> Block | None:
        large = LARGE_SEGMENT if size < LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        wanted = SMALL_SEGMENT if pool.small else large
        if self.limit is not None and self.reserved + wanted > self.limit:
            return None
        if self.expandable:
            return self._expanded(pool, size)
        self._take(wanted)
        return Block(self._address(wanted), wanted, pool)

    def _address(self, size: int) -> int:
        """The address of the next segment, of `size` bytes."""
        if self._dice is not None:
            self._ranges += 1
            return (self._dice.randrange(2**20) * 2**20 + self._ranges) * _ADDRESSES
        room = -(-size // RESERVATION) * RESERVATION
        if room <= self.gap:
            self.gap -= room
            return self.gap
        self._ranges += 1
        return -_ADDRESSES * self._ranges

    def _expanded(self, pool: _Pool, size: int) -> Block | None:
        """The first place of the pool's range with enough free and unmapped memory; unmapped parts
        get pages."""
        for candidate in sorted(pool.unmapped, key=lambda block: block.address):
            start = candidate.before if candidate.before and candidate.before.free else candidate
            if _room(start) >= size:
                break
        else:
            self._ranges += 1
            start = Block(_ADDRESSES * self._ranges, _ADDRESSES, pool, mapped=False)
            pool.unmapped.append(start)
        block = start if start.mapped else self._mapped(start, size)
        while block is not None and block.size < size:
            assert block.after is not None
            block = self._mapped(block.after, size - block.size)
        if block is not None:
            pool.remove(block)
        return block

    def _mapped(self, block: Block, size: int) -> Block | None:
        """`block`, whose first `size` bytes get whole pages, joined with its free neighbours, in
        the pool."""
        page = SMALL_SEGMENT if block.pool.small else LARGE_SEGMENT
        size = min(block.size, -(-size // page) * page)
        if self.limit is not None and self.reserved + size > self.limit:
            return None
        block.pool.unmapped.remove(block)
        self._take(size)
        if size < block.size:
            rest = _cut(block, size)
            rest.mapped = False
            block.pool.unmapped.append(rest)
        block.mapped = True
        block = _joined(block)
        block.pool.add(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Give the whole pages inside of a free block back."""
        pool = block.pool
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        first, end = -(-block.address // page) * page, (block.address + block.size) // page * page
        if first >= end:
            return
        pool.remove(block)
        if first > block.address:
            inner = _cut(block, first - block.address)
            pool.add(block)
            block = inner
        if end < block.address + block.size:
            pool.add(_cut(block, end - first))
        self.reserved -= block.size
        block.mapped = False
        pool.unmapped.append(_joined(block))

    def _collect(self) -> None:
        """`garbage_collection_threshold`: above that share of the limit, free segments older than
        the mean go back."""
        if not self.collect_above or self.limit is None:
            return
        target = self.reserved - int(self.collect_above * self.limit)
        whole = [
            block
            for pool in self._pools.values()
            if not pool.small
            for _, _, block in pool.free
            if block.before is block.after is None
        ]
        while target > 0 and whole:
            mean = sum(block.pool.requests - block.born for block in whole) / len(whole)
            for block in [block for block in whole if block.pool.requests - block.born >= mean]:
                target -= block.size
                self._give_back(block)
                whole.remove(block)

    def _give_back(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved -= block.size

    def _take(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)


def _cut(block: Block, size: int) -> Block:
    """Shorten `block` to `size` and return the rest."""
    rest = Block(
        block.address + size, block.size - size, block.pool, block, block.after, mapped=block.mapped
    )
    if block.after is not None:
        block.after.before = rest
    block.after, block.size = rest, size
    return rest


def _joined(block: Block) -> Block:
    """`block` with the neighbours that are free and mapped as it is, which leave the pool's
    lists."""
    for neighbour in (block.before, block.after):
        if neighbour is None or not neighbour.free or neighbour.mapped != block.mapped:
            continue
        if neighbour.mapped:
            block.pool.remove(neighbour)
        else:
            block.pool.unmapped.remove(neighbour)
        if neighbour is block.before:
            block.address, block.before = neighbour.address, neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.size += neighbour.size
    return block


def _can_be(block: Block) -> int:
    return block.size + (
        block.after.size if block.after is not None and not block.after.mapped else 0
    )


def _room(block: Block | None) -> int:
    size = 0
    while block is not None and block.free:
        size, block = size + block.size, block.after
    return size
