"""The command line as processes and as a person sees it: help, exit codes, tables, JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CHECKOUT, Hazards, Project, write_run

from lsai_core.config.model import ModelConfig
from lsai_lab.cli import app
from lsai_lab.cli import prediction as prediction_module
from lsai_lab.data.dataset import Dataset
from lsai_lab.runs.session import Session

GROUPS = {
    "data": ["prepare", "list", "info"],
    "runs": ["list", "compare", "delete"],
    "new": ["lab", "chapter"],
}
COMMANDS = [name for name in app.COMMANDS if name not in GROUPS]
COMMANDS += [f"{group} {name}" for group, names in GROUPS.items() for name in names]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(shared: Project, command: str) -> None:
    code, out, _ = shared.lsai(*command.split(), "--help")
    assert code == 0 and "Usage: " in out and len(out.splitlines()) > 5
    assert " ".join(out.split()).count(f"lsai {command}") >= 2, "how it is used, and an example"


def test_the_studies_are_listed(shared: Project) -> None:
    code, out, _ = shared.lsai("study")
    assert code == 0 and [line.split() for line in out.splitlines()] == [
        ["machine", "Machine"],
        ["memory", "Memory"],
    ]


def test_the_list_of_commands_needs_no_large_library_and_names_what_the_environment_sets(
    tmp_path: Path,
) -> None:
    large = (
        "[name for name in ('torch', 'numpy', 'pandas', 'pydantic', 'papermill', 'IPython') "
        "if "
        "name in sys.modules]"
    )
    code = (
        f"import atexit, sys\nfrom lsai_lab.cli import main\natexit.register(lambda: "
        f"print({large}))\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]"
    assert all(command.split()[0] in done.stdout for command in COMMANDS)
    read = {
        name
        for folder in ("lsai_core", "lsai_lab")
        for path in (CHECKOUT / folder).rglob("*.py")
        for name in re.findall(
            r"environ(?:\.get\(|\[)\"(LSAI_\w+)", path.read_text(encoding="utf-8")
        )
    }
    inner = {"LSAI_PEER", "LSAI_BESIDE", "LSAI_LAUNCHER"}  # set by lsai for its processes
    assert read - inner and all(name in done.stdout for name in read - inner), read


def test_version_and_completion(shared: Project) -> None:
    assert re.fullmatch(r"lsai \S+", shared.lsai("--version")[1].strip())
    environment = {
        **os.environ,
        **shared.env,
        "_LSAI_COMPLETE": "complete_bash",
        "COMP_WORDS": "lsai co",
        "COMP_CWORD": "1",
    }
    program = "import sys; sys.argv[0] = 'lsai'; from lsai_lab.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == ["compare"]


def test_a_model_is_predicted_without_a_checkout(tmp_path: Path) -> None:
    shutil.copytree(CHECKOUT / "lsai_core", tmp_path / "site" / "lsai_core")
    shutil.copytree(CHECKOUT / "lsai_lab", tmp_path / "site" / "lsai_lab")
    words = [
        "predict",
        "--model",
        "lab-tiny",
        "--gpu",
        "24GiB",
        "--json",
        "--set",
        "compile=false",
        "--set",
        "seq_len=64",
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LSAI_")}
    done = subprocess.run(
        [sys.executable, "-m", "lsai_lab.cli", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(tmp_path / "site")},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_gib"] > 0


def test_a_preset_from_the_command_line_is_the_whole_shape(
    new_project: Callable[..., Project],
) -> None:
    session = Session("cpu", root=new_project().root)
    config = session.plan("memory", parts=["train"], overrides={"model": {"preset": "lab"}})[
        0
    ].config
    assert config.model.model_dump() == ModelConfig.model_validate({"preset": "lab"}).model_dump()


def test_a_mistake_is_one_line_and_exit_code_2_of_a_real_process(shared: Project) -> None:
    process = shared.start("study", "memory", "--set", "stepz=1")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert len(err.splitlines()) == 1 and err.startswith(
        "error: study memory, variant baseline, part train: unknown key"
    )


@pytest.mark.parametrize("words", [[], ["data"], ["runs"], ["new"]])
def test_without_a_command_there_is_help(shared: Project, words: list[str]) -> None:
    code, out, err = shared.lsai(*words)
    assert code == 2 and "Usage: " in out + err and "Traceback" not in err


def test_a_question_that_nobody_answers_deletes_nothing(
    new_project: Callable[..., Project],
) -> None:
    project = new_project()
    folder = write_run(project.runs, "memory", "baseline")
    process = project.start("runs", "delete", "memory.baseline", stdin=subprocess.DEVNULL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.strip().splitlines()[-1].endswith("aborted"), (out, err)
    assert (folder / "summary.json").exists()


def test_ctrl_c_is_one_line_and_exit_code_130(
    shared: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prediction_module, "cached_on_disk", interrupted)
    code, _, err = shared.lsai("predict", "--model", "lab-tiny")
    assert (
        code == 130
        and "".join(err.splitlines())
        == "interrupted; finished runs are kept, the same command goes on from there"
    )


@pytest.mark.parametrize("library", ["pandas", "torch", "typer"])
def test_ctrl_c_while_libraries_are_imported_leaves_no_traceback(
    library: str, tmp_path: Path
) -> None:
    (tmp_path / f"{library}.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-m", "lsai_lab.cli", "study", "memory"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{CHECKOUT}"},
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip().startswith("interrupted") and "Traceback" not in done.stderr


def test_the_installed_command_is_the_package(shared: Project) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlib.metadata import entry_points as e; print(e(name='lsai'))",
        ],
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        check=True,
    )
    assert "lsai_lab.cli:main" in done.stdout


def test_compare_shows_every_outcome(hazards: Hazards) -> None:
    code, out, _ = hazards.project.lsai("compare", "memory")
    assert code == 0
    for words in (
        ("oom", "oom"),
        ("endless", "timeout"),
        ("fa2", "unavailable"),
        ("baseline", "ok"),
    ):
        assert any(all(word in line for word in words) for line in out.splitlines()), words
    baseline = next(line for line in out.splitlines() if "baseline" in line)
    assert f"{hazards.after_second['baseline'].summary.results['validation_loss']:,.4g}" in baseline


def test_compare_as_json_holds_every_result(hazards: Hazards) -> None:
    code, out, _ = hazards.project.lsai("compare", "memory", "--json")
    rows = {row["variant"]: row for row in json.loads(out)}
    assert code == 0 and set(rows) == {"oom", "endless", "crash", "fa2", "baseline"}
    results = hazards.after_second["baseline"].summary.results
    assert rows["baseline"]["tokens_per_s"] == pytest.approx(results["tokens_per_s"])
    assert rows["oom"]["outcome"] == "oom" and rows["oom"]["reason"]


def test_compare_takes_medians_over_repeats(new_project: Callable[..., Project]) -> None:
    project = new_project()
    for repeat, speed in enumerate((100.0, 300.0, 110.0)):
        write_run(
            project.runs, "memory", "baseline", repeat=repeat, results={"tokens_per_s": speed}
        )
    code, out, _ = project.lsai("compare", "memory", "--all")
    assert code == 0
    row = next(line for line in out.splitlines() if "baseline" in line).split()
    assert "3" in row and "110" in row


@pytest.mark.slow
def test_train_takes_shorthand_options_and_records_the_command(
    new_project: Callable[..., Project],
) -> None:
    project = new_project(
        {"baseline": {}, "bf16": {"config": {"precision": "bf16_autocast"}}},
        profile={"memory_steps": 1},
    )
    code, out, err = project.lsai(
        "train",
        "--technique",
        "bf16",
        "--batch-size",
        2,
        "--no-memory-profiling",
        "--set",
        "optim.lr=5e-4",
    )
    assert code == 0, (out, err)
    run = project.found()["bf16"]
    assert run.config["batch_size"] == 2 and run.config["optim"]["lr"] == 5e-4
    assert (
        run.config["profile"]["memory_steps"] == 0
        and "mem_peak_allocated_gib" not in run.summary.results
    )
    assert (
        run.summary.command.startswith("lsai train --technique bf16 --batch-size 2")
        and "--profile cpu" in run.summary.command
    )
    assert "bf16" in out and "ok" in out


@pytest.mark.slow
def test_find_batch(new_project: Callable[..., Project]) -> None:
    project = new_project()
    code, out, err = project.lsai("find-batch")
    assert code == 0, (out, err)
    results = project.found()["baseline.batch"].summary.results
    assert results["largest_batch"] > 0
    assert "max batch" in out and str(results["largest_batch"]) in out


def test_a_command_does_not_wait_for_the_compiler() -> None:
    """torch's compiler and its tensors over many processes take longer to import than all the rest
    of a command or a chapter."""
    loaded = (
        "[name for name in ('torch._dynamo', 'torch.distributed.tensor', 'sympy') if name in "
        "sys.modules]"
    )
    chapters = (
        "lsai_lab.report.load, lsai_lab.report.show, lsai_lab.analysis.summary, "
        "lsai_lab.claims.evaluate"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, lsai_lab.cli, {chapters}; print({loaded})"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    assert done.stdout.strip() == "[]"


def test_plans_and_datasets_are_there_for_scripts(shared: Project, dataset: Dataset) -> None:
    plan = json.loads(shared.lsai("study", "memory", "--parts", "train", "--dry-run", "--json")[1])
    assert [row["run"] for row in plan] == ["memory.baseline", "memory.bf16"]
    assert [row["config"]["precision"] for row in plan] == ["fp32", "bf16_autocast"] and not plan[
        0
    ]["finished"]
    root = dataset.folder.parent.parent
    found = json.loads(shared.lsai("data", "list", "--json", "--root", root)[1])
    assert found["datasets"][dataset.folder.name] == dataset.meta and "stdlib" in found["sources"]
    assert json.loads(shared.lsai("data", "info", dataset.folder, "--json")[1]) == dataset.meta


def test_a_report_s_dry_run_says_what_cannot_be_done_here(
    new_project: Callable[..., Project],
) -> None:
    fa2 = {"attention": {"backend": "fa2"}, "precision": "bf16", "device": "cpu"}
    project = new_project({"baseline": {}, "fa2": {"config": fa2}})
    code, out, err = project.lsai("report", "--full", "--dry-run", "--skip", "machine")
    assert code == 0, err
    assert re.search(
        r"memory: 4 runs, 2 to do, about 16 s\n  2 unavailable: attention backend fa2", out
    ), out
    assert "in all about 16 s" in out
