"""The memory of every way of sharing a model as it is predicted, against formulas, and against what
real processes hold."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CHECKOUT
from ways_memory_job import BASE, WAYS, run_of

import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_core.config.strict import deep_merge
from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import count_parameters
from lsai_core.prediction.interleaved import Action, played
from lsai_core.prediction.memory import differing_ranks, predict, predict_ranks
from lsai_core.prediction.roofline import estimate, untimed
from lsai_core.prediction.simulate import simulate
from lsai_core.profiling.gpus import find_gpu
from lsai_core.training.combinations import checked
from lsai_lab.launch.launch import on_this_machine, torchrun
from lsai_lab.predictions.recorded import predict_again, predicted_runs
from lsai_lab.runs.records import recorded_runs

Facts = dict[str, list[dict[str, Any]]]
SCALARS = 1024  # bytes: counts of steps, what processes ask one another


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Facts]:
    """What so many real processes held, by the name of their way; each number starts once."""
    folder, found = tmp_path_factory.mktemp("held"), dict[int, Facts]()

    def of(size: int) -> Facts:
        if size not in found:
            script, path = Path(__file__).parent / "ways_memory_job.py", folder / f"{size}.json"
            environment = {
                **on_this_machine(),
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parent.parent),
            }
            words = [*torchrun(size), str(script), str(path), ",".join(WAYS[size])]
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-6000:]
            found[size] = json.loads(path.read_text())
        return found[size]

    return of


EVERY = [
    pytest.param(size, name, marks=[pytest.mark.slow] if size > 2 else [])
    for size, ways in WAYS.items()
    for name in ways
]


@pytest.mark.parametrize(("size", "name"), EVERY)
def test_each_process_holds_what_was_predicted(
    held: Callable[[int], Facts], size: int, name: str
) -> None:
    config = run_of(name)
    for rank, real in enumerate(held(size)[name]):
        moments: list[tuple[str, dict[str, int]]] = []
        found = simulate(config, on="cpu", rank=rank, moments=moments)
        before_update = next(parts for phase, parts in moments if phase == "optimizer")
        assert before_update["weights"] == real["weights"]
        assert before_update["gradients"] == real["gradients"]
        assert 0 <= before_update["optimizer"] - real["states"] <= SCALARS
        assert found.phases.keys() == real["peaks"].keys()
        for phase, peak in real["peaks"].items():
            # Exchanged slices of a sequence, and a part that four processes gather at a time.
            inexact = config.parallel.cp > 1 or config.parallel.tp > 1
            near = 0.03 * peak if inexact and phase == "backward" else SCALARS
            assert abs(found.phases[phase] - peak) <= near, (rank, phase)


def of(**changes: Any) -> TrainConfig:
    return checked(TrainConfig, deep_merge(BASE, changes), "test")


def parts_before_update(config: TrainConfig, rank: int = 0) -> dict[str, int]:
    moments: list[tuple[str, dict[str, int]]] = []
    simulate(config, on="cpu", rank=rank, moments=moments)
    return next(parts for phase, parts in moments if phase == "optimizer")


N = count_parameters(run_of("ddp").model).total
D, F, V, LAYERS = (BASE["model"][key] for key in ("d_model", "d_ff", "vocab_size", "n_layers"))
MATRICES, NORMS = 4 * D * D + 3 * D * F, 2 * D  # of a block


def test_copies_keep_weights_and_gradients_whole_and_zero1_shares_states() -> None:
    for kind, of_all in {"ddp": 2 * 2 * N, "zero1": 2 * N}.items():
        states = []
        for rank in (0, 1):
            found = parts_before_update(of(parallel={"kind": kind, "replicate": 2}), rank)
            assert (found["weights"], found["gradients"]) == (4 * N, 4 * N)
            states.append(found["optimizer"])
        assert 0 <= sum(states) - 4 * of_all <= 2 * SCALARS
        # whole parameters are spread, so that shares differ by the largest at most
        assert max(states) - min(states) <= 2 * 4 * V * D


def test_several_micro_batches_hold_gradients_beside_their_buckets() -> None:
    one, several = (
        simulate(of(parallel={"kind": "ddp", "replicate": 2}, grad_accum=n), on="cpu")
        for n in (1, 3)
    )
    assert one.parts["gradients"] == 4 * N
    assert several.parts["gradients"] == 8 * N


def test_sharded_ways_keep_a_slice_of_everything() -> None:
    slices = {n: 4 * sum(math.ceil(rows / n) * rest for rows, rest in _shapes()) for n in (2, 4)}
    for parallel, n in (
        ({"fsdp": 2}, 2),
        ({"kind": "zero2", "fsdp": 4}, 4),
        ({"fsdp": 2, "replicate": 2}, 2),
        ({"cp": 2}, 2),
        ({"cp": 2, "fsdp": 2}, 4),
    ):
        found = parts_before_update(of(parallel=parallel))
        assert found["weights"] == found["gradients"] == slices[n]
        assert 0 <= found["optimizer"] - 2 * slices[n] <= SCALARS


def _shapes() -> list[tuple[int, int]]:
    """Rows of every parameter, and the numbers of a row."""
    block = [(D, 1), (D, 1), (3 * D, D), (D, D), (2 * F, D), (D, F)]
    return [(V, D), *block * LAYERS, (D, 1), (V, D)]


def test_tensor_parallelism_shares_matrices_and_keeps_norms() -> None:
    for tp in (2, 4):
        words, norms = math.ceil(V / tp), D * (2 * LAYERS + 1)
        found = parts_before_update(of(parallel={"tp": tp}))
        assert found["weights"] == 4 * (LAYERS * MATRICES // tp + 2 * words * D + norms)
        sharded = parts_before_update(of(parallel={"tp": tp, "fsdp": 2}))
        blocks = LAYERS * (MATRICES // tp + NORMS) // 2
        assert sharded["weights"] == 4 * (blocks + 2 * math.ceil(words / 2) * D + D // 2)


def test_a_process_of_a_pipeline_keeps_its_stages_layers() -> None:
    block = MATRICES + NORMS
    own = {0: 3 * block + V * D, 1: 2 * block + D + V * D}
    config = of(parallel={"pp": 2}, grad_accum=2)
    for rank, numbers in own.items():
        found = parts_before_update(config, rank)
        assert (found["weights"], found["gradients"]) == (4 * numbers, 4 * numbers)
    # a tensor (B, S, D) for each micro-batch that arrives
    four = of(parallel={"pp": 2}, grad_accum=4)
    more = parts_before_update(four)["messages"] - parts_before_update(config)["messages"]
    assert more == 2 * 4 * BASE["batch_size"] * BASE["seq_len"] * D


def test_a_sharded_pipeline_keeps_slices_and_in_a_step_whole_weights_and_gradients() -> None:
    numbers = 3 * (MATRICES + NORMS) + V * D
    words = math.ceil(V / 2)  # of rows, the embedding's alone do not divide
    slices = 3 * (MATRICES + NORMS) // 2 + words * D
    moments: list[tuple[str, dict[str, int]]] = []
    parallel, bf16 = {"pp": 2, "fsdp": 2}, {"precision": "bf16"}
    simulate(of(parallel=parallel, grad_accum=4, **bf16), on="cpu", moments=moments)
    before_update = next(parts for phase, parts in moments if phase == "optimizer")
    assert before_update["weights"] == before_update["gradients"] == 2 * slices
    passes = [parts for phase, parts in moments if phase == "forward"]
    # whole ones are summed over micro-batches in fp32, and FSDP's own gathered weights are bf16
    assert max(parts.get("gradients", 0) for parts in passes) >= 4 * numbers
    assert max(parts.get("FSDP buffers", 0) for parts in passes) >= 2 * numbers


def test_earlier_stages_keep_more_micro_batches() -> None:
    config = of(model={"n_layers": 4}, parallel={"pp": 4}, grad_accum=8)
    kept = [simulate(config, on="cpu", rank=rank).parts["activations"] for rank in (1, 2)]
    assert kept[0] > 1.3 * kept[1]


def test_rank_0_and_the_largest_are_told() -> None:
    assert differing_ranks(of(parallel={"fsdp": 4})) == [0]
    assert differing_ranks(of(parallel={"pp": 4}, grad_accum=4)) == [0, 1, 2, 3]
    assert differing_ranks(of(parallel={"pp": 2, "fsdp": 2}, grad_accum=4)) == [0, 1]
    spread = of(parallel={"kind": "zero1", "replicate": 4})
    ranks = [parts_before_update(spread, rank)["optimizer"] for rank in range(4)]
    assert ranks[differing_ranks(spread)[-1]] // 4096 == max(ranks) // 4096
    pipeline = of(parallel={"pp": 2}, grad_accum=4)
    found = predict_ranks(pipeline)
    assert [one.rank for one in found] == [0, 1]
    assert predict(pipeline).peak == max(one.peak for one in found)
    assert predict(pipeline, rank=1).peak == found[1].peak != found[0].peak


@pytest.mark.parametrize(
    "name", ["ddp", "zero1", "zero2", "tp", "tp_fsdp", "pp", "pp_fsdp", "cp", "cp_tp"]
)
def test_a_gpus_memory_is_predicted_for_every_way_compiled(name: str) -> None:
    config = run_of(name).model_copy(update={"compile": True, "precision": "bf16"})
    found = predict(config)
    assert found.reserved >= found.peak == pytest.approx(sum(found.parts.values()))


def test_time_is_predicted_where_messages_are_measured() -> None:
    """Among H100s they are, and an H200's link is as fast; an A100's is not."""
    h100, h200, a100 = map(find_gpu, ("h100", "h200", "a100-80"))
    for name in ("fsdp", "ddp", "zero1", "zero2", "tp", "tp_fsdp", "pp", "pp_fsdp", "cp_tp"):
        config = run_of(name)
        for gpu in (h100, h200):
            assert untimed(config, gpu) is None and estimate(config, gpu) is not None
        unmeasured = untimed(config, a100)
        plain = name in ("fsdp", "zero2")  # what the data sheet's link is near enough for
        assert plain == (unmeasured is None) == (estimate(config, a100) is not None)
        assert plain or "among GPUs like A100-80 are not measured" in str(unmeasured)


def test_a_pipeline_waits_for_a_micro_batch_of_every_other_stage() -> None:
    """Even stages: P - 1 micro-batches of M + P - 1, half as many where a process has two stages
    (Narayanan et al. 2021, 2.2). Among four processes messages that wait for others undo that."""
    h100 = find_gpu("h100")

    def waits(schedule: str, micro_batches: int, processes: int = 4) -> float:
        shape = {"n_layers": 32}  # next to nothing at the ends
        parallel = {"pp": processes, "pp_schedule": schedule}
        found = estimate(
            of(model=shape, parallel=parallel, grad_accum=micro_batches, precision="bf16"), h100
        )
        assert found is not None
        return found.waiting_s / found.busy_s

    assert waits("1f1b", 8) == pytest.approx(3 / 8, rel=0.15)
    assert waits("1f1b", 16) == pytest.approx(3 / 16, rel=0.15)
    assert waits("interleaved", 8, processes=2) == pytest.approx(1 / 16, rel=0.15)
    assert waits("interleaved", 8) > waits("1f1b", 8)


def test_a_late_message_holds_up_those_behind_it() -> None:
    """Process 1 computes for stage 3, and sends that on, after it has posted a message that comes
    late from process 0: process 2 gets it no earlier than that."""

    def through(orders: dict[int, list[Action]]) -> float:
        return played(orders, 5, lambda stage, what: {0: 5.0, 4: 2.0}.get(stage, 1.0))

    late: list[Action] = [(0, "F", 0), (0, "SEND_F", 0)]
    ends: list[Action] = [(4, "RECV_F", 0), (4, "F", 0)]
    early: list[Action] = [(3, "SEND_F", 0), (1, "RECV_F", 0), (1, "F", 0)]
    assert through({0: late, 1: early, 2: ends}) == 5.0 + 1.0
    held: list[Action] = [(1, "RECV_F", 0), (3, "SEND_F", 0), (1, "F", 0)]
    assert through({0: late, 1: held, 2: ends}) == 5.0 + 2.0


def test_times_of_the_ways_come_near_the_recorded_ones() -> None:
    """Runs of the study sharing: rates and messages were measured apart from them."""
    runs = [run for run in recorded_runs(CHECKOUT / "reports") if run.summary.id.study == "sharing"]
    said = predicted_runs(runs, CHECKOUT / "reports")
    errors = (said["estimated_s"] / said["step_s"] - 1).abs()
    assert errors.notna().sum() >= 12 and errors.median() <= 0.05
    pipelines = errors[said["variant"].str.startswith("pp")]
    assert len(pipelines) >= 2 and pipelines.max() <= 0.03


def test_pipelines_take_what_they_were_recorded_to_take() -> None:
    """The buffers of their messages are tensors, which are counted once."""
    runs = [
        run
        for run in recorded_runs(CHECKOUT / "reports")
        if run.summary.id.study == "sharing" and run.summary.id.variant.startswith("pp")
    ]
    assert len(runs) >= 2
    for run in runs:
        said, found = predict_again(run), run.summary.results
        assert said["predicted"] == pytest.approx(found["mem_peak_active_gib"], rel=0.01)
        assert said["predicted_reserved"] == pytest.approx(found["mem_peak_reserved_gib"], rel=0.02)
        assert said["estimated_s"] == pytest.approx(found["step_ms"] / 1e3, rel=0.03)


def test_one_prediction_does_not_disturb_another() -> None:
    """Ranks and meshes of one process after the other."""
    first = simulate(run_of("tp"), on="cpu", rank=1)
    for name in ("tp_4", "tp_fsdp", "tp"):
        simulate(run_of(name), on="cpu")
    assert simulate(run_of("tp"), on="cpu", rank=1) == first


def test_gpus_of_a_prediction_are_all_of_them() -> None:
    """Whatever else shares the work: FSDP, or copies, take what it leaves."""
    for changes, fsdp, replicate in (
        ({}, 4, 1),
        ({"parallel.tp": 2}, 2, 1),
        ({"parallel.cp": 2}, 2, 1),
        ({"parallel.replicate": 2}, 2, 2),
        ({"parallel.kind": "ddp"}, 1, 4),
        ({"parallel.fsdp": 2, "parallel.tp": 2}, 2, 1),
    ):
        found = lab.predict("lab-tiny", "h100", gpus=4, overrides=changes)
        way = found.config.parallel
        assert (way.world_size, way.fsdp, way.replicate) == (4, fsdp, replicate), changes
        assert f"4 GPUs ({way.kind + ', ' if way.kind == 'ddp' else ''}" in repr(found)
        again = lab.predict(found.config, "h100", gpus=8)  # of the own way of a run, too
        assert again.config.parallel.world_size == 8
    for changes, said in (
        ({"parallel.tp": 8}, "gpus=4: parallel.tp 8 makes a multiple of 8 GPUs"),
        ({"parallel.fsdp": 4, "parallel.tp": 2}, "gpus=4: parallel.tp 2 x parallel.fsdp 4 makes 8"),
    ):
        with pytest.raises(UserError, match=said):
            lab.predict("lab-tiny", "h100", gpus=4, overrides=changes)
