"""Analysis of losses and noise: Student's t, joint intervals, how much text a run read, training
loss by its last steps and by pass, sessions of equal work."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_lab.analysis.intervals import half_width, students_t


def test_students_t_is_that_of_the_tables() -> None:
    # R: qt(0.975, n), and qt(1 - 0.05 / 2 / m, n) for m settings
    for degrees, quantile in ((1, 12.706205), (2, 4.302653), (4, 2.776445), (7, 2.364624)):
        assert students_t(degrees) == pytest.approx(quantile, abs=1e-6)
    assert students_t(30) == pytest.approx(2.042272, abs=1e-6)
    assert students_t(4, 0.99) == pytest.approx(4.604095, abs=1e-6)
    assert students_t(10_000) == pytest.approx(1.9602, abs=1e-4)


def test_half_an_interval_needs_two_values_and_grows_with_the_settings() -> None:
    values = pd.Series([1.0, 2.0, float("nan"), 3.0])
    assert half_width(values) == pytest.approx(4.302653 / 3**0.5)
    assert half_width(values, 5) == pytest.approx(9.924843 / 3**0.5)
    assert math.isnan(half_width(values[:1]))


@pytest.fixture
def runs(tmp_path: Path, new_record) -> pd.DataFrame:
    """Two seeds of a base and of a variant that is 0.5 and 0.7 nats worse; 20 steps of 2 windows of
    8 tokens each, over a text of 16 windows."""
    rows = []
    for variant, gaps in (("base", (0.0, 0.0)), ("other", (0.5, 0.7))):
        for repeat, gap in enumerate(gaps):
            losses = [5.0 - 0.1 * step + repeat + gap for step in range(20)]
            folder = new_record(variant, repeat, losses)
            rows.append(
                {
                    "variant": variant,
                    "repeat": repeat,
                    "run": str(folder),
                    "outcome": "ok",
                    "validation_loss": 3.0 + gap,
                    "tokens": 320,
                    "seq_len": 8,
                    "dataset": "text-1",
                    "text_tokens": 129,
                }
            )
    return pd.DataFrame(rows)


@pytest.fixture
def new_record(tmp_path: Path):
    """Writes a record of a training run, as small as one can be."""

    def write(variant: str, repeat: int, losses: list[float]) -> Path:
        name = f"{variant}.r{repeat}" if repeat else variant
        folder = tmp_path / "memory" / f"{name}-0123456789ab"
        folder.mkdir(parents=True)
        identity = {
            "study": "memory",
            "variant": variant,
            "part": "train",
            "repeat": repeat,
            "key": "0123456789ab",
        }
        facts = {
            "schema": 1,
            "id": identity,
            "kind": "train",
            "outcome": "ok",
            "reason": None,
            "started": "2026-01-01T00:00:00+00:00",
            "wall_s": 1.0,
            "command": "lsai",
            "code": {"version": "0", "hash": "0" * 12, "commit": None, "dirty": None},
            "results": {},
        }
        (folder / "summary.json").write_text(json.dumps(facts))
        for other in ("config.json", "env.json"):
            (folder / other).write_text("{}")
        lines = [
            json.dumps({"step": step, "loss": loss, "step_ms": 1.0, "tokens_in_step": 16})
            for step, loss in enumerate(losses)
        ]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    return write


def test_tokens_distinct_tokens_and_passes(runs: pd.DataFrame) -> None:
    read = lab.text_read(runs)
    assert read.columns.tolist() == ["tokens", "distinct_tokens", "passes"]
    assert read.iloc[0].tolist() == [320, 128, 2.5]
    fresh = lab.text_read(runs.assign(text_tokens=641)).iloc[0]  # less than one pass
    assert fresh.tolist() == [320, 320, 0.5]
    unknown = runs.drop(columns="text_tokens")
    assert lab.text_read(unknown).isna().all(axis=None)
    committed = unknown.assign(dataset="polish-docs-53e7ce207e90", seq_len=512, tokens=8_192_000)
    assert lab.text_read(committed).iloc[0].tolist() == pytest.approx(
        [8_192_000, 1_612_800, 5.079365]
    )
    assert lab.text_read(pd.DataFrame({"variant": ["x"]})).isna().all(axis=None)


def test_training_loss_stands_beside_validation(runs: pd.DataFrame) -> None:
    assert lab.training_loss(runs, 4).tolist() == pytest.approx([3.25, 4.25, 3.75, 4.95])
    changes = lab.loss_changes(runs, "base", last=4).loc["other"]
    assert changes["validation"] == pytest.approx(0.6) == changes["training"]
    assert changes["training_half"] == pytest.approx(12.706205 * 0.1)
    assert changes[["n", "tokens", "distinct_tokens", "passes"]].tolist() == [2, 320, 128, 2.5]
    assert len(lab.loss_changes(runs, "no such variant")) == 0


def test_a_loss_that_is_no_number_stays_one(runs: pd.DataFrame) -> None:
    rows = Path(runs["run"][0]) / "metrics.jsonl"
    rows.write_text(rows.read_text().replace('"loss": 3.2', '"loss": NaN', 1))
    assert lab.training_loss(runs, 4).isna().tolist() == [True, False, False, False]
    assert lab.loss_by_pass(runs)["loss"].isna().sum() == 1


def test_losses_by_pass(runs: pd.DataFrame) -> None:
    found = lab.loss_by_pass(runs)
    first = found[(found["variant"] == "base") & (found["repeat"] == 0)]
    assert first[["pass", "first", "last"]].to_numpy().tolist() == [
        [1, 0, 7],
        [2, 8, 15],
        [3, 16, 19],
    ]
    assert first["loss"].tolist() == pytest.approx([4.65, 3.85, 3.25])
    assert len(found) == 4 * 3


def test_the_recorded_text_was_read_four_times_and_rounding_shows_in_training_loss() -> None:
    found = lab.load("largest")
    long = found[(found["part"] == "long_loss") & ~found["own"].astype(bool)]
    changes = lab.loss_changes(long, "plain_1").loc["bf16_1"]
    assert changes["validation"] == pytest.approx(0.132, abs=0.001)
    assert changes["training"] == pytest.approx(0.713, abs=0.001)
    passes = lab.loss_by_pass(long).pivot_table(index="pass", columns="variant", values="loss")
    cost = passes["bf16_1"] - passes["plain_1"]
    assert cost.is_monotonic_increasing and cost.iloc[0] < 0.1 < 0.7 < cost.iloc[-1]


def test_sessions_of_equal_work_differ_by_what_the_records_say() -> None:
    found = lab.load("peers")
    apart = lab.session_differences(found[~found["own"].astype(bool)]).set_index("variant")
    assert apart.loc["ours_eager", "spread"] == pytest.approx(lab.SESSION_SPREAD, abs=5e-4)
    assert (round(apart["spread"].min(), 3), round(apart["spread"].max(), 3)) == (0.004, 0.041)
    assert (apart["sessions"] >= 2).all() and len(apart) >= 10


def with_lost(run: str, at: int, shares: dict[str, float]) -> None:
    """Adds to a step of a record the counts of lost updates, and a validation loss."""
    path = Path(run) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lost = {f"lost_{name}": share for name, share in shares.items()}
    rows[at] |= lost | {"validation_loss": rows[at]["loss"] + 0.25}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_lost_updates_stand_beside_the_cost_of_rounding(runs: pd.DataFrame) -> None:
    for number, run in runs.iterrows():
        for at in (9, 19):
            with_lost(run["run"], at, {"norms": 0.5 + number / 8, "matrices": at / 20})
    runs = runs.assign(part="states")
    lost = lab.lost_updates(runs)
    assert len(lost) == 4 * 2 * 2 and set(lost["step"]) == {9, 19}
    assert lost[lost["class"] == "matrices"]["share"].unique().tolist() == [0.45, 0.95]
    (costs,) = lab.rounding_costs(runs, "base").to_dict("records")
    assert costs["validation"] == pytest.approx(0.6) and costs["passes"] == 2.5
    assert (costs["lost_norms"], costs["lost_matrices"]) == pytest.approx((0.8125, 0.95))


@pytest.mark.parametrize("told", [lab.rounding_costs, lab.cost_by_steps, lab.loss_changes])
def test_parts_of_a_study_are_not_mixed_in_a_mean(told: Any, runs: pd.DataFrame) -> None:
    with pytest.raises(UserError, match="several runs of repeat 0; choose one part"):
        told(pd.concat([runs, runs.assign(part="other")], ignore_index=True), "base")


def test_the_cost_is_told_as_training_goes_on(runs: pd.DataFrame) -> None:
    for number, run in runs.iterrows():
        with_lost(run["run"], 19, {"norms": number / 4})
    path = Path(runs["run"][2]) / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": 5.5,', '"loss": 6.5,', 1))  # of step 0
    found = lab.cost_by_steps(runs, "base", steps_each=10)
    training = found[found["loss"] == "training"]
    assert training["tokens"].tolist() == [160, 320] and set(found["n"]) == {2}
    assert training["mean"].tolist() == pytest.approx([0.65, 0.6])
    assert training["half"].tolist() == pytest.approx([12.706205 * 0.05, 12.706205 * 0.1])
    (validation,) = found[found["loss"] == "validation"].to_dict("records")
    assert validation["tokens"] == 320 and validation["mean"] == pytest.approx(0.6)
