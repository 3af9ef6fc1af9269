"""Figures that do not compare: they stay apart, or a line says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import below_cell, write_run

import lsai_lab as lab
from lsai_lab.interactive.sweep import frame_of
from lsai_lab.runs.session import Session

SPEEDS = {"bf16": [90.0, 91.0, 92.0], "flash_attn": [40.0, 99.0, 41.0], "window_512": [30.0, 31.0]}
CALM = {("bf16", 0), ("bf16", 1), ("bf16", 2), ("flash_attn", 1)}


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    def lines() -> str:
        both = capsys.readouterr()
        return both.out + both.err

    return lines


def runs_beside_others(root: Path) -> pd.DataFrame:
    for variant, speeds in SPEEDS.items():
        for repeat, speed in enumerate(speeds):
            results: dict[str, Any] = {"tokens_per_s": speed, "validation_loss": 4.0 + repeat}
            if (variant, repeat) not in CALM:
                results["disturbed"] = "2 other runs"
            write_run(root, "memory", variant, "train", repeat, results=results)
    return lab.load("memory", mine=True)


def test_a_speed_is_that_of_undisturbed_repeats_where_there_are_some(empty: Path) -> None:
    rows = lab.summarize(runs_beside_others(empty), ["tokens_per_s", "validation_loss"])
    found = rows.set_index("variant")
    assert found["tokens_per_s"].to_dict() == {"bf16": 91.0, "flash_attn": 99.0, "window_512": 30.5}
    assert found.loc["flash_attn", ["tokens_per_s_low", "n", "disturbed"]].tolist() == [99.0, 3, 2]
    assert found["validation_loss"].to_dict()["flash_attn"] == 5.0, "a loss is of all repeats"


def test_a_table_without_that_column_says_of_how_many_a_speed_is(empty: Path) -> None:
    rows = lab.summarize(runs_beside_others(empty), ["tokens_per_s", "validation_loss"])
    shown = rows.sort_values("tokens_per_s")[["variant", "tokens_per_s", "n", "run"]]
    assert lab.table(shown).cells["n"].tolist() == ["2", "3", "3 (1 undisturbed)"]
    for kept in (["variant", "validation_loss", "n", "run"], ["n", "tokens_per_s", "disturbed"]):
        assert lab.table(rows[kept]).cells["n"].tolist() == ["3", "3", "2"]


@pytest.mark.parametrize(
    "asked",
    [
        lambda rows: lab.relative(rows, "tokens_per_s", "bf16"),
        lambda rows: lab.equal_to_best(rows, "tokens_per_s"),
        lambda rows: lab.pareto(rows, "mem_peak_allocated_gib", "tokens_per_s"),
        lambda rows: lab.bars(rows, "variant", "tokens_per_s"),
    ],
)
def test_what_ran_only_beside_other_work_is_said(empty: Path, said: Any, asked: Any) -> None:
    rows = lab.summarize(runs_beside_others(empty), "tokens_per_s")
    rows = rows.assign(mem_peak_allocated_gib=1.0)
    said()
    asked(rows)
    line = "tokens_per_s compares poorly: all repeats of window_512 were disturbed\n"
    assert said() == line
    asked(rows)
    asked(rows[rows["variant"] != "window_512"])
    assert said() == "", "once, and only where it is so"


def test_the_fp8_runs_that_were_disturbed(empty: Path, said: Any) -> None:
    runs = lab.recorded("fp8").query("machine == 'h100' and part == 'batch_loss'")
    rows = lab.summarize(runs, "tokens_per_s").set_index("variant")
    assert round(rows.loc["fp32_states", "tokens_per_s"]) == 83447
    lab.relative(rows.reset_index(), "tokens_per_s", "bf16")
    assert "all repeats of bf16_rounded, fused_rounded were disturbed" in said()


def test_losses_on_two_texts_are_no_repeats(empty: Path, said: Any) -> None:
    for repeat, text in enumerate(("one-1", "one-1", "two-2")):
        results = {"validation_loss": 3.0 + repeat, "tokens_per_s": 5.0, "dataset": text}
        write_run(empty, "memory", "bf16", "train", repeat, results=results)
    runs = lab.load("memory", mine=True)
    rows = lab.summarize(runs, ["validation_loss", "tokens_per_s"])
    assert rows.set_index("dataset")["validation_loss"].to_dict() == {"one-1": 3.5, "two-2": 5.0}
    assert list(lab.summarize(runs, "tokens_per_s")["n"]) == [3], "a speed is of no text"
    said()
    both = lab.recorded("memory").query("machine in ['h100', 'h200'] and part == 'train'")
    rows = lab.summarize(both, "validation_loss")
    assert "dataset" not in rows and "losses of several texts do not compare" in said()


def test_losses_of_two_functions_are_told(empty: Path, said: Any) -> None:
    steps = [
        {"step": n, "loss": 2.0, "validation_loss": 3.0, "step_ms": 1.0, "tokens_in_step": 8}
        for n in (1, 2)
    ]
    found = {
        loss: write_run(
            empty,
            "memory",
            name,
            config={"loss": loss},
            metrics=steps,
            results={"validation_loss": value},
        )
        for name, loss, value in (
            ("bf16", "smooth", 5.0),
            ("baseline", "full", 4.0),
            ("window_512", "fused", 4.5),
        )
    }
    for folder, name in ((found["smooth"], "a"), (found["full"], "b"), (found["fused"], "c")):
        (folder / "run.json").write_text(json.dumps({"name": name}))
    lab.curves("a", "b")
    assert "several functions do not compare: a of smooth; b of cross entropy" in said()
    lab.curves("a", "b", y="validation_loss")
    assert said() == "", "validation is cross entropy in both"
    lab.curves("b", "c")
    assert said() == "", "both compute the same"
    text = repr(lab.compare("a", "b"))
    assert "smooth and cross entropy are two functions" in text
    rows = lab.compare("a", "b").results.set_index("what")
    assert rows.loc["validation_loss", "second - first"] == -1
    assert "two functions" not in repr(lab.compare("b", "c"))


def test_steps_and_device_are_settings_under_one_name(empty: Path) -> None:
    runs = lab.load()
    assert runs["config.steps"].notna().sum() >= runs["steps"].notna().sum()
    search = runs.query("largest_batch == 305")
    assert search["steps"].isna().all() and set(search["config.steps"]) == {2}
    settings = lab.compare("h100/memory.bf16", "h100/rounding.nearest.states").settings["what"]
    assert "config.steps" in settings.tolist() and "steps" not in settings.tolist()


def test_equal_losses_are_within_the_spread(empty: Path) -> None:
    rows = pd.DataFrame({"variant": ["a", "b"], "validation_loss": [4.0, 4.01]})
    assert lab.equal_to_best(rows, "validation_loss")["variant"].tolist() == ["a"]
    rows = rows.assign(validation_loss_low=[3.9, 4.0], validation_loss_high=[4.1, 4.1])
    assert lab.equal_to_best(rows, "validation_loss")["variant"].tolist() == ["a", "b"]
    speeds = pd.DataFrame({"variant": ["a", "b"], "tokens_per_s": [100.0, 99.0]})
    assert len(lab.equal_to_best(speeds, "tokens_per_s")) == 2


@pytest.mark.parametrize("steps, told", [(1, "are of 1 timed step"), (40, "")])
def test_a_speed_of_a_few_steps_is_told(empty: Path, said: Any, steps: int, told: str) -> None:
    session = Session("quick")
    (run,) = session.plan("memory", only=["bf16"], parts=["train"], overrides={})
    folder = write_run(empty, "memory", "bf16", results={"steps_timed": steps, "tokens_per_s": 9.0})
    folder.rename(run.folder)
    summary = json.loads((run.folder / "summary.json").read_text())
    summary["id"]["key"] = run.folder.name.rpartition("-")[2]
    (run.folder / "summary.json").write_text(json.dumps(summary))
    frame_of([(run, {"steps": 4})])
    lines = said()
    assert (told in lines and "do not compare" in lines) if told else lines == ""


WRONG = {
    "format": (lambda rows: lab.table(rows, {"tokens_per_s": "zz"}), "'zz' is no format of tok"),
    "number": (lambda rows: lab.table(rows, {"tokens_per_s": 3}), "3 is no format of tokens_per_s"),
    "color": (lambda rows: lab.bars(rows, "label", "tokens_per_s", color="dark"), "'dark' is none"),
    "colors": (
        lambda rows: lab.bars(rows, "label", "tokens_per_s", color=["C0", "C1"]),
        "2 colours for 8 bars",
    ),
    "text": (lambda rows: lab.bars(rows, "label", "tokens_per_s", text="{rat}"), "{ratio}"),
    "value": (lambda rows: lab.bars(rows, "label", "variant"), "'variant' is no column of num"),
    "column": (lambda rows: lab.bars(rows, "label", "tokens_pers"), "did you mean tokens_per_s"),
    "query": (lambda rows: rows.query("variant = 'bf16'"), "compares with ==, not with =: vari"),
    "kinds": (lambda rows: rows.query("tokens_per_s > 'a'"), "no query: tokens_per_s > 'a' ("),
    "syntax": (lambda rows: rows.query("variant =="), "no query: variant == ("),
    "markdown": (lambda rows: rows.to_markdown(), "lab.table(frame).to_markdown()"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line(empty: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    runs = lab.recorded("memory").query("part == 'train' and machine == 'h100'")
    rows = lab.summarize(runs, "tokens_per_s")
    monkeypatch.setitem(__import__("sys").modules, "tabulate", None)
    call, said = WRONG[name]
    with pytest.raises(Exception) as error:
        call(rows)
    (line,) = below_cell(error.value)
    assert said in line


def test_a_device_that_is_not_there_is_one_line(empty: Path) -> None:
    folder = write_run(empty, "memory", "bf16")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    for device in ("nonsense", "gpu", "cuda:9", "cuda:x"):
        with pytest.raises(Exception, match="device") as error:
            lab.load_model(folder, device=device)
        assert len(below_cell(error.value)) == 1 and device in str(error.value)


def test_losses_of_the_same_seeds_are_compared_seed_by_seed(empty: Path) -> None:
    """Seeds may lie further apart than what is compared; then each seed says it."""
    for variant, change in (("bf16", 0.0), ("baseline", 0.2)):
        for seed in range(3):
            results = {"validation_loss": 3.0 + seed + change * (1 + seed / 10)}
            write_run(empty, "memory", variant, repeat=seed, config={"seed": seed}, results=results)
    runs = lab.load("memory", mine=True).query("repeat == 0").sort_values("variant")
    row = lab.compare(runs.iloc[::-1]).repeats.set_index("what").loc["validation_loss"]
    assert row["second - first"] == pytest.approx(0.22)
    assert row["first_high"] > row["second_low"] and not row["within_spread"]


def test_a_comparison_leaves_disturbed_repeats_out_as_a_summary_does(empty: Path) -> None:
    rows = lab.compare("h100/memory.bf16", "h100/memory.window_256").repeats.set_index("what")
    runs = lab.recorded("memory").query("machine == 'h100' and part == 'train'")
    found = lab.summarize(runs, "tokens_per_s").set_index("variant")["tokens_per_s"]
    assert rows.loc["tokens_per_s", "second"] == found["window_256"]
    assert rows.loc["tokens_per_s", "first"] == found["bf16"]


def test_charts_of_losses_of_several_texts_say_so(empty: Path, said: Any) -> None:
    runs = lab.recorded("memory").query("part == 'train'")
    rows = lab.summarize(runs, ["validation_loss", "tokens_per_s"])
    told = said()
    assert re.search(r"losses of several texts .*: [\w-]+ \(h100, h200-d\), [\w-]+ \(h200\)", told)
    lab.bars(rows.query("machine == 'h100'"), "variant", "validation_loss")
    assert said() == ""
    lab.bars(rows.query("machine in ['h100', 'h200']"), "variant", "validation_loss")
    assert "losses of several texts do not compare" in said()


def test_no_loss_is_left_out_of_a_front(empty: Path) -> None:
    """A share of a loss is more than what variants differ by."""
    rows = pd.DataFrame(
        {"validation_loss": [3.77, 3.79], "tokens_per_s": [10.0, 20.0], "variant": ["a", "b"]}
    )
    assert len(lab.pareto(rows, "validation_loss", "tokens_per_s")) == 2
    assert len(lab.pareto(rows, "validation_loss", "tokens_per_s", same=0.01)) == 1
