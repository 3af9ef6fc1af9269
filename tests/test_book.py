"""The book as its readers meet it: both engines over the same executed notebooks, HTML in a real
browser, hostile outputs, reuse."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
import yaml
from conftest import CHECKOUT, Project, write_run
from fits_table import LENGTHS, MODELS, fits
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lsai_core.base.errors import UserError
from lsai_lab.predictions.recorded import table_path
from lsai_lab.predictions.techniques import TECHNIQUES
from lsai_lab.report.engines import HTML, PDF, Engine
from lsai_lab.report.judged import judged
from lsai_lab.report.render import EXECUTED, render
from lsai_lab.report.runpages import write_run_pages
from lsai_lab.report.show import figure, table
from lsai_lab.report.to_markdown import to_markdown
from lsai_lab.report.tooltips import tooltips
from lsai_lab.runs.pages import page_name
from lsai_lab.runs.plain import plain
from lsai_lab.runs.records import find_runs, recorded_runs

CHROMIUM = (
    shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
)
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 20" width="400" height="200"><text '
    'y="15">loss</text></svg>'
)
_MARK = (
    '<rect x="{}%" y="50.0%" width="{}%" height="0.0%" fill="none" data-run="{}">'
    "<title>loss\nvalue: {}</title></rect>"
)
MARK = _MARK.format("30.0", "20.0", "index", 3.5) + _MARK.format("80.0", "0.0", "", 4.5)
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
ROWS = pd.DataFrame(
    {
        "variant": [f"v{i}" for i in range(13)],
        "tokens/s": [30.0, 4, 200, 1, 55, 6, 77, 8, 9, 10, 11, 12, 13],
        **{f"wide column {i}": ["long words here"] * 13 for i in range(6)},
        "chapter": [
            "[@sec-front]",
            "@sec-finding",
            "as in @sec-one, (@tbl-one-rows)",
            plain("@sec-one"),
            plain("a [@sec-one]"),
            *["2026-11-22"] * 8,
        ],
    }
)
# What the page shows in place of references, and its data, too; text of records stays.
SAVED = ROWS.assign(
    chapter=[
        "Chapter 1",
        "Section 2.1",
        "as in Chapter 2, (Table 2.1)",
        "'@sec-one",
        "a [@sec-one]",
        *ROWS["chapter"][5:],
    ]
)
HOSTILE = """<script>document.title = "taken"</script> \
<img src=x onerror="document.title='taken'"> [click](javascript:alert(1))
![x](/etc/hostname) ![y](http://198.51.100.7/p.png) {{< include /etc/hostname >}}

---
filters: [evil.lua]
---

```{=html}
<script>document.title = "taken"</script>
```

:::

<iframe src="http://198.51.100.7/"></iframe>"""


def display(data: dict[str, Any], **metadata: Any) -> Any:
    return new_output("display_data", data, metadata=metadata)


def chapters(folder: Path, hostile: bool = False) -> None:
    """Two executed notebooks: a front page, and a chapter with a figure, a table, references,
    maths, a citation."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = table(ROWS)
    say = display(
        {"text/markdown": "The best is v2; see @fig-one-loss, @tbl-one-rows and @sec-one."}
    )
    figure = display(
        {"image/svg+xml": SVG.replace("</svg>", MARK + "</svg>"), "image/png": PNG},
        lsai={"csv": "step,loss\n0,3.5\n"},
    )
    box = display({"text/markdown": "> **Your machine.** All is **well**."})
    one = [
        new_markdown_cell(
            "# One {#sec-one}\n\nAs in [@dao2022flashattention], $a^2$. Zażółć gęślą jaźń."
        ),
        new_code_cell(
            '#| label: fig-one-loss\n#| fig-cap: "Loss over steps."\n#| fig-alt: "A line that '
            'falls."\nlab.figure()',
            outputs=[figure],
        ),
        new_code_cell(
            '#| label: tbl-one-rows\n#| tbl-cap: "All rows."\nlab.table()',
            outputs=[display({"text/markdown": shown.data}, **{"text/markdown": shown.metadata})],
        ),
        new_markdown_cell(
            "## Finding {#sec-finding}\n\nWords to look for: perplexity.\n\n### Detail "
            "{#sec-detail}\n\nMore in @sec-detail."
        ),
        new_code_cell("lab.say()  # " + "x" * 87, outputs=[say]),
        new_code_cell(
            "lab.say(box=...)",
            outputs=[
                box,
                display({"text/markdown": "**1.** Why?\n\n> **Answer.** Seven is $b^2$."}),
            ],
        ),
        new_code_cell(
            "1 / 0",
            outputs=[
                new_output(
                    "error",
                    ename="ZeroDivisionError",
                    evalue="<b>zero</b>",
                    traceback=["\x1b[31mTraceback\x1b[0m"],
                )
            ],
        ),
    ]
    if hostile:
        svg = SVG.replace("<text", "<script>alert(1)</script><text")
        foreign = [
            display({"text/markdown": HOSTILE}),
            display({"text/html": "<script>x</script>", "text/plain": "<b>plain</b>"}),
            display({"image/svg+xml": svg}),
        ]
        one.append(new_code_cell("foreign()", outputs=foreign))
    link = "[v2](runs/memory/x.html)"
    front = [
        new_markdown_cell(
            f"# Front {{#sec-front}}\n\nSee @fig-one-loss, @tbl-one-rows and {link}.\n\n[Every "
            f"run](runs/index.html)"
        )
    ]
    for name, cells in (("index.ipynb", front), ("one.ipynb", one)):
        notebook = new_notebook(
            cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        )
        nbformat.write(notebook, folder / name)


def templates(folder: Path) -> Path:
    """A `reports` folder as a clone has it."""
    folder.mkdir(parents=True)
    for path in (CHECKOUT / "reports").iterdir():
        if path.is_file() and path.suffix != ".ipynb" and path.name != EXECUTED:
            shutil.copy(path, folder)
    return folder


def reports(root: Path, hostile: bool = False) -> Path:
    """A `reports` folder with the shipped templates over the two bound chapters, and the pages of
    two runs."""
    folder = templates(root / "reports")
    settings = yaml.safe_load((folder / "_quarto.yml").read_text())
    settings["book"]["chapters"] = [
        "index.ipynb",
        {"part": "Second part", "chapters": ["one.ipynb"]},
    ]
    (folder / "_quarto.yml").write_text(yaml.safe_dump(settings, sort_keys=False))
    chapters(root / "executed", hostile)
    assert to_markdown(root / "executed" / "index.ipynb", folder / "index.ipynb") is None
    assert to_markdown(
        root / "executed" / "one.ipynb", folder / "one.ipynb", "a cell divided by zero"
    )
    metrics = [
        {
            "step": i,
            "loss": 5.0 - i,
            "step_ms": 9.0,
            "tokens_in_step": 900,
            "tokens_per_s": 100.0 + i,
        }
        for i in range(3)
    ]
    text = "<script>document.title = 'taken'</script>"
    write_run(
        root / "runs",
        "memory",
        "a",
        results={"tokens_per_s": 5.0, "mfu_peak_source": text, "val_loss": 2.5, "step_ms": 12345},
        config={"x": {"y": 1}, "same": 2},
        metrics=metrics,
    )
    write_run(
        root / "runs",
        "memory",
        "b",
        outcome="oom",
        reason=text,
        results={"val_loss": 2.75, "step_ms": 12300},
        config={"x": {"y": 3}, "same": 2},
    )
    write_run_pages(find_runs(root / "runs"), folder)
    return folder


def quarto() -> bool:
    return shutil.which("quarto") is not None


@pytest.fixture(scope="module", params=["pandoc", "quarto"])
def book(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "quarto" and not quarto():
        pytest.skip("quarto is not on PATH")
    root = tmp_path_factory.mktemp(request.param)
    made = render(reports(root, hostile=True), root / "out", ["html", "pdf"], request.param)
    assert [path.name for path in made] == [HTML, PDF]
    return root / "out"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium or Chrome on PATH")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the playwright package is not installed"
    )
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file; at the end nothing may have been asked of a network, and (of our own pages) no
    error logged."""
    complaints: list[str] = []
    pages = []

    def visitor(path: Path, width: int = 1280, **options: Any) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        pages.append(page)
        if not (
            path.parent / "site_libs"
        ).exists():  # Quarto's own scripts are modules, which no browser loads from a file
            page.on(
                "console",
                lambda message: message.type == "error" and complaints.append(message.text),
            )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: request.url.startswith("http") and complaints.append(request.url),
        )
        page.goto(path.as_uri())
        return page

    yield visitor
    for page in pages:
        page.close()
    assert complaints == []


def chapter_page(book: Path) -> Path:
    return book / ("one.html" if (book / "one.html").exists() else HTML)


def test_both_engines_number_the_same_and_resolve_every_reference(
    book: Path, visit: Callable[..., Any]
) -> None:
    page = visit(chapter_page(book))
    text = page.inner_text("main").replace("\xa0", " ")
    assert re.search(r"Figure 2\.1[.:] Loss over steps\.", text) and re.search(
        r"Table 2\.1[.:] All rows\.", text
    )
    assert (
        re.search(r"see Figure 2\.1, Table 2\.1 and (Chapter|Section) 2", text) and "?@" not in text
    )
    assert "More in Section 2.1.1." in text
    assert "Dao" in page.inner_text("body") and "@dao" not in text and "Zażółć gęślą jaźń" in text
    assert page.locator("figure img").count() == 1 and page.locator("math").count() == 2
    assert all(
        page.evaluate(
            "[...document.images].map(image => image.naturalWidth > 0 && image.alt === 'A line "
            "that falls.')"
        )
    )
    assert "ZeroDivisionError" in text and "<b>zero</b>" in text
    assert "This chapter did not complete." in text and "a cell divided by zero" in text
    dead = (
        "[...document.querySelectorAll('main a[href^=\"#\"]')].filter(a => a.hash.length > 1 "
        "&& "
        "!document.getElementById(decodeURIComponent(a.hash.slice(1)))).length"
    )
    assert page.evaluate(dead) == 0


def test_hostile_outputs_and_records_are_text(book: Path, visit: Callable[..., Any]) -> None:
    host = (
        Path("/etc/hostname").read_text().strip() if Path("/etc/hostname").exists() else "no host"
    )
    for path in (chapter_page(book), *book.glob("runs/*/*.html"), book / "runs" / "index.html"):
        page = visit(path)
        assert page.title() != "taken"
        assert (
            page.locator(
                "iframe:not([src^='runs/']), [onerror], a[href^='javascript:'], img[src^='http'], "
                "img[src^='/']"
            ).count()
            == 0
        )
    html = chapter_page(book).read_text()
    assert not re.search(r"""<[^>]*=["']?[^"'>]*198\.51\.100\.7""", html)  # as text it does nothing
    assert f">{host}<" not in html
    assert "foreignObject" not in html and len(list(book.rglob("*.svg"))) <= 3


def test_the_pdf_holds_the_chapters_and_their_programs(book: Path) -> None:
    pypdf = pytest.importorskip("pypdf")
    pages = [page.extract_text() for page in pypdf.PdfReader(book / PDF).pages]
    text = re.sub(r"\s+", " ", " ".join(pages))
    assert (
        "Loss over steps." in text
        and "Zażółć" in text
        and "see Figure 2.1, Table 2.1" in text
        and "Dao" in text
    )
    assert "Large-scale AI engineering" in pages[0] and "lab.figure()" in text and "?@" not in text
    # the abstract
    assert date.today().isoformat() in pages[0]
    abstract = " ".join(pages[0].split())
    assert re.search(r"the step [\d.]+x as fast as in eager", abstract), "its numbers are no links"
    assert text.count("Loss over steps") == 2  # in the list of figures, too
    assert "Answer." not in text and "Data (CSV)" not in text
    assert text.rindex("Answers") < text.index("2.1.1. Seven is"), "numbered as its exercise"
    parts = text.replace(" ", "").count("SECONDPART")
    assert parts == 2, "in the contents and before its chapter"
    assert "(2.1)" not in text, "equations have no numbers"


def test_a_table_longer_than_a_page_has_its_head_on_each(tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf")
    folder = reports(tmp_path)
    shown = table(pd.concat([ROWS] * 8, ignore_index=True))
    output = display({"text/markdown": shown.data}, **{"text/markdown": shown.metadata})
    code = '#| label: tbl-long\n#| tbl-cap: "All rows."\nlab.table()'
    end = new_markdown_cell("The chapter ends.")
    cells = [new_markdown_cell("# One"), new_code_cell(code, outputs=[output]), end]
    nbformat.write(new_notebook(cells=cells), tmp_path / "long.ipynb")
    assert to_markdown(tmp_path / "long.ipynb", folder / "one.ipynb") is None
    made = render(folder, tmp_path / "out", ["pdf"], "pandoc")
    pages = [page.extract_text() for page in pypdf.PdfReader(made[0]).pages]
    rows = {page: len(re.findall(r"(?m)^v\d+ \d", page)) for page in pages}
    assert sum(rows.values()) == 8 * len(ROWS) and max(rows.values()) < sum(rows.values())
    assert all(("wide column 5" in page) == (number > 0) for page, number in rows.items())
    text = "".join(pages)
    assert text.count("All rows.") == 1 and text.count("All rows") == 2, "in the list, too"


@pytest.mark.parametrize("engine", ["pandoc", "quarto"])
def test_figures_and_tables_have_the_same_numbers_in_both_editions(
    tmp_path: Path, engine: Engine
) -> None:
    pypdf = pytest.importorskip("pypdf")
    if engine == "quarto" and not quarto():
        pytest.skip("quarto is not on PATH")
    folder, cells = reports(tmp_path), [new_markdown_cell("# One {#sec-one}")]
    for name, times in (("first", 1), ("long", 8), ("last", 1)):
        shown = table(pd.concat([ROWS] * times, ignore_index=True))
        for kind, data in (("fig", {"image/svg+xml": SVG}), ("tbl", {"text/markdown": shown.data})):
            code = f'#| label: {kind}-{name}\n#| {kind}-cap: "The {name} one."\nlab.show()'
            words = new_markdown_cell("Some words. " * 60)
            cells += [words, new_code_cell(code, outputs=[display(data)])]
    nbformat.write(new_notebook(cells=cells), tmp_path / "floats.ipynb")
    assert to_markdown(tmp_path / "floats.ipynb", folder / "one.ipynb") is None
    assert len(render(folder, tmp_path / "out", ["html", "pdf"], engine)) == 2
    printed = " ".join(
        page.extract_text() for page in pypdf.PdfReader(tmp_path / "out" / PDF).pages
    )
    html = re.sub("<[^>]+>", "", (tmp_path / "out" / "one.html").read_text())
    expected = {
        (f"{kind} 2.{number}", name)
        for kind in ("Figure", "Table")
        for number, name in enumerate(("first", "long", "last"), 1)
    }
    for text in (printed, html):
        text = re.sub(r"\s|&nbsp;", " ", text)
        found = re.findall(r"((?:Figure|Table) [\d.]+\d)[.:] The (\w+) one\b", text)
        assert set(found) == expected


def test_chapters_follow_each_other_on_a_page_whose_head_names_both(tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf")
    folder, words = reports(tmp_path), "Some words. " * 200
    cells = [new_markdown_cell(f"# The {name}\n\n{words}") for name in ("old", "new", "last")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "short.ipynb")
    assert to_markdown(tmp_path / "short.ipynb", folder / "one.ipynb") is None
    (made,) = render(folder, tmp_path / "out", ["pdf"], "pandoc")
    pages = [page.extract_text() for page in pypdf.PdfReader(made).pages]
    assert len(pages) <= 2 and "2 The old" in pages[0] and "4 The last" in pages[-1]
    assert all(len(page) > 3000 for page in pages[:-1]), "no page is half empty"


def test_what_typst_warns_of_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = reports(tmp_path)
    template = folder / "typst-show.typ"
    template.write_text(template.read_text().replace("Libertinus Serif", "No Such Serif"))
    assert render(folder, tmp_path / "out", ["pdf"], "pandoc")
    assert "report: warning: unknown font family: no such serif" in capfd.readouterr().out


def test_a_part_of_the_pdf_begins_with_its_title() -> None:
    pypandoc = pytest.importorskip("pypandoc")
    part = "::: quarto-book-part\n`<!-- Quarto's mark -->`{=html}\n\nMany GPUs\n:::"
    filters = [f"--lua-filter={CHECKOUT / 'reports' / 'book.lua'}"]
    made = pypandoc.convert_text(part, "typst", format="markdown", extra_args=filters)
    assert made.strip() == "#part[Many GPUs]", "no empty line before it"


def filtered(text: str, to: str, folder: Path) -> str:
    """The text as reports/book.lua leaves it, seen from a folder with its pictures."""
    pypandoc = pytest.importorskip("pypandoc")
    options = [f"--lua-filter={CHECKOUT / 'reports' / 'book.lua'}", "--wrap=none"]
    return str(pypandoc.convert_text(text, to, "markdown", options, cworkdir=folder))


def test_drawings_of_all_widths_are_shown_at_one_scale(tmp_path: Path) -> None:
    for width in (288, 432):
        drawing = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}pt" height="144pt"/>'
        (tmp_path / f"{width}.svg").write_text(drawing)
    text = "![one](288.svg)\n\n![two](432.svg)"
    paper, screen = (filtered(text, to, tmp_path) for to in ("typst", "html"))
    assert re.findall(r"width: ([\d.]+)in, height: ([\d.]+)in", paper) == [
        ("3.333", "1.667"),
        ("5.000", "1.667"),
    ], "five sixths"
    assert re.findall(r"--points: ([\d.]+)", screen) == ["288", "432"]


def test_attributes_stand_in_one_order(tmp_path: Path) -> None:
    """The names of a table of Lua have another order in each process."""
    drawing = '<svg xmlns="http://www.w3.org/2000/svg" width="288pt" height="144pt">'
    panels = '<desc data-panels="0.5,0.5;1,1"></desc></svg>'
    (tmp_path / "one.svg").write_text(drawing + panels)
    text = '![one](one.svg){fig-alt="two" alt="three"}'
    made = {filtered(text, "html", tmp_path) for _ in range(6)}
    assert len(made) == 1 and 'fig-alt="two"' in made.pop()


def test_a_command_ends_a_line_at_its_spaces_alone(tmp_path: Path) -> None:
    made = filtered("`lsai predict --gpu h100 -- --batch-size <8>`", "html", tmp_path)
    found = re.findall('<span class="whole">(.*?)</span>', made)
    assert found == ["--gpu", "--", "--batch-size"] and "&lt;8&gt;</code>" in made


def test_a_table_that_waits_for_runs_is_a_line_of_the_pdf_and_in_its_list(tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf")
    folder = reports(tmp_path)
    table = "| will stand here | after |\n|:--|:--|\n| | `make report` |"
    cell = f"# Yours\n\n::: {{#tbl-own}}\n{table}\n\nYour runs.\n:::"
    nbformat.write(new_notebook(cells=[new_markdown_cell(cell)]), tmp_path / "short.ipynb")
    assert to_markdown(tmp_path / "short.ipynb", folder / "one.ipynb") is None
    (made,) = render(folder, tmp_path / "out", ["pdf"], "pandoc")
    text = "\n".join(page.extract_text() for page in pypdf.PdfReader(made).pages)
    assert "Stands here after make report" in text
    assert text.index("Tables") < text.rindex("Your runs")


def test_word_numbers_chapters_as_the_other_formats_do(tmp_path: Path) -> None:
    pypandoc = pytest.importorskip("pypandoc")
    if not quarto():
        pytest.skip("quarto is not on PATH")
    folder = reports(tmp_path)
    (folder / EXECUTED).write_text("project: { type: book }\n")
    out = str(tmp_path / "out")
    command = ["quarto", "render", str(folder), "--to", "docx", "--output-dir", out]
    subprocess.run(command, check=True, capture_output=True)
    text = pypandoc.convert_file(tmp_path / "out" / "lab-report.docx", "plain")
    assert "see Figure 2.1, Table 2.1" in re.sub(r"\s+", " ", text), "a part is no chapter"


@pytest.mark.parametrize("engine", ["pandoc", "quarto"])
def test_the_list_of_figures_names_the_pages_of_the_captions(
    tmp_path: Path, engine: Engine
) -> None:
    pypdf = pytest.importorskip("pypdf")
    if engine == "quarto" and not quarto():
        pytest.skip("quarto is not on PATH")
    folder, cells = reports(tmp_path), [new_markdown_cell("# One {#sec-one}")]
    for name in ("first", "second", "third", "fourth", "fifth"):
        code = f'#| label: fig-{name}\n#| fig-cap: "The {name} one."\nlab.figure()'
        cells += [
            new_markdown_cell("\n\n".join(["Some words. " * 60] * 4)),
            new_code_cell(code, outputs=[display({"image/svg+xml": SVG})]),
        ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "floats.ipynb")
    assert to_markdown(tmp_path / "floats.ipynb", folder / "one.ipynb") is None
    made = render(folder, tmp_path / "out", ["pdf"], engine)
    printed = [page.extract_text() for page in pypdf.PdfReader(made[0]).pages]
    lines = [line for page in printed for line in page.splitlines() if "Some words." in line]
    assert len(lines) > 200 and 45 < max(map(len, lines)) <= 75, "two columns of text"
    pages = [re.sub(r"\s+", " ", page) for page in printed]
    for name in ("first", "second", "third", "fourth", "fifth"):
        (listed,) = {
            int(at) for page in pages[-2:] for at in re.findall(rf"The {name} one[. ]*(\d+)", page)
        }
        assert f"The {name} one." in pages[listed - 1]


def test_tables_sort_filter_and_save(book: Path, visit: Callable[..., Any]) -> None:
    page = visit(chapter_page(book))
    column = (
        "[...document.querySelectorAll('#tbl-one-rows tbody tr')].filter(r => "
        "!r.hidden).map(r => r.cells[0].textContent)"
    )
    page.click("#tbl-one-rows th:nth-child(2) button")
    assert page.evaluate(column)[:2] == ["v3", "v1"]
    page.click("#tbl-one-rows th:nth-child(2) button")
    assert page.evaluate(column)[:2] == ["v2", "v6"]
    page.locator("#tbl-one-rows input").fill("v7")
    assert page.evaluate(column) == ["v7"]
    figure, rows = [
        (book / link.get_attribute("href")).read_text() for link in page.locator("a.csv").all()
    ]
    assert figure == "step,loss\n0,3.5\n" and rows == SAVED.to_csv(index=False)


@pytest.mark.parametrize("width", [1024, 1280, 1400])
def test_programs_are_whole_and_text_has_lines_that_are_read(
    book: Path, visit: Callable[..., Any], width: int
) -> None:
    """A line of a program has at most 100 characters; of text, about 75."""
    page = visit(chapter_page(book), width)
    program = page.locator("main pre code", has_text="lab.say()")
    assert len(program.inner_text().strip()) == 100
    assert program.evaluate("code => (e => e.scrollWidth <= e.clientWidth)(code.closest('pre'))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("main p").first.evaluate("p => p.clientWidth") <= 46 * 16
    if width == 1024 and not (book / "site_libs").exists():
        beside = "Math.round(document.querySelector('main').getBoundingClientRect().left)"
        contents = page.locator("#TOC").bounding_box()
        assert contents["x"] == 0 and contents["width"] <= page.evaluate(beside)


def test_formulas_have_their_font_and_dates_are_whole(
    book: Path, visit: Callable[..., Any]
) -> None:
    page = visit(chapter_page(book), 1280)
    page.evaluate("document.fonts.ready")
    fonts = "[...document.fonts].map(font => [font.family.replaceAll('\"', ''), font.status])"
    assert ["STIX Two Math", "loaded"] in page.evaluate(fonts)
    lines = "dates => dates.map(date => date.getClientRects().length)"
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.locator("#tbl-one-rows .whole").evaluate_all(lines) == [1] * 8


def test_on_a_phone_a_table_says_that_it_moves_and_its_rows_keep_their_names(
    book: Path, visit: Callable[..., Any]
) -> None:
    page = visit(chapter_page(book), 390)
    page.wait_for_selector("#tbl-one-rows table[tabindex]")
    caption = page.locator("figure:has(table) > figcaption").first
    assert "Swipe" in caption.evaluate("e => getComputedStyle(e, '::before').content")
    table = page.locator("#tbl-one-rows table")
    left = "table => Math.round(table.rows[1].cells[0].getBoundingClientRect().left)"
    before = table.evaluate(left)
    table.evaluate("table => { table.scrollLeft = 200; }")
    assert table.evaluate("table => table.scrollLeft") == 200
    assert abs(table.evaluate(left) - before) <= 2  # the space between cells


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_its_window(
    book: Path, visit: Callable[..., Any], width: int
) -> None:
    for path in (
        chapter_page(book),
        *list(book.glob("runs/*/*.html"))[:1],
        book / "runs" / "index.html",
    ):
        page = visit(path, width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        for fold in page.locator("main details summary, .code-fold summary").all():
            fold.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path


def test_a_page_a_chapter_without_quarto(book: Path, visit: Callable[..., Any]) -> None:
    """Skip link first, contents with this chapter's sections, previous and next, search on a file;
    every link within the book leads somewhere."""
    if (book / "site_libs").exists():
        pytest.skip("Quarto has its own")
    page = visit(book / "one.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the text"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert "quarto-book-part" not in page.content()  # a part's title is in the contents alone
    contents = page.locator("#TOC details")
    assert "SECOND PART\n2 One" in contents.inner_text()
    assert contents.locator("[aria-current=page]").inner_text() == "2 One"
    assert "2.1 Finding" in contents.inner_text() and contents.locator("ul ul").count() == 1
    field = page.get_by_label("Search the report")
    field.fill("perplexity")
    found = page.locator("#TOC [role=status] a")
    found.first.wait_for()
    hit = {"href": "one.html", "title": "a", "terms": "", "text": "uses MFU"}
    hits = [hit, hit | {"title": "b", "terms": "Use of FLOPs (MFU)"}, hit | {"title": "c MFU"}]
    page.evaluate("hits => { [window.kept, searchIndex] = [searchIndex, hits]; }", hits)
    field.fill("mfu")
    order = [text.split("…")[0] for text in found.all_inner_texts()]
    assert [text.strip() for text in order] == ["c MFU", "b", "a"], "headings, then terms"
    page.evaluate("searchIndex = kept")
    field.fill("look perplexity")
    page.locator("#TOC [role=status] a").first.click()
    assert page.url.endswith("one.html#sec-finding")
    page.locator("a[rel=prev]").click()
    assert page.url.endswith("index.html") and page.locator("a[rel=prev]").count() == 0
    for path in book.glob("*.html"):
        for target in re.findall(r'href="([\w./-]+\.html)', path.read_text()):
            assert target.startswith("runs/") or (book / target).exists(), (path.name, target)
        ids = set(re.findall(r'id="([^"]+)"', path.read_text()))
        assert set(re.findall(r'href="#([^"]+)"', path.read_text())) <= ids, path.name
    front = (book / HTML).read_text()
    assert 'href="one.html#tbl-one-rows"' in front, "a table of another page"
    phone = visit(book / "one.html", 390)
    assert not phone.locator("#TOC details").evaluate("list => list.open")


def brand() -> dict[str, dict[str, str]]:
    colors = yaml.safe_load((CHECKOUT / "reports" / "_brand.yml").read_text())["color"]
    assert isinstance(colors, dict)
    return colors


def rgb(color: str) -> str:
    return f"rgb({', '.join(str(int(color[at : at + 2], 16)) for at in (1, 3, 5))})"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_in_the_colours_of_the_brand_as_the_system_asks(
    book: Path, visit: Callable[..., Any], scheme: str
) -> None:
    for path in (chapter_page(book), book / "runs" / "index.html"):
        page = visit(path, color_scheme=scheme)
        for name, selector, style in (
            ("background", "body", "backgroundColor"),
            ("foreground", "main", "color"),
            ("primary", "main a[href]", "color"),
        ):
            shown = page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{style}")
            assert shown == rgb(brand()[name][scheme]), (path.name, name)
    card = "getComputedStyle(document.querySelector('main figure img')).backgroundColor"
    page = visit(chapter_page(book), color_scheme=scheme)
    assert page.evaluate(card) == "rgb(255, 255, 255)", "figures are drawn for white"


def test_the_reader_chooses_light_or_dark(book: Path, visit: Callable[..., Any]) -> None:
    page = visit(chapter_page(book), color_scheme="light")
    quarto_made = (book / "site_libs").exists()
    button = ".quarto-color-scheme-toggle >> visible=true" if quarto_made else ".theme"
    page.locator(button).first.click()
    background = "getComputedStyle(document.body).backgroundColor"
    page.wait_for_function(f"{background} === '{rgb(brand()['background']['dark'])}'")
    if not quarto_made:  # Quarto keeps the choice where it is served, not for a file
        page.reload()
        page.wait_for_function(f"{background} === '{rgb(brand()['background']['dark'])}'")


def test_search_on_a_file(book: Path, visit: Callable[..., Any]) -> None:
    page = visit(book / HTML)
    if (book / "site_libs").exists():
        page.fill(".aa-Input", "perplexity")
        page.wait_for_selector(".aa-Item")
        assert "perplexity" in page.inner_text(".aa-Panel")
        return


def test_tables_are_worked_by_keyboard(book: Path, visit: Callable[..., Any]) -> None:
    page = visit(chapter_page(book))
    page.focus("#tbl-one-rows th:nth-child(2) button")
    page.keyboard.press("Enter")
    assert page.get_attribute("#tbl-one-rows th:nth-child(2)", "aria-sort") == "ascending"


def test_a_figure_tells_its_values_to_pointer_finger_and_keyboard(
    book: Path, visit: Callable[..., Any]
) -> None:
    page = visit(chapter_page(book))
    told, figure = page.locator("#told"), page.locator(".marked")
    figure.scroll_into_view_if_needed()
    box = figure.bounding_box()

    def point(across: float, down: float) -> None:
        page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])

    assert told.is_hidden() and page.locator("input[type=range]").count() == 0
    for across in (0.32, 0.4, 0.49):
        point(across, 0.5)  # all of the bar
        assert "value: 3.5" in told.inner_text()
    point(0.8, 0.55)  # near the point
    assert "value: 4.5" in told.inner_text()
    point(0.05, 0.05)
    assert told.is_hidden()
    figure.focus()
    page.keyboard.press("ArrowRight")
    assert figure.get_attribute("aria-valuetext") == "loss\nvalue: 3.5"
    page.keyboard.press("ArrowRight")
    assert "value: 4.5" in told.inner_text() and figure.get_attribute("aria-valuenow") == "2"
    page.keyboard.press("Tab")
    assert told.is_hidden() and not figure.evaluate("e => e === document.activeElement"), "no trap"
    figure.focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/index.html")
    phone = visit(chapter_page(book), 390, has_touch=True)
    phone.locator(".marked").scroll_into_view_if_needed()
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    phone.locator(".tip").last.evaluate("e => e.scrollIntoView({ inline: 'end', block: 'center' })")
    box = phone.locator(".tip").last.bounding_box()
    phone.touchscreen.tap(box["x"], box["y"])
    assert "value: 4.5" in phone.locator("#told").inner_text()
    shown = phone.locator("#told").bounding_box()
    assert shown["x"] >= 0 and shown["x"] + shown["width"] <= 390, "inside of the window"
    phone.locator(".tip").first.evaluate(
        "e => e.scrollIntoView({ inline: 'center', block: 'center' })"
    )
    box = phone.locator(".tip").first.bounding_box()
    for url in (phone.url, "**/runs/index.html"):  # the first tap shows, the second opens
        phone.touchscreen.tap(box["x"] + box["width"] / 2, box["y"])
        phone.wait_for_url(url)


def test_panels_beside_each_other_stack_on_a_phone(
    tmp_path: Path, visit: Callable[..., Any]
) -> None:
    folder = reports(tmp_path)
    fig, panels = plt.subplots(1, 2, figsize=(6.3, 2), sharey=True)
    data = pd.DataFrame({"gib": [3.0, 5.0], "name": ["left one", "right one"]})
    for axes, (_, row) in zip(panels, data.iterrows(), strict=True):
        axes.bar([row["name"]], [row["gib"]])
        axes.set(ylabel="memory (GiB)" if row["gib"] == 3 else "")
    shown: list[dict[str, Any]] = []
    with mock.patch("IPython.display.display", lambda bundle, **_: shown.append(bundle)):
        figure(fig, data=data)
    assert len(re.findall("[;]", re.findall('data-panels="(.*?)"', shown[0]["image/svg+xml"])[0]))
    bundle = shown[0] | {"image/png": PNG}
    cell = new_code_cell('#| label: fig-two\n#| fig-cap: "Two."', outputs=[display(bundle)])
    nbformat.write(new_notebook(cells=[new_markdown_cell("# One"), cell]), tmp_path / "two.ipynb")
    assert to_markdown(tmp_path / "two.ipynb", folder / "one.ipynb") is None
    render(folder, tmp_path / "out", ["html"], "pandoc")
    page = visit(tmp_path / "out" / "one.html", 390)
    page.locator(".panel").first.wait_for()
    boxes = [panel.bounding_box() for panel in page.locator(".panel").all()]
    assert len(boxes) == 2 and boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"]
    assert all(box["x"] + box["width"] <= 390 and box["height"] > 100 for box in boxes)
    assert page.locator(".panel").last.locator(".part").count() == 2, "its values stand beside it"
    part = page.locator(".panel").last.locator(".part").last
    part.scroll_into_view_if_needed()
    box = part.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "right one" in page.locator("#told").inner_text()
    assert visit(tmp_path / "out" / "one.html", 1280).locator(".panel").count() == 0


def test_rows_that_lean_on_others_stay_and_links_in_headers_lead(
    tmp_path: Path, visit: Callable[..., Any]
) -> None:
    folder = reports(tmp_path)
    leaning = "| technique | GiB |\n|:--|--:|\n| eager | 3 |\n| the same, fused | 1 |\n"
    linked = "| name | [Chapter](#sec-one) |\n|:--|--:|\n| a | 3 |\n| b | 1 |\n"
    cells = [new_markdown_cell(f"# One {{#sec-one}}\n\n{leaning}\n\n{linked}")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "tables.ipynb")
    assert to_markdown(tmp_path / "tables.ipynb", folder / "one.ipynb") is None
    render(folder, tmp_path / "out", ["html"], "pandoc")
    page = visit(tmp_path / "out" / "one.html")
    first, second = page.locator("main table").all()
    assert first.get_by_role("button").count() == 0
    second.get_by_role("button", name="sort by Chapter").click()
    assert second.locator("tbody tr").first.inner_text().startswith("b")
    assert page.locator("th button a").count() == 0
    second.get_by_role("link", name="Chapter").click()
    assert page.url.endswith("#sec-one")


def test_a_number_of_a_claim_leads_to_the_page_of_its_run() -> None:
    claims = judged("weak_scaling", "weak_scaling_two")
    pages = {page_name(run.folder) for run in recorded_runs(CHECKOUT / "reports")}
    for folders in claims["runs"]:
        assert folders and {page_name(folder) for folder in folders} <= pages


def test_a_box_is_a_box(book: Path, visit: Callable[..., Any]) -> None:
    page = visit(chapter_page(book))
    box = page.locator("blockquote").first
    assert (
        "Your machine" in box.inner_text() and box.locator("strong", has_text="well").count() == 1
    )


def test_an_answer_is_folded_until_it_is_asked_for(book: Path, visit: Callable[..., Any]) -> None:
    page = visit(chapter_page(book))
    answer = page.get_by_text("Seven is")
    assert not answer.is_visible() and "Answer." not in page.inner_text("main")
    page.locator("summary", has_text="Answer").click()
    assert answer.is_visible() and answer.locator("math").count() == 1


def test_a_link_alone_in_its_paragraph_shows_the_page(
    book: Path, visit: Callable[..., Any]
) -> None:
    page = visit(book / HTML)
    page.locator("iframe").scroll_into_view_if_needed()
    shown = page.frame_locator("iframe[title='Every run']")
    assert shown.locator("[data-run]").count() == 2 and not shown.locator("nav").is_visible()
    page.click("main p > a >> text=Every run")
    assert page.url.endswith("runs/index.html") and page.locator("nav").is_visible()


def test_any_two_runs_are_compared_by_what_differs(book: Path, visit: Callable[..., Any]) -> None:
    page = visit(book / "runs" / "index.html")
    for box in page.locator("[data-run]").all():
        box.check()
    shown = page.locator("#tool").inner_text()
    rows = [row.split("\t") for row in shown.split("\n")]
    assert ["x y", "1", "3", "3.00x"] in rows
    assert ["val loss", "2.5", "2.75", "+0.25 nats"] in rows, "losses have differences"
    assert ["step (ms)", "12,345", "12,300", "−0.365%"] in rows
    assert shown.startswith("Two single runs.")
    assert re.fullmatch(r"memory: a \(\S+\) and memory: b \(\S+\)", page.title())
    assert (
        shown.index("Results") < shown.index("outcome") < shown.index("Configuration")
        and "same" not in shown
    )
    page.evaluate("document.querySelector('main').style.minHeight = '4000px'; scrollTo(0, 2000)")
    assert page.locator("#tool").bounding_box()["y"] == 0, "it stays in sight"
    page.get_by_role("button", name="clear memory: b").click()
    assert page.locator("[data-run]:checked").count() == 1 and "tick another" in page.inner_text(
        "#tool"
    )
    page.get_by_role("button", name="clear memory: a").click()
    assert page.inner_text("#tool") == "" and page.title() == page.inner_text("h1") == "All runs"
    a, b = page.locator("[data-run]").evaluate_all("boxes => boxes.map((box) => box.dataset.run)")
    page.goto("about:blank")
    page.goto((book / "runs" / "index.html").as_uri() + f"#{b},{a}")  # as a number of the text does
    assert "0.333x" in page.inner_text("#tool")
    page.click("td a >> nth=1")
    shown = page.inner_text("main")
    assert "x.y" in shown and "tokens_per_s" in shown and "Measurements" in shown


def test_the_list_of_runs_says_what_a_reader_looks_for_and_is_chosen_from(
    tmp_path: Path, visit: Callable[..., Any]
) -> None:
    folder = templates(tmp_path / "reports")
    for at in range(14):
        write_run(
            tmp_path / "runs",
            "memory" if at % 3 else "speed",
            f"v{at}",
            results={"tokens_per_s": 8872.4 + at},
            outcome="oom" if at == 5 else "ok",
        )
    write_run_pages(find_runs(tmp_path / "runs"), folder)
    page = visit(folder / "runs" / "index.html")
    rows = page.locator("tbody tr >> visible=true")
    assert rows.count() == 14 and "8,872 tokens/s" in page.inner_text("tbody")
    page.get_by_label("outcome").select_option("oom")
    assert rows.count() == 1 and "v5" in rows.inner_text()
    page.get_by_label("outcome").select_option("any")
    page.get_by_label("study").select_option("speed")
    assert rows.count() == 5
    page.get_by_label("Filter the rows").fill("V9 speed")
    assert rows.count() == 1
    for box in page.locator("[data-run]").all()[:3]:
        box.dispatch_event("click")
    assert page.locator("[data-run]:checked").count() == 2, "the first makes room for the third"
    assert page.inner_text("#tool").startswith("Two at most: “")


def fits_page(folder: Path) -> Path:
    """The page of what fits, from the committed tables."""
    reports = templates(folder / "reports")
    for name in ("fits.csv", "steps.jsonl"):
        path = table_path(folder).with_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(table_path(CHECKOUT).with_name(name), path)
    write_run_pages([], reports)
    return reports / "runs" / "fits.html"


def test_without_scripts_what_fits_is_a_table(tmp_path: Path, browser: Any) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(fits_page(tmp_path).as_uri())
    table = pd.read_csv(table_path(CHECKOUT))
    assert page.locator("tbody tr").count() == len(table)
    needs = table["needs"].iloc[0]
    page.locator("summary").click()
    assert page.locator("tbody tr").first.inner_text().split("\t")[5] == f"{needs:.4g}"
    page.close()


def test_without_scripts_the_page_reads_the_same(book: Path, browser: Any) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(chapter_page(book).as_uri())
    assert (
        "Loss over steps." in page.inner_text("main")
        and page.locator("#tbl-one-rows tbody tr").count() == 13
    )
    page.close()


def test_without_a_renderer_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "pypandoc.get_pandoc_path", lambda: (_ for _ in ()).throw(OSError("No pandoc was found"))
    )
    assert render(reports(tmp_path), tmp_path / "out", ["html", "pdf"], "pandoc") == []
    said = capsys.readouterr().out
    assert (
        "the HTML could not be made: no pandoc here" in said and "the PDF could not be made" in said
    )


def test_a_clone_without_executed_chapters_says_what_to_run(tmp_path: Path) -> None:
    folder = templates(tmp_path / "reports")
    assert "type" not in yaml.safe_load((folder / "_quarto.yml").read_text())["project"], (
        "of a book Quarto wants every chapter first"
    )
    command = (
        ["quarto", "render", str(folder)]
        if quarto()
        else [sys.executable, str(folder / "prepare.py")]
    )
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and "make report NO_RUN=1" in done.stderr and "ERROR" not in done.stderr


def test_the_front_page_names_the_license(tmp_path: Path) -> None:
    folder, out = reports(tmp_path), tmp_path / "out"
    render(folder, out, ["html"], "pandoc")
    title = re.findall(r"<p class=date>(.*?)</p>", (out / HTML).read_text())
    assert len(title) == 1 and title[0].endswith(" · The LSAI lab · Apache-2.0")


def test_a_pdf_that_fails_costs_the_pdf_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = reports(tmp_path)
    (folder / "typst-show.typ").write_text("#no-such-function()\n")
    made = render(folder, tmp_path / "out", ["html", "pdf"], "pandoc")
    assert [path.name for path in made] == [HTML] and "no-such-function" in capsys.readouterr().out
    assert not list(tmp_path.rglob("rendering-*"))


@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_a_damaged_notebook_is_shown_as_such(tmp_path: Path, damage: str) -> None:
    chapters(tmp_path)
    path = tmp_path / "one.ipynb"
    path.unlink() if damage == "gone" else path.write_text(
        path.read_text()[:200] if damage == "cut" else ""
    )
    assert "could not be read" in str(to_markdown(path, tmp_path / "bound.ipynb"))
    bound = nbformat.read(tmp_path / "bound.ipynb", as_version=4)
    assert "could not be read" in bound.cells[1].source and bound.cells[0].source == "# one"


@pytest.mark.parametrize(
    ("option", "code", "output"),
    [
        ("echo: true", 1, 1),
        ("echo: false", 0, 1),
        ("output: false", 1, 0),
        ("include: false", 0, 0),
    ],
)
def test_a_cell_shows_what_its_options_say(
    tmp_path: Path, option: str, code: int, output: int
) -> None:
    shown = [new_output("stream", text="what it printed")]
    cells = [
        new_markdown_cell("# One"),
        new_code_cell(f"#| {option}\nwhat_is_run()", outputs=shown),
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "one.ipynb")
    assert to_markdown(tmp_path / "one.ipynb", tmp_path / "bound.ipynb") is None
    text = (tmp_path / "bound.ipynb").read_text()
    assert (text.count("what_is_run()"), text.count("what it printed")) == (code, output)


@pytest.mark.parametrize("engine", ["pandoc", "quarto"])
def test_a_frame_as_the_value_of_a_cell_is_a_table_in_html_and_pdf(
    tmp_path: Path, visit: Callable[..., Any], engine: Engine
) -> None:
    if engine == "quarto" and not quarto():
        pytest.skip("quarto is not on PATH")
    pypdf = pytest.importorskip("pypdf")
    folder = reports(tmp_path)
    columns = pd.MultiIndex.from_product([["H100", "H200"], ["GiB", "a | b"]])
    index = pd.MultiIndex.from_tuples([("eager", 1), ("eager", 2), ("fp8", 1)], names=["way", "n"])
    frame = pd.DataFrame([[1.5, "<b>*x*</b>", 2, "-y"]] * 3, index=index, columns=columns)
    outputs = [
        new_output("execute_result", {"text/html": html, "text/plain": "as text"})
        for html in (frame._repr_html_(), "<p>no table</p>", "<td>x</td></table><table><tr><td>")
    ]
    cells = [
        new_markdown_cell("# One"),
        new_code_cell('#| label: tbl-frame\n#| tbl-cap: "A frame."\nframe', outputs=outputs[:1]),
        new_code_cell("something", outputs=outputs[1:2]),
        new_code_cell("broken", outputs=outputs[2:]),
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "frame.ipynb")
    assert to_markdown(tmp_path / "frame.ipynb", folder / "one.ipynb") is None
    render(folder, tmp_path / "out", ["html", "pdf"], engine)
    page = visit(tmp_path / "out" / "one.html")
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("main tr").all()]
    rows = [[cell.removesuffix(" ↕").strip() for cell in row] for row in rows]
    assert rows[0] == ["way", "n", "H100 GiB", "H100 a | b", "H200 GiB", "H200 a | b"]
    assert rows[1:3] == [
        ["eager" * (n == 1), str(n), "1.5", "<b>*x*</b>", "2", "-y"] for n in (1, 2)
    ]
    assert page.locator("main table").count() == 1 and "A frame." in page.inner_text("main")
    assert page.inner_text("main").count("as text") == 2
    text = "".join(each.extract_text() for each in pypdf.PdfReader(tmp_path / "out" / PDF).pages)
    assert "<b>*x*</b>" in text and "A frame." in text and text.count("as text") == 2


def test_a_cell_option_that_a_chapter_has_no_use_for_is_named(tmp_path: Path) -> None:
    cells = [new_markdown_cell("# One"), new_code_cell("#| layout-ncol: 2\nfigures()")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "one.ipynb")
    problem = to_markdown(tmp_path / "one.ipynb", tmp_path / "bound.ipynb")
    assert problem and problem.startswith("The cell option layout-ncol is not known here;")


def test_a_colour_that_the_brand_lacks_is_named(tmp_path: Path) -> None:
    folder = templates(tmp_path / "reports")
    (folder / "_brand.yml").write_text('color: { foreground: "#000000" }\n')
    with pytest.raises(UserError, match=r"_brand.yml: color.foreground is to be written as in"):
        write_run_pages([], folder)


def write_notebook(path: Path, *code: str) -> None:
    nbformat.write(
        new_notebook(cells=[new_markdown_cell(f"# {path.stem}"), *map(new_code_cell, code)]), path
    )


@pytest.mark.slow
def test_only_what_changed_is_executed_again(new_project: Callable[..., Project]) -> None:
    project = new_project()
    write_notebook(
        project.root / "notebooks" / "00-summary.ipynb",
        'import lsai_lab as lab\nlen(lab.load("machine"))',
    )
    load = (
        'import lsai_lab as lab\nlab.table(lab.load("memory")[["variant", "tokens_per_s", "run"]])'
    )
    write_notebook(project.root / "notebooks" / "65-yours.ipynb", load)
    folder = write_run(
        project.root / "reports" / "recorded" / "box",
        "memory",
        "baseline",
        results={"tokens_per_s": 1234.0},
    )
    command = ("report", "--no-run", "--engine", "pandoc", "--out", project.root / "out")

    def again() -> str:
        code, out, err = project.lsai(*command)
        assert code == 0, (out, err)
        return out

    def executed() -> list[str]:
        before = {path: path.stat().st_mtime_ns for path in build.glob("*.ipynb")}
        again()
        return sorted(
            path.stem
            for path in build.glob("*.ipynb")
            if path.stat().st_mtime_ns != before.get(path)
        )

    build = project.root / "reports" / "_build"
    assert executed() == ["65-yours", "index"]
    html = (project.root / "out" / "65-yours.html").read_text()
    assert "1,234" in html and f"runs/box/memory/{folder.name}.html" in html
    assert (project.root / "out" / "runs" / "box" / "memory" / f"{folder.name}.html").exists()
    assert executed() == []
    notebook = nbformat.read(project.root / "notebooks" / "00-summary.ipynb", as_version=4)
    notebook.cells[1].outputs = [new_output("stream", text="run and saved in an editor")]
    nbformat.write(notebook, project.root / "notebooks" / "00-summary.ipynb")
    assert executed() == [], "outputs saved in a notebook change nothing"
    row = {"step": 0, "loss": 1.0, "step_ms": 9.0, "tokens_in_step": 900, "tokens_per_s": 1e5}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert executed() == ["65-yours"]
    with (project.root / "params" / "studies" / "memory.yaml").open("a") as file:
        file.write("\n")
    assert executed() == ["65-yours", "index"], "any chapter may read a file of parameters"


def test_the_table_of_what_fits_is_what_is_predicted() -> None:
    """Rows of the committed table, computed again. `python tests/fits_table.py` writes it."""
    table, chosen = (
        pd.read_csv(table_path(CHECKOUT)),
        ["fused loss and blocks", "fused, full checkpointing"],
    )
    for model, names in MODELS.items():
        rows = table[table["model"] == model]
        assert (
            rows.groupby("technique")["tokens"]
            .apply(list)
            .map(lambda tokens: tokens == LENGTHS)
            .all()
        )
        assert list(rows["technique"].unique()) == list(names or dict(TECHNIQUES))
    again = fits("llama3.2-1b", 8192, chosen)
    committed = again[["model", "tokens", "technique"]].merge(table)
    for name in ("needs", "least", "activations", "H100", "RTX 4090"):
        assert committed[name].to_numpy() == pytest.approx(again[name].to_numpy(), rel=0.01), name


@pytest.mark.filterwarnings("error")
def test_a_mark_names_its_series_its_values_and_the_run_of_its_row() -> None:
    rows = pd.DataFrame(
        {
            "label": ["a", "b"],
            "gib": [0.0, 2.0],
            "tokens": [1500.0, 3000.0],
            "run": ["x/memory/a-1", "x/memory/b-2"],
        }
    )
    fig, axes = plt.subplots()
    axes.plot(rows["gib"], rows["tokens"] / 1e3, "o", label="H200")
    axes.set(xlabel="peak memory (GiB)", ylabel="thousand tokens/s")
    fig.canvas.draw()
    found = re.findall(
        r'data-run="(.*?)"><title>(.*?)</title>', tooltips(fig, fig.get_tightbbox(), rows), re.S
    )
    assert found[1] == (
        "memory/b-2",
        "H200\npeak memory: 2 GiB\nthousand tokens/s: 3\nlabel: b\nmemory/b",
    )
    assert len(found) == 2
    both = rows.assign(run=[("x/memory/a-1", run) for run in rows["run"]], variant=["k_1", "k_2"])
    axes.set(xlabel="peak memory (GiB)", ylabel="speed (longer is better)")
    axes.yaxis.set_major_formatter("{x:.0%}")
    shown = tooltips(fig, fig.get_tightbbox(), both)
    assert 'data-run="memory/a-1,memory/b-2"' in shown and "speed: 300%\n" in shown
    assert "k_2" not in shown, "a key is not for readers"
    plt.close(fig)
