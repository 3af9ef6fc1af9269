"""Binds executed notebooks and the provenance of all runs into one Markdown source, `report.qmd`.

The source is plain pandoc Markdown with Quarto's labels and conditional content, so that `quarto render` takes it as it is
and pandoc takes it with the small filter `data/crossref.lua`. Nothing is executed or computed here: what the report says is
what the notebooks and records hold.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from lsai_core.errors import UserError
from lsai_core.files import write_text
from lsai_lab.report.appendix import appendix_markdown
from lsai_lab.report.chapter import convert_notebook
from lsai_lab.report.check import reference_errors
from lsai_lab.runs.records import Run

TITLE = "Large-scale AI engineering: lab report"


@dataclass(frozen=True)
class Meta:
    """What the title page says. `date` is ISO (default: today); `machine` describes where the report was made."""

    title: str = TITLE
    machine: str = ""
    date: str = ""


def bind(chapters: Sequence[Path], runs: Sequence[Run], build: Path, meta: Meta | None = None) -> Path:
    """Write `build/report.qmd` and its pictures (`build/files/`); returns the path of the source.

    The first chapter is the front matter: it is not numbered. `runs` make the appendix; without any there is none.
    Raises UserError, naming the place, for an unreadable notebook, a missing picture, a label that stands twice and a
    reference to nothing. If a chapter failed or did not finish, its missing figures are to be expected: references to
    nothing are then printed as warnings, and the report shows them as such.
    """
    meta = meta or Meta()
    if not chapters:
        raise UserError("a report needs at least one chapter notebook")
    files = build / "files"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    converted = [
        convert_notebook(path, files, slug=f"{number:02d}-{_slug(path.stem)}", numbered=number > 0)
        for number, path in enumerate(chapters)
    ]
    header = {"title": meta.title, "date": meta.date or datetime.date.today().isoformat(), "lang": "en"}
    if meta.machine:
        header["subtitle"] = meta.machine
    parts = [f"---\n{yaml.safe_dump(header, allow_unicode=True, sort_keys=False)}---\n"]
    parts += [chapter.markdown for chapter in converted]
    if runs:
        parts.append(appendix_markdown(runs, run_pages(runs)))
    source = build / "report.qmd"
    write_text(source, "\n\n".join(parts))
    incomplete = [chapter.path.name for chapter in converted if not chapter.complete]
    errors = reference_errors(source)
    fatal = [line for line in errors if not (incomplete and "refers to nothing" in line)]
    if fatal:
        raise UserError("the report's references do not fit together: " + "; ".join(fatal))
    for line in errors:
        print(f"report: warning: {line} ({', '.join(incomplete)} did not complete)")
    return source


def run_pages(runs: Sequence[Run]) -> dict[str, str]:
    """Folder of each run that has an executed notebook -> address of its page, relative to the report."""
    return {
        str(run.folder): f"runs/{_slug(run.summary.id.study)}/{_slug(run.folder.name)}.html" for run in runs if run.page
    }


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
