"""Fifteen things that a person who explores wants, each in at most six lines of a notebook or of a
terminal, as they would be written, in a laboratory as `lsai new lab` lays it out. No profile is set
in the environment: what a person gets is what this machine's usual profile and the cells say."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CHECKOUT, Project, write_corpus, write_run
from test_own_techniques import SIGN

LINES = 6
IMPORT = "import lsai_lab as lab\n"
TINY = '"steps": 6, "eval.sequences": 2'
PYTHON = {
    "two trainings, their curves live and beside each other": f"""
words = {{"study": "memory", "profile": "quick", "overrides": {{{TINY}}}}}
one = lab.open_run(variant="bf16", name="one", **words)
one.execute()
two = lab.open_run(variant="flash_attn", **words)
two.execute(beside=[one])
lab.curves(one, two, y=["loss", "tokens_per_s"])
""",
    "loss against the clock of any two": """
lab.curves("one", "h100/memory.bf16", x="elapsed_s")
""",
    "another attention kernel, and the memory of each phase": f"""
other = {{{TINY}, "attention.backend": "sdpa_math", "profile.memory_steps": 2}}
run = lab.open_run(study="memory", variant="bf16", profile="quick", overrides=other)
run.execute()
print(run.phases)
""",
    "a sweep over lengths, and its picture": """
words = {"profile": "quick", "overrides": {"steps": 4}}
found = lab.sweep("memory", ["flash_attn", "bf16"], {"seq_len": [32, 64]}, **words)
found.pivot(index="seq_len", columns="label", values="mem_peak_allocated_gib").plot()
print(found[["label", "seq_len", "tokens_per_s", "mem_peak_allocated_gib"]])
""",
    "the largest batch of a 1 B model on a GPU with 24 GB": """
for length in (1024, 4096):
    settings = {"seq_len": length}
    print(lab.predict("llama3.2-1b", "24GiB", overrides=settings, largest="batch").batch_size)
""",
    "a model from text of one's own": f"""
run = lab.open_run(study="memory", variant="bf16", profile="quick", name="own text",
    overrides={{"data.source": "file:own.jsonl", "data.max_mb": None, {TINY}}})
run.execute()
print(run.results["dataset"], run.results["validation_loss"])
""",
    "an optimizer of one's own, without touching the package": f"""
settings = {{"optim.name": "sign", "optim.kernel": "auto", {TINY}}}
run = lab.open_run(study="memory", variant="bf16", profile="quick", overrides=settings)
run.execute()
print(run._record.plan["inputs"], run.results["train_loss"])
""",
    "the trained model, and what it writes": f"""
settings = {{"checkpoint.export": True, {TINY}}}
run = lab.open_run(study="memory", variant="bf16", profile="quick", overrides=settings)
run.execute()
print(type(run.model).__name__, run.generate("import", tokens=5).text)
""",
    "mine beside the recorded one, on one page": """
print(lab.compare("one", "h100/memory.bf16"))
lab.compare("one", "h100/memory.bf16").plot("loss")
rows = lab.load("memory").query("variant == 'bf16' and part == 'train'")
""",
    "a traced step: the longest kernels, and its timeline": """
settings = {"profile.trace": True, "steps": 10, "eval.sequences": 2}
run = lab.open_run(study="memory", variant="bf16", profile="quick", overrides=settings)
run.execute()
print(run.kernels.head(3))
run.timeline()
""",
}
CONSOLE = {
    "a figure of a chapter edited, in the report": [
        "report --no-run --engine pandoc --formats html"
    ],
    "a chapter of one's own, in the report": ["new chapter 70-mine"],
    "a sweep, a comparison and a prediction without a notebook": [
        "sweep memory bf16 --over seq_len=32,64 --set steps=4 --profile quick --name swept",
        "runs compare one h100/memory.bf16",
        "predict --model llama3.2-1b --gpu 24GB --largest-batch",
    ],
}
# Runs every wish in a namespace of its own and prints what each showed, or its error.
RUNNER = """
import contextlib, io, json, sys
import matplotlib; matplotlib.use("agg")
from IPython.core.interactiveshell import InteractiveShell
wishes, found = json.load(sys.stdin), {}
for title, source in wishes.items():
    shell, text = InteractiveShell(), io.StringIO()
    with contextlib.redirect_stdout(text):
        good = shell.run_cell(source).success
    found[title] = [good, text.getvalue()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ceilings: dict[str, Any]) -> Project:
    root = tmp_path_factory.mktemp("wishes") / "mine"
    project = Project(root)
    assert "LSAI_PROFILE" not in project.env
    code, _, err = Project(CHECKOUT).lsai("new", "lab", root)
    assert code == 0, err
    for path in root.glob("reports/recorded/*/*"):
        if path.is_dir() and path.name != "memory":
            shutil.rmtree(path)
    write_run(project.runs, "machine", "machine", "ceilings", kind="ceilings", results=ceilings)
    (root / "techniques" / "optimizers").mkdir(parents=True)
    (root / "techniques" / "optimizers" / "sign.py").write_text(SIGN)
    write_corpus(root / "notebooks" / "own.jsonl", documents=2000)
    return project


def environment(project: Project) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "LSAI_PROFILE"}
    return {**kept, "PYTHONPATH": str(CHECKOUT), **project.env}


@pytest.fixture(scope="module")
def shown(folder: Project) -> dict[str, tuple[bool, str]]:
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps({title: IMPORT + source for title, source in PYTHON.items()}),
        capture_output=True,
        text=True,
        cwd=folder.root / "notebooks",
        timeout=600,
        env=environment(folder),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_takes_at_most_six_lines() -> None:
    sources = [source.strip().splitlines() for source in PYTHON.values()]
    for lines in [*sources, *CONSOLE.values(), INTERRUPTED, BESIDE, BY_PAPERMILL]:
        assert 0 < len(lines) <= LINES
    assert not re.search(r"\blsai_(core|lab)\.", "".join(PYTHON.values())), "inner modules"


@pytest.mark.slow
@pytest.mark.parametrize("title", PYTHON)
def test_a_wish_in_a_notebook(shown: dict[str, tuple[bool, str]], title: str) -> None:
    good, text = shown[title]
    assert good, text


@pytest.mark.slow
def test_what_they_show(shown: dict[str, tuple[bool, str]], folder: Project) -> None:
    texts = {title: text for title, (_, text) in shown.items()}
    phases = texts["another attention kernel, and the memory of each phase"]
    assert all(word in phases for word in ("forward", "backward", "optimizer", "whole step"))
    swept = texts["a sweep over lengths, and its picture"]
    assert "32" in swept and "64" in swept and "flash attention" in swept
    short, long = map(int, texts[LARGEST].split())
    assert short > 2 * long > 0
    assert "optimizers/sign" in texts["an optimizer of one's own, without touching the package"]
    assert "Transformer import" in texts["the trained model, and what it writes"]
    assert "own.jsonl" in texts["a model from text of one's own"] or "file" in texts[OWN_TEXT]
    beside = texts["mine beside the recorded one, on one page"]
    assert "h100" in beside and "settings differ" in beside and "tokens_per_s" in beside
    assert "own runs not shown" in beside, "runs of other settings are not left out in silence"
    assert "aten" in texts["a traced step: the longest kernels, and its timeline"]


LARGEST = "the largest batch of a 1 B model on a GPU with 24 GB"
OWN_TEXT = "a model from text of one's own"


@pytest.mark.slow
def test_own_runs_of_a_named_profile_are_in_the_table(folder: Project) -> None:
    """As the examples say it: a run of profile quick, and then `lab.load`."""
    source = """
import lsai_lab as lab
words = dict(study="memory", variant="window_256", profile="quick")
run = lab.open_run(**words, name="mine", tags=["a", "b"])
run.execute()
rows = lab.load("memory").query("own and variant == 'window_256'")
print(rows[["machine", "profile", "name", "tags"]].to_json(orient="records"))
"""
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=folder.root / "notebooks",
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])
    assert row["machine"].endswith("(own, quick)") and row["profile"] == "quick"
    assert row["name"] == "mine" and row["tags"] == "a b"


INTERRUPTED = [
    "run = lab.open_run(study='memory', variant='bf16', profile='quick', name='long',",
    "    overrides={'steps': 4000, 'checkpoint.every': 5, 'eval.sequences': 2, 'log_every': 1})",
    "run.execute()",
]


@pytest.mark.slow
def test_a_run_shows_itself_while_it_goes_on_and_after_an_interrupt(folder: Project) -> None:
    source = "\n".join(["import lsai_lab as lab", *INTERRUPTED])
    words = [sys.executable, "-c", source]
    options: dict[str, Any] = {"cwd": folder.root / "notebooks", "env": environment(folder)}
    process = subprocess.Popen(
        words, **options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    look = (
        "import lsai_lab as lab; run = lab.find_run('long'); print(len(lab.steps(run)), run.state)"
    )
    deadline, said = time.monotonic() + 120, "0"
    while said.startswith("0") and time.monotonic() < deadline:
        done = subprocess.run(
            [sys.executable, "-c", look], **options, capture_output=True, text=True
        )
        said = done.stdout or "0"
    assert "goes on" in said and int(said.split()[0]) > 0, done.stderr
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    done = re.search(r"stopped: (\d+) of 4000.* execute\(\) goes on from its .* of step (\d+)", err)
    assert done and done[1] == done[2], err
    code = look + "; run.plot(); print(run.outcome, repr(run))"
    done = subprocess.run([sys.executable, "-c", code], **options, capture_output=True, text=True)
    assert "preempted" in done.stdout and "goes on from its checkpoint" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_run_that_still_begins_is_stopped_at_once(folder: Project) -> None:
    """The signal comes while its process is being started."""
    source = "\n".join(["import lsai_lab as lab", *INTERRUPTED]).replace("'long'", "'early'")
    process = subprocess.Popen(
        [sys.executable, "-c", source.replace("4000", "4001")],
        cwd=folder.root / "notebooks",
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline, found = time.monotonic() + 120, list[Path]()
    while not found and process.poll() is None and time.monotonic() < deadline:
        plans = folder.runs.glob("memory/*/run.json")
        named = [path.parent for path in plans if '"early"' in path.read_text()]
        found = [one for one in named if (one / "env.json").exists()]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)  # less than the patience with a run that goes on
    assert "stopped: 0 of 4001 steps are done" in err, err
    summary = json.loads((found[0] / "summary.json").read_text())
    assert summary["reason"] == "stopped by SIGINT before it could end a step"


BESIDE = ["summary = run.execute()"]


@pytest.mark.slow
def test_two_notebooks_at_once_and_both_say_that_they_disturbed_each_other(folder: Project) -> None:
    source = """
import sys
import lsai_lab as lab
settings = {"seed": int(sys.argv[1]), "steps": 40, "eval.sequences": 2}
run = lab.open_run(study="memory", variant="bf16", profile="quick", overrides=settings)
summary = run.execute()
print(summary.outcome, run.results.get("disturbed"))
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", source, str(seed)],
            cwd=folder.root / "notebooks",
            env=environment(folder),
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (71, 72)
    ]
    for process in started:
        out, _ = process.communicate(timeout=200)
        assert out.splitlines()[-1].startswith("ok ")


BY_PAPERMILL = ["papermill run-training.ipynb - -p variant bf16 -p overrides '{steps: 4}'"]


@pytest.mark.slow
def test_a_run_notebook_from_top_to_bottom_with_overrides_as_text(folder: Project) -> None:
    words = ["-m", "papermill", "run-training.ipynb", "made.ipynb", "-p", "variant", "bf16"]
    done = subprocess.run(
        [sys.executable, *words, "-p", "overrides", "{steps: 4, optim.lr: 25e-4}"],
        cwd=folder.root / "notebooks",
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    text = (folder.root / "notebooks" / "made.ipynb").read_text()
    assert "outcome: ok" in text and "<details>" in text
    (page,) = {path.parent for path in folder.runs.glob("memory/*/notebook.ipynb")} & {
        path.parent
        for path in folder.runs.glob("memory/*/config.json")
        if '"lr": 0.0025' in path.read_text()
    }
    assert (page / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("title", CONSOLE)
def test_a_wish_at_a_terminal(
    shown: dict[str, tuple[bool, str]], folder: Project, title: str
) -> None:
    if "report" in title:
        make_small(folder)
    for line in CONSOLE[title]:
        code, out, err = folder.lsai(*line.split())
        assert code == 0 and out.strip(), (line, err)
    if title.startswith("a sweep"):
        assert folder.lsai("runs", "list", "--json")[1].count('"swept"') == 2
    if title.startswith("a figure"):
        page = (folder.root / "reports" / "_output" / "index.html").read_text()
        assert "my own figure" in page


def make_small(folder: Project) -> None:
    """The report of a chapter, whose figure somebody has just edited."""
    book = folder.root / "reports" / "_quarto.yml"
    settings = yaml.safe_load(book.read_text())
    settings["book"]["chapters"] = ["index.ipynb"]
    book.write_text(yaml.safe_dump(settings))
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None}
    figure = "#| label: fig-own\n#| fig-cap: my own figure\nimport matplotlib.pyplot as plt\n"
    figure += "import lsai_lab as lab\nplt.plot([1, 2, 3])\nlab.figure()"
    title = {"cell_type": "markdown", "id": "b", "metadata": {}, "source": "# Front {#sec-front}"}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}}
    notebook["cells"] = [title, cell | {"source": figure}]
    (folder.root / "notebooks" / "00-summary.ipynb").write_text(json.dumps(notebook))
    assert Path(folder.root / "notebooks").is_dir()
