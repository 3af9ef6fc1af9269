"""Other projects' programs beside ours: what is committed is complete, the table follows from it by
hand, and Megatron-LM, which two of them simulate, is predicted by what its layers keep."""

from __future__ import annotations

import csv
from statistics import median
from typing import Any

import pytest
from conftest import CHECKOUT
from rivals import Asked, eager_cannot, measured_runs, megatron_cannot

from lsai_core.config.train import TrainConfig
from lsai_core.prediction.memory import GIB
from lsai_lab.peers.settings import PLAIN
from lsai_lab.peers.trainer_memory import predict_as, trainer_memory_of
from lsai_lab.predictions.recorded import table_path
from lsai_lab.predictions.rivals import SAMPLES, rival_errors, rival_table, rivals

CANNOT = {"SimuMax": megatron_cannot, "Primus": megatron_cannot, "MemTracker": eager_cannot}
# What SimuMax's own table says of Megatron-LM on eight B200: predicted and measured GiB.
OWN = [66.44, 60.51, 38.94, 28.17, 86.88, 81.31, 52.68, 38.38]
MEASURED = [66.55, 60.68, 39.07, 28.29, 87.08, 81.59, 52.89, 38.57]


def answers(rival: str, sample: str | None = None) -> list[dict[str, str]]:
    with table_path(CHECKOUT, "rivals").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["rival"] == rival]
    return [row for row in rows if sample in (None, row["sample"])]


def test_each_program_is_named_with_its_version_and_how_it_was_run() -> None:
    told = rivals(CHECKOUT)["rivals"]
    assert set(told) == set(CANNOT) and len(told) >= 3
    for name, rival in told.items():
        assert {"version", "url", "run", "number", "cannot", "beside", "time"} == set(rival), name
        assert all(map(str.strip, rival.values())), name
        assert set(rival_table(CHECKOUT).query("rival == @name")["sample"]) <= set(SAMPLES)


def test_a_program_answers_for_runs_that_it_has_words_for_and_for_no_other() -> None:
    """Nearly all: a run that was recorded since need not be asked about at once."""
    asked = measured_runs(CHECKOUT)
    for name, cannot in CANNOT.items():
        wanted = {(run.sample, run.run) for run in asked if cannot(run) is None}
        found = [(row["sample"], row["run"]) for row in answers(name)]
        own = [pair for pair in found if pair[0] != "programs"]
        assert len(own) == len(set(own)) and set(own) <= wanted, name
        assert len(own) >= 0.8 * len(wanted), name


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"precision": "bf16"}, "precision"),
        ({"loss": "fused"}, "logits"),
        ({"grad_checkpoint": "selective"}, "checkpointing"),
        ({"parallel": {"fsdp": 2}}, "FSDP"),
    ],
)
def test_what_a_simulator_of_megatron_has_no_words_for_is_not_asked(
    changes: dict[str, Any], word: str
) -> None:
    plain = {"precision": "bf16_autocast"} | changes
    reason = megatron_cannot(Asked("recorded", "a run", config(**plain)))
    assert reason is not None and word in reason
    assert megatron_cannot(Asked("recorded", "a run", config(precision="bf16_autocast"))) is None


def test_simumax_says_again_what_its_own_table_says_and_its_errors_follow() -> None:
    rows = answers("SimuMax", "megatron")
    assert [float(row["gib"]) for row in rows] == pytest.approx(OWN, rel=2e-3)
    errors = [float(row["gib"]) / gib - 1 for row, gib in zip(rows, MEASURED, strict=True)]
    table = rival_table(CHECKOUT).set_index(["rival", "sample"])
    row = table.loc["SimuMax", "megatron"]
    assert row["runs"] == 8
    assert row["error_median"] == pytest.approx(median(map(abs, errors)))
    assert row["error_near"] == sum(abs(error) <= 0.05 for error in errors) / 8


def test_reserved_figures_are_held_against_reserved_numbers() -> None:
    """nanotron's figures are of reserved memory, and SimuMax has such a number."""
    (row,) = [row for row in answers("SimuMax", "published") if row["run"].endswith("lel, row 8")]
    off = rival_errors(CHECKOUT).query("rival == 'SimuMax'").set_index("run")["error"]
    assert float(row["reserved"]) > float(row["gib"])
    assert off[row["run"]] == pytest.approx(float(row["reserved"]) / 57.8 - 1)


LAYER = {"n_layers": 2, "d_model": 1024, "n_heads": 8, "n_kv_heads": 4, "d_ff": 4096}


def config(**changes: Any) -> TrainConfig:
    model = LAYER | {"vocab_size": 4096} | changes.pop("model", {})
    said = PLAIN | {"model": model, "precision": "bf16", "seq_len": 2048, "batch_size": 2}
    return TrainConfig.model_validate(said | changes)


def megatron(**changes: Any) -> Any:
    asked = config(**changes)
    return predict_as(asked, trainer_memory_of("megatron", asked))


def test_a_block_of_megatron_keeps_what_its_layers_say() -> None:
    """Of a token in bf16: the input of both norms and their results, q, k, v, attention's result,
    of SwiGLU both inputs and the result; in fp32 a number for each norm and head. Of a weight 18
    bytes."""
    two, four = (megatron(model={"n_layers": n}).phases["forward"] for n in (2, 4))
    width, hidden, keys = 1024, 4096, 512
    token = 2 * (4 * width + width + 2 * keys + width + 3 * hidden) + 4 * (2 + 8)
    weights = width * (2 * width + 2 * keys) + 3 * width * hidden + 2 * width
    assert (four - two) / 2 * GIB == pytest.approx(2 * 2048 * token + 18 * weights, rel=1e-3)


def test_a_gathered_input_is_gathered_again_and_not_kept() -> None:
    """Two processes: norms, their results and the residual stream are halved as all others."""
    alone, shared = (
        [
            megatron(model={"n_layers": n}, loss="fused", parallel={"tp": tp}).phases["forward"]
            for n in (2, 4)
        ]
        for tp in (1, 2)
    )
    assert shared[1] - shared[0] == pytest.approx((alone[1] - alone[0]) / 2, rel=2e-3)


def test_gradients_have_one_stand_in_for_each_shape_and_no_buckets() -> None:
    told = trainer_memory_of("megatron", config())
    kept = [
        predict_as(config(), told.model_copy(update={"engine": engine})).parts["optimizer"]
        for engine in (True, False)
    ]
    shapes = 1024 * (2048 + 1024 + 8192 + 4096)  # qkv, output, gate and up, down
    parameters = 2 * (shapes + 2 * 1024) + 2 * 4096 * 1024 + 1024
    assert (kept[1] - kept[0]) * GIB == pytest.approx(2 * (parameters - shapes), rel=1e-3)


def test_megatron_on_eight_gpus_is_predicted_within_a_percent() -> None:
    found = rival_errors(CHECKOUT).query("rival == 'SimuMax' and sample == 'megatron'")
    assert found["measured"].tolist() == MEASURED
    assert found["ours"].abs().max() <= 0.01
