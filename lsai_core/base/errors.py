"""The exceptions that have a meaning of their own, first of all the one that users are meant to
see.

Everything a person can get wrong (a key in a YAML file, a missing file, a combination that cannot
work) is raised as `UserError` with one clear line that says what is wrong and what to do. The
command line prints that line and exits with 2; a notebook shows the line below the cell. Anything
else is a bug or a failed run and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in the input: one line that says what is wrong and what to do about it."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it in a notebook, where nobody turns it into that line: the same
        line, no traceback."""
        return [f"error: {self}"]


class Unavailable(Exception):
    """This machine cannot run the request (no GPU, package missing, ...): recorded as
    `unavailable`, never as a failure."""


class Preempted(Exception):
    """The run was asked to stop (SIGTERM or SIGUSR1) and has saved a checkpoint."""


class Diverged(Exception):
    """The loss is no finite number, so that training cannot go on."""


_SHOWN = 30


def hint(name: object, known: Iterable[str]) -> str:
    """What an error line says after an unknown name: up to three known ones that come close, else
    all of them, else, of more than thirty, the three that come nearest."""
    names, name = list(dict.fromkeys(map(str, known))), str(name)
    if close := difflib.get_close_matches(name, names, n=3):
        return f"; did you mean {' or '.join(close)}?"
    if len(names) <= _SHOWN:
        return f"; known: {', '.join(names)}"
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
    return f"; of {len(names)} known ones the nearest are {', '.join(nearest)}"


def no_column(name: object, columns: Iterable[str]) -> str:
    """The error line for a name that is no column, with the nearest of those that are."""
    return f"there is no column {name!r}{hint(name, columns)}"


def not_installed(error: ModuleNotFoundError) -> str | None:
    """What to do about a package of somebody else's that is not there; None if a file of ours is
    missing."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "lsai_core", "lsai_lab"):
        return None
    return (
        f"the package {package} is not installed here; pip install 'lsai[report]' brings all "
        f"of "
        f"the laboratory's"
    )
