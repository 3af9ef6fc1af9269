"""What is found by looking into a folder: one file, one name (attention backends, optimizers).

A package is named with a star behind it, `lsai_core.attention.backends.*`: `lsai_core.base.code`
then knows that the folder's files are reached, too.
"""

from __future__ import annotations

import functools
from importlib import import_module
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def names(package: str) -> tuple[str, ...]:
    """The names of the files in `package` ("a.b.*"), sorted; imports nothing."""
    folder = _ROOT.joinpath(*package.removesuffix(".*").split("."))
    return tuple(sorted(path.stem for path in folder.glob("[!_]*.py")))


def declared(package: str, name: str, what: str) -> Any:
    """What the file `name` of `package` declares under the name `what`; imports the file."""
    return getattr(import_module(package.replace("*", name)), what)
