"""The report in one call: bind the chapters, check the references, render the run pages, the HTML and the PDF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lsai_lab.report.bind import TITLE, Meta, bind
from lsai_lab.report.pages import remove_other_pages, render_run_pages
from lsai_lab.report.render import Engine, RenderResult, render
from lsai_lab.runs.records import Run


def build_report(
    chapters: Sequence[Path],
    runs: Sequence[Run],
    out: Path,
    title: str = TITLE,
    *,
    machine: str = "",
    date: str = "",
    formats: Sequence[str] = ("html", "pdf"),
    engine: Engine = "auto",
    build: Path | None = None,
) -> RenderResult:
    """Make `out/index.html`, `out/lab-report.pdf` and `out/runs/<study>/<run>.html`.

    `chapters`: executed notebooks in reading order, the first is the front matter. `runs`: what the appendix lists, and
    what numbers link to. `machine` and `date` (ISO, default today) stand on the title page. `build` is the folder of the
    bound source (default: `_build` beside `out`). Prints one line that names the files and the engine. Errors as in
    `bind.bind` and `render.render`; the last good report stays in place when one occurs.
    """
    source = bind(chapters, runs, build or out.parent / "_build", Meta(title, machine, date))
    pages = render_run_pages(runs, out) if "html" in formats else []
    result = render(source, out, formats, engine)
    if "html" in formats:
        remove_other_pages(pages, out)
    print(f"report: {result}")
    return result
