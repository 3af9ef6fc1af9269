"""Whether what a report is made of is still what it was, by size and time of every file: that takes
a tenth of a second, where reading them takes several.

A state is written after a good report only, and is the one from before it began, so that a file
which changed meanwhile makes the next report anew.
"""

import datetime
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from lsai_core.base import code
from lsai_lab.runs.session import Session

_CODE = ("*.py", "*.json", "*.csv")  # files of the packages that can change a result
_MADE = ("files", "data", "explore", "runs", "_build", "_output")  # folders that a report writes


def book_state(session: Session, *facts: object) -> str:
    """A hash over every file that the book is made of, and `facts`: the engine, the formats."""
    root, reports = session.root, session.root / "reports"
    folders = [root / "notebooks", root / "params", root / "techniques", session.runs_root]
    folders += [path for path in reports.iterdir() if path.is_dir() and path.name not in _MADE]
    files = [path for folder in folders for path in folder.rglob("*")]
    made = ("*.ipynb", "_quarto-executed.yml", "colors.css")
    files += [path for path in reports.iterdir() if not any(map(path.match, made))]
    today = datetime.date.today()  # stands on the first page
    return files_state([*files, *code_files()], session.profile_name, today, *facts)


def code_files() -> list[Path]:
    """The files of the packages."""
    return [path for end in _CODE for path in code.ROOT.glob(f"lsai_*/**/{end}")]


def files_state(files: Iterable[Path], *facts: object) -> str:
    """A hash over names, sizes and times of those of `files` that are files, and over `facts`."""
    digest = hashlib.sha256(repr(facts).encode())
    for path in sorted(set(files)):
        if path.is_file():
            found = path.stat()
            digest.update(
                f"{path}\0{found.st_size}\0{found.st_mtime_ns}\n".encode(errors="replace")
            )
    return digest.hexdigest()


def is_as(stamp: Path, state: str, results: Sequence[Path]) -> bool:
    """Whether all `results` are there, and `stamp` says that they were made of `state`."""
    there = all(path.exists() for path in results) and stamp.is_file()
    return there and stamp.read_text(encoding="utf-8") == state
