"""Which code can change a result: the files that a module reaches by its imports, and a hash of
what they do.

The files are found by reading, not by importing: every import statement counts, also one inside a
function, and so does a string that names a module (`python -m lsai_core...`), or with a star all
files of a package (`plugins.py`). The hash covers syntax trees without docstrings, descriptions of
fields and what an error says, so rewording a comment or formatting a file throws no measured result
away, and changing a line that runs does. A JSON or CSV file that lies beside a module and is named
in it counts as it stands.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import re
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from lsai_core.base import plugins
from lsai_core.base.errors import UserError
from lsai_core.base.files import write_json

ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the packages
_DATA = (".json", ".csv")  # beside a module, named in it
_MODULE = re.compile(r"lsai_\w+(\.\w+)+(\.\*)?")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Python 3.11 counts the depth of a syntax tree for all threads together and fails when two parse at
# the same time: "AST constructor recursion depth mismatch".
_ONE_PARSER = threading.Lock()


_ALL = ("lsai_",)


def closure(modules: Iterable[str], within: Collection[str] = _ALL) -> list[Path]:
    """The files of `modules` and of all that they reach by imports, as far as a module's name
    begins with one of `within`."""
    found: set[Path] = set()
    left = [path for name in modules if (path := _file(name)) is not None]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        for name in _names(path, _stamp(path)):
            reached = path.with_name(name) if name.endswith(_DATA) else _file(name)
            if reached is not None and (reached.suffix != ".py" or name.startswith(tuple(within))):
                left.append(reached)
    return sorted(found)


def code_hash(files: Iterable[Path]) -> str:
    """Twelve hex digits over what `files` do."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(_normalized(path, _stamp(path)).encode())
    return digest.hexdigest()[:12]


def own_hash(path: Path) -> str:
    """Twelve hex digits over what a file of the laboratory does (`plugins.own`)."""
    return hashlib.sha256(_normalized(path, _stamp(path)).encode()).hexdigest()[:12]


def version_of(*modules: str, within: Collection[str] = _ALL, without: Collection[str] = ()) -> str:
    """`code_hash` of all that `modules` reach (see `closure`), but for files of the names
    `without`. Reading that takes 0.3 s, so it is kept until a file's size or time changes."""
    files = sorted(path for path in ROOT.glob("lsai_*/**/*.*") if path.suffix in (".py", *_DATA))
    state = hashlib.sha256(repr([(path, _stamp(path)) for path in files]).encode()).hexdigest()
    question = repr((modules, within, without)).encode()
    kept = ROOT / ".cache" / "code" / f"{hashlib.sha256(question).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError):  # not there, or not whole
        known = json.loads(kept.read_text(encoding="utf-8"))
        if known[:1] == [state]:
            return str(known[1])
    found = code_hash(path for path in closure(modules, within) if path.name not in without)
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, [state, found])
    return found


def _file(module: str) -> Path | None:
    """The file of a module, or of the longest beginning of its name that is one (the rest is a name
    in it)."""
    while "." in module or module.startswith("lsai_"):
        path = ROOT / module.replace(".", "/")
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
        if "." not in module:
            return None
        module = module.rpartition(".")[0]
    return None


def _stamp(path: Path) -> tuple[int, int]:
    """Changes with the file, so that an edit during a run is seen."""
    return path.stat().st_size, path.stat().st_mtime_ns


@functools.cache
def _names(path: Path, stamp: tuple[int, int]) -> frozenset[str]:
    """What a file names: modules (`package.module` or `package.module.name`), and JSON files that
    lie beside it."""
    return frozenset(_each_name(path)) if path.suffix == ".py" else frozenset()


def _each_name(path: Path) -> Iterator[str]:
    tree = _tree(path)
    for guard in (node for node in ast.walk(tree) if isinstance(node, ast.If)):
        if "TYPE_CHECKING" in ast.dump(guard.test):
            guard.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if _MODULE.fullmatch(text) and text.endswith(".*"):
                yield from (text.replace("*", name) for name in plugins.names(text))
            elif _MODULE.fullmatch(text) or (
                re.fullmatch(r"[\w-]+\.(json|csv)", text) and path.with_name(text).is_file()
            ):
                yield text


def _tree(path: Path) -> ast.Module:
    with _ONE_PARSER:
        try:
            return ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError as error:
            raise UserError(f"{path}, line {error.lineno}: SyntaxError: {error.msg}") from None


@functools.cache
def _normalized(path: Path, stamp: tuple[int, int]) -> str:
    if path.suffix != ".py":
        return path.read_text(encoding="utf-8")
    tree = _tree(path)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "Field"
        ):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "description"]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args = []
    return _dump(tree)


def _dump(node: Any) -> str:
    """A syntax tree in one line, without its empty fields: newer versions of Python add some, and a
    result is not theirs."""
    if isinstance(node, ast.AST):
        fields = [
            f"{name}={_dump(value)}"
            for name, value in ast.iter_fields(node)
            if value not in (None, [])
        ]
        return f"{type(node).__name__}({', '.join(fields)})"
    return f"[{', '.join(map(_dump, node))}]" if isinstance(node, list) else repr(node)
