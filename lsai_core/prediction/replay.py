"""The first steps of a run, replayed through the allocator's model: what they reserve, and whether
they run out.

A simulated step gives births and deaths in their order. A run is made of them: the weights, one by
one; their values, each drawn in fp32 as a whole tensor; a first step, whose update makes the
optimizer's states, whose first products take cuBLAS's workspaces, one for each of two threads, and
which measures what fused fp8 casts; then steps that are alike.

Two things no simulation knows: where the driver puts segments, and what compilers ask for when they
measure kernels in the first step. A *shaken* replay draws both.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lsai_core.prediction.allocator import GAP, SMALL, WORKSPACE, Allocator, Block, OutOfMemory
from lsai_core.prediction.simulate import Simulated
from lsai_core.prediction.tracker import FIRST

STEPS = 3
MEASURED = 0.02  # of a shaken first step's requests: a second one while the first is there


@dataclass(frozen=True)
class Replayed:
    """Bytes of one process: peaks of what was allocated after the first step, and reserved; whether
    it got through.

    `flushes`: how often cached memory had to go back to the driver; `flushes_late`: in the last
    step, so in every one.
    """

    allocated: int
    reserved: int
    fits: bool
    flushes: int
    flushes_late: int


def replay(
    step: Simulated,
    drawn: Sequence[float] = (),
    limit: int | None = None,
    expandable: bool = False,
    collect_above: float = 0.0,
    first: Simulated | None = None,
    shaken: int | None = None,
) -> Replayed:
    """`drawn`: bytes that a weight's first values take, per byte of it: of the whole, then of the
    slice cut from it. `limit`: bytes that may be reserved. `first`: the first step, if it is
    another one. `shaken`: a seed."""
    dice = None if shaken is None else random.Random(shaken)
    allocator, flushes, fits = Allocator(limit, expandable, collect_above, dice), [0], True
    try:
        for _ in _steps(allocator, [first or step, *[step] * (STEPS - 1)], drawn, dice):
            flushes.append(allocator.retries)
    except OutOfMemory:
        fits = False
    late = allocator.retries - flushes[-2] if fits else 0
    return Replayed(
        allocator.peak_allocated, allocator.peak_reserved, fits, allocator.retries, late
    )


def _steps(
    allocator: Allocator,
    steps: Sequence[Simulated],
    drawn: Sequence[float],
    dice: random.Random | None,
) -> Iterator[None]:
    """Runs the steps, and stops after each."""
    marks, lasting = steps[0].marks, dict[int, Block]()
    dead = {-event for event in steps[0].events[: marks["forward"]] if event < 0}  # on the host
    before = [event for event in steps[0].events[: marks["forward"]] if event > 0]
    numbered = list(enumerate(before, 1))
    made = [0, *(marks[f"{name} made"] for name in ("gradients", "optimizer", "activations"))]
    weights, buckets, states = (numbered[a:b] for a, b in itertools.pairwise(made))

    def make(which: list[tuple[int, int]]) -> None:
        for number, event in which:
            if number not in dead:
                lasting[number] = allocator.malloc(event)

    make(weights)
    make(buckets)
    for _, event in weights:
        for block in reversed([allocator.malloc(int(event * share)) for share in drawn]):
            allocator.free(block)
    allocator.gap = GAP
    for index, step in enumerate(steps):
        if index == 1:
            allocator.peak_allocated = allocator.allocated
        blocks: dict[int, Block] = {}
        born, marks = len(before), step.marks
        for at, event in enumerate(step.events[marks["forward"] :], marks["forward"]):
            if index == 0 and at in (marks["forward product"], marks["backward product"]):
                allocator.gap = 0
                allocator.malloc(WORKSPACE)
            if index == 0 and at == marks["optimizer"]:
                make(states)
            if event > 0:
                born += 1
                if index == 0 or event % 512 != FIRST:
                    size, stream = event // 512 * 512, event % 512 % FIRST
                    blocks[born] = allocator.malloc(size, stream)
                    if index == 0 and dice and size > SMALL and dice.random() < MEASURED:
                        allocator.free(allocator.malloc(size, stream))
            elif -event in blocks:
                allocator.free(blocks.pop(-event))
            elif -event in lasting:
                allocator.free(lasting.pop(-event))
        for block in blocks.values():
            allocator.free(block)
        yield
