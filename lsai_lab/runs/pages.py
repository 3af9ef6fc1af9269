"""The page of a run in the book, by which numbers and marks lead to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lsai_lab.runs.records import as_name


def page_name(folder: str | Path) -> str:
    """A run's page below `runs/`, without its ending: `<study>/<run>`, of a committed one
    `<machine>/<study>/<run>`."""
    found = re.search(r"(?:(?<=/recorded/)[^/]+/)?[^/]+/[^/]+$", Path(folder).as_posix())
    return "/".join(map(as_name, found[0].split("/"))) if found else ""


def page_names(run: Any) -> str:
    """What a number or a mark leads to: a run's page, of a pair of folders `(before, after)` both,
    `before,after`; empty if none is meant."""
    folders = run if isinstance(run, tuple) else (run,)
    pages = [page_name(folder) for folder in folders if isinstance(folder, (str, Path))]
    return ",".join(dict.fromkeys(pages))
