"""Charts that do not mislead: who a bar is of, what a line joins, where an axis begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import write_run

import lsai_lab as lab
from lsai_core.base.errors import UserError


def labels_of(fig: Any) -> list[str]:
    return [label.get_text() for label in fig.axes[0].get_yticklabels()]


def test_bars_of_several_machines_name_them(empty: Path) -> None:
    runs = lab.recorded("memory").query("part == 'train' and variant in ['bf16', 'baseline']")
    rows = lab.summarize(runs.query("machine in ['h100', 'h200']"), "tokens_per_s")
    found = labels_of(lab.bars(rows, "label", "tokens_per_s"))
    assert len(found) == len({*found}) == 4 and sum(each.endswith(", h200") for each in found) == 2
    assert labels_of(lab.bars(rows, "machine", "tokens_per_s")) == rows["machine"].tolist()
    one = rows.query("machine == 'h100'")
    assert labels_of(lab.bars(one, "label", "tokens_per_s")) == one["label"].tolist()


def test_more_bars_than_a_reader_tells_apart_are_refused(empty: Path) -> None:
    rows = pd.DataFrame({"label": [str(n) for n in range(41)], "ms": 1.0})
    with pytest.raises(UserError, match="41 bars are too many to read, 40 the most"):
        lab.bars(rows, "label", "ms")
    assert len(labels_of(lab.bars(rows.head(40), "label", "ms"))) == 40


@pytest.mark.parametrize("y, begins", [("validation_loss", 6.0), ("tokens_per_s", 0.0)])
def test_an_axis_begins_at_zero_but_for_losses_and_markers_are_whole(y: str, begins: float) -> None:
    rows = pd.DataFrame({"lr": [1.0, 2.0, 3.0], y: [6.5, 6.75, 7.0], "variant": "bf16"})
    axes = lab.lines(rows, "lr", y, "variant").axes[0]
    assert begins <= axes.get_ylim()[0] < 6.5
    (line,) = axes.lines
    heights = [axes.transData.transform(each)[1] for each in line.get_xydata()]
    radius = line.get_markersize() / 2 * axes.figure.dpi / 72
    assert max(heights) + radius <= axes.bbox.y1 and min(heights) - radius >= axes.bbox.y0


def test_a_line_says_which_other_settings_its_runs_differ_in(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for repeat, (lr, steps) in enumerate([(0.1, 8), (0.2, 8), (0.4, 16)]):
        config = {"optim": {"lr": lr}, "steps": steps, "seed": 0, "log_every": repeat}
        found = {"validation_loss": 6.0 + lr, "steps": steps}
        write_run(empty, "memory", "bf16", "train", repeat, config=config, results=found)
    runs = lab.load("memory", mine=True)
    capsys.readouterr()
    lab.lines(runs, "optim.lr", "validation_loss", "variant")
    said = "a line joins runs that differ in more than optim.lr: steps\n"
    shown = capsys.readouterr()
    assert shown.out + shown.err == said
    lab.lines(runs.query("steps == 8"), "optim.lr", "validation_loss", "variant")
    lab.lines(runs, "optim.lr", "validation_loss", "steps")
    lab.lines(lab.steps("h100/memory.bf16").assign(run="bf16"), "step", "loss", "run")
    shown = capsys.readouterr()
    assert shown.out + shown.err == ""


def test_points_of_several_things_are_not_joined(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither of machines nor of repeats is a line made; every series has its name."""
    points = lab.points(lab.recorded("attention"))
    points = points.query("measure == 'time' and variant == 'mha128' and mask == 'causal'")
    capsys.readouterr()
    axes = lab.lines(points, "length", "training_tflops", "backend", log="x").axes[0]
    said = capsys.readouterr()
    assert "points are not joined, for a series has several at one length: machine h100, h200" in (
        said.out + said.err
    )
    assert {line.get_linestyle() for line in axes.lines} == {"None"}
    there = points.dropna(subset=["training_tflops"])
    assert {text.get_text() for text in axes.texts} == {*there["backend"]}
    one = there.query("machine == 'h100' and repeat == repeat.min()")
    axes = lab.lines(one, "length", "training_tflops", "backend").axes[0]
    said = capsys.readouterr()
    assert said.out + said.err == "" and "-" in {line.get_linestyle() for line in axes.lines}


def test_a_chart_refuses_axes_that_are_none(empty: Path) -> None:
    rows = pd.DataFrame({"x": [1, 2], "y": [1.0, 2.0], "of": "a", "text": "b"})
    with pytest.raises(UserError, match='log is "x", "y" or "xy", not \'q\''):
        lab.lines(rows, "x", "y", "of", log="q")
    with pytest.raises(UserError, match="'text' is no column of numbers"):
        lab.lines(rows, "x", "text", "of")
