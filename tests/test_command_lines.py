"""Command lines that cannot be: options that contradict each other, numbers beyond any machine, odd
names and folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Project
from test_bad_input import files, refused

from lsai_lab.runs.records import find_runs

TOGETHER = {
    "train --batch-size 100000000 --set seq_len=512": r"batch_size x seq_len = 100000000 x 512 "
    r"tokens",
    f"train --batch-size {10**30}": r"batch_size: Input should be less than or equal to",
    "train --set steps=5 --set steps=6": r"--set gives steps twice, as 5 and as 6",
    "train --batch-size 4 --set batch_size=8": r"batch_size=8 and an option that sets it to 4",
    "train --dataset stdlib --set data.source=polish-docs": r"data.source=polish-docs and an "
    r"option",
    "train --no-memory-profiling --set profile.memory_steps=3": r"memory_steps=3 and an option "
    r"that sets it to 0",
    "study --only bf16": r"--only is for the runs of a study; say which STUDY",
    "study --dry-run": r"--dry-run is for the runs of a study",
    "study --set steps=3": r"settings is for the runs of a study",
    "study memory --json": r"--json shows the plan of --dry-run",
    "study memory --dry-run --again": r"--dry-run and --again contradict each other",
    "train --technique *": r"study memory has no variant '\*'",
    "report --no-run --full": r"--full says what to run, and --no-run runs nothing",
    "report --no-run --budget 5m": r"--budget says what to run",
    "report --no-run --dry-run": r"--dry-run says what to run",
    "report --dry-run --watch": r"--dry-run and --watch contradict each other",
    "report --dry-run --budget 5m": r"--dry-run and --budget contradict each other",
    "report --budget ²m": r"--budget wants a time",
    f"report --budget {10**30}h": r"--budget wants a time",
    "compare --recorded --all": r"--recorded and --all contradict each other",
    "compare --recorded --runs /tmp": r"--recorded and --runs contradict each other",
    "runs list --where =": r"--where wants key=value",
    "techniques --model lab --gpu h100 --json": r"[Nn]o such option: --json",
    "longest --config a.toml --gpu h100": r"[Nn]o such option: --config",
    "predict --model lab --profile cpu": r"--profile belongs to a study",
    "predict --model lab --gpus 4 --set parallel.fsdp=8": r"--gpus 4: parallel.fsdp 8 makes 8 GPUs",
    "predict --model lab --gpus 100000000000": r"parallel.fsdp: Input should be less than or equal "
    r"to",
    "predict --model lab-tiny --gpus 131072 --gpu h100": r"131,072 shards cannot be predicted, at "
    r"most in 4,096; with parallel.replicate",
    f"predict --model lab --set batch_size={10**12}": r"batch_size: Input should be less than or "
    r"equal to",
    f"predict --model lab --gpu {10**30}GB": r"unknown GPU",
    "predict --model lab --gpu h100 --set precision=fp32 --set attention.backend=eager --set "
    "seq_len=134217728 --set model.d_model=1048576 "
    "--set model.n_heads=524288 --set model.n_kv_heads=524288": r"larger than any tensor can be",
    f"new chapter 70-{'x' * 400}": r"is no name of a chapter",
    "new chapter ٧٠-x": r"is no name of a chapter",
    f"new lab {'x' * 300}": r"File name too long",
    "new lab /proc/x": r"/proc/x: No such file or directory",
    "data prepare tokens:a.npy": r"--vocab-size, or which, with --tokenizer",
    "data prepare stdlib --column body": r"data.column='body' names the text of records",
    "data prepare tokens:a.npy --vocab-size 300 --max-mb 5": r"data.max_mb counts text",
}


@pytest.mark.parametrize("words", TOGETHER)
def test_options_that_cannot_be(
    shared: Project, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = files(shared)
    refused(shared.lsai(*words.split()), TOGETHER[words])
    assert files(shared) == before and not list(tmp_path.iterdir())


TYPERS = {
    "train --batch-size 0": r"'--batch-size'.*`lsai train --help` tells more",
    "train --batch-size x": r"'--batch-size'",
    "train --batch 4": r"No such option: --batch",
    "train extra": r"is an option: --study extra",
    "studdy": r"no command 'studdy'; did you mean study\? `lsai --help`",
    "data nothing": r"no command 'nothing'; `lsai data --help` tells more",
    "data prepare": r"Missing argument",
    "predict --as nothing": r"'nothing' is not",
    "predict --gpus": r"requires an argument",
    "--nothing": r"No such option: --nothing",
}


@pytest.mark.parametrize("words", TYPERS)
def test_what_typer_refuses_is_one_line_too(shared: Project, words: str) -> None:
    refused(shared.lsai(*words.split()), TYPERS[words])


@pytest.mark.parametrize("threads", ["abc", "0", "-1", "2,0", "2,,1", ",", "1.5", str(10**30)])
def test_threads_that_are_no_number(
    shared: Project, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shared.environment, "OMP_NUM_THREADS", threads)
    refused(shared.lsai("study", "memory"), r"OMP_NUM_THREADS=.* is no number of threads")


def test_a_list_of_threads_and_braces_in_the_folder_are_as_good_as_any(
    new_project: Callable[..., Project],
) -> None:
    project = new_project()
    folder = project.root / "runs %s{x} [1] {0}"
    project.environment |= {"OMP_NUM_THREADS": "2,1", "LSAI_RUNS": str(folder)}
    code, out, err = project.lsai("train", "--set", "steps=2")
    assert code == 0 and "outcomes: 1 ok" in out, (out, err)
    assert [run.summary.outcome for run in find_runs(folder)] == ["ok"]


def test_folders_that_lead_nowhere(
    shared: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name in ("LSAI_RUNS", "LSAI_DATA"):
        for folder, message in {
            tmp_path / "loop": "loop is no folder",
            tmp_path / "loop" / "x": "loop is no folder",
            tmp_path / ("x" * 300): "at most 255 bytes",
        }.items():
            with monkeypatch.context() as patch:
                patch.setitem(shared.environment, name, str(folder))
                refused(shared.lsai("study", "memory", "--parts", "train"), rf"{name}=.*{message}")
    with monkeypatch.context() as patch:
        patch.setitem(shared.environment, "LSAI_RUNS", "/proc/x")
        patch.setitem(shared.environment, "LSAI_DATA", str(tmp_path / "data"))
        for words in ("study memory", "train", "find-batch", "report"):
            refused(shared.lsai(*words.split()), r"LSAI_RUNS=/proc/x: the folder cannot be made")
    for out in ("loop", "loop/x", "x" * 300):
        refused(shared.lsai("report", "--out", tmp_path / out), r"--out .*|File name too long")
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_a_word_that_is_no_text(shared: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = os.fsdecode(b"/tmp/\xff")
    refused(shared.lsai("train", "--note", odd), r"argument 3 is not UTF-8 text")
    monkeypatch.setitem(shared.environment, "LSAI_RUNS", odd)
    refused(shared.lsai("study", "memory"), r"LSAI_RUNS is not UTF-8 text")


def test_the_reports_folder_is_checked_before_the_work(
    new_project: Callable[..., Project], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("precious")
    project = new_project()
    before = sorted(project.root.rglob("*"))
    for out in (tmp_path / "file", tmp_path / "file" / "below", "/proc/x/y"):
        refused(project.lsai("report", "--out", out), r"--out .*: cannot write to")
    assert (
        sorted(project.root.rglob("*")) == before and (tmp_path / "file").read_text() == "precious"
    )
