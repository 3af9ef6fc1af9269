"""Numbers of a text: compared with what its cells compute, mended on request, led to their runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from conftest import Project, write_run
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_lab.report.numbers import Number, bound, compared, number, rewritten

CODE = """import lsai_lab as lab
runs = lab.recorded("memory")
speed = lab.number(runs["tokens_per_s"].iloc[0], ",.0f", runs.iloc[0])
lost = lab.number(-0.25, "{:.2f}")"""
WORDS = "# Try\n\nIt makes [{}](#speed) tokens a second. It loses [−0.25](#lost) nats."


def chapter(project: Project, speed: str) -> Path:
    path = project.root / "notebooks" / "65-yours.ipynb"
    words = new_markdown_cell(WORDS.format(speed))
    nbformat.write(new_notebook(cells=[words, new_code_cell(CODE)]), path)
    return path


@pytest.fixture
def project(new_project: Callable[..., Project]) -> Project:
    made = new_project()
    front = new_notebook(cells=[new_markdown_cell("# Front")])
    nbformat.write(front, made.root / "notebooks" / "00-summary.ipynb")
    book = made.root / "reports" / "_quarto.yml"
    abstract = "  abstract: It makes [1,234](notebooks/65-yours.ipynb#speed) tokens a second.\n"
    rest = re.sub(r"(?m)^  abstract: .*\n(?:    .*\n)*", "", book.read_text())
    book.write_text(rest.replace("book:\n", f"book:\n{abstract}"))
    place = made.root / "reports" / "recorded" / "box"
    write_run(place, "memory", "baseline", results={"tokens_per_s": 1234.0})
    return made


def measured_again(project: Project, speed: float) -> Path:
    """The project's one record with another speed."""
    place = project.root / "reports" / "recorded" / "box"
    shutil.rmtree(place / "memory")
    return write_run(place, "memory", "baseline", results={"tokens_per_s": speed})


@pytest.mark.slow
def test_a_changed_record_names_the_sentence_and_is_written(project: Project) -> None:
    path = chapter(project, "1,234")
    readme = project.root / "README.md"
    readme.write_text("Fast: [1,234](notebooks/65-yours.ipynb#speed) tokens/s.")
    code, out, err = project.lsai("numbers")
    assert code == 0, (out, err)

    folder = measured_again(project, 1300.0)
    code, out, _ = project.lsai("numbers")
    assert code == 1
    assert "It makes [1,234](#speed) tokens a second." in out and "'1,300'" in out
    assert "README.md: the text says '1,234'" in out
    code, _, _ = project.lsai("numbers", "--write")
    assert code == 0 and "[1,300](#speed)" in path.read_text()
    book = project.root / "reports" / "_quarto.yml"
    for text in (readme, book):
        assert "[1,300](notebooks/65-yours.ipynb#speed)" in text.read_text()
    assert project.lsai("numbers")[0] == 0

    out_folder = project.root / "out"
    words = ("--no-run", "--engine", "pandoc", "--formats", "html", "--out", out_folder)
    code, out, err = project.lsai("report", *words)
    assert code == 0, (out, err)
    html = (out_folder / "65-yours.html").read_text()
    assert f'href="runs/box/memory/{folder.name}.html"' in html and ">1,300</a>" in html
    assert "loses −0.25 nats" in html


def test_a_number_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="missing"):
        number(float("nan"), "{:.2f}")


def test_numbers_are_compared_where_they_are_text() -> None:
    computed = {"gain": Number("1.64x"), "share": Number("30%")}
    text = "It is [1.6x](#gain), see [a section](#sec-gain).\n\n`[2x](#gain)` leaves [30%](#share)."
    first, second = compared(text, computed)
    assert (first.written, first.computed) == ("1.6x", "1.64x")
    assert first.sentence == "It is [1.6x](#gain), see [a section](#sec-gain)."
    assert second.written == second.computed == "30%"
    assert rewritten(text, computed) == text.replace("[1.6x]", "[1.64x]")
    (lacking,) = compared("[3](#gian)", computed)
    assert lacking.computed is None and "gain" in str(lacking)


def test_the_book_shows_what_was_computed() -> None:
    gain = Number("1.64x")
    gain.run = "h100/speed/fp8-0"
    text = "It is [1.6x](#gain) and [9](#other), [1.6x](notebooks/25-time.ipynb#gain)."
    shown = bound(text, {"gain": gain, "share": Number("30%")})
    assert shown.startswith("It is [1.64x](runs/h100/speed/fp8-0.html) and 9, [1.6x](")
    gain.run = "h100/speed/eager-0,h100/speed/fp8-0"
    two = "[1.64x](runs/index.html#h100/speed/eager-0,h100/speed/fp8-0)"
    assert bound("[1.6x](#gain)", {"gain": gain}) == two


def test_a_number_leads_to_a_run_however_it_is_named(empty: Path) -> None:
    run = lab.find_run("h100/memory.bf16")
    row = lab.recorded("memory").query("machine == 'h100' and variant == 'bf16'").iloc[0]
    for named in (run, run.folder, str(run.folder)):
        assert number(1.5, "{:.2f}x", named).run == f"h100/memory/{run.folder.name}"
    assert number(1.5, None, row).run.startswith("h100/memory/bf16-")
    other = lab.find_run("h100/memory.baseline")
    before, after = number(1.5, None, row, other).run.split(",")
    assert before == f"h100/memory/{other.folder.name}" and after == number(1.5, None, row).run
    pair = (str(other.folder), row["run"])  # as rows of differences have it
    assert (
        number(1.5, None, {"run": pair}).run == number(1.5, None, pair).run == f"{before},{after}"
    )
    assert number(1.5, None, row, run).run == after, "not beside itself"
    with pytest.raises(UserError, match="a run is a row of"):
        number(1.5, "{:.2f}x", 7)
