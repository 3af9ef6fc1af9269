"""The chapters, as Markdown, made a book: by Quarto where there is one, else by pandoc and typst,
packages of Python.

Both read `reports/_quarto.yml`, whose words for a format are pandoc's. A rendering is made in a
folder of its own and copied into place when it is whole, the HTML first: a PDF that fails, or has
too little memory, costs the PDF only.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html import escape, unescape
from pathlib import Path

import pypandoc
import yaml

from lsai_core.base.code import version_of
from lsai_core.base.files import write_text
from lsai_lab.report.brand import brand_colors
from lsai_lab.report.engines import RESULTS, Engine, call, find_quarto
from lsai_lab.report.numbers import COLLECT, differing
from lsai_lab.report.pages import finish_pages
from lsai_lab.report.runpages import write_run_pages
from lsai_lab.report.to_markdown import to_markdown
from lsai_lab.runs.chapters import (
    book_runs,
    book_settings,
    execute_chapters,
    headings_of,
    read_chapters,
)
from lsai_lab.runs.plain import REFERENCE
from lsai_lab.runs.session import Session

# makes the project a book; without it Quarto gets as far as reports/prepare.py
EXECUTED = "_quarto-executed.yml"
_FACTS = "facts.yml"
_BESIDE = ("book.js", "book.css", "math.css", "colors.css", "pages.js", "pages.css")
# A reference as a page shows it, and as the data behind a table have it.
_SHOWN = re.compile(
    r'<a\s+href="[^"]*#((?:sec|fig|tbl)-[\w-]+)"[^>]*>(?:<span>)?(\w+(?:\s|&nbsp;)(?:<span>)?[\dA-Z.]+)<'
)
# A chapter's number on its page: Quarto's references to it name the page alone.
_CHAPTER = re.compile(
    r'id="(sec-[\w-]+)" class="'
    r'(?:quarto-section-identifier"><span class="chapter-number">|level1" data-number=")(\w+)'
)
_WRITTEN = re.compile(rf"{REFERENCE}([\w-]+)")
_PAGES = [
    "--to=chunkedhtml",
    "--split-level=1",
    "--chunk-template=%i.html",
    "--template=page.html",
    "--include-in-header=head.html",
]
# In a process of its own, which may run out of memory, with typst's own fonts and those of the
# figures.
_TYPST = (
    "import sys, typst, matplotlib as m; said = typst.compile_with_warnings(*sys.argv[1:4], "
    "[m.get_data_path() + '/fonts/ttf'], True)[1]; [print('warning:', w.message) for w in said]"
)


def render(reports: Path, out: Path, formats: Sequence[str], engine: Engine) -> list[Path]:
    """Render the chapters bound in `reports` into `out`, unless what is there was made of the same;
    returns what there is then. Prints it, or why it could not be made."""
    return _rendered(reports, out, formats, find_quarto(engine))


def _rendered(reports: Path, out: Path, formats: Sequence[str], quarto: str | None) -> list[Path]:
    made = []
    write_text(reports / EXECUTED, "project: { type: book }\n")
    for name in sorted(formats):
        result = out / RESULTS[name]
        key = _sources(reports, name, quarto, out)
        stamp = reports / "_build" / f"rendered.{name}"
        if result.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == key:
            made.append(result)
            print(f"report: {result} (unchanged)", flush=True)
            continue
        stamp.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=reports, prefix="rendering-") as folder:
            try:
                if quarto:
                    to = name.replace("pdf", "typst")
                    output = call(quarto, "render", reports, "--to", to, "--output-dir", folder)
                else:
                    output = _pandoc(reports, Path(folder), name)
                if name == "html":
                    _name_references(Path(folder))
                left = ("*.typ", *["data"] * (name == "pdf"))  # the pages' data are theirs
                ignore = shutil.ignore_patterns(*left)
                shutil.copytree(folder, out, dirs_exist_ok=True, ignore=ignore)
            except RuntimeError as error:
                print(f"report: the {name.upper()} could not be made: {error}", flush=True)
                continue
        for warning in re.findall(r"(?im)^.*\bwarn(?:ing)?\b.*(?:\n[ \t]+.*)*", output):
            print("report:", " ".join(warning.split()), flush=True)
        write_text(stamp, key)
        made.append(result)
        print(f"report: {result}", flush=True)
    return made


def _sources(reports: Path, name: str, quarto: str | None, out: Path) -> str:
    """A hash of what a rendering is made of: the bound chapters, what they show, and how; of the
    HTML also the pages of runs."""
    folders = ("files", "data", "runs", "explore") if name == "html" else ("files",)
    paths = [path for path in reports.iterdir() if path.is_file()]
    paths += [path for folder in folders for path in (reports / folder).rglob("*.*")]
    digest = hashlib.sha256(version_of("lsai_lab.report.render").encode())
    for path in sorted(paths):
        digest.update(f"{path.relative_to(reports)}\0".encode(errors="surrogateescape"))
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    version = call(quarto, "--version").strip() if quarto else pypandoc.__file__
    digest.update("\0".join([version, str(out.resolve()), str(datetime.date.today())]).encode())
    return digest.hexdigest()


def _pandoc(reports: Path, folder: Path, name: str) -> str:
    """A page of HTML a chapter with their pictures beside them, or the PDF."""
    try:
        pandoc = pypandoc.get_pandoc_path()
    except OSError:
        raise RuntimeError(
            "no pandoc here that runs: `pip install pypandoc-binary typst`, or install Quarto"
        ) from None
    settings = book_settings(reports)
    form = settings.pop("format")[name.replace("pdf", "typst")]
    facts = {**settings, **form, **settings.pop("book"), "date": datetime.date.today().isoformat()}
    texts = list[str]()
    for chapter in settings["chapters"]:
        if chapter in settings["parts"]:
            texts.append(f"::: quarto-book-part\n{settings['parts'][chapter]}\n:::")
        cells = json.loads((reports / chapter).read_text(encoding="utf-8"))["cells"]
        texts += ["".join(cell["source"]) for cell in cells]
    for path in filter(
        Path.exists, map(reports.joinpath, (*_BESIDE, "files", "runs", "data", "explore"))
    ):
        shutil.copytree(path, folder / path.name) if path.is_dir() else shutil.copy(path, folder)
    primary = brand_colors(reports)["primary"]["light"]
    wanted = {"html": _PAGES, "pdf": ["--template=book.typ", f"--variable=primary:{primary}"]}
    target = "lab-report.typ" if name == "pdf" else "pages"
    # Beside the text, in which no line is metadata; in a file of its own, whose texts may be
    # Markdown.
    write_text(folder / _FACTS, yaml.safe_dump(facts))
    output = call(
        pandoc,
        "--defaults=pandoc.yml",
        *wanted[name],
        f"--metadata-file={folder / _FACTS}",
        f"--output={folder / target}",
        cwd=reports,
        input="\n\n".join(texts),
    )
    (folder / _FACTS).unlink()
    if name == "pdf":
        return output + call(sys.executable, "-c", _TYPST, target, RESULTS[name], ".", cwd=folder)
    shutil.rmtree(folder / target / "files", ignore_errors=True)  # pandoc's copy of what is there
    shutil.copytree(folder / target, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / target)
    finish_pages(folder, settings["chapters"], settings["parts"], _title(facts))
    return output


def _name_references(folder: Path) -> None:
    """Writes what the pages show in place of the references in the data of tables."""
    pages = [path.read_text(encoding="utf-8") for path in folder.glob("*.html")]
    numbers = [pair for page in pages for pair in _CHAPTER.findall(page)]
    pairs = [pair for page in pages for pair in _SHOWN.findall(page)]
    shown = {name: f"Chapter {number}" for name, number in numbers}
    shown |= {name: text.replace("<span>", "") for name, text in pairs}

    def words(found: re.Match[str]) -> str:
        return " ".join(unescape(shown.get(str(found[1]), str(found[1]))).split())

    for path in folder.glob("data/*.csv"):
        text = path.read_text(encoding="utf-8")
        if (named := _WRITTEN.sub(words, text)) != text:
            write_text(path, named)


def _title(facts: dict[str, object]) -> str:
    """The book's title as the front page has it: with its author, the package's license and
    repository, as far as they are declared."""
    about = [f"<p class={key}>{escape(str(facts[key]))}</p>" for key in ("title", "subtitle")]
    line = [escape(str(facts[key])) for key in ("date", "author") if facts.get(key)]
    line += _declared()
    return f"<header>{''.join(about)}<p class=date>{' · '.join(line)}</p></header>"


def _declared() -> Iterator[str]:
    """The package's license and its repository, as HTML; nothing where it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        declared = importlib.metadata.metadata("lsai")
        yield from map(escape, declared.get_all("License-Expression") or [])
        for each in declared.get_all("Project-URL") or []:
            name, _, address = each.partition(", ")
            if name.lower() == "repository":
                yield f'<a href="{escape(address)}">{escape(name)}</a>'


def execute_and_render(
    session: Session, out: Path, formats: list[str], quarto: str | None, only: Sequence[str]
) -> bool:
    """Execute the chapters, of them `only` these, if any are named, and render. False if one did
    not complete or a format could not be made."""
    reports, chapters, good = session.root / "reports", read_chapters(session.root), True
    chosen = {name: path for name, path in chapters.items() if name in only or not only}
    runs = book_runs(session)
    folders = (reports / name for name in ("files", "data", "explore"))
    for old in (*folders, *reports.glob("*.ipynb")):
        shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)
    with contextlib.closing(
        execute_chapters(session, chosen, build := reports / "_build", runs, COLLECT)
    ) as ends:
        for name, problem in ends:
            problem = to_markdown(build / name, reports / name, problem)
            print(
                f"report: chapter {name}" + (f" did not complete: {problem}" if problem else ""),
                flush=True,
            )
            good &= problem is None
            if problem is None and (number := differing(build / name)):
                differ = "numbers of {} differ" if number > 1 else "number of {} differs"
                words = f"{number} {differ.format(Path(name).stem)}"
                print(f"report: {words} from its text; `lsai numbers` lists them", flush=True)
    for name in chapters.keys() - chosen.keys():  # as they were executed last
        made = build / name
        to_markdown(made if made.exists() else headings_of(chapters[name], made), reports / name)
    write_run_pages(runs, reports)
    return len(_rendered(reports, out, formats, quarto)) == len(formats) and good
