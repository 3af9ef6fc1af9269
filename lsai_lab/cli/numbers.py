"""`lsai numbers`: what the texts of chapters, README and the book's abstract say, beside what the
cells of the chapters compute."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsai_core.base.errors import UserError

if TYPE_CHECKING:
    from lsai_lab.report.numbers import Found, Number

_OTHERS = ("README.md", "reports/_quarto.yml")  # with numbers of chapters


def numbers(
    chapters: Annotated[
        list[Path] | None,
        typer.Argument(help="Notebooks; default: all chapters, the abstract, and README."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Put the computed numbers into the texts.")
    ] = False,
) -> None:
    """Execute the chapters whose records or cells have changed, and compare each number of the
    text; exit 1 if one differs."""
    from lsai_lab.project.files import repo_root
    from lsai_lab.runs.chapters import read_chapters

    root = repo_root()
    wanted = {path.name: path for path in chapters or read_chapters(root).values()}
    for path in wanted.values():
        if not path.is_file():
            raise UserError(f"there is no notebook {path}")
    computed, good = {}, True
    for name, problem, found in _executed(root, wanted):
        computed[name] = found
        if problem:
            print(f"{name} did not complete: {problem}", flush=True)
            good = False
    count = 0
    for name, path in wanted.items():
        differing = _chapter(path, computed[name], write)
        count += len(computed[name])
        good &= _tell(f"notebooks/{name}", differing, write)
    for name in _OTHERS if not chapters else ():
        good &= _tell(name, _other(root / name, wanted, computed, write), write)
    print(f"{count} numbers of {len(wanted)} chapters")
    if not good:
        raise typer.Exit(1)


def _executed(
    root: Path, chapters: dict[str, Path]
) -> Iterator[tuple[str, str | None, dict[str, Number]]]:
    import nbformat

    from lsai_lab.report.numbers import COLLECT, collected
    from lsai_lab.runs.chapters import book_runs, execute_chapters
    from lsai_lab.runs.session import Session

    session, build = Session(None), root / "reports" / "_build"
    ends = execute_chapters(session, chapters, build, book_runs(session), COLLECT)
    with contextlib.closing(ends):
        for name, problem in ends:
            notebook = nbformat.read(build / name, as_version=4)  # type: ignore[no-untyped-call]
            yield name, problem, collected(notebook)


def _chapter(path: Path, computed: dict[str, Number], write: bool) -> list[Found]:
    """The numbers of a chapter's text that differ; `write`: with the computed ones put in."""
    from lsai_core.base.files import write_text
    from lsai_lab.project.strip import stripped
    from lsai_lab.report.numbers import compared, rewritten

    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    texts = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    found = [each for cell in texts for each in compared("".join(cell["source"]), computed)]
    used = {each.name for each in found}
    if unused := sorted(set(computed) - used):
        print(f"{path.name}: no text has the number{'s' * (len(unused) > 1)} {', '.join(unused)}")
    differing = [each for each in found if each.written != each.computed]
    if write and differing:
        for cell in texts:
            cell["source"] = rewritten("".join(cell["source"]), computed).splitlines(True)
        write_text(path, stripped(json.dumps(notebook)))
    return differing


def _other(
    path: Path, chapters: dict[str, Path], computed: dict[str, dict[str, Number]], write: bool
) -> list[Found]:
    """The numbers of a text that is no chapter that differ; `write`: with the computed ones put
    in."""
    from lsai_core.base.files import write_text
    from lsai_lab.report.numbers import compared, rewritten

    if not path.exists():
        return []
    text, differing = path.read_text(encoding="utf-8"), []
    for name, source in chapters.items():
        file = f"notebooks/{source.name}"
        found = compared(text, computed[name], file)
        differing += [each for each in found if each.written != each.computed]
        text = rewritten(text, computed[name], file)
    if write and differing:
        write_text(path, text)
    return differing


def _tell(where: str, differing: list[Found], write: bool) -> bool:
    """Say what differs; whether all is well now."""
    for each in differing:
        mended = write and each.computed is not None
        print(f"{where}{' (mended)' if mended else ''}: {each}", flush=True)
    return all(write and each.computed is not None for each in differing)
