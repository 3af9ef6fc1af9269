"""The notebooks as they are in git and as a person opens them: no outputs, a parameters cell, run
with their defaults."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import CHECKOUT, write_run
from IPython.core.interactiveshell import InteractiveShell

import lsai_core
import lsai_lab as lab
from lsai_lab.runs.chapters import read_chapters
from lsai_lab.runs.kinds import KINDS
from lsai_lab.runs.records import find_runs

NOTEBOOKS = sorted((CHECKOUT / "notebooks").glob("*.ipynb"))
names = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def statements(source: str) -> int:
    """The statements of a cell, however many lines each takes; imports do not count."""
    imports = (ast.Import, ast.ImportFrom)
    nodes = ast.walk(ast.parse(source))
    return sum(isinstance(node, ast.stmt) and not isinstance(node, imports) for node in nodes)


@names
def test_git_holds_no_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
        hidden = cell.cell_type == "code" and re.search("(?m)^#\\| echo: false$", cell.source)
        folded = {"source_hidden": True} if hidden else {}
        assert cell.metadata.get("jupyter", {}) == folded, "what the report hides is folded"
        assert set(cell.metadata) <= {"tags", "jupyter"}, "metadata of an editor or of an execution"
    assert notebook.metadata.kernelspec.name == "python3"
    assert "papermill" not in notebook.metadata


@names
def test_run_notebooks_have_one_parameters_cell_and_programs_are_short(
    path: Path,
) -> None:
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    tagged = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == code[:1] or (not tagged and not path.name.startswith("run-"))
    source = "\n".join(cell.source for cell in code)
    forbidden = "def|class|while|try" if path.name.startswith("run-") else "class|while|try"
    assert not re.search(rf"^\s*({forbidden})\b", source, re.M)
    for source in (cell.source for cell in code if not path.name.startswith("run-")):
        # hidden: drawings
        assert statements(source) <= (25 if "#| echo: false" in source else 15), source


@names
def test_a_notebook_takes_names_from_the_two_public_faces_only(path: Path) -> None:
    """Also what a cell writes into a program that it starts."""
    for source in (cell.source for cell in read(path).cells if cell.cell_type == "code"):
        assert not re.search(r"\blsai_(core|lab)\.\w", source), source
        taken = re.findall(r"(?m)^from lsai_core import (.+)$", source)
        names = {name.strip() for line in taken for name in line.split(",")}
        assert names <= {*lsai_core.__all__, "__version__"}
        imports = re.findall(r"(?m)^(?:from|import) lsai_.*$", source)
        assert len([line for line in imports if line != "import lsai_lab as lab"]) == len(taken)
        for_chapters = {name for names in lab.chapters.NAMES.values() for name in names}
        assert set(re.findall(r"\blab\.(\w+)", source)) <= {*lab.__all__} | for_chapters


def test_every_kind_and_every_chapter_has_its_notebook() -> None:
    chapters = {path.name for path in read_chapters(CHECKOUT).values()}
    kinds = {kind.notebook for kind in KINDS.values()}
    assert chapters | kinds | {"playground.ipynb"} == {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"variant": "bf61"}, "no variant 'bf61'; did you mean bf16"),
        (
            {"overrides": {"optim.lr": "fast"}},
            "optim.lr: Input should be a valid number, got 'fast'",
        ),
        ({"overrides": 3}, "parameters: overrides: Input should be a valid dictionary, got 3"),
        ({"variant": 3}, "lab.open_run takes a text as 'variant', not 3"),
        (
            {"study": "speed", "variant": "fused_loss", "part": "attention"},
            "does not measure fused_loss; it measures",
        ),
    ],
)
def test_a_wrong_parameter_is_one_line_below_the_cell(changed: dict[str, Any], said: str) -> None:
    words: dict[str, Any] = {
        "study": "memory",
        "variant": "bf16",
        "part": "train",
        "profile": "quick",
    }
    shell = InteractiveShell()
    shell.user_ns["call"] = lambda: lab.open_run(**words | changed)
    with redirect_stdout(StringIO()) as shown:
        shell.run_cell("call()")
    (line,) = shown.getvalue().strip().splitlines()
    assert line.startswith("error: ") and said in line


@pytest.fixture(scope="module")
def executed(
    tmp_path_factory: pytest.TempPathFactory, ceilings: dict[str, Any]
) -> dict[str, tuple[Path, str]]:
    """Every notebook executed by plain papermill with its own defaults, two at a time; chapters
    after the runs."""
    folder = tmp_path_factory.mktemp("notebooks")
    write_run(folder / "runs", "machine", "machine", "ceilings", kind="ceilings", results=ceilings)
    env = {
        **os.environ,
        "LSAI_RUNS": str(folder / "runs"),
        "PYTHONPATH": str(CHECKOUT),
        "OMP_NUM_THREADS": "1",
    }
    for name in ("LSAI_ROOT", "LSAI_DATA"):
        env.pop(name, None)

    def execute(path: Path) -> tuple[Path, str]:
        target = folder / path.name
        command = [
            sys.executable,
            "-m",
            "papermill",
            "--no-progress-bar",
            "-k",
            "python3",
            str(path),
            str(target),
        ]
        # In the notebook's own folder, as JupyterLab does it.
        done = subprocess.run(
            command, cwd=path.parent, env=env, capture_output=True, text=True, timeout=280
        )
        return target, done.stderr if done.returncode else ""

    runs = [path for path in NOTEBOOKS if path.name.startswith("run-")]
    chapters = [path for path in NOTEBOOKS if path not in runs]
    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(execute, runs), *pool.map(execute, chapters)]
    return {path.stem: result for path, result in zip([*runs, *chapters], results, strict=True)}


@pytest.mark.slow
@names
def test_it_runs_from_top_to_bottom_with_its_defaults(
    executed: dict[str, tuple[Path, str]], path: Path
) -> None:
    target, error = executed[path.stem]
    assert not error
    code = [cell for cell in read(target).cells if cell.cell_type == "code" and cell.source]
    assert all(cell.execution_count for cell in code)
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    shown = [
        output
        for cell in code
        for output in cell.outputs
        if {"text/markdown", "image/svg+xml"} & {*output.get("data", {})}
    ]
    assert len(shown) >= 2  # a run's settings and results; a chapter's tables and figures


@pytest.mark.slow
def test_the_memory_models_chapter_shows_predictions_beside_records(
    executed: dict[str, tuple[Path, str]],
) -> None:
    cells = [
        cell
        for cell in read(executed["55-prediction"][0]).cells
        if cell.cell_type == "code" and cell.outputs
    ]
    labels = {
        label for cell in cells for label in re.findall(r"(?m)^#\| label: (\S+)", cell.source)
    }
    assert labels >= {"fig-prediction-error", "tbl-prediction-error", "fig-prediction-parts"}
    assert labels >= {"tbl-prediction-published", "fig-prediction-estimators"}


@pytest.mark.slow
def test_runs_by_hand_are_recorded_like_all_others(executed: dict[str, tuple[Path, str]]) -> None:
    folder = executed["run-training"][0].parent
    runs = {(run.summary.kind, run.summary.outcome) for run in find_runs(folder / "runs")}
    assert runs >= {("train", "ok"), ("batch_search", "ok"), ("ceilings", "ok")}
    chapter = read(executed["65-yours"][0])
    assert "flash attention" in str(
        [cell.outputs for cell in chapter.cells if cell.cell_type == "code"]
    )
