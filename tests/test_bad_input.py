"""Wrong requests: one clear line on standard error, exit code 2, nothing started, nothing
half-written, earlier results intact."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import CHECKOUT, Project, write_corpus, write_run

from lsai_core.base.errors import UserError
from lsai_core.config.train import TrainConfig
from lsai_core.training.combinations import checked
from lsai_lab.runs.records import find_runs

STUDY = "params/studies/memory.yaml"


def refused(result: tuple[int, str, str], message: str) -> None:
    """Exit code 2, and (after the bars of a text's preparation) one line on standard error that
    matches `message`."""
    code, out, err = result
    assert code == 2, (code, out, err)
    lines = [
        line
        for line in err.splitlines()
        if line and not line.startswith(("tokenizer: ", "encoding: "))
    ]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    assert re.search(message, lines[0]), err


def files(project: Project) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in project.runs.rglob("*") if p.is_file() and p.name != ".lock"}


SETTINGS = {
    "stepz=5": r"unknown key 'stepz' \(did you mean 'steps'\?\)",
    "optim.learning_rate=1": r"unknown key 'optim.learning_rate' \(did you mean 'optim.lr'",
    "model.n_layer=3": r"unknown key 'model.n_layer' \(did you mean 'model.n_layers'\?\)",
    "steps=many": r"steps: Input should be a valid integer, got 'many'",
    "steps=1.5": r"steps: .* got 1.5",
    "steps=0": r"steps: Input should be greater than 0, got 0",
    "seed=x": r"seed: Input should be a valid integer, got 'x'",
    "compile=1": r"compile: Input should be a valid boolean, got 1",
    "optim=3": r"optim: ",
    "data=3": r"data: ",
    "model.preset=gpt5": r"model: unknown preset 'gpt5'; known: lab,",
    "model.scaling_factor=0": r"model: scaling_factor must be at least 1, got 0",
    "model.d_model=33": r"d_model=33 is not divisible by n_heads=2",
    "model.n_kv_heads=3": r"n_heads=2 is not divisible by n_kv_heads=3",
    "model.n_heads=32": r"head dimension 1 must be even",
    "attention.backend=flash": r"unknown attention backend 'flash'",
    "attention.backend=sdpa_flash": r"'sdpa_flash' needs 16-bit inputs but precision is 'fp32'; "
    r"use precision bf16",
    "attention.window=64": r"attention.window=64 is longer than seq_len=32; use window: null",
    "attention={backend: sdpa_cudnn, window: 8}": r"'sdpa_cudnn' has no sliding window; use auto, "
    r"eager",
    "precision=fp16": r"precision: Input should be 'fp32', .* got 'fp16'",
    "model.vocab_size=300": r"data.vocab_size=320 does not fit model.vocab_size=300",
    "optim.lr=.inf": r"'\.inf' is no finite number",
    "optim.lr=.nan": r"'\.nan' is no finite number",
    "optim.lr=1e999": r"'1e999' is no finite number",
    "optim.betas=[5, -3]": r"optim\.betas\.0: Input should be less than 1, got 5",
    f"seed={10**30}": r"is no finite number of 64 bits",
    f"seed={2**40}": r"seed: Input should be less than 4294967296",
    "steps=" + "9" * 5000: r"is no finite number of 64 bits",
    "steps=2026-13-45": r"steps: Input should be a valid integer, got '2026-13-45'",
    "steps=2026-01-05": r"steps: Input should be a valid integer, got '2026-01-05'",
    "steps=!!int abc": r"'abc' is no finite number",
    "steps=!!timestamp x": r"cannot be read as a YAML value",
    "steps=!!python/object/apply:os.system [id]": r"cannot be read as a YAML value",
    "steps=" + "[" * 5000: r"nested too deeply",
    "steps={[1]: 2}": r"cannot be read as a YAML value",
    "optim.lr=[1": r"'\[1' cannot be read as a YAML value",
    "optim.lr": r"--set wants key=value",
    "=5": r"--set wants key=value",
    "optim.lr.x=1": r"optim.lr: ",
    "steps=1:30": r"steps: Input should be a valid integer, got '1:30'",
    "steps=1:30:00": r"steps: Input should be a valid integer, got '1:30:00'",
    "optim.lr=1:30.5": r"optim.lr: Input should be a valid number, got '1:30.5'",
    "steps=010": r"steps: Input should be a valid integer, got '010'",
    "steps=!!int 1:30": r"'1:30' is no finite number",
    f"batch_size={2**40}": r"batch_size: Input should be less than or equal to \d+, got "
    r"1099511627776",
    f"seq_len={10**18}": r"seq_len: Input should be less than or equal to",
    f"grad_accum={2**62}": r"grad_accum: Input should be less than or equal to",
    f"steps={2**62}": r"steps: Input should be less than or equal to",
    f"parallel.fsdp={2**40}": r"parallel.fsdp: Input should be less than or equal to",
    "optim" + ".x" * 2000 + "=1": r"--set wants key=value",
    "optim..lr=1": r"--set wants key=value",
    "optim.=1": r"--set wants key=value",
    "data.column=[a]": r"data.column: Input should be a valid string",
    "data.column=body": r"no field 'body'; it has text",
    "data.tokenizer=/no/such": r"data.tokenizer=/no/such: no such file",
    "data.vocab_size=262145": r"data.vocab_size: Input should be less than or equal to 262144",
    "data.source=tokens:/no/such.npy": r"/no/such.npy: no such file",
    "data.source=ftp:x": r"ftp:x",
    "data.source=file:/no/such.jsonl": r"/no/such.jsonl",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_wrong_settings(shared: Project, setting: str) -> None:
    before = files(shared)
    refused(shared.lsai("study", "memory", "--parts", "train", "--set", setting), SETTINGS[setting])
    assert files(shared) == before


@pytest.mark.parametrize(
    "pairs", [["optim=3", "optim.lr=x"], ["optim.lr=x", "optim=3"], ["data=3", "steps=x"]]
)
def test_settings_that_contradict_each_other(shared: Project, pairs: list[str]) -> None:
    refused(
        shared.lsai("train", *[word for pair in pairs for word in ("--set", pair)]), r"optim|steps"
    )


NAMES = {
    "study memry": r"unknown study 'memry'; did you mean memory\?",
    "study memory --only bf17": r"study memory has no variant 'bf17'; did you mean bf16\?",
    "study memory --skip bf17": r"study memory has no variant 'bf17'",
    "study memory --only bf16 --skip bf16": r"no variant of study memory is left",
    "study memory --parts trian": r"study memory has no part 'trian'; did you mean train\?",
    "study memory --profile h300": r"unknown profile 'h300'; known: cpu, gpu",
    "train --technique nothing": r"no variant 'nothing'; known:",
    "train --study machine": r"study machine measures no train; its parts: ceilings",
    "find-batch --study machine": r"study machine measures no batch_search",
    "find-batch --set optm.lr=1": r"unknown key 'optm'",
    "study memory --dry-run --batch-size 1 --set data=1 --dataset stdlib"
    " --set x.y=1": r"unknown key 'x'",
    "study memory --only ,": r"expected names separated by commas, got ','; leave the option out",
    "report --only ,": r"expected names separated by commas",
    "predict --study memory --model lab": r"--study with --variant, or --model",
    "report --only nothing": r"no study or variant 'nothing'; known: machine, memory, ",
    "report --skip nothing": r"no study or variant 'nothing'",
    "report --formats docx": r"--formats wants html, pdf or html,pdf, got 'docx'",
    "report --engine word": r"--engine wants auto, quarto or pandoc",
    "report --only memory --no-run": r"--no-run runs nothing",
    "compare nothing": r"no finished runs",
    "compare --machine nothing": r"no finished runs",
    "compare --runs /no/such/folder": r"no such folder of runs",
    "record --runs /no/such/folder": r"no such folder of runs",
}


@pytest.mark.parametrize("words", NAMES)
def test_wrong_names(shared: Project, words: str) -> None:
    before = files(shared)
    refused(shared.lsai(*words.split()), NAMES[words])
    assert files(shared) == before and not (shared.root / "reports" / "_output").exists()


def test_a_name_without_runs_is_answered_with_the_names_that_have_some(
    shared: Project, tmp_path: Path
) -> None:
    write_run(tmp_path, "memory", "baseline", "train")
    refused(
        shared.lsai("compare", "speed", "--runs", tmp_path),
        r"no finished runs match; there are .*: memory; --recorded",
    )


def test_a_part_that_measures_no_such_variant(new_project: Callable[..., Project]) -> None:
    project = new_project({"baseline": {}, "bf16": {"config": {"precision": "bf16_autocast"}}})
    path = project.root / STUDY
    path.write_text(
        path.read_text().replace("kind: batch_search", "kind: batch_search\n    variants: [bf16]")
    )
    message = r"study memory measures nothing of that with profile cpu; it measures batch: bf16"
    refused(
        project.lsai("study", "memory", "--only", "baseline", "--parts", "batch", "--dry-run"),
        message,
    )
    refused(project.lsai("find-batch"), message)


YAML = {
    "not yaml": (STUDY, "variants: [1", r"memory.yaml: cannot be read as YAML: .*line \d"),
    "no mapping": (STUDY, "- 1\n- 2\n", r"memory.yaml: expected a mapping"),
    "empty": (STUDY, "", r"memory.yaml: expected a mapping"),
    "binary": (STUDY, "\x00\xff", r"memory.yaml: cannot be read as YAML"),
    "twice": (STUDY, "study: memory\nstudy: memory\n", r"key 'study' stands twice"),
    "missing keys": (
        STUDY,
        "study: memory\n",
        r"memory.yaml: title: Field required.*variants: Field required",
    ),
    "profile": (
        "params/profiles/cpu.yaml",
        "profile: cpu\n",
        r"cpu.yaml: description: Field required",
    ),
    "profile typo": (
        "params/profiles/cpu.yaml",
        "profile: cpu\ndescription: x\nstudies: {memroy: {base: {steps: 3}}}\n",
        r"cpu.yaml: there is no study 'memroy' to change; did you mean memory\?",
    ),
    "book": (
        "reports/_quarto.yml",
        "book: {chapter: [a.ipynb]}",
        r"_quarto.yml names no chapters of a book",
    ),
    "chapter": (
        "reports/_quarto.yml",
        "book: {chapters: [gone.ipynb]}",
        r"gone.ipynb, a chapter of reports/_quarto.yml, cannot be read as a notebook: .*No such "
        r"file",
    ),
}


@pytest.mark.parametrize("case", YAML)
def test_wrong_parameter_files(new_project: Callable[..., Project], case: str) -> None:
    project = new_project()
    path, text, message = YAML[case]
    (project.root / path).write_text(text, encoding="latin-1")
    command = ["report", "--no-run"] if path.startswith("reports/") else ["study", "memory"]
    refused(project.lsai(*command), message)


STUDY_EDITS = {
    "baseline: other": r"baseline 'other' is no variant; there are baseline",
    "study: other": r"study is 'other', but the file is called memory.yaml",
    "parts: {train: {kind: tain}}": r"unknown kind of run 'tain'; did you mean train",
    "parts: {train: {timeout: 5}}": r"unknown key 'parts.train.timeout'",
    "parts: {train: {settings: {stepz: 5}}}": r"variant baseline, part train: unknown key 'stepz'",
    "parts: {batch: {kind: batch_search, settings: {begin: 5}}}": r"part batch: unknown key "
    r"'begin'",
    "variants: {baseline: {label: a, config: {optim: {lr: fast}}}}": r"variant baseline, part "
    r"train: optim.lr: .* got "
    r"'fast'",
    "variants: {}": r"baseline 'baseline' is no variant",
    "base: {model: {}}": r"model.n_layers: Field required",
}


@pytest.mark.parametrize("change", STUDY_EDITS)
def test_wrong_studies(new_project: Callable[..., Project], change: str) -> None:
    project = new_project()
    lines = (project.root / STUDY).read_text().splitlines(keepends=True)
    key = change.split(":")[0]
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{key}:"))
    end = next(
        (i for i in range(start + 1, len(lines)) if not lines[i].startswith(" ")), len(lines)
    )
    (project.root / STUDY).write_text("".join([*lines[:start], change + "\n", *lines[end:]]))
    refused(project.lsai("study", "memory"), STUDY_EDITS[change])


def test_everything_is_checked_before_anything_runs(new_project: Callable[..., Project]) -> None:
    """A wrong key of the last variant must not cost the first an hour."""
    project = new_project({"baseline": {}, "last": {"config": {"optim": {"lr": -1}}}})
    refused(
        project.lsai("study", "memory"),
        r"variant last, part train: optim.lr: Input should be greater than 0",
    )
    assert not (project.runs / "memory").exists()
    assert not (project.root / "data").exists()


@pytest.mark.parametrize("text", ["", "\n\n", '{"text": "one short story"}\n'])
def test_a_corpus_without_enough_text(
    new_project: Callable[..., Project], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text(text)
    project = new_project()
    refused(
        project.lsai("study", "memory", "--dataset", f"file:{path}", "--parts", "train"),
        r"few\.jsonl",
    )
    assert not list((project.root / "data").glob("datasets/[!.]*"))


@pytest.mark.slow
def test_a_corpus_smaller_than_a_batch_is_a_recorded_failure(
    new_project: Callable[..., Project], tmp_path: Path
) -> None:
    source = write_corpus(tmp_path / "small.jsonl", documents=30)
    project = new_project()
    code, out, _ = project.lsai("train", "--dataset", f"file:{source}", "--batch-size", "5000")
    assert code == 1
    summary = project.found()["baseline"].summary
    assert (
        summary.outcome == "failed" and "fewer than one batch of batch_size=5000" in summary.reason
    )
    assert summary.reason in out


def test_damaged_data(new_project: Callable[..., Project]) -> None:
    project = new_project()
    assert project.lsai("study", "memory", "--dry-run")[0] == 0  # prepares the text
    path = next((project.root / "data").glob("datasets/*/train.bin"))
    good = path.read_bytes()
    for bad in (good[:-2], good[:100] + bytes([good[100] ^ 1]) + good[101:], b""):
        path.write_bytes(bad)
        refused(
            project.lsai("study", "memory"),
            r"train\.bin: .*(damaged|bytes instead of).*delete .* prepare",
        )
    path.write_bytes(good)
    assert project.lsai("study", "memory", "--dry-run")[0] == 0


def test_folders_that_cannot_be_written(
    new_project: Callable[..., Project], tmp_path: Path
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("precious")
    project = new_project()
    for name in ("LSAI_RUNS", "LSAI_DATA"):
        for folder in (blocked, blocked / "below"):
            project.environment[name] = str(folder)
            refused(
                project.lsai("study", "memory"), rf"{name}=.*a file is no folder; set it to another"
            )
        del project.environment[name]
    assert blocked.read_text() == "precious"
    refused(project.lsai("report", "--no-run", "--out", blocked / "report"), r"a file")
    refused(project.lsai("report", "--no-run", "--out", blocked), r"a file")
    assert blocked.read_text() == "precious"


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip("mounting needs privileges")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_read_only_disk(new_project: Callable[..., Project], tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        project = new_project()
        project.environment["LSAI_RUNS"] = str(disk / "runs")
        refused(
            project.lsai("study", "memory"), r"the folder cannot be made: Read-only file system"
        )


@pytest.mark.slow
def test_a_disk_that_fills_up_keeps_earlier_results(
    new_project: Callable[..., Project], tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "size=48k") as disk:
        project = new_project()
        project.environment["LSAI_RUNS"] = str(disk)
        earlier = write_run(disk, "memory", "earlier", results={"tokens_per_s": 5.0})
        code, out, err = project.lsai("study", "memory", "--parts", "train", "--set", "steps=400")
        assert code in (1, 2), (out, err)
        assert re.search(r"No space left on device", out + err), (out, err)
        assert "Traceback" not in out + err
        assert [r.summary.results for r in find_runs(disk) if r.folder == earlier] == [
            {"tokens_per_s": 5.0}
        ]
        assert not list(disk.rglob("*.part"))
    with mounted(tmp_path / "full", "size=16k") as disk:
        project.environment["LSAI_RUNS"] = str(disk)
        with contextlib.suppress(OSError):
            (disk / "filler").write_bytes(os.urandom(1 << 20))
        refused(
            project.lsai("study", "memory", "--parts", "train"),
            r"cannot write the records .*No space left",
        )


def test_a_limit_on_file_sizes_is_one_line(new_project: Callable[..., Project]) -> None:
    project = new_project()
    assert project.lsai("study", "memory", "--dry-run")[0] == 0
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))
    try:
        result = project.lsai("study", "memory", "--parts", "train")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    refused(result, r"cannot write the records of memory.baseline .*File too large")
    assert [path.name for path in project.runs.glob("memory/*/*") if path.name != ".lock"] == []


def test_a_project_folder_that_is_none(tmp_path: Path) -> None:
    refused(Project(tmp_path).lsai("study", "memory"), r"LSAI_ROOT=.* holds no params/ folder")


def test_several_mistakes_are_named_together() -> None:
    with pytest.raises(UserError, match=r"test: steps: .*; unknown key 'colour'"):
        checked(TrainConfig, {"model": {"preset": "lab"}, "steps": -1, "colour": 1}, "test")


def test_text_is_read_and_written_as_utf8_whatever_the_locale(tmp_path: Path) -> None:
    unnamed = []
    for path in [*(CHECKOUT / "lsai_core").rglob("*.py"), *(CHECKOUT / "lsai_lab").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or not isinstance(
                call.func, ast.Attribute | ast.Name
            ):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
            modes = [
                a.value
                for a in call.args
                if isinstance(a, ast.Constant) and str(a.value).strip("rwab+x") == ""
            ]
            encoded = any(k.arg == "encoding" for k in call.keywords) or "utf-8" in ast.unparse(
                call
            )
            if name == "read_text" and not encoded:
                unnamed.append(f"{path}:{call.lineno}")
            if (
                name == "open"
                and not encoded
                and len(modes) == len(call.args)
                and not any("b" in m for m in modes)
            ):
                unnamed.append(f"{path}:{call.lineno}")
    assert not unnamed


@pytest.mark.parametrize(
    "words", ["doctor", "data list", "study memory --dry-run --parts train", "compare --runs r"]
)
def test_an_ascii_locale_ends_no_command(shared: Project, words: str, tmp_path: Path) -> None:
    write_run(tmp_path / "r", "memory", "baseline", results={"note": "zażółć"})
    ascii_only = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lsai_lab.cli",
            *words.replace("--runs r", f"--runs {tmp_path}/r --all").split(),
        ],
        capture_output=True,
        cwd=shared.root,
        env={**os.environ, **shared.env, **ascii_only},
    )
    assert done.returncode == 0, done.stderr.decode()
