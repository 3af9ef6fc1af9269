"""Frames that were put together, whose rows have labels of their own no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import write_run

import lsai_lab as lab
from lsai_lab.analysis.attention import SHAPE, kernel_lead
from lsai_lab.analysis.losses import loss_by_pass, training_loss
from lsai_lab.interactive.sweep import plan_sweep
from lsai_lab.runs.session import Session

SPEEDS = {"baseline": 10.0, "bf16": 30.0, "flash_attn": 20.0, "window_512": 40.0}
GIB = {"baseline": 9.0, "bf16": 3.0, "flash_attn": 2.0, "window_512": 4.0}


def one_label(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame as `pd.concat` of frames of a row makes it."""
    return frame.set_axis([0] * len(frame), axis="index")


@pytest.fixture
def runs(empty: Path) -> pd.DataFrame:
    steps = [{"step": n, "loss": 2.0, "step_ms": 1.0, "tokens_in_step": 8} for n in range(3)]
    for variant, speed in SPEEDS.items():
        for repeat in range(2):
            found = {"tokens_per_s": speed + repeat, "mem_peak_allocated_gib": GIB[variant]}
            lost = [row | {"loss": speed} for row in steps]
            write_run(empty, "memory", variant, "train", repeat, results=found, metrics=lost)
    return lab.load("memory", mine=True)


def test_figures_are_of_their_own_rows(runs: pd.DataFrame) -> None:
    parts = [runs[runs["variant"] == name].reset_index(drop=True) for name in SPEEDS]
    rows = lab.summarize(pd.concat(parts), "tokens_per_s", by="variant").set_index("variant")
    assert rows["tokens_per_s"].to_dict() == {name: each + 0.5 for name, each in SPEEDS.items()}
    assert rows["n"].tolist() == [2, 2, 2, 2]
    assert rows["tokens_per_s_high"].tolist() == [each + 1 for each in SPEEDS.values()]


def test_own_and_recorded_runs_have_a_summary(runs: pd.DataFrame) -> None:
    both = pd.concat([runs, lab.recorded("memory")])
    rows = lab.summarize(both, "tokens_per_s")
    h100 = rows.query("machine == 'h100' and variant == 'bf16'")
    assert round(h100["tokens_per_s"].item()) == 447956
    own = rows[~rows["machine"].isin(lab.recorded()["machine"])].set_index("variant")
    assert own.loc["bf16", "tokens_per_s"] == 30.5


def test_a_run_that_stands_there_twice_counts_once(runs: pd.DataFrame) -> None:
    rows = lab.summarize(pd.concat([runs, runs]), "tokens_per_s").set_index("variant")
    assert rows["n"].tolist() == [2, 2, 2, 2]
    copied = runs.query("variant == 'bf16'").iloc[[0, 1]]
    copied = copied.assign(key="same", tokens_per_s=[30.0, 30.0])
    assert lab.summarize(copied, "tokens_per_s")["n"].tolist() == [1]


def test_a_sweep_over_seeds_has_each_run_once(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session("quick")
    study = session.study("rounding")
    twice = {"states": study.parts["states"].model_copy(update={"repeats": 2})}
    study = study.model_copy(update={"parts": study.parts | twice})
    monkeypatch.setattr(session, "study", lambda name: study)

    def seeds(over: dict[str, Any]) -> list[int]:
        planned = plan_sweep(session, "rounding", ["nearest"], over, "states", {"steps": 4})
        assert len({run.id.key for run, _ in planned}) == len(planned)
        return [vars(run.config)["seed"] for run, _ in planned]

    assert seeds({"seed": [0, 1, 2]}) == [0, 1, 2]
    assert seeds({"optim.lr": [1e-3]}) == [0, 1], "a study's repeats otherwise stay"


ASKED: list[Callable[[pd.DataFrame], Any]] = [
    lambda rows: lab.relative(rows, "tokens_per_s", "baseline").tolist(),
    lambda rows: lab.pareto(rows, "mem_peak_allocated_gib", "tokens_per_s")["variant"].tolist(),
    lambda rows: lab.equal_to_best(rows, "tokens_per_s", within=0.5)["variant"].tolist(),
    lambda rows: str(lab.table(rows).data),
    lambda rows: [
        bar.get_width() for bar in lab.bars(rows, "label", "tokens_per_s").axes[0].patches
    ],
    lambda rows: [
        line.get_xydata().tolist()
        for line in lab.lines(rows, "mem_peak_allocated_gib", "tokens_per_s", "variant")
        .axes[0]
        .lines
    ],
]


@pytest.mark.parametrize("asked", ASKED)
def test_rows_of_one_label_are_asked_as_those_of_several(
    runs: pd.DataFrame, asked: Callable[[pd.DataFrame], Any]
) -> None:
    rows = lab.summarize(runs, ["tokens_per_s", "mem_peak_allocated_gib"])
    found = asked(one_label(rows))
    assert found and found == asked(rows)


def test_the_front_of_rows_of_one_label(runs: pd.DataFrame) -> None:
    rows = one_label(lab.summarize(runs, ["tokens_per_s", "mem_peak_allocated_gib"]))
    front = lab.pareto(rows, "mem_peak_allocated_gib", "tokens_per_s")
    assert front["variant"].tolist() == ["flash_attn", "bf16", "window_512"]


def test_losses_of_rows_of_one_label(runs: pd.DataFrame) -> None:
    asked = one_label(runs.assign(text_tokens=17, tokens=24, seq_len=8))
    assert training_loss(asked).tolist() == [SPEEDS[variant] for variant in runs["variant"]]
    assert loss_by_pass(asked).equals(loss_by_pass(asked.reset_index(drop=True)))


def test_points_and_leads_of_rows_of_one_label() -> None:
    runs = lab.recorded("attention")
    runs = runs[runs["outcome"] == "ok"].head(2)
    assert lab.points(one_label(runs)).equals(lab.points(runs))
    shape = dict(zip(SHAPE, ("64", "causal", 0, 128), strict=True))
    times = [
        shape | {"backend": name, "ms": ms} for name, ms in (("a", 2.0), ("b", 4.0), ("c", 3.0))
    ]
    frame = pd.DataFrame(times).assign(
        ms_low=lambda rows: rows["ms"], ms_high=lambda rows: rows["ms"]
    )
    assert kernel_lead(one_label(frame), "a")["rival_backend"].tolist() == ["c"]
