"""A run's record belongs to one writer and to what its key says: two at once, what changes
meanwhile, orphans, repetition."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from conftest import CHECKOUT, Project, losses, write_corpus

from lsai_core.base import code
from lsai_core.base.files import read_jsonl
from lsai_lab.runs.execute import ActiveRun, write_plan
from lsai_lab.runs.kinds import KINDS, Kind
from lsai_lab.runs.records import Summary
from lsai_lab.runs.session import Session, current_runs

BY_HAND = [
    "-p",
    "study",
    "memory",
    "-p",
    "variant",
    "baseline",
    "-p",
    "part",
    "train",
    "-p",
    "profile",
    "cpu",
]


@pytest.fixture
def project(new_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch) -> Project:
    made = new_project()
    for key, value in made.env.items():
        monkeypatch.setenv(key, value)
    return made


def papermill(project: Project, out: str, *words: str) -> subprocess.Popen[str]:
    """Plain papermill over the project's training notebook, as a process of its own."""
    source = CHECKOUT / "notebooks" / "run-training.ipynb"
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", "-k", "python3", str(source)]
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT), **project.env}
    return subprocess.Popen(
        [*command, str(project.root / out), *words],
        env=env,
        cwd=project.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_papermills_of_one_run_lose_nothing(project: Project) -> None:
    # which YAML 1.1 reads as a string
    steps = ["-y", "{overrides: {steps: 600, 'optim.lr': 1e-3}}"]
    both = [papermill(project, f"out-{number}.ipynb", *BY_HAND, *steps) for number in range(2)]
    errors = [process.communicate(timeout=200)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], errors
    (refused,) = [error for process, error in zip(both, errors, strict=True) if process.returncode]
    (winner,) = [process for process in both if process.returncode == 0]
    assert "is being run by process" in refused and winner.returncode == 0
    run = project.found()["baseline"]
    assert run.summary.outcome == "ok" and run.config["optim"]["lr"] == 1e-3
    assert len(losses(run.folder)) == 600  # each step once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["-p", "varient", "bf16"],
            "the notebook has no parameter 'varient'; did you mean variant",
        ),
        (
            ["-p", "steps", "5"],
            "the notebook has no parameter 'steps'; known: folder, study, variant",
        ),
        (
            ["-y", "{overrides: {optim.lr: fast}}"],
            "study memory, variant baseline, part train: optim.lr: Input should be",
        ),
    ],
)
def test_papermill_alone_stops_at_a_wrong_parameter(
    project: Project, words: list[str], said: str
) -> None:
    process = papermill(project, "out.ipynb", *BY_HAND, *words)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 1 and f"error: {said}" in error
    assert not list(project.runs.glob("memory/*"))
    executed = [
        cell
        for cell in nbformat.read(project.root / "out.ipynb", 4).cells
        if cell.get("execution_count")
    ]
    assert len(executed) == 3  # the parameters, those passed, and the one that says so


@pytest.fixture
def planned(project: Project) -> ActiveRun:
    """A run that was planned a moment ago."""
    (run,) = Session().plan("memory", parts=["train"])
    write_plan(run, "test")
    return ActiveRun(run.folder, Session().data_root)


def test_text_that_was_changed_after_the_plan_is_not_trained_on_under_the_old_key(
    project: Project, tmp_path: Path
) -> None:
    text = write_corpus(tmp_path / "own.jsonl")
    (run,) = Session().plan(
        "memory", parts=["train"], overrides={"data": {"source": f"file:{text}"}}
    )
    write_plan(run, "test")
    text.write_text(text.read_text().replace("milk", "soup"))
    # prepares the new text
    Session().plan("memory", parts=["train"], overrides={"data": {"source": f"file:{text}"}})
    summary = ActiveRun(run.folder, Session().data_root).execute()
    assert (summary.outcome, summary.results) == ("failed", {}) and "the data changed since" in str(
        summary.reason
    )


def test_code_that_is_changed_during_a_run_makes_it_failed(
    planned: ActiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = iter([planned.code["hash"], "another"])
    monkeypatch.setattr(Kind, "code", property(lambda kind: next(hashes)))
    summary = planned.execute()
    assert (summary.outcome, summary.results) == ("failed", {})
    assert "the code changed since the run began" in str(summary.reason)
    assert len(read_jsonl(planned.folder / "metrics.jsonl")) == 12  # it had come to its end


def test_an_edit_is_seen_by_a_process_that_has_hashed_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text('x: int = Field(3, description="words")\nif x: raise UserError(f"words {x}")\n')
    first = code.code_hash([path])
    path.write_text(
        'x: int = Field(3, description="others")\nif x: raise UserError("other words, longer")\n'
    )
    assert code.code_hash([path]) == first
    path.write_text(
        'x: int = Field(4, description="others")\nif x: raise UserError("other words")\n'
    )
    assert code.code_hash([path]) != first


def test_weights_are_part_of_the_key_by_their_content(project: Project, tmp_path: Path) -> None:
    def planned(name: object) -> Any:
        return Session().plan("memory", parts=["train"], overrides={"init_from": str(name)})[0]

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    first = planned(tmp_path / "a")
    assert planned(tmp_path / "b").id.key == first.id.key  # another place, the same content
    (tmp_path / "a" / "model.safetensors").write_bytes(b"others!")
    assert planned(tmp_path / "a").id.key not in (first.id.key, planned(tmp_path / "none").id.key)


def test_unavailable_is_tried_again(project: Project) -> None:
    changes = {"init_from": str(project.root / "weights")}
    (run,) = Session().plan("memory", parts=["train"], overrides=changes)
    for _ in range(2):
        write_plan(run, "test")
        started = time.time()
        assert ActiveRun(run.folder, Session().data_root).execute().outcome == "unavailable"
        assert (run.folder / "summary.json").stat().st_mtime >= started
    code, out, _ = project.lsai("train", "--set", f"init_from={project.root / 'weights'}")
    assert code == 2 and "started" in out and "unavailable" in out


def test_relative_paths_are_seen_from_where_one_stands(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "a.jsonl")
    write_corpus(project.root / "notebooks" / "b.jsonl")
    (tmp_path / "ck").mkdir()
    monkeypatch.chdir(tmp_path)

    def config(**overrides: Any) -> Any:
        return Session().plan("memory", parts=["train"], overrides=overrides)[0].config

    assert config(data={"source": "file:a.jsonl"}).data.source == f"file:{tmp_path / 'a.jsonl'}"
    assert config(data={"source": "file:*.jsonl"}).data.source == f"file:{tmp_path / '*.jsonl'}"
    assert config(init_from="ck").init_from == str(tmp_path / "ck")
    assert config(init_from="nothing").init_from == "nothing"
    monkeypatch.chdir(project.root / "notebooks")
    assert config(data={"source": "file:b.jsonl"}).data.source == "file:notebooks/b.jsonl"


def test_a_finished_run_is_repeated_when_asked_and_the_first_result_is_kept(
    project: Project, capsys: Any
) -> None:
    (run,) = Session().plan("memory", parts=["train"])
    write_plan(run, "test")
    active = ActiveRun(run.folder, Session().data_root)
    first = active.execute()
    capsys.readouterr()
    assert active.execute().started == first.started
    said = capsys.readouterr().out
    assert str(run.folder) in said and "--again" in said
    active.execute(again=True)
    (kept,) = (run.folder / "earlier").iterdir()
    assert (
        Summary.read(kept).results == first.results
        and len(losses(kept)) == len(losses(run.folder)) == 12
    )
    assert [found.folder for found in current_runs(Session(), "memory")] == [run.folder]
    assert json.loads((run.folder / "env.json").read_text())["load_average"] >= 0


@pytest.mark.slow
def test_a_command_killed_as_soon_as_it_has_begun_leaves_no_second_writer(
    new_project: Callable[..., Project],
) -> None:
    """The process of its notebook ends itself and the kernel, and holds the run's lock until
    then."""
    project = new_project(steps=400, checkpoint={"every": 20})
    for delay in (0.0, 0.3, 1.0, 4.0):
        command = project.start("study", "memory", "--parts", "train")
        assert command.stdout is not None
        for line in command.stdout:
            if "started" in line:
                break
        time.sleep(delay)
        family = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(signal.SIGKILL)
        command.communicate()
        deadline = time.monotonic() + 60
        while True:
            code, out, err = project.lsai("study", "memory", "--parts", "train", "--dry-run")
            assert code == 0, err
            if psutil.wait_procs(family, timeout=0.1)[1] == []:
                break
            assert time.monotonic() < deadline, family
    code, out, err = project.lsai("study", "memory", "--parts", "train")
    assert code == 0, (out, err)
    assert len(losses(project.found()["baseline"].folder)) == 400


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"matplotlib", "seaborn", "pypandoc", "typst"}:
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import lsai_lab as lab
run = lab.open_run(study="memory", variant="baseline", part="train", profile="cpu")
run._repr_markdown_()
assert run.execute().outcome == "ok"
assert "perplexity" in run.results._repr_markdown_()
from lsai_lab.runs.keep import record_runs
from lsai_lab.runs.records import find_runs
from lsai_lab.runs.session import Session
record_runs(find_runs(Session().runs_root), Session().root / "reports")
sys.argv = ["lsai", "compare", "memory"]
from lsai_lab.cli.runs import compare
compare(None, False, None, False, False, None, None)
"""


def test_measuring_and_recording_need_no_typesetter_and_no_plots(project: Project) -> None:
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT), **project.env}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], env=env, capture_output=True, text=True, cwd=project.root
    )
    assert done.returncode == 0, done.stderr
    assert "baseline" in done.stdout
    kinds = [
        name.partition(":")[0] for kind in KINDS.values() for name in (kind.module, kind.config)
    ]
    reached = code.closure(
        [*kinds, "lsai_lab.runs.execute", "lsai_lab.runs.notebook", "lsai_lab.cli.runs"]
    )
    assert not [path for path in reached if "report" in path.parts]
