"""Text of a record stays text: in the report it stands where a harmless word would stand, and
nothing else changes.

`make attack` tries many more (`attack_report.py`).
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import yaml
from attack_report import WORD, Book, survived, write_record
from conftest import CHECKOUT
from nbformat.v4 import new_code_cell, new_notebook, new_output
from test_book import PNG, SVG, reports

import lsai_lab as lab
from lsai_lab.project.files import PAGE_FOLDER
from lsai_lab.report import engines, load
from lsai_lab.report.engines import HTML, PDF
from lsai_lab.report.render import render
from lsai_lab.report.to_markdown import to_markdown
from lsai_lab.runs.notebook import execute_notebook
from lsai_lab.runs.plain import as_csv, plain, unmarked

KINDS = {
    "settings behind CR": (
        "reason",
        "x\r\n\r\n---\r\ntitle: EVIL\r\ncss: http://evil.example/x.css\r\n---\r\n\r\n",
    ),
    "settings behind U+2028": ("reason", "\u2028---\u2028title: EVIL\u2028---\u2028"),
    "a macro": ("env.gpu", r"\renewcommand{\times}{+}\renewcommand{\frac}[2]{#2/#1}"),
    "an endless macro": ("env.gpu", r"\newcommand{\a}{\a x}\a $\def\a{\a\a}\a$"),
    "brackets": ("metrics.backend", "[" * 40),
    "backticks": ("metrics.backend", "`" * 5_000),
    "raw": ("metrics.backend", "`<script>`{=html} <script>EVIL</script> `#panic()`{=typst} <!--"),
    "a table": ("env.gpu", "a | b\n\n| c | d |\n|---|---|"),
    "references": (
        "reason",
        "@fig-one [^1] [x]: http://evil.example {{< include /etc/hostname >}}",
    ),
    "quotes and emphasis": ("reason", "'a \"b *c **d _e ~~f $g"),
    "an item of a list": ("reason", "12. # > - :::"),
    "directions and controls": ("env.gpu", "\u202eabc\u2066 \x1b[31m \x00"),
}


@pytest.fixture(scope="module")
def book(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Book, dict[str, dict[str, str]]]]:
    before = dict(os.environ)
    load.session.cache_clear()
    made = Book(tmp_path_factory.mktemp("text"))
    yield made, {field: made.made(field, WORD) for field in dict(KINDS.values())}
    os.environ.clear()
    os.environ |= before
    load.session.cache_clear()
    load._committed.cache_clear()


@pytest.mark.parametrize("name", KINDS)
def test_text_of_a_record_changes_nothing_but_its_own_place(
    book: tuple[Book, dict[str, dict[str, str]]], name: str
) -> None:
    field, text = KINDS[name]
    formats = ("html", "pdf") if name in ("settings behind CR", "an endless macro") else ("html",)
    assert survived(book[0], book[1][field], field, text, formats) is None


def test_ordinary_words_stay_as_they_are_and_others_come_back() -> None:
    for text in (
        "flash_attn",
        "NVIDIA H100 80GB HBM3",
        "2.11.0+cu130",
        "needs 2 GPUs; torch sees 1",
        "a.b",
        "1.5",
    ):
        assert plain(text) == text
    for text in ("---", "[a](b)", "*x*", "$x$", "it's <b>", "1. a", "_a_", "a::b", "http://x"):
        assert plain(text) != text and unmarked(plain(text)) == text
        assert not set(re.sub(r"&#\d+;", "", plain(text))) & set("\\`*[]{}<>$@^~|!\"'")
    assert plain({"a": ["<", 1, None]}) == {"a": ["&#60;", 1, None]}


KERNEL = "void at::native::elementwise<4, float*, int*>(x | [a](http://evil.example))"


def test_a_frame_holds_text_as_recorded_and_what_is_made_of_it_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a person; and in a chapter, executed as the report executes it, fit for Markdown."""
    write_record(tmp_path, "ours", "bf16", "kernels.name", KERNEL)
    (run,) = (tmp_path / "reports" / "recorded").glob("*/*/*")
    monkeypatch.delenv(PAGE_FOLDER, raising=False)
    kernels = lab.kernels(run)
    assert kernels["name"].str.contains("at::native").all() and kernels["name"][0] == KERNEL
    link = lab.run_link(KERNEL, run)
    for text in (
        lab.table(kernels).data,
        lab.table(kernels.assign(run=str(run))).data,
        lab.table(kernels, {"name": lambda name: name[:90]}).data,
        lab.table(kernels.set_index("name")[["ms"]].T).data,
        link,
    ):
        assert "at&#58;:native" in text or "at&#58;&#58;native" in text
        assert not re.search(r"[*<]|a\]|x \|", text)
    (folder := tmp_path / "notebooks").mkdir()
    source = f"import lsai_lab as lab\nprint(lab.kernels({str(run)!r})['name'][0])"
    nbformat.write(new_notebook(cells=[new_code_cell(source)]), folder / "one.ipynb")
    problem = execute_notebook(
        folder / "one.ipynb", made := folder / "made.ipynb", {}, root=tmp_path, timeout_s=100
    )
    assert problem is None
    (shown,) = nbformat.read(made, as_version=4).cells[-1].outputs
    assert shown.text.strip() == plain(KERNEL) != KERNEL


def hang(folder: Path) -> Path:
    """A report whose own chapter takes pandoc longer than anybody waits."""
    made = reports(folder)
    cell = new_code_cell(
        "foreign()", outputs=[new_output("display_data", {"text/markdown": "[" * 60})]
    )
    nbformat.write(new_notebook(cells=[cell]), folder / "slow.ipynb")
    assert to_markdown(folder / "slow.ipynb", made / "one.ipynb") is None
    return made


def test_a_program_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "LIMIT_S", 3.0)
    begun, folder = time.monotonic(), hang(tmp_path)
    assert render(folder, tmp_path / "out", ["html"], "pandoc") == []
    said = capsys.readouterr().out
    assert "pandoc did not end within 3 s" in said and time.monotonic() - begun < 60
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in running, "nothing is left"


def test_both_engines_read_chapters_without_settings_macros_and_raw_tex() -> None:
    settings = [
        yaml.safe_load((CHECKOUT / "reports" / name).read_text())["from"]
        for name in ("_quarto.yml", "pandoc.yml")
    ]
    for reader in settings:
        assert reader.startswith("markdown") and {
            "yaml_metadata_block",
            "latex_macros",
            "raw_tex",
        } <= {*reader.split("-")}


OUTSIDE = '<image href="file:///etc/hostname" width="9" height="9"/>'
DRAWINGS = {
    "an outside picture": SVG.replace("</svg>", f"{OUTSIDE}</svg>"),
    "an outside picture in a name space": SVG.replace(
        "<svg", '<svg xmlns:k="http://www.w3.org/1999/xlink"'
    ).replace("</svg>", '<image k:href="http://evil.example/p.png"/></svg>'),
    "a script": SVG.replace("</svg>", "<script>x</script></svg>"),
    "an event": SVG.replace("<text", "<text onclick='x'"),
    "a style from outside": SVG.replace(
        "</svg>", "<style>@import url(http://evil.example/x.css);</style></svg>"
    ),
    "no XML": SVG.replace("</text>", ""),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_that_leads_elsewhere_costs_that_picture_only(tmp_path: Path, name: str) -> None:
    folder = reports(tmp_path)
    data = {"image/svg+xml": DRAWINGS[name], "text/plain": "a figure"}
    cells = [
        new_code_cell("lab.figure()", outputs=[new_output("display_data", shown)])
        for shown in (
            {"image/svg+xml": SVG},
            data,
            data | {"image/png": PNG},
            data | {"image/png": "AAAA"},
        )
    ]
    shutil.rmtree(folder / "files")
    nbformat.write(new_notebook(cells=cells), tmp_path / "drawn.ipynb")
    assert to_markdown(tmp_path / "drawn.ipynb", folder / "one.ipynb") is None
    assert sorted(path.name for path in (folder / "files").glob("one-*")) == [
        "one-0-0.svg",
        "one-2-0.png",
    ]
    if name in ("an outside picture", "no XML"):
        assert [
            path.name for path in render(folder, tmp_path / "out", ["html", "pdf"], "pandoc")
        ] == [HTML, PDF]


def test_no_cell_of_a_csv_is_a_formula() -> None:
    words = [
        "=1+1",
        "+1+cmd|' /C calc'!A0",
        "-2+3",
        "@SUM(1)",
        plain("=1"),
        "-1.5",
        "+3%",
        "-2 GiB",
        "a=b",
        "– none",
    ]
    frame = pd.DataFrame({"=head": words, "number": [-1.5] * len(words)})
    for csv in (as_csv(frame), lab.table(frame).metadata["lsai"]["csv"]):
        read = pd.read_csv(io.StringIO(csv), dtype={"'=head": str})
        assert read["'=head"].tolist() == [
            "'=1+1",
            "'+1+cmd|' /C calc'!A0",
            "'-2+3",
            "'@SUM(1)",
            "'=1",
            *words[5:],
        ]
        assert (read["number"] == -1.5).all()


def test_a_sentence_that_begins_with_an_address_is_shown_not_opened(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lab.say("http&#58;//evil.example/")
    assert "http&#58;//evil.example/" in capsys.readouterr().out


def test_ranges_and_intervals_stand_on_their_decimal_points() -> None:
    gap, whole = "\u2007", "\u00a0"
    gains = ["9.0 (8.5 to 9.8)", "–", "11.4 (11.0 to 12.1)"]
    first, none, last = (line.strip("| ") for line in written({"gain": gains}))
    assert first == f"{gap}9.0 (8.5 to 9.8)".replace(" ", whole)
    assert (none, last) == ("–", gains[2].replace(" ", whole))
    changes = written({"change": ["−11 ± 51", "6 ± 7", "−0.02"]})
    assert [line.strip("| ").lstrip(gap).replace(whole, " ") for line in changes] == [
        "−11 ± 51",
        "6 ± 7",
        "−0.02",
    ]
    for as_is in (["4 GPUs", "16 GPUs"], ["a", "1 to 2"], ["91.7% (n = 1)", "2 (1 to 3)"]):
        assert [line.strip("| ") for line in written({"x": as_is})] == as_is


def written(columns: dict[str, list[str]]) -> list[str]:
    return str(lab.table(pd.DataFrame(columns)).data).splitlines()[2:]


def test_a_row_of_a_difference_leads_to_both_runs(tmp_path: Path) -> None:
    before, after = (tmp_path / "recorded" / "h100" / "speed" / name for name in ("a-1", "b-2"))
    table = lab.table(pd.DataFrame({"gain": ["1.5x", "2.0x"], "run": [(before, after), after]}))
    output = new_output("display_data", data={"text/markdown": str(table.data)})
    notebook = new_notebook(cells=[new_code_cell("1", outputs=[output])])
    nbformat.write(notebook, tmp_path / "one.ipynb")
    made = tmp_path / "made" / "one.ipynb"
    assert to_markdown(tmp_path / "one.ipynb", made) is None
    text = made.read_text()
    assert "[1.5x](runs/index.html#h100/speed/a-1,h100/speed/b-2)" in text
    assert "[2.0x](runs/h100/speed/b-2.html)" in text
