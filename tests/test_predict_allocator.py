"""The model of the caching allocator: PyTorch's rules, recorded runs, and a GPU's answers to predictions that were committed first."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import CHECKOUT
from verify_predictions import table

from lsai_core.config import TrainConfig
from lsai_core.files import read_jsonl
from lsai_core.profiling.predict import predict
from lsai_core.profiling.predict.allocator import Allocator, Block, OutOfMemory
from lsai_core.profiling.predict.prediction import GIB
from lsai_lab.predicted import predicted_runs
from lsai_lab.runs.records import recorded_runs

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "reserved"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12), (33 * MIB + 1, 34)],
)
def test_segments_have_the_sizes_of_pytorch(size: int, reserved: int) -> None:
    allocator = Allocator()
    block = allocator.malloc(size)
    assert allocator.reserved == reserved * MIB and size <= allocator.allocated <= size + MIB
    allocator.free(block)
    assert allocator.allocated == 0 and allocator.reserved == reserved * MIB == allocator.peak_reserved
    allocator.release()
    assert allocator.reserved == 0


def test_the_smallest_block_that_is_large_enough_is_taken_and_split_and_joined() -> None:
    allocator = Allocator()
    blocks = [allocator.malloc(size * MIB) for size in (100, 40, 60)]
    for block in blocks:
        allocator.free(block)
    part = allocator.malloc(30 * MIB)
    assert part.address == blocks[1].address and allocator.reserved == 200 * MIB
    rest = allocator.malloc(10 * MIB)
    assert rest.address == part.address + 30 * MIB
    allocator.free(part)
    allocator.free(rest)
    assert allocator.malloc(40 * MIB).address == blocks[1].address
    assert allocator.malloc(59 * MIB).size == 60 * MIB, (
        "what remains of a large block is worth a split above 1 MiB only"
    )
    allocator.malloc(90 * MIB, stream=1)
    assert allocator.reserved == 290 * MIB, "another stream has a pool of its own"


def test_cached_memory_goes_back_before_memory_runs_out() -> None:
    allocator = Allocator(limit=100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)
    assert allocator.retries == 1 and allocator.reserved == 80 * MIB
    with pytest.raises(OutOfMemory):
        allocator.malloc(30 * MIB)
    allocator.malloc(20 * MIB)


def test_old_segments_are_collected_above_the_threshold() -> None:
    allocator = Allocator(limit=1000 * MIB, collect_above=0.5)
    for size in (200, 300):
        allocator.free(allocator.malloc(size * MIB))
    kept = allocator.malloc(400 * MIB)
    allocator.free(kept)
    allocator.malloc(500 * MIB)
    assert allocator.retries == 0 and allocator.reserved < 1000 * MIB


def test_expandable_segments_grow_by_pages_and_leave_no_gaps() -> None:
    fixed, growing = Allocator(), Allocator(expandable=True)
    for allocator in (fixed, growing):
        for size in range(50, 100, 3):  # each a little longer than the one before
            allocator.free(allocator.malloc(size * MIB))
    assert growing.peak_reserved == 100 * MIB < fixed.peak_reserved
    assert Allocator(expandable=True).malloc(1).pool.small


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap_and_nothing_is_lost(expandable: bool) -> None:
    dice, allocator, held = random.Random(3), Allocator(expandable=expandable), list[Block]()
    for _ in range(3000):
        if held and dice.random() < 0.5:
            allocator.free(held.pop(dice.randrange(len(held))))
        else:
            held.append(allocator.malloc(int(2 ** dice.uniform(4, 26)), dice.randrange(2)))
        assert sum(block.size for block in held) == allocator.allocated <= allocator.reserved <= allocator.peak_reserved
    held.sort(key=lambda block: block.address)
    assert all(one.address + one.size <= other.address for one, other in pairwise(held))
    for block in held:
        allocator.free(block)
    allocator.release()
    assert allocator.reserved == allocator.allocated == 0


def test_recorded_runs_reserve_what_is_predicted() -> None:
    """Runs of the loop as it stands: within 5 % on nine of ten, within 10 % on all; on a GPU whose size makes no difference."""
    runs = [run for run in recorded_runs(CHECKOUT / "reports") if "blocks" in run.config]
    frame = predicted_runs(runs, CHECKOUT / "reports").query("kind == 'train' and reserved.notna()")
    frame = frame[frame["predicted_reserved"] < 135].drop_duplicates(
        ["study", "variant", "machine"]
    )  # an H200 has 139.8
    errors = (frame["predicted_reserved"] / frame["reserved"] - 1).abs()
    assert len(errors) > 50
    assert (errors <= 0.05).mean() >= 0.9, frame[errors > 0.05][["study", "variant"]]
    assert errors.max() <= 0.10, frame[errors > 0.10][["study", "variant"]]


MEASURED = sorted((CHECKOUT / "reports" / "recorded" / "predictions").glob("*.*.jsonl"))


def test_a_gpu_answered_as_predicted() -> None:
    """What was predicted before the runs. The first set found an error of the replay, so its tail is judged by the test below."""
    assert MEASURED
    for path in MEASURED:
        found = table(path)
        assert found["active_gib"]["median"] <= 0.01 and found["active_gib"]["p95"] <= 0.03, path.name
        assert found["reserved_gib"]["median"] <= 0.01, path.name
        if not path.name.startswith("random-1."):
            assert found["reserved_gib"]["p90"] <= 0.05, path.name


@pytest.mark.xfail(
    strict=True, reason="the bar is not reached: 26 of 28, 34 of 39 and 19 of 21 verdicts at a cap were right"
)
def test_verdicts_at_a_cap_are_right_in_95_of_100() -> None:
    for path in MEASURED:
        found = table(path)
        assert found["right"] >= 0.95 * found["verdicts"] > 0, path.name


@pytest.mark.slow
@pytest.mark.xfail(
    strict=False,
    reason="the bar is not reached on every set: 22 of 25 within 5 % on random-2, some compiled steps by more",
)
@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_predictions_of_today_for_what_a_gpu_answered(path: Path) -> None:
    errors = []
    for row in read_jsonl(path):
        if "measured" in row and row["cap_gib"] is None:
            prediction = predict(TrainConfig.model_validate(row["settings"]))
            found = prediction.on_gpu_with(1000.0, expandable=row["expandable"])
            errors.append(abs(found.reserved / GIB / row["measured"]["reserved_gib"] - 1))
    assert sum(error <= 0.05 for error in errors) >= 0.9 * len(errors), errors
    assert sum(error <= 0.10 for error in errors) >= 0.95 * len(errors), errors
