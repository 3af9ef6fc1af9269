"""What is saved for a paper: figures with all their labels, pictures as SVG, tables of objects."""

from __future__ import annotations

import io
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from PIL import Image

import lsai_lab as lab
from lsai_core.base.errors import UnknownName, UserError

RUN = "h100/memory.bf16"


def test_a_saved_figure_has_all_its_labels_without_the_reports_style(empty: Path) -> None:
    runs = lab.recorded("memory").query("machine == 'h100' and part == 'train'")
    with mpl.rc_context():
        mpl.rcdefaults()
        fig, file = (
            lab.bars(lab.summarize(runs, "tokens_per_s"), "label", "tokens_per_s"),
            io.BytesIO(),
        )
        fig.savefig(file, format="png", dpi=100)
        box, whole = fig.get_tightbbox(), fig.bbox_inches
        plt.close(fig)
    assert box.x0 < whole.x0 or box.y0 < whole.y0, "labels reach over the figure's edge"
    width, height = Image.open(file).size
    assert width >= 100 * box.width and height >= 100 * box.height


def test_pictures_are_saved_below_each_other(empty: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    with lab.watch(model, optimizer) as seen:
        for _ in range(6):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, picture in (("one.svg", lab.timeline(RUN)), ("two.svg", seen.plot())):
        picture.savefig(tmp_path / name)
        root = ElementTree.parse(tmp_path / name).getroot()
        assert root.attrib["viewBox"] == f"0 0 {root.attrib['width']} {root.attrib['height']}"
        heights = [float(each.attrib["height"]) for each in root]
        assert len(heights) == str(picture.data).count("<svg")
        assert float(root.attrib["height"]) == sum(heights)
        assert [float(each.attrib["y"]) for each in root] == [0.0, heights[0]][: len(heights)]
    assert len(heights) == 2
    with pytest.raises(UserError, match=r"name the file \.svg"):
        lab.timeline(RUN).savefig(tmp_path / "one.png")
    with pytest.raises(UserError, match="No such file or directory"):
        lab.timeline(RUN).savefig(tmp_path / "none" / "one.svg")


def test_what_is_not_there_is_told_by_what_is(empty: Path) -> None:
    with pytest.raises(UnknownName, match="'save_fig'; did you mean savefig"):
        lab.timeline(RUN).save_fig  # noqa: B018
    with pytest.raises(UnknownName, match="'to_html'; known: to_markdown, to_latex, to_csv"):
        lab.table(lab.recorded("memory")).to_html  # noqa: B018


def test_a_prediction_and_a_comparison_are_tables(empty: Path) -> None:
    found = lab.predict("lab-tiny")
    assert lab.table(found).data == lab.table(found.gpus).data
    both = lab.table(lab.compare(RUN, "h100/memory.flash_attn"))
    row = "| tokens_per_s | 447,956 (447,806–449,552) | 676,727 (657,687–707,444) | 1.51x |"
    assert row in str(both.to_markdown())


def test_counts_are_whole_numbers(empty: Path) -> None:
    calls = lab.table(lab.kernels("h200/speed.fp8.levers").head(3)).cells["calls"]
    assert calls.tolist() == ["128", "64", "32"]
    frame = pd.DataFrame({"calls": [5708.0, float("nan")], "ms": [1.5, 2.0]})
    assert lab.table(frame).cells["calls"].tolist() == ["5,708", "–"]
    assert lab.table(frame).cells["ms"].tolist() == ["1.50", "2.00"]
