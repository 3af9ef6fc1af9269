"""What a person meets who explores in a notebook and at a terminal, in a laboratory as `lsai new
lab` lays it out, with a few real runs: names that stay, tables that agree, lines that say what is
wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from typing import Any

import nbformat
import pytest
import yaml
from conftest import CHECKOUT, Project, write_run
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from test_wishes import environment

pytestmark = pytest.mark.slow
SHORT = ("--profile", "quick", "--set", "steps=5", "--set", "eval.sequences=2")
BEGIN = """
import contextlib, io, json, lsai_lab as lab
from lsai_core.base.errors import UserError
short = {"steps": 5, "eval.sequences": 2}
words = {"profile": "quick", "overrides": short}
def error(call):
    try:
        call()
    except UserError as said:
        return str(said)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ceilings: dict[str, Any]) -> Project:
    """A laboratory with a sweep of two runs, called `sw`, of 5 and of 12 steps."""
    project = Project(tmp_path_factory.mktemp("explorers") / "mine")
    assert Project(CHECKOUT).lsai("new", "lab", project.root)[0] == 0
    for path in project.root.glob("reports/recorded/*/*"):
        if path.is_dir() and path.name != "memory":
            shutil.rmtree(path)
    write_run(project.runs, "machine", "machine", "ceilings", kind="ceilings", results=ceilings)
    line = ("sweep", "memory", "bf16", "--over", "steps=5,12", *SHORT[:2], *SHORT[4:])
    code, out, err = project.lsai(*line, "--name", "sw", "--tag", "a")
    assert code == 0, err
    (project.root / "swept.txt").write_text(out)
    return project


def said(folder: Project, source: str) -> Any:
    """What the last line that a notebook prints is, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + source],
        cwd=folder.root / "notebooks",
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_mfu_is_the_same_in_every_table(folder: Project) -> None:
    swept = (folder.root / "swept.txt").read_text()
    code, out, err = folder.lsai("compare", "memory", "--all", "--full", "--profile", "quick")
    assert code == 0, err
    tables = [re.split(r"  +", line.strip()) for line in (*swept.splitlines(), *out.splitlines())]
    heads = [line for line in tables if "MFU %" in line]
    rows = [line for line in tables if line[0].startswith("bf16") and len(line) == len(heads[0])]
    source = "print(json.dumps(lab.load('memory', mine=True)['mfu'].dropna().tolist()))"
    shares = {f"{100 * share:.4g}" for share in said(folder, source)}
    shown = {line[head.index("MFU %")] for head in heads for line in rows if len(line) == len(head)}
    assert len(heads) == 2 and {*filter(None, shown)} == shares != set()


def test_settings_are_not_averaged_as_repeats(folder: Project) -> None:
    source = """
rows = lab.summarize(lab.load("memory", mine=True), ["train_loss"])
print(json.dumps([rows["n"].tolist(), sorted(rows["differs"])]))
"""
    number, differs = said(folder, source)
    told = "steps={}, profile=quick, eval.sequences=2"
    assert number == [1, 1] and differs == [told.format(12), told.format(5)]


def test_a_run_keeps_the_name_that_it_has(folder: Project) -> None:
    source = """
rows = lab.sweep("memory", "bf16", {"steps": [5]}, name="sw2", tags=["b"], profile="quick",
    overrides={"eval.sequences": 2})
runs = lab.load("memory", mine=True)
print(json.dumps([rows["name"].tolist(), rows["tags"].tolist(), runs["name"].tolist(),
    lab.find_run("sw2").id.key, rows["key"][0], lab.find_run("sw, sw2").id.key]))
"""
    names, tags, every, found, key, by_both = said(folder, source)
    assert names == ["sw, sw2"] and tags == ["a b"] and sorted(every) == ["sw", "sw, sw2"]
    assert found == key == by_both


def test_of_one_name_the_newest_run_is_meant_and_none_is_deleted_unasked(folder: Project) -> None:
    source = """
first = lab.open_run("memory", "flash_attn", name="again", **words)
second = lab.open_run("memory", "flash_attn", name="again", profile="quick")
link = lab.run_link("x", "again")
print(json.dumps([lab.find_run("again").id.key, second.id.key, link, first.id.key, first.state,
    error(lambda: lab.run_link("x", "agian"))]))
"""
    found, newest, link, other, state, unknown = said(folder, source)
    assert found == newest and newest in link and "did you mean again" in unknown
    assert state == "planned, not yet executed: execute() does the work"
    code, _, err = folder.lsai("runs", "delete", "again", "--yes")
    assert code == 2 and "means several runs" in err and newest in err and other in err


def test_a_run_that_was_only_planned_is_in_nobodys_way(folder: Project) -> None:
    source = """
done = lab.open_run("memory", "window_256", **words)
ended = done.execute()
done.annotate(name="exp")
said = io.StringIO()
with contextlib.redirect_stdout(said):
    lab.open_run("memory", "window_256", profile="quick", name="exp")
found = [lab.find_run(name).id.key for name in ("memory.window_256", "exp")]
print(json.dumps([found, done.id.key, said.getvalue(), repr(ended), ended._repr_html_()]))
"""
    found, key, line, text, table = said(folder, source)
    assert (
        found == [key, key]
        and line == f"'exp' is already window_256-{key}, ok; the run that starts last is meant\n"
    )
    assert text.startswith("result") and len(text) < 500 and "<table>" in table
    done = subprocess.run(
        [sys.executable, "-c", "import lsai_lab as lab; lab.load('memory'); lab.load('memory')"],
        cwd=folder.root / "notebooks",
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert "have not ended" not in done.stderr and done.stderr.count("own runs not shown") == 1


def test_too_few_steps_say_how_many_are_needed(folder: Project) -> None:
    source = """
run = lab.open_run("memory", "bf16", profile="quick", overrides=short | {"profile.trace": True})
run.execute()
longer = lab.open_run("memory", "bf16", profile="quick",
    overrides=short | {"profile.trace": True, "steps": int(run.results["speed_note"].split()[-2])})
longer.execute()
print(json.dumps([run.results["speed_note"], error(lambda: run.kernels), len(longer.kernels),
    longer.results.steps_timed]))
"""
    note, why, kernels, timed = said(folder, source)
    assert "none of 5 steps was timed" in note and "are traced" in note
    assert "ended before its traced steps" in why and note in why
    assert kernels > 0 and timed == 1


def test_what_a_recorded_run_ran_can_be_done_here_in_this_machines_size(folder: Project) -> None:
    source = """
run = lab.find_run("h100/memory.bf16")
line = error(run.execute)
opened = eval(line.partition("for this machine: ")[2].replace(".execute()", ""))
same = (opened.id.study, opened.id.name) == (run.id.study, run.id.name)
sizes = [each.config.model.n_layers for each in (run, opened)]
print(json.dumps([same, sizes, line]))
"""
    same, (recorded, here), line = said(folder, source)
    assert same and here < recorded, line


SAYS = "from IPython.display import Markdown\nMarkdown('This is {}.')"


def chapter(folder: Project, name: str, *sources: str) -> None:
    """A chapter: a title and what follows, Markdown or (what imports) code."""
    cells = [new_markdown_cell(f"# {name.title()} {{#sec-{name}}}")]
    cells += [
        new_code_cell(source) if "import" in source else new_markdown_cell(source)
        for source in sources
    ]
    number = {"front": "00-summary", "first": "10-first", "second": "20-second"}[name]
    nbformat.write(new_notebook(cells=cells), folder.root / "notebooks" / f"{number}.ipynb")


def test_one_chapter_of_the_report_is_made(folder: Project) -> None:
    """The others stay as they were executed; of one that never was the headings are there."""
    book = folder.root / "reports" / "_quarto.yml"
    settings = yaml.safe_load(book.read_text())
    settings["book"]["chapters"] = ["index.ipynb", "10-first.ipynb", "20-second.ipynb"]
    book.write_text(yaml.safe_dump(settings, sort_keys=False))
    chapter(folder, "front", "The front.")
    speed = "import lsai_lab as lab\nspeed = lab.number(8)"
    chapter(folder, "first", SAYS.format("one"), "See @sec-part.", speed, "At [7](#speed).")
    chapter(folder, "second", "## A part {#sec-part}", SAYS.format("two"))
    words = ("report", "--engine", "pandoc", "--formats", "html", "--chapter")
    code, out, err = folder.lsai(*words, "10-first")
    made = folder.root / "reports" / "_output"
    pages = {path.name: path.read_text() for path in made.glob("*.html")}
    assert "1 number of 10-first differs from its text; `lsai numbers` lists them" in out
    assert code == 0 and "10-first" in out and "20-second" not in out.replace("_output", ""), err
    assert "This is one." in pages["10-first.html"] and "#sec-part" in pages["10-first.html"]
    assert "This chapter is not made yet" in pages["20-second.html"]
    assert folder.lsai(*words[:-1], "--no-run")[0] == 0
    assert "This is two." in (made / "20-second.html").read_text()
    chapter(folder, "second", "## A part {#sec-part}", SAYS.format("three"))
    chapter(folder, "first", SAYS.format("four"), "See @sec-part.")
    assert folder.lsai(*words, "second,00-summary")[0] == 0
    assert "This is three." in (made / "20-second.html").read_text()
    assert "This is one." in (made / "10-first.html").read_text()


@pytest.mark.parametrize(
    "line, wanted",
    [
        ("report 15-memory", "a chapter is an option: --chapter 15-memory"),
        ("report --chapter memroy", "no chapter 'memroy'; its chapters are summary, "),
        ("report --only 00-summary", "for a chapter say --chapter 00-summary"),
        ("compare memory", r"profile cpu; `--profile quick` has \d+; `lsai compare --all` shows"),
        ("train memory --technique bf16", "an option: --study memory"),
        ("runs list memry", "no study 'memry'; did you mean memory"),
        ("train --technique bf16 --profile quik", "unknown profile 'quik'; did you mean quick"),
        ("train --technique bf16 --set lr=1", "unknown key 'lr' .did you mean 'optim.lr'"),
    ],
)
def test_a_line_says_what_to_do(folder: Project, line: str, wanted: str) -> None:
    folder.lsai("train", "--technique", "bf16", "--profile", "quick")
    code, _, err = folder.lsai(*line.split())
    assert code == 2 and re.search(wanted, err.replace("\n", " ")), err
