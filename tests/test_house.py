"""The house stands: rooms and which way imports go, sizes, and what the core gives to somebody who
uses it alone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import CHECKOUT

# The rooms of a package in the order in which they stand: one imports from rooms before it only,
# also inside of functions and for types.
CORE = (
    "base config kernels attention context model fp8 parallel optimizers profiling training "
    "prediction"
)
LAB = (
    "project machine data launch runs benches searches peers analysis predictions claims report "
    "chapters interactive cluster cli"
)
ROOMS = {"lsai_core": CORE.split(), "lsai_lab": LAB.split()}
NOT_FOR_THE_CORE = {
    *("lsai_lab", "pandas", "matplotlib", "seaborn", "IPython", "papermill", "typer", "rich"),
    "requests",
}
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 400, 60
LONGEST_CHAIN = 14  # files of the core that import one another in a row
REACHED_BY_THE_MODEL = 20  # files that it needs, with its own


def files(package: str) -> list[Path]:
    return sorted((CHECKOUT / package).rglob("*.py"))


def module(path: Path) -> str:
    parts = path.relative_to(CHECKOUT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> frozenset[str]:
    """The names that a file imports anywhere, functions and TYPE_CHECKING included."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def reached(name: str, known: dict[str, Path]) -> str | None:
    """The file that an imported name stands for."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


@pytest.mark.parametrize("package", ROOMS)
def test_nothing_lies_about_and_every_room_says_what_it_is(package: str) -> None:
    loose = [path.name for path in (CHECKOUT / package).glob("*.py")]
    assert loose == ["__init__.py"]
    folders = {path.name for path in (CHECKOUT / package).iterdir() if list(path.glob("*.py"))}
    assert folders == set(ROOMS[package])
    for room in folders:
        said = ast.get_docstring(ast.parse((CHECKOUT / package / room / "__init__.py").read_text()))
        assert said, room


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_from_rooms_before_it_only(package: str) -> None:
    order = ROOMS[package]
    upward = [
        f"{path.relative_to(CHECKOUT)} imports {name}"
        for path in files(package)
        if path.parent.name != package
        for name in imports(path)
        if name.startswith(f"{package}.")
        and name.split(".")[1] in order
        and order.index(name.split(".")[1])
        > order.index(path.relative_to(CHECKOUT / package).parts[0])
    ]
    assert not upward


def test_the_core_imports_nothing_of_the_laboratory() -> None:
    for path in files("lsai_core"):
        assert not {name.partition(".")[0] for name in imports(path)} & NOT_FOR_THE_CORE, path


@pytest.mark.parametrize("package", ROOMS)
def test_files_import_in_no_circle_and_in_short_chains(package: str) -> None:
    known = {module(path): path for path in files(package)}
    edges = {
        name: {to for used in imports(path) if (to := reached(used, known)) not in (None, name)}
        for name, path in known.items()
    }
    edges[package] = set()  # its names are looked up when somebody outside asks for them
    chain = 0
    while free := [name for name, to in edges.items() if not to & edges.keys()]:
        for name in free:
            del edges[name]
        chain += 1
    assert not edges, f"a circle among {sorted(edges)}"
    assert package != "lsai_core" or chain <= LONGEST_CHAIN


def test_the_model_needs_few_files() -> None:
    known = {module(path): path for path in files("lsai_core")}
    found, todo = set[str](), ["lsai_core.model.transformer"]
    while todo:
        name = todo.pop()
        if name not in found and name != "lsai_core":
            found.add(name)
            todo += [to for used in imports(known[name]) if (to := reached(used, known))]
    assert len(found) <= REACHED_BY_THE_MODEL, sorted(found)


@pytest.mark.parametrize("package", ROOMS)
def test_files_and_functions_can_be_read_at_once(package: str) -> None:
    for path in files(package):
        assert len(path.read_text().splitlines()) <= LINES_OF_A_FILE, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= LINES_OF_A_FUNCTION, f"{path}: {node.name}"


def test_the_core_is_usable_alone() -> None:
    """The public names, and that they bring none of the packages of the laboratory; importing the
    core alone brings no torch."""
    program = (
        "import json, sys, lsai_core; early = 'torch' in sys.modules\n"
        "from lsai_core.training import step\n"
        "from lsai_core import TrainConfig, train, predict, Transformer\n"
        "assert callable(train) and callable(predict)\n"
        "print(json.dumps([early, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=CHECKOUT
    )
    assert answer.returncode == 0, answer.stderr
    early, roots = json.loads(answer.stdout)
    assert not early and not set(roots) & NOT_FOR_THE_CORE
