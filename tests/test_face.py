"""The page that documents the public face: its examples run as they stand there, in a laboratory as
`lsai new lab` lays it out."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
import yaml
from conftest import CHECKOUT, Project, write_run

import lsai_core
import lsai_lab
from lsai_lab import chapters
from lsai_lab.report.load import ABOUT, IDENTITY
from lsai_lab.runs.chapters import book_settings
from lsai_lab.runs.result_names import NAMES

PAGE = (CHECKOUT / "notebooks" / "README.md").read_text(encoding="utf-8")
BEGIN, *SECTIONS = re.split(r"(?m)^### ", PAGE.split("\n## Columns")[0])
BLOCKS = {text.splitlines()[0]: re.search(r"```(\w+)\n(.*?)```", text, re.S) for text in SECTIONS}
EXAMPLES = {title: (found[1], found[2]) for title, found in BLOCKS.items() if found}
PYTHON = [title for title, (language, _) in EXAMPLES.items() if language == "python"]
CONSOLE = [title for title in EXAMPLES if title not in PYTHON]

# Runs the examples in their order, each in a namespace of its own, and prints what each showed, or
# its error.
RUNNER = """
import contextlib, io, json, sys
import matplotlib; matplotlib.use("agg")
from IPython.core.interactiveshell import InteractiveShell
begin, examples = json.load(sys.stdin)
found = {}
for title, source in examples.items():
    shell, text = InteractiveShell(), io.StringIO()
    with contextlib.redirect_stdout(text):
        good = shell.run_cell(begin).success and shell.run_cell(source).success
    found[title] = [good, text.getvalue()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, ceilings: dict[str, Any]) -> Project:
    """A folder made by `lsai new lab`, without a run of its own, and a report of two chapters."""
    folder = tmp_path_factory.mktemp("lab") / "mine"
    project = Project(folder)  # without a profile: as a person has it
    code, said, err = Project(CHECKOUT).lsai("new", "lab", folder)
    assert code == 0 and str(folder) in said, err
    assert Project(CHECKOUT).lsai("new", "lab", folder)[0] == 2, (
        "a folder with something in it is left alone"
    )
    assert {path.name for path in folder.iterdir()} == {
        "notebooks",
        "params",
        "envs",
        "reports",
        "Makefile",
    }
    assert not list(folder.glob("reports/*.ipynb")) and list(
        folder.glob("reports/recorded/*/memory/*/summary.json")
    )
    # two studies are enough for a page for each run
    for path in folder.glob("reports/recorded/*/*"):
        if path.is_dir() and path.name not in ("memory", "speed"):
            shutil.rmtree(path)
    write_run(project.runs, "machine", "machine", "ceilings", kind="ceilings", results=ceilings)
    front = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Front {#sec-front}")])
    nbformat.write(front, folder / "notebooks" / "00-summary.ipynb")
    book = folder / "reports" / "_quarto.yml"
    settings = yaml.safe_load(book.read_text())
    settings["book"]["chapters"] = ["index.ipynb", "10-machine.ipynb"]
    book.write_text(yaml.safe_dump(settings))
    (folder / "notebooks" / "10-machine.ipynb").write_bytes(
        (folder / "notebooks" / "00-summary.ipynb").read_bytes()
    )
    return project


@pytest.fixture(scope="module")
def shown(lab: Project) -> dict[str, tuple[bool, str]]:
    begin = re.search(r"```python\n(.*?)```", BEGIN, re.S)
    assert begin
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps([begin[1], {title: EXAMPLES[title][1] for title in PYTHON}]),
        capture_output=True,
        text=True,
        cwd=lab.root / "notebooks",
        timeout=400,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), **lab.env},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("face", [lsai_core, lsai_lab], ids=lambda face: face.__name__)
def test_every_public_name_is_there_and_in_the_docstring(face: ModuleType) -> None:
    for name in face.__all__:
        assert not isinstance(getattr(face, name), ModuleType)
        assert re.search(rf"\b{name}\b", str(face.__doc__)), name
        # importing a folder would put the folder in the name's place
        assert not (CHECKOUT / face.__name__ / name).exists()
    with pytest.raises(AttributeError):
        face.no_such_name  # noqa: B018


def test_completion_offers_few_names_and_chapters_find_theirs() -> None:
    """What chapters alone use is explained in their room, and a typo is led to it, too."""
    assert dir(lsai_lab) == sorted(lsai_lab.__all__) and len(lsai_lab.__all__) <= 36
    names = {name for of_module in chapters.NAMES.values() for name in of_module}
    assert not names & {*lsai_lab.__all__}
    for name in names:
        assert hasattr(lsai_lab, name) and re.search(rf"\b{name}\b", chapters.__doc__), name
    with pytest.raises(AttributeError, match="did you mean waterfall"):
        _ = lsai_lab.waterfal


def test_examples_of_at_most_six_statements_or_a_few_commands() -> None:
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    assert f"has {len(EXAMPLES)} examples" in readme
    for title, (language, source) in EXAMPLES.items():
        if language != "python":
            assert len(source.splitlines()) <= 5, title
            continue
        nodes, imports = ast.walk(ast.parse(source)), (ast.Import, ast.ImportFrom)
        own = [node for node in nodes if isinstance(node, ast.stmt)]
        assert sum(not isinstance(node, imports) for node in own) <= 6, title


@pytest.mark.slow
@pytest.mark.parametrize("title", PYTHON)
def test_an_example_in_python_runs(shown: dict[str, tuple[bool, str]], title: str) -> None:
    good, text = shown[title]
    assert good, text


@pytest.mark.slow
def test_what_the_examples_show(shown: dict[str, tuple[bool, str]], lab: Project) -> None:
    differ = shown["A sweep"][1]
    assert "0.00100" in differ and "optim.lr=0.003" in differ
    machines = shown["Your machine beside the H200"][1]
    assert "h200" in machines and "(own, quick)" in machines and "bf16" in machines
    shares = dict(re.findall(r"(?m)^\| (\w+) +\|.* (\d+)% +\|", machines))
    assert shares["baseline"] == "100" and "bf16" in shares and "nan" not in machines, machines
    compared = shown["Two runs compared, own or recorded"][1]
    assert "settings differ" in compared and "losses do not compare" in compared
    assert (lab.root / "notebooks" / "memory-talk.svg").exists()


@pytest.mark.slow
@pytest.mark.parametrize("title", [title for title in CONSOLE if "chapter" not in title])
def test_an_example_of_commands_runs(
    shown: dict[str, tuple[bool, str]], lab: Project, title: str
) -> None:
    for line in EXAMPLES[title][1].splitlines():
        code, out, err = lab.lsai(*line.removeprefix("$ lsai ").split())
        assert code == 0 and out.strip(), (line, err)


@pytest.mark.slow
def test_a_chapter_of_ones_own_is_in_the_report_and_made_again(
    shown: dict[str, tuple[bool, str]], lab: Project
) -> None:
    """As the page says, in a process: the new chapter is rendered, and once more when it has been
    saved."""
    make, watch = (
        line.removeprefix("$ lsai ").split()
        for line in EXAMPLES["A chapter of your own"][1].splitlines()
    )
    assert lab.lsai(*make)[0] == 0 and lab.lsai(*make)[0] == 2
    assert book_settings(lab.root / "reports")["chapters"][-1] == "70-mine.ipynb"
    watcher = lab.start(*watch, "--engine", "pandoc", "--formats", "html")
    assert watcher.stdout
    try:
        lines = iter(watcher.stdout.readline, "")
        assert any("reload the page" in line for line in lines)
        page = lab.root / "reports" / "_output" / "70-mine.html"
        text = " ".join(page.read_text().split())
        assert "What the table shows." in text and "bf16" in text
        path = lab.root / "notebooks" / "70-mine.ipynb"
        path.write_text(path.read_text().replace("The question.", "Which is the fastest?"))
        assert any("index.html" in line for line in lines)
        assert "Which is the fastest?" in page.read_text()
    finally:
        watcher.kill()
        watcher.communicate()


def test_every_result_and_column_is_documented_with_its_type() -> None:
    """Of all committed records; an ending that the page explains may follow a name that it
    lists."""
    table = re.findall(r"(?m)^\| (`.*?`) \| ([\w, ]+) \|", PAGE.split("| result |")[1])
    known = [
        (re.compile(re.sub(r"<\w+>", r"\\w+", name)), types)
        for names, types in table
        for name in re.findall(r"`(.+?)`", names)
    ]
    endings = re.compile(r"(_p25|_p75|_min|_max|_mean|_min_rank)$")
    words = {str: "text", list: "list", bool: "number", int: "number", float: "number"}
    for path in (CHECKOUT / "reports" / "recorded").glob("*/*/*/summary.json"):
        for name, value in json.loads(path.read_text())["results"].items():
            types = [types for pattern, types in known if pattern.fullmatch(endings.sub("", name))]
            assert types, f"{name} is not on the page"
            assert value is None or any(words[type(value)] in one for one in types), (name, value)
    assert all(f"`{name}`" in PAGE for name in (*IDENTITY, *ABOUT))
    assert [name for names, _ in table for name in re.findall(r"`(.+?)`", names)] == [*NAMES]


@pytest.mark.slow
def test_installed_from_a_wheel_it_lays_out_a_laboratory_that_works(tmp_path: Path) -> None:
    """Built and installed without a network; nothing of the checkout is on the path afterwards."""
    pytest.importorskip("setuptools")
    sources, site, made = tmp_path / "sources", tmp_path / "site", tmp_path / "made"
    skipped = shutil.ignore_patterns(
        ".*", "_[!q_]*", "__pycache__", "h200-b", "attention", "context", "fsdp", "peers"
    )
    for name in ("notebooks", "params", "envs", "reports"):
        shutil.copytree(CHECKOUT / name, sources / name, ignore=skipped)
    for name in ("lsai_core", "lsai_lab"):
        shutil.copytree(
            CHECKOUT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("Makefile", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, sources)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, "--target", str(site), str(sources)], check=True)
    shutil.rmtree(sources)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LSAI_")}
    env = {**kept, "PYTHONPATH": str(site), "PATH": f"{site / 'bin'}:{os.environ['PATH']}"}

    def call(*words: str, where: Path) -> str:
        done = subprocess.run(words, cwd=where, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    read = "import lsai_lab as lab; print(len(lab.load('memory')))"
    assert int(call(sys.executable, "-c", read, where=tmp_path)) > 20, (
        "outside a laboratory its own records"
    )
    call("lsai", "new", "lab", str(made), where=tmp_path)
    assert "h200" in call("lsai", "compare", "memory", "--recorded", where=made)
    assert "to run" in call("lsai", "study", "machine", "--dry-run", where=made)
    plan = " ".join(call("make", "-n", "report", "NO_RUN=1", where=made).split())
    assert f"{site}/bin/lsai report --no-run" in plan and "venv" not in plan and "pip" not in plan
