"""A parameter's way: which files a variant's setting passes between params/studies and the
optimizer's step, the config from `train` to the step, and a tensor in attention that processes
share; counted as they run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CHECKOUT, Project

from lsai_core.config.strict import validated
from lsai_core.config.train import TrainConfig
from lsai_core.context.methods import ContextParallel
from lsai_core.parallel.processes import connect
from lsai_core.training.loop import train
from lsai_lab.runs.execute import ActiveRun, write_plan
from lsai_lab.runs.session import Session
from lsai_lab.searches import tries

LR = 0.000731  # nothing else has this value
MODULES = {
    ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("lsai_core", "lsai_lab")
    for path in (CHECKOUT / package).rglob("*.py")
}
# What is read of a config like a field is no place that a reader goes to.
PROPERTIES = {
    member.fget.__code__
    for member in vars(TrainConfig).values()
    if isinstance(member, property) and isinstance(member.fget, FunctionType)
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
            and code not in PROPERTIES
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
    assert len(set(way)) <= 19, dict.fromkeys(way)
    assert len(climbs) <= 10, climbs


def stays(call: Callable[[], Any], is_it: Callable[[Any], bool]) -> list[str]:
    """The files of the core whose functions get what `is_it` says, or have it in `self`, in the
    order in which each function is first called, a file once for each stay in it."""
    met, found = set[tuple[str, str]](), list[str]()

    def look(frame: Any, event: str, _: Any) -> None:
        code, name = frame.f_code, NAMES.get(frame.f_code.co_filename, "")
        stop = (name, code.co_qualname)
        if event != "call" or not name.startswith("lsai_core.") or stop in met:
            return
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        owner = frame.f_locals.get("self")
        if name == module_of(owner) and not is_it(owner):
            given += vars(owner).values() if hasattr(owner, "__dict__") else ()
        if any(map(is_it, given)):
            met.add(stop)
            found.extend([name] if found[-1:] != [name] else [])

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def module_of(value: Any) -> str:
    return type(value).__module__


class Tokens:
    def tokens(self, split: str) -> np.ndarray[Any, Any]:
        return np.arange(2000, dtype=np.uint16) % 300


def test_the_config_returns_to_few_files_between_train_and_the_step(tmp_path: Path) -> None:
    shape = {"n_layers": 2, "d_model": 32, "n_heads": 2, "n_kv_heads": 2, "d_ff": 64}
    given = {"model": {**shape, "vocab_size": 300}, "data": {"vocab_size": 300}, "device": "cpu"}
    config = validated(TrainConfig, {**given, "seq_len": 32, "batch_size": 2, "steps": 1}, "test")

    def call() -> None:
        train(config, Tokens(), tmp_path)

    files = stays(call, lambda value: value is config)
    step = "lsai_core.training.step"
    way = files[: len(files) - files[::-1].index(step)]
    assert way[0] == "lsai_core.training.loop" and way[-1] == step, files
    assert len(way) - len(set(way)) <= 4, way


def shared_attention(rank: int, method: str) -> dict[str, str]:
    """The files that queries pass in one of two processes that share a sequence."""
    connect(torch.device("cpu"))
    context = ContextParallel(method, 32)
    q_BSHD = torch.randn(1, 16, 2, 8)

    def call() -> None:
        context.attention(q_BSHD, q_BSHD, q_BSHD)

    files = stays(call, lambda value: isinstance(value, torch.Tensor))
    return {"way": " ".join(files)}


@pytest.mark.parametrize("method", ["ulysses", "zigzag"])
def test_shared_attention_returns_to_few_files(method: str) -> None:
    workers = tries.server(["lsai_core.parallel.build"], on_gpu=False)
    ended, found = tries.attempt(workers, shared_attention, method, processes=2, timeout_s=300)
    assert ended["outcome"] == "ok", ended
    way = found["way"].split()
    assert "lsai_core.context.engine" in way, way
    assert len(way) - len(set(way)) <= 2, way
