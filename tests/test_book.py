"""The book as its readers meet it: both engines over the same executed notebooks, HTML in a real
browser, hostile outputs, reuse."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import CHECKOUT, Project, write_run
from fits_table import LENGTHS, MODELS, fits, task_of
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lsai_core.prediction.roofline import estimate
from lsai_core.profiling.gpus import find_gpu, usable_gib
from lsai_lab.predictions.recorded import table_path
from lsai_lab.predictions.techniques import TECHNIQUES, compare
from lsai_lab.report.render import EXECUTED, HTML, PDF, Engine, render
from lsai_lab.report.runpages import write_run_pages
from lsai_lab.report.show import table
from lsai_lab.report.to_markdown import to_markdown
from lsai_lab.report.tooltips import tooltips
from lsai_lab.runs.records import find_runs

CHROMIUM = (
    shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
)
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 20" width="400" height="200"><text '
    'y="15">loss</text></svg>'
)
_MARK = (
    '<circle cx="{}%" cy="50.0%" r="5" fill="none" data-run="{}"><title>loss\nvalue: '
    "{}</title></circle>"
)
MARK = _MARK.format("50.0", "index", 3.5) + _MARK.format("80.0", "", 4.5)
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
ROWS = pd.DataFrame(
    {
        "variant": [f"v{i}" for i in range(13)],
        "tokens/s": [30.0, 4, 200, 1, 55, 6, 77, 8, 9, 10, 11, 12, 13],
        **{f"wide column {i}": ["long words here"] * 13 for i in range(6)},
    }
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
        new_code_cell("lab.say()", outputs=[say]),
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
            f"# Front {{#sec-front}}\n\nSee @fig-one-loss and {link}.\n\n[Every "
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
    settings["book"]["chapters"] = ["index.ipynb", "one.ipynb"]
    (folder / "_quarto.yml").write_text(yaml.safe_dump(settings, sort_keys=False))
    chapters(root / "executed", hostile)
    assert to_markdown(root / "executed" / "index.ipynb", folder / "index.ipynb") is None
    assert to_markdown(
        root / "executed" / "one.ipynb", folder / "one.ipynb", "a cell divided by zero"
    )
    metrics = [{"step": i, "loss": 5.0 - i, "tokens_per_s": 100.0 + i} for i in range(3)]
    text = "<script>document.title = 'taken'</script>"
    write_run(
        root / "runs",
        "memory",
        "a",
        results={"tokens_per_s": 5.0, "mfu_peak_source": text},
        config={"x": {"y": 1}, "same": 2},
        metrics=metrics,
    )
    write_run(
        root / "runs", "memory", "b", outcome="oom", reason=text, config={"x": {"y": 3}, "same": 2}
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
    assert (
        "198.51.100.7" not in re.sub(r"<(pre|code).*?</\1>", "", html, flags=re.S)
        and f">{host}<" not in html
    )
    assert "foreignObject" not in html and len(list(book.rglob("*.svg"))) <= 3


def test_the_pdf_holds_the_chapters_and_no_code(book: Path) -> None:
    pypdf = pytest.importorskip("pypdf")
    pages = [page.extract_text() for page in pypdf.PdfReader(book / PDF).pages]
    text = re.sub(r"\s+", " ", " ".join(pages))
    assert (
        "Loss over steps." in text
        and "Zażółć" in text
        and "see Figure 2.1, Table 2.1" in text
        and "Dao" in text
    )
    assert (
        "Large-scale AI engineering" in pages[0] and "lab.figure" not in text and "?@" not in text
    )
    # the abstract
    assert date.today().isoformat() in pages[0] and "stochastic rounding" in pages[0]
    assert "are measured alone and together" in text
    assert text.count("Loss over steps") == 2  # in the list of figures, too
    assert "Answer. Seven is" in text and "Data (CSV)" not in text


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
    pages = [re.sub(r"\s+", " ", page.extract_text()) for page in pypdf.PdfReader(made[0]).pages]
    for name in ("first", "second", "third", "fourth", "fifth"):
        (listed,) = {
            int(at) for page in pages[:4] for at in re.findall(rf"The {name} one[. ]*(\d+)", page)
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
    assert figure == "step,loss\n0,3.5\n" and rows == ROWS.to_csv(index=False)


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
        for fold in page.locator("details summary, .code-fold summary").all():
            fold.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path


def test_search_and_dark_mode_on_a_file(book: Path, visit: Callable[..., Any]) -> None:
    page = visit(book / HTML, color_scheme="dark")
    assert "invert" in page.evaluate("getComputedStyle(document.documentElement).filter")
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


def test_a_mark_shows_its_value_to_pointer_finger_and_keyboard(
    book: Path, visit: Callable[..., Any]
) -> None:
    shown = "getComputedStyle(document.querySelector('.tip'), '::after').content"
    page = visit(chapter_page(book))
    assert page.evaluate(shown) == "none"
    page.hover(".tip")
    assert "value: 3.5" in page.evaluate(shown)
    page.mouse.move(0, 0)
    assert page.evaluate(shown) == "none"
    page.focus(".marked input")  # the only stop of the figure
    assert (
        "value: 3.5" in page.evaluate(shown)
        and page.locator(".marked :is(a, [tabindex='0'])").first.get_attribute("tabindex") == "-1"
    )
    assert page.locator(".marked input").get_attribute("aria-valuetext") == "loss\nvalue: 3.5"
    page.keyboard.press("ArrowRight")
    assert page.locator(".marked input").get_attribute("aria-valuetext") == "loss\nvalue: 4.5"
    page.keyboard.press("Tab")
    assert not page.evaluate("document.activeElement.matches('.marked input')"), "no trap"
    page.focus(".marked input")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/index.html")
    phone = visit(chapter_page(book), 390, has_touch=True)
    assert phone.locator(".marked").bounding_box()["width"] > 500, (
        "wide enough to read, and it scrolls"
    )
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    phone.tap(".tip")
    assert "value: 3.5" in phone.evaluate(shown) and not phone.url.endswith("runs/index.html")
    phone.tap(".tip")
    phone.wait_for_url("**/runs/index.html")


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
    assert ["y", "1", "3", "3.00x"] in [[row[0].removeprefix("x."), *row[1:]] for row in rows]
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
    assert page.inner_text("#tool") == ""
    page.click("td a >> nth=0")
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


def fits_page(folder: Path, rows: pd.DataFrame | None = None) -> Path:
    """The page of what fits, from the committed table or from `rows`."""
    reports = templates(folder / "reports")
    table_path(folder).parent.mkdir(parents=True)
    (pd.read_csv(table_path(CHECKOUT)) if rows is None else rows).to_csv(
        table_path(folder), index=False
    )
    write_run_pages([], reports)
    return reports / "runs" / "fits.html"


def shown_rows(page: Any) -> dict[str, list[str]]:
    """Of each technique in the calculator its verdict, GiB, room and tokens/s, from top to
    bottom."""
    names = page.locator(".fits tbody th").evaluate_all(
        "heads => heads.map((head) => head.firstChild.data)"
    )
    cells = page.locator(".fits tbody tr").evaluate_all(
        "rows => rows.map((row) => [...row.cells].map((c) => c.innerText))"
    )
    return {name: row[2:] for name, row in zip(names, cells, strict=True)}


def test_what_fits_is_answered_for_model_length_batch_and_gpu(
    tmp_path: Path, visit: Callable[..., Any]
) -> None:
    page = visit(path := fits_page(tmp_path))
    answer, rows = page.locator("p[role=status]"), page.locator(".fits tbody tr")
    table = pd.read_csv(table_path(CHECKOUT)).query("model == 'llama3-8b' and gpus == 1")
    first, usable = (
        table[table["tokens"] == 8192].set_index("technique"),
        usable_gib(find_gpu("H100")),
    )
    fitting = first[first["needs"] <= usable]
    best = fitting["H100"].idxmin()
    assert (
        f"On one H100 the fastest that fits is {best}: {first['needs'][best]:.1f} of 79.1 GiB,"
        in answer.inner_text()
    )
    shown = shown_rows(page)
    assert set(shown) == set(first.index) and next(iter(shown)) == best
    assert shown[best] == [
        "fits",
        f"{first['needs'][best]:.1f}",
        shown[best][2],
        f"{8192 / first['H100'][best]:,.0f}",
    ]
    # The room is the most tokens that fit, on a straight line between the predictions.
    line = table[table["technique"] == best].sort_values("tokens")
    room = int(shown[best][2].replace(",", ""))
    needed = [np.interp(tokens, line["tokens"], line["needs"]) for tokens in (room, room + 1024)]
    assert needed[0] <= usable < needed[1] and f"fits up to {room:,} tokens." in answer.inner_text()
    # Bars are drawn on one scale, one and a half GPUs wide.
    bands = rows.first.locator("td div").evaluate("bar => bar.style.background")
    weights = float(re.findall(r"([\d.]+)%", bands)[0])
    assert weights == pytest.approx(100 / 1.5 * first["weights"][best] / 79.1, rel=1e-3)
    assert f"weights {first['weights'][best]:.1f} GiB" in rows.first.get_by_role(
        "img"
    ).get_attribute("aria-label")
    page.locator("[name=gpu]").select_option("A100-80")
    assert "A100-80" in answer.inner_text() and page.url.split("#")[1].count("=") == 5
    assert not any("fp8" in name for name in shown_rows(page)), "it has no fp8"
    page.get_by_label("model").select_option("llama3-70b")
    assert page.get_by_label("GPUs at most").input_value() == "8", "it was predicted for no fewer"
    assert "tight is FSDP, 8 GPUs, full checkpointing" in answer.inner_text() and rows.count() == 3
    page.get_by_label("GPUs at most").select_option("64")
    assert "On several A100-80 the first that fits is FSDP, 64 GPUs" in answer.inner_text()
    rows.last.focus()
    assert page.locator(".fits p b").last.inner_text() == list(shown_rows(page))[-1]
    # What was chosen stands in the address. A batch beyond the longest prediction is cut.
    page.get_by_label("sequences on a GPU").fill("32")
    assert page.get_by_label("sequences on a GPU").input_value() == "16" and "batch=16" in page.url
    said, link = answer.inner_text(), page.url
    again = visit(path)
    again.goto(link)
    assert again.locator("p[role=status]").inner_text() == said
    again.goto(link.split("#")[0] + "#model=nothing&gpu=none&tokens=7&batch=x")
    assert "of 23.5 GiB" in again.locator("p[role=status]").inner_text()


def test_between_its_predictions_the_calculator_says_nearly_what_is_predicted(
    tmp_path: Path, visit: Callable[..., Any]
) -> None:
    page = visit(fits_page(tmp_path))
    page.goto(page.url + "#model=llama3.2-1b&tokens=12.5&batch=3&gpu=H200&gpus=2")
    shown, chosen = (
        shown_rows(page),
        ["fused loss and blocks", "fused, full checkpointing", "FSDP, 2 GPUs"],
    )
    for row in compare(task_of("llama3.2-1b", 5888, 3), techniques=chosen):
        verdict, needs, _, speed = shown[row.name]
        assert verdict == "fits" and float(needs) == pytest.approx(row.prediction.needs, rel=0.05)
        time = estimate(row.config, find_gpu("H200"))
        assert time is not None and float(speed.replace(",", "")) == pytest.approx(
            time.tokens_per_s, rel=0.03
        )


def test_the_calculator_takes_any_table(tmp_path: Path, visit: Callable[..., Any]) -> None:
    rows = pd.read_csv(table_path(CHECKOUT)).head(3)
    rows = rows.assign(
        model="<b>new</b>", tokens=8192, gpus=1, least=[90, 77, 90], needs=[100, 79, 110]
    )
    page = visit(fits_page(tmp_path, rows), 390)
    answer = page.locator("p[role=status]")
    assert answer.inner_text().startswith("Nothing fits with room to spare; tight is")
    page.locator("[name=gpu]").select_option("A100-40")
    assert answer.inner_text().startswith("Nothing fits; nearest is") and len(shown_rows(page)) == 3
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.get_by_label("model").input_value() == "<b>new</b>"


def test_without_scripts_what_fits_is_a_table(tmp_path: Path, browser: Any) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(fits_page(tmp_path).as_uri())
    table = pd.read_csv(table_path(CHECKOUT))
    assert page.locator("tbody tr").count() == len(table)
    needs = table["needs"].iloc[0]
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


def test_a_pdf_that_fails_costs_the_pdf_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = reports(tmp_path)
    (folder / "layout.typ").write_text("#no-such-function()\n")
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
    write_notebook(project.root / "notebooks" / "10-memory.ipynb", load)
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
    assert executed() == ["10-memory", "index"]
    html = (project.root / "out" / HTML).read_text()
    assert "1234" in html and f"runs/box/memory/{folder.name}.html" in html
    assert (project.root / "out" / "runs" / "box" / "memory" / f"{folder.name}.html").exists()
    assert executed() == []
    notebook = nbformat.read(project.root / "notebooks" / "00-summary.ipynb", as_version=4)
    notebook.cells[1].outputs = [new_output("stream", text="run and saved in an editor")]
    nbformat.write(notebook, project.root / "notebooks" / "00-summary.ipynb")
    assert executed() == [], "outputs saved in a notebook change nothing"
    (folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    assert executed() == ["10-memory"]
    with (project.root / "params" / "studies" / "memory.yaml").open("a") as file:
        file.write("\n")
    assert executed() == ["10-memory", "index"], "any chapter may read a file of parameters"


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
    import matplotlib.pyplot as plt

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
    plt.close(fig)
