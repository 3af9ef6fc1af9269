"""The bound chapters as a book: by Quarto where there is one, else by pandoc and typst, which come with the Python packages.

Both read `reports/_quarto.yml`. A rendering is made in a folder of its own and copied into place when it is whole, the HTML first: a PDF
that fails, or has too little memory, costs the PDF only. typst runs in a process of its own for that, with its own fonts and those of the figures.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from lsai_core.errors import UserError

Engine = Literal["auto", "quarto", "pandoc"]
HTML, PDF = "index.html", "lab-report.pdf"
OLDEST_QUARTO = (1, 9)
READER = "markdown+lists_without_preceding_blankline-blank_before_blockquote-blank_before_header-implicit_figures"
_TYPST = "import sys, typst, matplotlib as m; typst.compile(*sys.argv[1:4], [m.get_data_path() + '/fonts/ttf'], True)"


def book_settings(reports: Path) -> dict[str, Any]:
    """`reports/_quarto.yml`, with the names of the chapters as `chapters`; parts are taken apart."""
    try:
        settings: dict[str, Any] = yaml.safe_load((reports / "_quarto.yml").read_text(encoding="utf-8"))
        entries = settings["book"]["chapters"]
        names = [name for entry in entries for name in (entry["chapters"] if isinstance(entry, dict) else [entry])]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"{reports / '_quarto.yml'} names no chapters of a book: {error}") from None
    return {**settings, "chapters": [name for name in names if name.endswith(".ipynb")]}


def find_quarto(engine: Engine) -> str | None:
    """Quarto on PATH or beside this Python, if it is wanted and new enough. UserError where it was asked for by name."""
    beside = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    quarto = shutil.which("quarto", path=beside) if engine != "pandoc" else None
    problem = "no `quarto` on PATH; install Quarto 1.9 or newer, or use --engine pandoc"
    if quarto is not None:
        said = subprocess.run([quarto, "--version"], capture_output=True, text=True, check=False).stdout.strip()
        if tuple(map(int, re.findall(r"\d+", said)[:2])) < OLDEST_QUARTO:
            problem = f"Quarto {said or 'without a version'} is older than 1.9; the book is made by pandoc and typst"
            print(f"report: {problem}", flush=True)
            quarto = None
    if engine == "quarto" and quarto is None:
        raise UserError(problem)
    return quarto


def render(reports: Path, out: Path, formats: Sequence[str], engine: Engine) -> list[Path]:
    """Render the chapters bound in `reports` into `out`; returns what was made, and prints why something could not be."""
    quarto = find_quarto(engine)
    made: list[Path] = []
    for name in [name for name in ("html", "pdf") if name in formats]:
        with tempfile.TemporaryDirectory(dir=reports, prefix="rendering-") as folder:
            try:
                (_quarto if quarto else _pandoc)(quarto or "", reports, Path(folder), name)
                if not (Path(folder) / (HTML if name == "html" else PDF)).exists():
                    raise RuntimeError("nothing was written")
            except RuntimeError as error:
                print(f"report: the {name.upper()} could not be made: {error}", flush=True)
                continue
            shutil.copytree(folder, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("book.md", "book.typ"))
            made.append(out / (HTML if name == "html" else PDF))
    return made


def _quarto(quarto: str, reports: Path, folder: Path, name: str) -> None:
    target = {"html": "html", "pdf": "typst"}[name]
    environment = {**os.environ, "QUARTO_PYTHON": os.environ.get("QUARTO_PYTHON", sys.executable)}
    said = _call(quarto, "render", reports, "--to", target, "--output-dir", folder, env=environment)
    for warning in re.findall(r"(?m)^.*\bWARN(?:ING)?\b.*$", said):
        print("report: quarto:", warning.strip(), flush=True)


def _pandoc(_: str, reports: Path, folder: Path, name: str) -> None:
    """One page of HTML with its pictures beside it, or one PDF."""
    try:
        import pypandoc

        pandoc = str(pypandoc.get_pandoc_path())
    except (ImportError, OSError):
        raise RuntimeError("no pandoc here that runs: `pip install pypandoc-binary typst`, or install Quarto") from None
    settings = book_settings(reports)
    facts = {
        **settings["book"], **settings["format"]["typst"], "lang": settings["lang"], "section-numbering": "1.1",
        "date": datetime.date.today().isoformat(), "link-citations": True,
    }  # fmt: skip
    chapters = [_chapter(reports / chapter, name) for chapter in settings["chapters"]]
    text = "\n\n".join([f"---\n{yaml.safe_dump(facts, allow_unicode=True)}---", *chapters])
    (folder / "book.md").write_text(text, encoding="utf-8")
    for extra in ("book.js", "book.css", "page.css", "files", "runs", "data"):
        if (reports / extra).is_dir():
            shutil.copytree(reports / extra, folder / extra)
        elif (reports / extra).exists():
            shutil.copy(reports / extra, folder)
    html = ("--to", "html5", "--mathml", "--toc-depth=3", "--css", "book.css", "--css", "page.css", "-H", reports / "head.html",
            "--output", folder / HTML)  # fmt: skip
    typst = ("--to", "typst", "--toc-depth=2", "-H", reports / "book.typ", "-H", reports / "layout.typ", "--output", folder / "book.typ")  # fmt: skip
    said = _call(
        pandoc, "--from", READER, "--standalone", "--number-sections", "--toc", "--lua-filter", reports / "book.lua",
        "--citeproc", "--bibliography", reports / "references.bib", "--syntax-highlighting=none", *(html if name == "html" else typst),
        "book.md", cwd=folder,
    )  # fmt: skip
    for warning in filter(None, re.split(r"\n(?=\[)", said.strip())):
        print("report: pandoc:", " ".join(warning.split()), flush=True)
    if name == "pdf":
        _call(sys.executable, "-c", _TYPST, folder / "book.typ", folder / PDF, folder)


def _chapter(path: Path, name: str) -> str:
    """A bound notebook as Markdown. Code is folded, and not in a PDF."""
    from lsai_lab.kit.bind import fenced  # its imports take seconds

    cells = [(c["cell_type"], "".join(c["source"])) for c in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    fold = '<details class="code">\n<summary>Code</summary>\n\n{}\n\n</details>'
    texts = [fold.format(fenced(source, "python")) if kind == "code" else source for kind, source in cells]
    return "\n\n".join(text for text, (kind, _) in zip(texts, cells, strict=True) if name == "html" or kind != "code")


def _call(*command: object, **options: Any) -> str:
    """What a program printed. RuntimeError with the end of it if it failed."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, encoding="utf-8", check=False, **options
    )
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr + done.stdout)
    if done.returncode:
        raise RuntimeError(f"{Path(str(command[0])).name} ended with {done.returncode}: {said.strip()[-2000:] or 'no memory left?'}")  # fmt: skip
    return said
