"""A kernel that lives on while its files change: what a run records is what the files under its key
compute, whatever the kernel imported before an edit or replaced in its modules."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from conftest import CHECKOUT, Project, losses
from jupyter_client import KernelManager

from lsai_lab.runs.records import Summary, find_runs

OPEN = """
import lsai_lab as lab
def opened(**overrides):
    words = dict(study="memory", variant="baseline", part="train", profile="cpu")
    return lab.open_run(**words, overrides=overrides)
"""
LOSS = "print('loss', opened(**{}).execute({}).results['train_loss'])".format
WHOLE, HALF = "[total.float(), norm", "[0.5 * total.float(), norm"


@dataclass
class Kernel:
    """A Jupyter kernel in a project that has a copy of the package, as in a checkout."""

    project: Project
    manager: KernelManager

    @property
    def step(self) -> Path:
        return self.project.root / "lsai_core" / "training" / "step.py"

    def begin(self, code: str) -> Callable[[float], str]:
        """Start a cell; the function that comes back waits for its end and returns what it
        showed."""
        client = self.client
        asked = client.execute(code)

        def wait(timeout_s: float = 120) -> str:
            said, deadline = "", time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                try:
                    message = client.get_iopub_msg(timeout=1)
                except queue.Empty:
                    continue
                content = message["content"]
                if message["parent_header"].get("msg_id") != asked:
                    continue
                if message["msg_type"] == "status" and content["execution_state"] == "idle":
                    return said
                said += content.get("text", "") + str(content.get("data", ""))
                said += content.get("ename", "") + content.get("evalue", "")
                said += "\n" + "\n".join(content["traceback"]) if "traceback" in content else ""
            raise AssertionError(f"the cell did not end; it showed {said}")

        return wait

    def run(self, code: str) -> str:
        return self.begin(code)(120)

    def __post_init__(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        assert self.run(OPEN) == ""

    def loss(self, again: bool = False, **overrides: object) -> float:
        """The loss that a cell of this kernel gets for a run."""
        said = self.run(LOSS(overrides, again))
        assert "loss " in said, said
        return float(said.split("loss ")[-1])


@pytest.fixture(scope="module")
def project(new_project: Callable[..., Project]) -> Project:
    made = new_project()
    for package in ("lsai_core", "lsai_lab"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / package, made.root / package, ignore=ignored)
    return made


@pytest.fixture(scope="module")
def kernel(project: Project) -> Iterator[Kernel]:
    manager = KernelManager(kernel_name="python3")
    env = {**os.environ, "PYTHONPATH": str(project.root), **project.env}
    manager.start_kernel(env=env, cwd=str(project.root))
    made = Kernel(project, manager)
    try:
        yield made
    finally:
        made.client.stop_channels()
        manager.shutdown_kernel(now=True)


def steps_of_a_run_that_goes_on(project: Project) -> Path:
    """The file of its steps, once there is one."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        for path in project.runs.glob("memory/*/metrics.jsonl"):
            if not (path.parent / "summary.json").exists():
                return path
        time.sleep(0.05)
    raise AssertionError("no run took a step")


def in_a_fresh_process(project: Project, code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(project.root), **project.env}
    script = project.root / "script.py"
    script.write_text(OPEN + code)
    done = subprocess.run(
        [sys.executable, str(script)], env=env, cwd=project.root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def fresh_loss(project: Project, **overrides: object) -> float:
    """The loss that a process which has just begun gets, and which it does not take from a
    record."""
    return float(in_a_fresh_process(project, LOSS(overrides, True)).split("loss ")[-1])


@pytest.mark.slow
def test_code_that_was_edited_while_the_kernel_lives_is_the_code_that_runs(kernel: Kernel) -> None:
    before, text = kernel.loss(seed=1), kernel.step.read_text()
    assert text.count(WHOLE) == 1
    try:
        kernel.step.write_text(text.replace(WHOLE, HALF))
        edited = kernel.loss(seed=1)
        assert edited == fresh_loss(kernel.project, seed=1) == pytest.approx(before / 2)
    finally:
        kernel.step.write_text(text)
    assert kernel.loss(seed=1) == before  # by its record: the key is what it was
    keys = [path.name for path in kernel.project.runs.glob("memory/baseline-*/summary.json")]
    assert len(keys) >= 2


@pytest.mark.slow
def test_a_function_that_the_kernel_replaced_has_no_part_in_a_run(kernel: Kernel) -> None:
    patched = """
import contextlib, torch
from unittest import mock
with contextlib.ExitStack() as patches:
    for name in ("step.train_step", "loop.train_step", "step.loss_fn", "loop.loss_fn"):
        zeros = lambda *a, **k: torch.zeros(2)
        patches.enter_context(mock.patch(f"lsai_core.training.{name}", zeros))
    patches.enter_context(mock.patch("torch.nn.Module.__call__", lambda *a, **k: 1 / 0))
    print('loss', opened(seed=2).execute().results['train_loss'])
"""
    said = kernel.run(patched)
    assert float(said.split("loss ")[-1]) == fresh_loss(kernel.project, seed=2) > 1


@pytest.mark.slow
def test_what_a_script_replaced_at_its_head_has_no_part_in_a_run(project: Project) -> None:
    patch = "import lsai_core.training.loop as loop\nloop.learning_rate = lambda *a, **k: 0.0\n"
    said = in_a_fresh_process(project, patch + LOSS({"seed": 3}, False))
    assert said.count("loss ") == 1, "the script was executed again by the process of the run"
    assert float(said.split("loss ")[-1]) == fresh_loss(project, seed=3)


@pytest.mark.slow
def test_what_the_cells_of_a_run_notebook_replace_has_no_part_in_a_run(project: Project) -> None:
    path = project.root / "notebooks" / "run-training.ipynb"
    text, notebook = path.read_text(), nbformat.read(path, as_version=4)
    at = next(i for i, cell in enumerate(notebook.cells) if "run.execute()" in cell.source)
    patch = "import lsai_core.training.loop as loop\nloop.learning_rate = lambda *a, **k: 0.0"
    nested = "words = dict(study='memory', variant='baseline', part='train', profile='cpu')\n"
    nested += "other = lab.open_run(**words, overrides={'seed': 9}).execute()"
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(nested))
    notebook.cells.insert(at, nbformat.v4.new_code_cell(patch))
    try:
        nbformat.write(notebook, path)
        words = [sys.executable, "-m", "lsai_lab.cli", "train", "--technique", "baseline"]
        env = {**os.environ, "PYTHONPATH": str(project.root), **project.env}
        done = subprocess.run(
            [*words, "--set", "seed=8"], env=env, cwd=project.root, capture_output=True, text=True
        )
    finally:
        path.write_text(text)
    assert done.returncode == 0, done.stderr
    by_seed = {run.config["seed"]: run for run in find_runs(project.runs, study="memory")}
    for seed in (8, 9):  # the second by a run within the page of the first
        found = by_seed[seed].summary.results["train_loss"]
        assert found == fresh_loss(project, seed=seed), seed
    (page,) = by_seed[8].folder.glob("earlier/*/notebook.ipynb")  # fresh_loss repeated it
    assert "outcome: ok" in page.read_text()


@pytest.mark.slow
def test_an_edit_between_opening_and_executing_is_refused_in_one_line(kernel: Kernel) -> None:
    text = kernel.step.read_text()
    kernel.run("run = opened(seed=4)")
    try:
        kernel.step.write_text(text.replace(WHOLE, HALF))
        said = kernel.run("run.execute()")
    finally:
        kernel.step.write_text(text)
    assert "UserErrorthe code changed since the run was opened" in said
    kernel.run("import os; os.environ['OMP_NUM_THREADS'] = '2'")
    said = kernel.run("run.execute()")
    assert "UserErrorthe machine was" in said and "threads 2; open the run again" in said
    kernel.run("os.environ['OMP_NUM_THREADS'] = '1'")
    assert "UserErrorbaseline-" in kernel.run("run.results")
    assert "0" in kernel.run("len(run.steps), len(lab.steps(run.folder))")
    assert "outcome: ok" in kernel.run("run.execute()")


@pytest.mark.slow
def test_settings_that_the_kernel_imported_before_an_edit_are_refused(kernel: Kernel) -> None:
    path = kernel.project.root / "lsai_core" / "config" / "train.py"
    text, field = path.read_text(), "    grad_accum: int = "
    kernel.run("run = opened(seed=5)")  # the kernel knows the settings as they were
    try:
        path.write_text(text.replace(field, f"    damping: float = 0.5\n{field}", 1))
        said = kernel.run("opened(seed=5).execute()")
    finally:
        path.write_text(text)
    assert (
        "outcome: failed (the code that describes the settings changed; restart the kernel" in said
    )


@pytest.mark.slow
def test_a_failure_shows_its_traceback_in_the_cell(kernel: Kernel) -> None:
    text = kernel.step.read_text()
    try:
        kernel.step.write_text(text.replace(WHOLE, "[nothing.float(), norm"))
        said = kernel.run("opened(seed=6).execute()")
    finally:
        kernel.step.write_text(text)
    assert "Traceback" in said and "[nothing.float(), norm" in said
    assert "outcome: failed (NameError: name 'nothing' is not defined" in said


@pytest.mark.slow
def test_the_stop_button_leaves_a_checkpoint_and_what_was_done(kernel: Kernel) -> None:
    cell = kernel.begin("run = opened(steps=1500, seed=7); run.execute()")
    found = steps_of_a_run_that_goes_on(kernel.project)
    kernel.manager.interrupt_kernel()
    said = cell(60)
    assert "outcome: stopped after step" in said and "Cell In" not in said
    last = said.strip().splitlines()[-1]
    done = r"\d+ of 1500 steps are done, the last one's loss is [\d.]+"
    how = rf"stopped: {done}; execute\(\) goes on from its checkpoint of step \d+"
    assert re.match(how, last) and "run.plot() show what is done" in last
    assert "it/s" in said or "step/s" in said, "no progress was shown"
    folder = found.parent
    done = len(losses(folder))
    assert 0 < done < 1500 and Summary.read(folder).outcome == "preempted"
    assert list(folder.glob("checkpoint-*.pt"))
    assert (folder / "run.log").exists()
    assert f"({done}, {done})" in kernel.run("len(run.steps), len(lab.steps(run.folder))")
    assert "preempted" in kernel.run("run.results['outcome']")
    stopped = kernel.begin(
        "lab.sweep('memory', 'baseline', {'seed': [8, 9]}, overrides={'steps': 1500}, "
        "profile='cpu')"
    )
    steps_of_a_run_that_goes_on(kernel.project)
    kernel.manager.interrupt_kernel()
    said = stopped(60)
    assert "2 of 2 runs are left: lab.sweep with the same arguments goes on" in said
    assert "memory.baseline, seed=8 started" in said
    assert "Cell In" not in said and "seed=9" not in said
    assert "outcome: ok" in kernel.run("run.execute()")
    assert Summary.read(folder).results["resumed_at"] == done and len(losses(folder)) == 1500
