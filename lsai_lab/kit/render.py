"""The bound chapters as a book: by Quarto where there is one, else by pandoc and typst, which come with the Python packages.

Both read `reports/_quarto.yml`. A rendering is made in a folder of its own and published when it is whole, the HTML first: a PDF that
fails, or has too little memory, costs the PDF only. typst runs in a process of its own for that.
"""

from __future__ import annotations

import base64
import datetime
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import nbformat
import yaml

from lsai_core.errors import UserError
from lsai_lab.kit.bind import options

Engine = Literal["auto", "quarto", "pandoc"]
HTML, PDF = "index.html", "lab-report.pdf"
OLDEST_QUARTO = (1, 9)
READER = "markdown+lists_without_preceding_blankline-blank_before_blockquote-blank_before_header-implicit_figures+autolink_bare_uris"  # fmt: skip
_SUFFIX = {"image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpg"}
_SHARED = ("book.js", "book.css")
_TYPST = "import sys, typst; typst.compile(sys.argv[1], output=sys.argv[2], root=sys.argv[3], ignore_system_fonts=True)"


def chapter_names(reports: Path) -> list[str]:
    """The chapters of `reports/_quarto.yml`, in their order; parts are taken apart."""
    try:
        entries = yaml.safe_load((reports / "_quarto.yml").read_text(encoding="utf-8"))["book"]["chapters"]
        names = [name for entry in entries for name in (entry["chapters"] if isinstance(entry, dict) else [entry])]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"{reports / '_quarto.yml'} names no chapters of a book: {error}") from None
    return [name for name in names if name.endswith(".ipynb")]


def find_quarto(engine: Engine) -> str | None:
    """Quarto on PATH or beside this Python, if it is wanted and new enough. UserError where it was asked for by name."""
    beside = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    quarto = shutil.which("quarto", path=beside) if engine != "pandoc" else None
    problem = "no `quarto` on PATH; install Quarto 1.9 or newer, or use --engine pandoc" if quarto is None else ""
    if quarto is not None:
        said = subprocess.run([quarto, "--version"], capture_output=True, text=True, check=False).stdout.strip()
        if tuple(map(int, re.findall(r"\d+", said)[:2])) < OLDEST_QUARTO:
            problem = f"Quarto {said or 'without a version'} is older than 1.9; the book is made by pandoc and typst"
            print(f"report: {problem}", flush=True)
            quarto = None
    if engine == "quarto" and quarto is None:
        raise UserError(problem)
    return quarto


def render(reports: Path, out: Path, formats: Sequence[str], engine: Engine, made_on: str) -> list[Path]:
    """Render the chapters bound in `reports` into `out`; returns what was made. Raises RuntimeError if the HTML cannot be made."""
    quarto = find_quarto(engine)
    made: list[Path] = []
    out.mkdir(parents=True, exist_ok=True)
    for name in ("html", "pdf"):
        if name not in formats:
            continue
        with tempfile.TemporaryDirectory(dir=out.parent, prefix="rendering-") as scratch:
            folder = Path(scratch) / "book"
            try:
                if quarto:
                    _quarto(quarto, reports, folder, name, made_on)
                else:
                    _pandoc(reports, folder, name, made_on, "pdf" in formats)
            except RuntimeError as error:
                if name == "html":
                    raise
                print(f"report: the PDF could not be made: {error}", flush=True)
                continue
            made.append(_publish(folder, out, name))
    return made


def _publish(folder: Path, out: Path, name: str) -> Path:
    """Move a whole rendering into place; of the HTML, what the last one had and this one has not is removed."""
    if name == "pdf":
        os.replace(folder / PDF, out / PDF)
        return out / PDF
    shutil.copytree(folder, out, dirs_exist_ok=True)
    for path in sorted(out.rglob("*"), reverse=True):
        if path.is_file() and path.name != PDF and not (folder / path.relative_to(out)).exists():
            path.unlink()
    return out / HTML


def _quarto(quarto: str, reports: Path, folder: Path, name: str, made_on: str) -> None:
    target = {"html": "html", "pdf": "typst"}[name]
    command = [quarto, "render", str(reports), "--to", target, "--output-dir", str(folder), "-M", f"made-on:{made_on}"]
    environment = {**os.environ, "QUARTO_PYTHON": os.environ.get("QUARTO_PYTHON", sys.executable)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr + done.stdout)
    if done.returncode or not (folder / (HTML if name == "html" else PDF)).exists():
        raise RuntimeError(f"quarto render --to {target} failed ({done.returncode}): {said.strip()[-2000:]}")
    for warning in re.findall(r"(?m)^.*\bWARN(?:ING)?\b.*$", said):
        print("report: quarto:", warning.strip(), flush=True)


def _pandoc(reports: Path, folder: Path, name: str, made_on: str, with_pdf: bool) -> None:
    """One page of HTML with its pictures beside it, or one PDF."""
    folder.mkdir(parents=True)
    source = folder / "book.md"
    book = yaml.safe_load((reports / "_quarto.yml").read_text(encoding="utf-8"))["book"]
    facts = {
        **{key: book[key] for key in ("title", "subtitle", "author") if key in book}, "lang": "en", "made-on": made_on,
        "date": datetime.date.today().isoformat(), "link-citations": True, "reference-section-title": "References",
        "bibliography": str(reports / "references.bib"), **({"pdf": PDF} if with_pdf else {}),
    }  # fmt: skip
    chapters = [chapter_markdown(reports / chapter, folder, name) for chapter in chapter_names(reports)]
    source.write_text("\n\n".join([f"---\n{yaml.safe_dump(facts, allow_unicode=True)}---", *chapters]))
    shared = ("--from", READER, "--standalone", "--number-sections", "--lua-filter", reports / "book.lua", "--citeproc")
    if name == "html":
        pandoc(
            *shared, "--to", "html5", "--mathml", "--toc", "--toc-depth=3", "--template", reports / "book.html",
            "--syntax-highlighting=none", "--output", folder / HTML, source,
        )  # fmt: skip
        for extra in _SHARED:
            shutil.copy(reports / extra, folder)
        for extra in ("runs", "data"):
            if (reports / extra).is_dir():
                shutil.copytree(reports / extra, folder / extra)
        source.unlink()
        return
    typeset = folder / "book.typ"
    pandoc(
        *shared, "--to", "typst", "--template", reports / "book.typ", "--syntax-highlighting=none",
        "--output", typeset, source,
    )  # fmt: skip
    command = [sys.executable, "-c", _TYPST, str(typeset), str(folder / PDF), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / PDF).exists():
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["no memory left?"]
        raise RuntimeError(f"typst ended with {done.returncode}: {lines[-1][:500]}")


def chapter_markdown(path: Path, folder: Path, name: str) -> str:
    """A bound notebook as pandoc's Markdown, as Quarto reads it; pictures go to `folder/files`. Code is folded, and not in a PDF."""
    parts = []
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):  # type: ignore[no-untyped-call]
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            asked = options(cell.source)
            if name == "html" and asked.get("echo", True) and "remove-input" not in cell.metadata.get("tags", []):
                code = re.sub(r"(?m)\A(\s*#\|.*\n?)+", "", cell.source).strip()
                fold = '<details class="code">\n<summary>Code</summary>\n\n{}\n\n</details>'
                parts.append(fold.format(_fenced(code, "python")) if code else "")
            if asked.get("output", True) and asked.get("include", True):
                parts.append(_outputs(cell.outputs, asked, folder, f"{path.stem}-{number}"))
    return "\n\n".join(part for part in parts if part.strip())


def _outputs(outputs: list[Any], asked: dict[str, Any], folder: Path, name: str) -> str:
    """A cell's outputs; the first picture or table of a labelled cell is that figure or table."""
    label = str(asked.get("label", ""))
    wanted = {"fig": "image/", "tbl": "text/markdown"}.get(label[:3], "none")
    caption = " ".join(str(asked.get(f"{label[:3]}-cap", "")).split())
    parts = []
    for index, output in enumerate(outputs):
        if output.output_type == "stream":
            parts.append(_fenced(output.text, f"output .{output.name}"))
            continue
        kinds = [kind for kind in (*_SUFFIX, "text/markdown", "text/plain") if kind in output.data]
        text = output.data[kinds[0]]
        if kinds[0] in _SUFFIX:
            picture = folder / "files" / f"{name}-{index}.{_SUFFIX[kinds[0]]}"
            picture.parent.mkdir(exist_ok=True)
            picture.write_bytes(text.encode() if kinds[0].endswith("xml") else base64.b64decode(text))
            alt = re.sub(r"[\\\"*`{}\[\]$@]", "", str(asked.get("fig-alt") or caption)) or "output of the cell above"
            text = f'![](files/{picture.name}){{alt="{alt}" loading="lazy"}}'
        elif kinds[0] == "text/plain":
            text = _fenced(text, "output")
        if kinds[0].startswith(wanted) and (wanted != "text/markdown" or "|--" in text or "|:-" in text):
            text, wanted = f"::::: {{#{label}}}\n{text.strip()}\n\n{caption}\n:::::", "none"
        parts.append(text)
    return "\n\n".join(parts)


def _fenced(text: str, classes: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{{.{classes}}}\n{text.rstrip()}\n{fence}"


def pandoc(*arguments: str | Path) -> None:
    """Run the pandoc that the Python package brings. RuntimeError with its message; warnings are printed."""
    done = subprocess.run([_pandoc_path(), *map(str, arguments)], capture_output=True, text=True, encoding="utf-8", check=False)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"pandoc failed ({done.returncode}): {done.stderr.strip()}")
    for warning in filter(None, re.split(r"\n(?=\[)", done.stderr.strip())):
        print("report: pandoc:", " ".join(warning.split()), flush=True)


@functools.cache
def _pandoc_path() -> str:
    import pypandoc

    return str(pypandoc.get_pandoc_path())
