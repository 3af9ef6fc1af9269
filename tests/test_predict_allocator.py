"""The model of the caching allocator: PyTorch's rules, recorded runs, and a GPU's answers to
predictions that were committed first."""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import CHECKOUT
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from verify_predictions import table

from lsai_core.base.files import read_jsonl
from lsai_core.config.train import TrainConfig
from lsai_core.prediction import tracker as tracking
from lsai_core.prediction.allocator import GAP, Allocator, Block, OutOfMemory
from lsai_core.prediction.memory import GIB, predict
from lsai_core.prediction.replay import replay
from lsai_core.prediction.simulate import Simulated, simulate
from lsai_core.prediction.tracker import FIRST, SCRATCH, PurposeTracker
from lsai_lab.predictions.recorded import predicted_runs
from lsai_lab.runs.records import recorded_runs

MIB = 2**20
PLANS = CHECKOUT / "reports" / "predictions" / "plans.filled.jsonl"
PREDICTIONS = CHECKOUT / "reports" / "recorded" / "predictions"


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (11 * MIB, 12),
        (33 * MIB + 1, 34),
    ],
)
def test_segments_have_the_sizes_of_pytorch(size: int, reserved: int) -> None:
    allocator = Allocator()
    block = allocator.malloc(size)
    assert allocator.reserved == reserved * MIB and size <= allocator.allocated <= size + MIB
    allocator.free(block)
    assert (
        allocator.allocated == 0 and allocator.reserved == reserved * MIB == allocator.peak_reserved
    )
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


def test_each_segment_lies_below_the_last_and_the_lower_of_equal_blocks_is_taken() -> None:
    allocator = Allocator()
    blocks = [allocator.malloc(size * MIB) for size in (40, 20, 40)]
    addresses = [block.address for block in blocks]
    assert addresses == sorted(addresses, reverse=True)
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(40 * MIB).address == addresses[2]


def test_the_gap_above_all_segments_is_filled_from_its_end_in_reservations_of_the_driver() -> None:
    allocator = Allocator()
    first = allocator.malloc(100 * MIB)
    allocator.gap = GAP
    high, low, below = (allocator.malloc(120 * MIB) for _ in range(3))
    assert high.address == low.address + 128 * MIB and below.address < first.address < low.address
    assert allocator.malloc(30 * MIB).address == low.address - 32 * MIB


class Traced(Allocator):
    """Segments lie where the driver of a recorded run put them."""

    def __init__(self, addresses: list[int]) -> None:
        super().__init__()
        self._addresses = iter(addresses)

    def _address(self, size: int) -> int:
        return next(self._addresses)


class Placed(Traced):
    """Large segments lie where the driver put those of a recorded run, small ones where the model
    puts them."""

    def _address(self, size: int) -> int:
        return super()._address(size) if size > 20 * MIB else Allocator._address(self, size)


def test_with_the_drivers_addresses_the_model_reserves_what_recorded_runs_did() -> None:
    """Runs on H100s, one of them sharded. Each new segment at its time, too."""
    with lzma.open(PREDICTIONS / "traces.h100.jsonl.xz", "rt") as file:
        traces = [json.loads(line) for line in file]
    assert len(traces) == 6
    for trace in traces:
        segments = [
            (address, size)
            for action, address, size, _ in trace["events"]
            if action == "segment_alloc"
        ]
        model, held, given = Traced([address for address, _ in segments]), dict[int, Block](), 0
        for action, address, size, stream in trace["events"]:
            if action == "segment_alloc":
                given += size
            elif action == "alloc":
                held[address] = model.malloc(size, stream)
                assert model.reserved == given and model.allocated >= size, trace["name"]
            elif address in held:
                model.free(held.pop(address))


@pytest.mark.slow
def test_with_the_drivers_addresses_simulated_steps_reserve_what_recorded_runs_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So what a prediction of them misses is where the driver put segments, not what the step asks
    for."""
    with lzma.open(PREDICTIONS / "traces.h100.jsonl.xz", "rt") as file:
        traces = [json.loads(line) for line in file]
    for trace in traces:
        plan, name = trace["name"].split("/")
        (row,) = (row for row in read_jsonl(PREDICTIONS / f"{plan}.jsonl") if row["name"] == name)
        segments = [
            (address, size)
            for action, address, size, _ in trace["events"]
            if action == "segment_alloc"
        ]
        large = [address for address, size in segments if size > 20 * MIB]
        with monkeypatch.context() as patch:
            prediction = predict(TrainConfig.model_validate(row["settings"]))
            patch.setattr(
                "lsai_core.prediction.replay.Allocator", lambda *_, large=large: Placed(large)
            )
            reserved = prediction.on_gpu_with(1000.0).reserved
        assert abs(reserved - sum(size for _, size in segments)) <= 2 * MIB, trace["name"]


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
        assert (
            sum(block.size for block in held)
            == allocator.allocated
            <= allocator.reserved
            <= allocator.peak_reserved
        )
    held.sort(key=lambda block: block.address)
    assert all(one.address + one.size <= other.address for one, other in pairwise(held))
    for block in held:
        allocator.free(block)
    allocator.release()
    assert allocator.reserved == allocator.allocated == 0


def test_recorded_runs_reserve_what_is_predicted() -> None:
    """Runs of the loop as it stands, on a GPU whose size makes no difference: within 0.5 % on three
    of four, within 10 % on all."""
    runs = [run for run in recorded_runs(CHECKOUT / "reports") if "blocks" in run.config]
    frame = predicted_runs(runs, CHECKOUT / "reports").query("kind == 'train' and reserved.notna()")
    frame = frame[frame["predicted_reserved"] < 135].drop_duplicates(
        ["study", "variant", "machine"]
    )  # an H200 has 139.8
    errors = (frame["predicted_reserved"] / frame["reserved"] - 1).abs()
    assert len(errors) > 50
    assert (errors <= 0.005).mean() >= 0.75
    assert (errors <= 0.05).mean() >= 0.97, frame[errors > 0.05][["study", "variant"]]
    assert errors.max() <= 0.10, frame[errors > 0.10][["study", "variant"]]


def births(loss: Callable[[Tensor], Tensor], *, on_gpu: bool) -> int:
    """How many blocks the backward pass of `loss` takes, its scratch with them."""
    with FakeTensorMode():
        made = loss(2 * torch.empty(256, 256, requires_grad=True))
        with PurposeTracker(on_gpu) as tracker:
            made.backward()
            return sum(event > 0 for event in tracker.events)


class AddsByItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad + grad


def test_a_second_gradient_is_added_in_place() -> None:
    """Not while a dispatch mode watches a CPU; a function's own addition makes a tensor
    anywhere."""
    for loss, saved in (
        (lambda x: (x.neg() + x.neg()).sum(), 1),
        (lambda x: AddsByItself.apply(x).sum(), 0),
    ):
        assert births(loss, on_gpu=False) - births(loss, on_gpu=True) == saved


def test_the_backward_pass_of_softmax_holds_a_product() -> None:
    def loss(x: Tensor) -> Tensor:
        return x.softmax(-1).sum()

    assert births(loss, on_gpu=True) - births(loss, on_gpu=False) == 1


@pytest.mark.parametrize(("tokens", "sums"), [(3072, 0), (3073, 1)])
def test_the_gradient_of_a_token_table_is_summed_beside_it(tokens: int, sums: int) -> None:
    """For many tokens; a recorded trace of 30720 tokens, 50304 words and a width of 1024 has a
    block of 132 MiB there."""

    def loss(table: Tensor) -> Tensor:
        return torch.nn.functional.embedding(torch.zeros(tokens, dtype=torch.int64), table).sum()

    assert births(loss, on_gpu=True) - births(loss, on_gpu=False) == sums
    grad, words = torch.empty(30720, 1024, device="meta"), torch.empty(30720, device="meta")
    assert SCRATCH["aten::embedding_dense_backward"]((grad, words, 50304)) == [132 * MIB]


@pytest.mark.parametrize("compile", [False, True])
def test_the_feed_forward_layer_is_followed_chunk_by_chunk(
    monkeypatch: pytest.MonkeyPatch, compile: bool
) -> None:
    """Its backward pass, of a chunk and a half. Of many chunks the first tell what the others
    take."""
    model = {
        "n_layers": 1,
        "d_model": 128,
        "n_heads": 2,
        "n_kv_heads": 1,
        "d_ff": 256,
        "vocab_size": 512,
    }
    settings = {
        "model": model,
        "batch_size": 1,
        "precision": "bf16",
        "blocks": "fused",
        "data": {"vocab_size": 400},
    }

    def simulated(tokens: int) -> Simulated:
        changes = {"seq_len": tokens, "mlp_chunk": 256, "compile": compile}
        return simulate(TrainConfig.model_validate(settings | changes))

    births = [event for event in simulated(384).events if event > 0]
    # bytes: of a chunk, and of the weight; gate and up are twice as large
    h, down = 256 * 256 * 2, 128 * 256 * 2
    first = [h, 2 * h, 2 * h, h, 2 * down, 4 * down]  # with the sums of the weights' gradients
    wanted = [384 * 128 * 2, *first, h // 2, h, h, h // 2, 2 * down, down]
    assert any(births[at : at + len(wanted)] == wanted for at in range(len(births)))
    few = simulated(5248)
    monkeypatch.setattr(tracking, "ALIKE", 20)
    every = simulated(5248)
    assert len(every.events) - len(few.events) == 18 * 2 * (2 + 4)
    assert replay(every) == replay(few) and (every.peak, every.work) == (few.peak, few.work)


def test_what_only_the_first_step_takes_stays_reserved() -> None:
    marks = dict.fromkeys(("forward product", "backward product", "optimizer"), 99) | {
        "gradients made": 1,
        "optimizer made": 1,
        "activations made": 1,
        "forward": 1,
    }
    events = [64 * MIB, 32 * MIB + FIRST, -2, 16 * MIB, -3]
    found = replay(Simulated(phases={}, peak=0, parts={}, events=events, marks=marks, work={}))
    assert (found.reserved, found.allocated) == (96 * MIB, 80 * MIB)


@pytest.mark.parametrize("compile", [False, True])
def test_fused_fp8_measures_in_its_first_step(compile: bool) -> None:
    model = {
        "n_layers": 1,
        "d_model": 128,
        "n_heads": 2,
        "n_kv_heads": 1,
        "d_ff": 256,
        "vocab_size": 512,
    }
    for recipe, measures in (("fused", True), ("none", False)):
        settings = {
            "model": model,
            "seq_len": 64,
            "precision": "bf16",
            "compile": compile,
            "fp8": {"recipe": recipe},
        }
        events = simulate(
            TrainConfig.model_validate(settings | {"data": {"vocab_size": 400}})
        ).events
        assert any(event > 0 and event % 512 == FIRST for event in events) == measures


MEASURED = sorted(PREDICTIONS.glob("*.*.jsonl"))


def test_a_gpu_answered_as_predicted() -> None:
    """Of what was predicted before the runs. The first set found an error of the replay, the second
    one eager attention, tied embeddings and fp8's first step; with all of it the bars (95 % of
    active within 3 %, 90 % of reserved within 5 %) were missed."""
    rows = [
        row for path in MEASURED if path.name.startswith("random-2.") for row in read_jsonl(path)
    ]
    for path in MEASURED:
        assert (
            table(path)["active_gib"]["median"] <= 0.01
            and table(path)["reserved_gib"]["median"] <= 0.01
        ), path.name
    found = shares([(row, row["predicted"]) for row in rows if "measured" in row])
    assert found == pytest.approx(
        {"active 3 %": 59 / 64, "reserved 5 %": 57 / 64, "reserved 10 %": 60 / 64, "right": 38 / 40}
    )


def shares(rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """Of measured rows and predictions of them: the shares within an error, and of right verdicts
    at a cap."""
    found: dict[str, float] = {}
    for kind, error in (("active", 3), ("reserved", 5), ("reserved", 10)):
        ratios = [
            said[f"{kind}_gib"] / row["measured"][f"{kind}_gib"]
            for row, said in rows
            if row["cap_gib"] is None
        ]
        found[f"{kind} {error} %"] = sum(abs(ratio - 1) <= error / 100 for ratio in ratios) / len(
            ratios
        )
    right = [said["fits"] == row["measured"]["fits"] for row, said in rows if row["cap_gib"]]
    return found | {"right": sum(right) / len(right)}


@pytest.mark.slow
def test_predictions_of_today_for_what_a_gpu_answered() -> None:
    """Over all sets the bars are met that the predictions written down before the runs missed.

    One is off by more than 10 % in reserved memory: open-49 of the first set on an H200, which
    reserved 19 % more there than in every run on an H100. Left out is open-33 of that set, which
    reserved 6.26 GiB on both GPUs when eager fused blocks still computed their down projection
    again under gradient checkpointing. In six runs of today's code on an H100 it reserved what is
    predicted.
    """
    rows, repeats = [], read_jsonl(PREDICTIONS / "repeats-h100.jsonl")
    (again,) = {
        row["measured"]["reserved_gib"]
        for row in repeats
        if row["name"].startswith("random-1/open-33,")
    }
    for first, row in [
        ("random-1" in path.name, row)
        for path in MEASURED
        for row in read_jsonl(path)
        if "measured" in row
    ]:
        if first and row["name"] == "open-33":
            reserved = predict(TrainConfig.model_validate(row["settings"])).reserved
            assert reserved == pytest.approx(again, rel=0.001)
            continue
        prediction = predict(TrainConfig.model_validate(row["settings"]))
        replayed = prediction.on_gpu_with(row["cap_gib"] or 1000.0, expandable=row["expandable"])
        said = {
            "active_gib": prediction.peak,
            "reserved_gib": replayed.reserved / GIB,
            "fits": replayed.fits,
        }
        rows.append((row, said))
    found = shares(rows)
    assert (
        found["active 3 %"] >= 0.99
        and found["reserved 5 %"] >= 0.99
        and found["reserved 10 %"] >= 0.99
    ), found
    assert found["right"] >= 0.95, found


def test_replays_with_other_addresses_see_which_plans_ran_out_of_memory() -> None:
    """Of five tasks whose plans failed on an H200 within their budget, as predicted fitting; and of
    plans that held there."""
    rows = read_jsonl(PLANS)
    failed = {row["name"]: row for row in rows if not row["measured"]["fits"]}
    held = [row for row in rows if row["name"] not in failed][:10]

    def sure(row: dict[str, Any]) -> bool:
        config = TrainConfig.model_validate(row["settings"])
        found = predict(config, row["settings"]["attention"]["backend"])
        assert found.reserved < row["cap_gib"]
        return found.surely_fits(row["cap_gib"])

    assert len(failed) == 5 and sum(map(sure, failed.values())) <= 2
    assert sum(map(sure, held)) >= 8
