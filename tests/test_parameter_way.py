"""A parameter's way: which files a variant's setting passes between params/studies and the
optimizer's step, counted as it runs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import CHECKOUT, Project

from lsai_lab.runs.execute import ActiveRun, write_plan
from lsai_lab.runs.session import Session

LR = 0.000731  # nothing else has this value
MODULES = {
    ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("lsai_core", "lsai_lab")
    for path in (CHECKOUT / package).rglob("*.py")
}
NAMES = {str(path): name for name, path in MODULES.items()}


def above(name: str) -> set[str]:
    """The modules that `name` imports, and what these import: it stands above them."""
    found, todo = set[str](), [name]
    while todo:
        for node in ast.walk(ast.parse(MODULES[todo.pop()].read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            for used in [f"{module}.{alias.name}" for alias in node.names] if module else []:
                known = used if used in MODULES else used.rpartition(".")[0]
                if known in MODULES and known not in found and MODULES[known].name != "__init__.py":
                    found.add(known)
                    todo.append(known)
    return found


def carries(value: Any, depth: int = 0) -> bool:
    """Whether the setting is in a value: itself, or in a text, a mapping, a sequence or an object
    of ours."""
    if isinstance(value, (float, str)):
        return value == LR or str(LR) in str(value)
    if depth > 4:
        return False
    if isinstance(value, dict):
        return any(carries(item, depth + 1) for item in value.values())
    if isinstance(value, (list, tuple)):
        return len(value) < 50 and any(carries(item, depth + 1) for item in value)
    ours = type(value).__module__.startswith("lsai_")
    return ours and any(
        carries(item, depth + 1) for item in getattr(value, "__dict__", {}).values()
    )


@pytest.mark.timeout(300)
def test_a_setting_reaches_the_step_through_few_files(
    new_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = new_project({"baseline": {"config": {"optim": {"lr": LR}}}}, steps=1)
    for key, value in project.env.items():
        monkeypatch.setenv(key, value)
    session, stops = Session("cpu"), dict[tuple[str, str], None]()

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        stop = (code.co_filename, code.co_name)
        if (
            event == "call"
            and code.co_filename in NAMES
            and stop not in stops
            and not code.co_name.startswith("<")
        ):
            sys.setprofile(None)
            if any(carries(item) for item in list(frame.f_locals.values())):
                stops[stop] = None
            if (Path(code.co_filename).name, code.co_name) != ("step.py", "train_step"):
                sys.setprofile(look)

    sys.setprofile(look)
    try:
        (run,) = session.plan("memory", only=["baseline"], parts=["train"])
        write_plan(run, "test")
        assert ActiveRun(run.folder, session.data_root).execute().outcome == "ok"
    finally:
        sys.setprofile(None)
    way = [NAMES[file] for file, _ in stops]
    assert way[0] == "lsai_lab.project.files" and way[-1] == "lsai_core.training.step", way
    assert "lsai_core.optimizers.build" in way, "the optimizer was built with it"
    climbs = [(a, b) for a, b in pairwise(way) if a in above(b) and b not in above(a)]
    assert len(set(way)) <= 22, dict.fromkeys(way)
    assert len(climbs) <= 12, climbs
