"""Each run's own page: its executed notebook as one self-contained HTML file, linked from the report's appendix.

A page is made anew only if what it is made from has changed: the notebook's own bytes, the page's template and style, or
pandoc. The page carries the hash of these, so an untouched run costs nothing when the report is made again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from lsai_core.profiling.limits import cpu_cores
from lsai_lab.report.appendix import wall_time
from lsai_lab.report.bind import run_pages
from lsai_lab.report.chapter import convert_notebook
from lsai_lab.report.pandoc import DATA, pandoc_version
from lsai_lab.report.render import HTML, html_page
from lsai_lab.runs.records import Run


def render_run_pages(runs: Sequence[Run], out: Path) -> list[Path]:
    """Write `out/runs/<study>/<run>.html` for every run that has an executed notebook; returns the paths.

    Pages are complete or absent, never half written.
    """
    addresses = run_pages(runs)
    jobs = {out / addresses[str(run.folder)]: run for run in runs if str(run.folder) in addresses}
    stale = [(page, run) for page, run in jobs.items() if _stored_hash(page) != _source_hash(run)]
    if stale:
        with ThreadPoolExecutor(min(cpu_cores(), 8)) as pool:  # each job waits for a pandoc process
            list(
                tqdm(
                    pool.map(lambda job: _render(*job), stale),
                    total=len(stale),
                    desc="run pages",
                    unit="page",
                    disable=None,
                )
            )
    return list(jobs)


def remove_other_pages(pages: Sequence[Path], out: Path) -> None:
    """Remove the pages below `out/runs/` that are not among `pages`: runs that the report no longer has."""
    for page in set((out / "runs").glob("*/*.html")) - set(pages):
        page.unlink()


def _render(page: Path, run: Run) -> None:
    assert run.page is not None
    summary = run.summary
    page.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=page.parent, prefix=".rendering-") as scratch:
        folder = Path(scratch)
        (folder / "files").mkdir()
        chapter = convert_notebook(run.page, folder / "files", slug="run", numbered=False)
        # Links between runs lead through the report's appendix.
        text = chapter.markdown.replace("](#run-", f"](../../{HTML}#run-")
        source = folder / "page.md"
        source.write_text(text)
        variables = {
            "pagetitle": f"{summary.id.study}: {summary.id.name}",
            "home": f"../../{HTML}#run-{summary.id.key}",
            "lead": " · ".join(
                part
                for part in (
                    f"Study {summary.id.study}",
                    f"measured as {summary.measured_as}" if summary.measured_as else "",
                    summary.outcome,
                    summary.reason,
                    run.machine,
                    wall_time(summary.wall_s),
                    summary.started[:16].replace("T", " "),
                )
                if part
            ),
            "lang": "en",
            "rendered-by": f"Run {summary.id.key}. Rendered by pandoc {pandoc_version()}",
            "source-hash": _source_hash(run),
        }
        html_page(source, folder / "page.html", variables)
        os.replace(folder / "page.html", page)


def _source_hash(run: Run) -> str:
    assert run.page is not None
    digest = hashlib.sha256(pandoc_version().encode() + run.page.read_bytes())
    for path in sorted([*DATA.iterdir(), *Path(__file__).parent.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _stored_hash(page: Path) -> str | None:
    """The hash that the page carries in its head, or None if there is no such page."""
    try:
        with page.open(encoding="utf-8") as file:
            head = file.read(4000)
    except OSError:
        return None
    marker = 'name="source-hash" content="'
    return head.split(marker)[1].split('"')[0] if marker in head else None
