"""The house stands: which way imports go, no circles, sizes, and what the core gives to somebody
who uses it alone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import CHECKOUT

from lsai_core.base import plugins

# Lines of .py in all, of a file, of a function; None: no bar yet.
LIMITS: dict[str, tuple[int | None, int | None, int | None]] = {
    "lsai_core": (10_600, 300, 60),
    "lsai_lab": (None, 400, 60),
}
NOT_FOR_THE_CORE = {
    "lsai_lab",
    "pandas",
    "matplotlib",
    "seaborn",
    "IPython",
    "papermill",
    "typer",
    "rich",
    "requests",
}
# Everything in lsai_core, then everything in lsai_lab; what is no package of ours ends an edge.
OURS = ("lsai_core", "lsai_lab")


def files(package: str) -> list[Path]:
    return sorted((CHECKOUT / package).rglob("*.py"))


def module(path: Path) -> str:
    parts = path.relative_to(CHECKOUT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def of_types_only(tree: ast.AST) -> set[ast.AST]:
    """Nodes that no run executes: imports under TYPE_CHECKING."""
    guards = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    )
    return {node for guard in guards for statement in guard.body for node in ast.walk(statement)}


@cache
def imports(path: Path) -> frozenset[str]:
    """The names that a file imports anywhere, functions included, as far as they are run, and files
    that it finds by looking."""
    tree = ast.parse(path.read_text())
    found, unused = set(), of_types_only(tree)
    for node in ast.walk(tree):
        if node in unused:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Constant)
            and str(node.value).startswith(OURS)
            and str(node.value).endswith(".*")
        ):
            found |= {str(node.value).replace("*", name) for name in plugins.names(str(node.value))}
    return frozenset(found)


def test_the_core_imports_nothing_from_above() -> None:
    for path in files("lsai_core"):
        everything = {
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        roots = {
            name.partition(".")[0]
            for node in everything
            for name in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [a.name for a in node.names]
            )
        }
        assert not roots & NOT_FOR_THE_CORE, path


def test_imports_go_one_way() -> None:
    known = {module(path): path for path in files("lsai_core")}

    def reached(name: str) -> str | None:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name or None

    edges = {
        name: {to for used in imports(path) if (to := reached(used)) not in (None, name)}
        for name, path in known.items()
    }
    edges["lsai_core"] = set()  # its names are looked up when somebody outside asks for them
    while free := [name for name, to in edges.items() if not to & edges.keys()]:
        for name in free:
            del edges[name]
    assert not edges, f"a circle among {sorted(edges)}"


@pytest.mark.parametrize("package", LIMITS)
def test_sizes(package: str) -> None:
    in_all, of_file, of_function = LIMITS[package]
    lines = {path: len(path.read_text().splitlines()) for path in files(package)}
    assert in_all is None or sum(lines.values()) <= in_all
    assert of_file is None or {path: size for path, size in lines.items() if size > of_file} == {}
    for path in files(package) if of_function is not None else ():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                long = (node.end_lineno or 0) - node.lineno >= of_function
                assert not long, f"{path}: {node.name}"


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


def test_the_report_kit_is_small() -> None:
    """Lines of the kit with its templates, and of what binds and renders, templates and scripts: to
    come down to 500."""
    templates = [
        path
        for path in (CHECKOUT / "reports").iterdir()
        if path.suffix in {".css", ".html", ".js", ".lua", ".py", ".scss", ".typ"}
    ]
    kit = files("lsai_lab/report")
    making = [path for path in kit if path.stem in {"bind", "render", "runpages"}]
    assert sum(len(path.read_text().splitlines()) for path in [*kit, *templates]) <= 1_450
    assert sum(len(path.read_text().splitlines()) for path in [*making, *templates]) <= 800
