"""The report as its readers meet it: HTML in a real browser, PDF by its text, mistakes as one line."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from report_fixture import KEYS, write_chapters, write_runs

from lsai_core.errors import UserError
from lsai_lab.report.appendix import appendix_markdown
from lsai_lab.report.bind import Meta, bind
from lsai_lab.report.build import build_report
from lsai_lab.report.chapter import fit_headings
from lsai_lab.report.outputs import plain_text
from lsai_lab.report.render import RenderResult, render
from lsai_lab.report.show import show_table, table_markdown

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    return write_chapters(root / "chapters"), write_runs(root / "runs", 12), root


@pytest.fixture(scope="module")
def report(inputs) -> RenderResult:
    chapters, runs, root = inputs
    return build_report(chapters, runs, root / "out", machine="laptop: żółw", date="2025-03-01", engine="pandoc")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium or Chrome on PATH")
    playwright = pytest.importorskip("playwright.sync_api", reason="the playwright package is not installed")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens a file at a window size; at the end no error may have been logged and nothing asked of a network."""
    complaints: list[str] = []
    pages = []

    def watch_console(message):
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def watch_requests(request):
        if not request.url.startswith(("file:", "data:")):
            complaints.append(request.url)

    def opener(path: Path, width: int = 1280, height: int = 900):
        page = browser.new_page(viewport={"width": width, "height": height})
        pages.append(page)
        page.on("console", watch_console)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", watch_requests)
        page.goto(path.as_uri())
        return page

    yield opener
    for page in pages:
        page.close()
    assert complaints == []


def test_html_is_complete_and_every_internal_link_has_a_target(report, open_page):
    page = open_page(report.html)
    dead = page.evaluate(
        "[...document.querySelectorAll('a[href^=\"#\"]')].map(a => decodeURIComponent(a.hash.slice(1)))"
        ".filter(id => !document.getElementById(id))"
    )
    assert dead == []
    images = page.evaluate("[...document.images].map(i => [i.complete, i.naturalWidth, i.alt])")
    assert len(images) == 3 and all(done and width > 0 and alt for done, width, alt in images)
    assert page.locator("figure.table").count() == 2
    assert page.locator("math").count() >= 4
    text = page.inner_text("main")
    assert "Table\u00a01. Peak memory falls from 12.3 to 6.0 GiB" in text and "zażółć gęślą jaźń" in text
    assert "See Table\u00a01, Figure\u00a01 and Section\u00a01" in text
    assert "pandoc" in page.inner_text("footer") and "typst" in page.inner_text("footer")
    assert "This cell failed" in text and "CUDA out of memory" in text
    assert "Did not finish" in text and "1 code cell after it did not run" in text
    assert "papermill" not in text and "An Exception was encountered" not in text
    assert "?@" not in text and "not produced" not in text


def test_contents_and_run_links_lead_where_they_say(report, open_page):
    page = open_page(report.html)
    page.click("#toc a:has-text('Memory')")
    assert page.evaluate("location.hash") == "#sec-memory"
    page.wait_for_function("Math.abs(document.getElementById('sec-memory').getBoundingClientRect().top) < 60")
    page.click("#tbl-headline a:has-text('8.10')")
    card = page.locator(f"#run-{KEYS[1]}")
    card.locator("table").wait_for(state="visible", timeout=5000)  # the link opens the run's provenance
    provenance = card.inner_text()
    for fact in (
        "variant_1",
        "laptop",
        "2.13.0",
        "f00dfeedf00d",
        "c0ffee",
        "uncommitted",
        "16.5 s",
        "n_layers=5",
        "lsai run",
    ):
        assert fact in provenance, fact
    card.locator("a:has-text('run page')").click()
    page.wait_for_load_state()
    assert "Run variant_1" in page.inner_text("main") and "not produced" in page.inner_text("main")
    page.click("main >> text=another")
    page.wait_for_load_state()
    assert page.url.endswith(f"index.html#run-{KEYS[0]}")


def test_search_finds_text_and_filters_the_contents(report, open_page):
    page = open_page(report.html)
    page.fill("#search", "zażółć GĘŚLĄ")
    assert not page.is_visible("#toc")
    assert page.locator("#results a").count() == 1
    assert "Summary" in page.inner_text("#results a")
    page.fill("#search", "variant_7")
    page.locator("#results a").first.click()
    page.fill("#search", "no such words anywhere")
    assert page.inner_text("#results") == "Nothing found."
    page.press("#search", "Escape")
    assert page.is_visible("#toc")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(report, open_page, width):
    page = open_page(report.html, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator("#tbl-wide .table-box")
    assert box.evaluate("b => b.scrollWidth > b.clientWidth"), "a wide table scrolls in its own box"
    text = page.locator("main > p").first.evaluate("p => p.clientWidth")
    assert (box.evaluate("b => b.clientWidth") > text + 100) == (width == 1280), (
        "wide tables use the room beside the text"
    )
    assert not page.is_visible("details.code pre"), "code is folded"


def test_pdf_holds_captions_polish_letters_and_resolved_references(report):
    pypdf = pytest.importorskip("pypdf")
    reader = pypdf.PdfReader(report.pdf)
    pages = [page.extract_text() for page in reader.pages]
    text = re.sub(r"\s+", " ", " ".join(pages))
    assert "laptop: żółw" in pages[0] and "2025-03-01" in pages[0] and "typst" in pages[0]
    assert "Contents" in pages[1] and "Appendix: every run" in pages[1]
    for part in (
        "zażółć gęślą jaźń, ŻÓŁĆ",
        "See Table 1, Figure 1 and Section 1",
        "Figure 2. Forward and backward peak",
    ):
        assert part in text, part
    assert "show_table" not in text, "no code in the PDF"
    assert "variant_11" in text and "n_layers=15" in text and "peak 139.2 GiB" in text
    assert all(tuple(map(round, page.mediabox[2:])) == (595, 842) for page in reader.pages)
    links = [a.get_object() for page in reader.pages for a in page.get("/Annots") or []]
    assert len(links) >= 15, "references and contents are links"
    wide = next(page for page in reader.pages if "A wide and long table" in page.extract_text())
    assert max(text_positions(wide)) < 595 - 60, "a table of twelve columns stays inside the margins"


def test_a_failing_render_leaves_the_last_report(report, inputs):
    chapters, runs, root = inputs
    before = report.html.read_bytes(), report.pdf.read_bytes()
    source = bind(chapters, runs, root / "broken", Meta("another title"))
    source.write_text(source.read_text() + "\n```{=typst}\n#no-such-function()\n```\n")
    with pytest.raises(RuntimeError, match="no-such-function"):
        render(source, report.html.parent, engine="pandoc")
    assert (report.html.read_bytes(), report.pdf.read_bytes()) == before
    assert sorted(path.name for path in report.html.parent.iterdir()) == ["index.html", "lab-report.pdf", "runs"]


def test_unchanged_run_pages_are_kept_and_others_removed(report, inputs):
    chapters, runs, root = inputs
    pages = sorted((root / "out" / "runs").glob("*/*.html"))
    assert len(pages) == 2
    times = [page.stat().st_mtime_ns for page in pages]
    stray = pages[0].with_name("gone-000000000000.html")
    stray.write_text("old")
    build_report(chapters, runs, root / "out", date="2025-03-01", formats=["html"], engine="pandoc")
    assert [page.stat().st_mtime_ns for page in pages] == times
    assert not stray.exists()


def write_chapter(folder: Path, name: str, *cells) -> Path:
    path = folder / name
    nbformat.write(new_notebook(cells=[c if not isinstance(c, str) else new_markdown_cell(c) for c in cells]), path)
    return path


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["# One\n\nsee @fig-lost"], "chapter 'One': @fig-lost refers to nothing"),
        (["# One {#sec-one}", "# Two {#sec-one}"], "chapter 'Two': label 'sec-one' stands twice"),
        (["# One {#sec-one}\n\n[x](#sec-onee)"], "did you mean 'sec-one'"),
        (["# One\n\n[12](#run-abc)"], "#run-abc refers to nothing"),
        (["![x](missing.png)"], "no such picture: missing.png"),
        (["![x](https://example.org/x.png)"], "is on the network"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path, texts, message):
    chapters = [write_chapter(tmp_path, f"0{i}.ipynb", text) for i, text in enumerate(texts)]
    with pytest.raises(UserError, match=re.escape(message)) as error:
        bind(chapters, [], tmp_path / "build")
    assert "\n" not in str(error.value)


def test_references_in_code_are_no_references_and_failures_excuse_missing_figures(tmp_path, capsys):
    code = write_chapter(tmp_path, "00.ipynb", "# One\n\n`@fig-x` and\n\n```python\n@fig-y\n```\n")
    bind([code], [], tmp_path / "a")
    failed = new_code_cell("x", outputs=[new_output("error", ename="E", evalue="", traceback=[])])
    bind([write_chapter(tmp_path, "01.ipynb", "# One\n\n@fig-x", failed)], [], tmp_path / "b")
    assert "@fig-x refers to nothing (01.ipynb did not complete)" in capsys.readouterr().out


def test_missing_and_damaged_notebooks_and_unknown_formats(tmp_path):
    with pytest.raises(UserError, match="no such notebook"):
        bind([tmp_path / "none.ipynb"], [], tmp_path)
    (tmp_path / "bad.ipynb").write_text("{")
    with pytest.raises(UserError, match=r"bad\.ipynb: cannot be read"):
        bind([tmp_path / "bad.ipynb"], [], tmp_path)
    with pytest.raises(UserError, match="unknown report format"):
        render(tmp_path / "x.qmd", tmp_path, ("docx",))


def test_table_markdown_formats_links_and_hostile_text():
    frame = pd.DataFrame({"a|b": ["x|y", "<script>"], "n": [0.5, None], "k": [KEYS[0], None]})
    lines = table_markdown(frame, formats={"n": ".1f"}, links={"n": "k"}).split("\n")
    assert lines == [r"| a\|b | n |", "|:---|---:|", rf"| x\|y | [0.5](#run-{KEYS[0]}) |", r"| \<script> | – |"]
    with pytest.raises(UserError, match="no column 'm'; columns: a"):
        table_markdown(frame, formats={"m": ".1f"})
    with pytest.raises(UserError, match="must start with 'tbl-'"):
        show_table(frame, "memory", "caption")


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("  1%\r 50%\r100%\n", "100%"),
        ("a\r\nb\r\n", "a\nb"),
        ("x" * 150, "x" * 100 + "\n" + "x" * 50),
    ],
)
def test_plain_text(raw, shown):
    assert plain_text(raw) == shown


def test_headings_fit_one_chapter():
    text = "# One {#sec-one}\n## Sub\n```\n# code\n```\n# Two\n## Deep"
    headings = [line for line in fit_headings(text, "t").split("\n") if line.startswith("#")]
    assert headings == ["# One {#sec-one}", "## Sub", "# code", "## Two", "### Deep"]
    assert fit_headings("# One {#a}", "t", numbered=False).strip() == "# One {#a .unnumbered}"
    assert fit_headings("# One <!-- #sec-one -->", "t").strip() == "# One {#sec-one}"
    assert fit_headings("text", "Title").startswith("# Title\n")


def test_appendix_compares_like_with_like_and_shares_anchors(tmp_path):
    runs = write_runs(tmp_path / "runs", 3)
    runs[0].summary.kind, runs[1].machine = "search", "node"
    runs += [replace(runs[2], folder=runs[2].folder)]
    text = appendix_markdown(runs, {})
    assert "n_layers" not in text, "runs of different kinds and machines are not compared key by key"
    assert text.count(f"#run-{KEYS[2]}") == 2, "one anchor for HTML and one for the PDF, however often a run appears"
    assert text.count("Machine: node") == 1 and text.count("Machine: laptop") == 1


def test_headings_without_content_are_left_out(tmp_path):
    cells = [
        "# One",
        "## Nothing measured",
        new_code_cell("if measured: show()"),
        "## Referred to {#sec-kept}",
        "## Something",
        new_code_cell("1", outputs=[new_output("execute_result", {"text/plain": "1"})]),
        "## Last",
        new_code_cell("show()"),
    ]
    text = bind([write_chapter(tmp_path, "00.ipynb", *cells)], [], tmp_path / "build").read_text()
    headings = [line.split(" {")[0] for line in text.split("\n") if line.startswith("#")]
    assert headings == ["# One", "## Referred to", "## Something"]
    assert "if measured" not in text, "the code of a section that is left out goes with it"


@pytest.fixture(scope="module")
def quarto_report(inputs) -> RenderResult:
    if shutil.which("quarto") is None:
        pytest.skip("quarto is not on PATH")
    chapters, runs, root = inputs
    return build_report(chapters, runs, root / "quarto-out", machine="laptop", date="2025-03-01", engine="quarto")


def test_quarto_renders_the_same_source(quarto_report, open_page):
    page = open_page(quarto_report.html)
    text = page.inner_text("body")
    assert "Rendered by Quarto" in text and "?@" not in text and "See Table\u00a01, Figure\u00a01" in text
    assert all(page.evaluate("[...document.images].map(i => i.naturalWidth > 0)"))
    assert page.get_attribute("text=PDF", "href") == "lab-report.pdf"
    dead = page.evaluate(
        "[...document.querySelectorAll('a[href^=\"#\"]')].map(a => decodeURIComponent(a.hash.slice(1)))"
        ".filter(id => !document.getElementById(id))"
    )
    assert dead == []
    wraps = page.evaluate(
        "[...document.querySelectorAll('#tbl-headline td')].map(d => [d.textContent, getComputedStyle(d).whiteSpace])"
    )
    assert dict(wraps)["bf16"] == "nowrap", "a short cell stays on one line"
    page.click("#tbl-headline a:has-text('8.10')")
    card = page.locator(f"#run-{KEYS[1]}")
    card.locator("table").wait_for(state="visible", timeout=5000)  # the link opens the run's provenance
    card.locator("a:has-text('run page')").click()
    page.wait_for_load_state()
    assert "Run variant_1" in page.inner_text("main")


@pytest.mark.parametrize("width", [390, 1280])
def test_quarto_has_contents_and_search_at_every_width(quarto_report, open_page, width):
    page = open_page(quarto_report.html, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#tbl-wide figure > div").evaluate("b => b.scrollWidth > b.clientWidth")
    assert not page.is_visible("details.code pre"), "code is folded"
    if width < 500:
        page.click("#contents > summary")
    page.fill("#search", "zażółć GĘŚLĄ")
    assert not page.is_visible("#toc") and "Summary" in page.inner_text("#results a")
    page.press("#search", "Escape")
    page.click("#toc a:has-text('Memory')")
    page.wait_for_function("Math.abs(document.getElementById('sec-memory').getBoundingClientRect().top) < 90")


def test_quarto_sets_the_same_pdf(quarto_report):
    pypdf = pytest.importorskip("pypdf")
    pages = pypdf.PdfReader(quarto_report.pdf).pages
    text = re.sub(r"\s+", " ", " ".join(page.extract_text() for page in pages))
    assert "ŻÓŁĆ" in text and "See Table 1, Figure 1 and Section 1" in text and "show_table" not in text
    assert "1.1 Definitions" in text
    wide = [number for number, page in enumerate(pages) if "variant-0" in page.extract_text()]
    assert "A wide and long table" in pages[wide[0]].extract_text(), "the caption stands with the table"
    assert max(text_positions(pages[wide[0]])) < 595 - 60, "a table of twelve columns stays inside the margins"


def text_positions(page) -> list[float]:
    """Where each text of a PDF page begins, in points from the left edge."""
    found: list[float] = []
    page.extract_text(
        visitor_text=lambda text, cm, tm, font, size: found.append(tm[4] * cm[0] + cm[4]) if text.strip() else None
    )
    return found
