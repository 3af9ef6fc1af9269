"""Which code made a result: a hash that changes when the code can change the result, and the git commit for people.

The hash covers the syntax trees of a kind's source files without docstrings, so rewording a comment or formatting a file
does not throw measured results away, and changing a line that runs does. A data file counts as it stands.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import lsai_core

PACKAGE = Path(lsai_core.__file__).parent
# Python 3.11 counts the depth of a syntax tree for all threads together and fails when two parse at the same time:
# "AST constructor recursion depth mismatch".
_ONE_PARSER = threading.Lock()


def code_hash(paths: tuple[str, ...]) -> str:
    """Twelve hex digits over the given files and folders (relative to the package)."""
    digest = hashlib.sha256()
    for path in sorted(_files(paths)):
        digest.update(str(path.relative_to(PACKAGE)).encode())
        digest.update(_normalized(path).encode())
    return digest.hexdigest()[:12]


def _files(paths: tuple[str, ...]) -> set[Path]:
    found: set[Path] = set()
    for name in paths:
        path = PACKAGE / name
        if not path.exists():
            raise FileNotFoundError(f"the code of a kind of run names a file that does not exist: {path}")
        found |= set(path.rglob("*.py")) if path.is_dir() else {path}
    return found


@functools.cache
def _normalized(path: Path) -> str:
    if path.suffix != ".py":
        return path.read_text()
    with _ONE_PARSER:
        tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body[0] = ast.Pass()
    return _dump(tree)


def _dump(node: Any) -> str:
    """A syntax tree in one line, without its empty fields: newer versions of Python add some, and a result is not theirs."""
    if isinstance(node, ast.AST):
        fields = (
            f"{name}={_dump(value)}" for name, value in ast.iter_fields(node) if value is not None and value != []
        )
        return f"{type(node).__name__}({', '.join(fields)})"
    return f"[{', '.join(map(_dump, node))}]" if isinstance(node, list) else repr(node)


@functools.cache
def git_state(root: Path) -> dict[str, Any]:
    """`{commit, dirty}` of the checkout at `root`, or $LSAI_COMMIT (set it when you copy the code to a machine or into a
    container without its history); without either both are null."""
    if os.environ.get("LSAI_COMMIT"):
        return {"commit": os.environ["LSAI_COMMIT"], "dirty": None}

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--verify", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None}
    status = git("status", "--porcelain", "--", "lsai_core", "params", "notebooks")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def code_facts(paths: tuple[str, ...], root: Path) -> dict[str, Any]:
    """What `summary.json` keeps about the code of a run."""
    return {"version": lsai_core.__version__, "hash": code_hash(paths), **git_state(root)}
