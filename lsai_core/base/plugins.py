"""What is found by looking into a folder: one file, one name (attention backends, optimizers).

A package is named with a star behind it, `lsai_core.attention.backends.*`: `lsai_core.base.code`
then knows that the folder's files are reached, too.

A laboratory can have files of its own beside these: `techniques/<kind>/<name>.py`, where `kind` is
`attention`, `optimizers` or `losses`. Such a file serves where a config names it. `auto` never
chooses it, it is imported when it is first needed, and its content is part of the key of a run.
"""

import functools
import os
import re
import sys
import traceback
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

from lsai_core.base.errors import UserError

_ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"[A-Za-z0-9]\w{0,60}")
TECHNIQUES = "techniques"  # the folder in a laboratory


@functools.cache
def names(package: str) -> tuple[str, ...]:
    """The names of the files in `package` ("a.b.*"), sorted; imports nothing."""
    folder = _ROOT.joinpath(*package.removesuffix(".*").split("."))
    return tuple(sorted(path.stem for path in folder.glob("[!_]*.py")))


def declared(package: str, name: str, what: str, kind: str, wanted: Any = object) -> Any:
    """What the file `name` of `package`, or of the laboratory's folder `kind`, declares under the
    name `what`: a `wanted` (a class, or Callable); imports the file. UserError if the laboratory's
    file cannot be imported, does not declare it or has the name of one of the package's."""
    path = own(kind).get(name)
    if name in names(package):
        if path is not None:
            raise UserError(f"{path} has the name of one of this package's {kind}; rename it")
        return getattr(import_module(package.replace("*", name)), what)
    if path is None:
        raise UserError(f"there is no file {name}.py in {TECHNIQUES}/{kind}")
    module = _imported(path, path.stat().st_mtime_ns)
    if not hasattr(module, what):
        raise UserError(f"{path} declares no {what}")
    if not isinstance(found := getattr(module, what), wanted):
        raise UserError(f"{path}: {what} must be of type {wanted.__name__}, not {found!r:.80}")
    return found


def laboratory() -> Path | None:
    """The laboratory's folder: $LSAI_ROOT, else the nearest one at or above the current folder that
    holds `params/` and `notebooks/`; None without either."""
    if given := os.environ.get("LSAI_ROOT"):
        return Path(given)
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "params").is_dir() and (folder / "notebooks").is_dir():
            return folder
    return None


def own(kind: str) -> dict[str, Path]:
    """The files of the laboratory's folder `techniques/<kind>`, by name; imports nothing."""
    root = laboratory()
    paths = sorted((root / TECHNIQUES / kind).glob("[!_]*.py")) if root else []
    return {path.stem: path for path in paths if _NAME.fullmatch(path.stem)}


def file_adds(kind: str) -> str:
    """What an error line says where a name of this kind is unknown."""
    return f"a file {TECHNIQUES}/{kind}/<name>.py of your laboratory adds one"


def place_of(function: Any) -> str:
    """The file of a laboratory and the line in which a function begins."""
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(function)
    return f"{'/'.join(Path(code.co_filename).parts[-3:])}, line {code.co_firstlineno}"


def own_fault(error: BaseException) -> str | None:
    """Where a file of the laboratory's techniques raised `error`, or what it called did, and the
    error, in one line; None if no such file had a part in it."""
    root = laboratory()
    folder = None if root is None else (root / TECHNIQUES).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        path = Path(frame.filename)
        if folder is not None and path.is_absolute() and path.resolve().is_relative_to(folder):
            where = path.relative_to(folder.parent)
            return f"{where}, line {frame.lineno}: {_told(error)}"
    return None


def _told(error: BaseException) -> str:
    """The kind of an error and what it says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@functools.lru_cache(maxsize=64)
def _imported(path: Path, changed_ns: int) -> ModuleType:
    """The module of one file of the laboratory, imported again once the file has changed."""
    name = f"lsai_{TECHNIQUES}.{path.parent.name}.{path.stem}"
    spec = util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        told = own_fault(error) or f"{path}: {_told(error)}"
        if isinstance(error, SyntaxError) and error.filename == str(path):
            told = f"{path}, line {error.lineno}: SyntaxError: {error.msg}"
        raise UserError(f"{told}; so it cannot be imported") from error
    return module
