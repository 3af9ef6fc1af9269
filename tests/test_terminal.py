"""What a person sees in a terminal of 100 columns."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import write_run

import lsai_core
import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_lab.cli.own import list_runs

TRAINED = "part == 'train' and machine == 'h100'"


@pytest.fixture(autouse=True)
def _terminal(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


@pytest.mark.parametrize("show", [print, repr, str])
def test_what_is_printed_has_no_long_lines(show: Any, capsys: pytest.CaptureFixture[str]) -> None:
    changed = {"model.n_layers": 2, "model.d_model": 128, "model.n_heads": 4, "seq_len": 128}
    changed |= {"model.n_kv_heads": 2, "model.d_ff": 256, "optim.lr": 0.004, "steps": 12}
    run = lab.open_run("memory", "bf16", overrides=changed)
    shown = [run, lab.study("memory").variants, lsai_core.GPUS, lsai_core.find_gpu("h100")]
    shown += (
        [] if show is repr else [lab.study("memory"), run.config, lab.config("h100/memory.bf16")]
    )
    for each in shown:
        text = show(each) or capsys.readouterr().out
        assert widest(text) <= 105 and "Config(" not in text and "NVIDIA" not in text, text
    assert "\n  overrides model.n_layers: 2, " in repr(run)


def test_a_setting_of_a_config_has_a_line() -> None:
    lines = str(lab.config("h100/memory.bf16")).splitlines()
    assert (
        lines[0] == "TrainConfig" and [line.split()[0] for line in lines].count("batch_size") == 1
    )


def test_a_frame_says_once_what_all_its_rows_have() -> None:
    runs = lab.recorded("memory").query(TRAINED)
    text = repr(runs)
    table, _, notes = text.partition("\n\n")
    assert widest(text) <= 100 and "validation_loss" in table.splitlines()[0]
    assert "All rows: machine h100, study memory, part train, outcome ok" in notes
    assert "machine" not in table and "variant" in table
    assert "The others: label; results by name" in notes and "12" not in notes.split()[:1]
    html = runs._repr_html_()
    assert "<th>variant</th>" in html and "<th>machine</th>" not in html and "All rows" in html
    assert "<th>machine</th>" in runs[["machine", "variant", "tokens_per_s"]]._repr_html_()
    assert "All rows" not in repr(runs.head(1))


def test_points_show_what_was_measured() -> None:
    points = lab.points("h100/attention.mha128.kernels")
    assert points["measure"].drop_duplicates().tolist() == ["time", "error", "backend"]
    assert {"forward_tflops", "training_tflops"} <= {*repr(points.head(8)).split()}
    assert "tflops" in repr(lab.points("h100/gemm.machine.products").head()).split()


def test_a_training_has_steps_and_no_points(capsys: pytest.CaptureFixture[str]) -> None:
    runs = lab.recorded("largest")
    points = lab.points(runs)
    trained = int((runs["kind"] == "train").sum())
    assert len(points) == 61 and "step_ms" not in points
    said = capsys.readouterr()
    assert f"{trained} of {len(runs)} runs are trainings: lab.steps(run)" in said.out + said.err
    with pytest.raises(UserError, match=r"is a training; lab\.steps\(run\) has its steps"):
        lab.points("h100/memory.bf16")


def test_names_of_kernels_show_where_they_differ() -> None:
    kernels = lab.kernels("h100/speed.fp8.levers").head(10)
    for text in (repr(kernels), kernels._repr_html_()):
        assert "nvjet_sm90_qrtst_128x128_128x6_1x2_h_bz_coopA_algo2_TNT" in text
    long = kernels["name"][kernels["name"].str.len() > 60].iloc[0]
    assert f"{long[:34]}…{long[-22:]}" in repr(kernels) and widest(repr(kernels)) <= 100


def test_a_method_shows_how_it_is_called() -> None:
    with lab.simulated_gpu("24GiB") as gpu:
        pass
    said = repr(gpu.verdict_on)
    assert said.startswith("to be called: Simulated.verdict_on(gpu)\n") and "GiB" not in said
    run = lab.find_run("h100/memory.bf16")
    assert [*inspect.signature(run.execute).parameters] == ["again", "live", "beside"]
    assert inspect.getdoc(run.execute) == inspect.getdoc(type(run).execute)
    assert inspect.isroutine(run.execute), "help tells its arguments"


def test_each_run_of_several_has_its_line() -> None:
    with pytest.raises(UserError) as error:
        lab.find_run("speed.fp8.levers")
    assert str(error.value).splitlines()[1:] == [
        "  h100/speed.fp8.levers",
        "  h200/speed.fp8.levers",
    ]


def test_a_list_of_runs_says_what_differs_first(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for repeat, rate in enumerate((0.1, 0.2, 0.2)):
        asked = {"batch_size": 3, "optim.lr": rate}
        config = lab.open_run("memory", "bf16", overrides=asked).config.model_dump(mode="json")
        write_run(empty, "memory", "bf16", "train", repeat, config=config)
    list_runs(None, None, None, False, False)
    said = capsys.readouterr().out
    assert "all differ from their study's plan by batch_size=3\n" in said
    assert said.count("optim.lr=0.1") == 1 and said.count("batch_size") == 1 and widest(said) <= 100
    list_runs(None, None, None, True, False)
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["differs"] == "optim.lr=0.1, batch_size=3", "JSON has all"
    mine = lab.load("memory", mine=True)["differs"].tolist()
    assert sorted(mine)[0] == "optim.lr=0.1, batch_size=3"


def test_two_notes_are_two_lines(empty: Path) -> None:
    peak = {"mfu": 1.2, "mfu_peak_tflops": 0.116, "mfu_peak_source": "own measured ceiling"}
    pair = [write_run(empty, "memory", name, results=peak) for name in ("bf16", "baseline")]
    lines = repr(lab.compare(*pair)).splitlines()
    assert [line[:15] for line in lines if "MFU is above" in line] == [
        "the first: MFU ",
        "the second: MFU",
    ]


def test_a_run_that_goes_on_has_its_machine(empty: Path) -> None:
    done = write_run(empty, "memory", "bf16")
    planned = lab.open_run("memory", "baseline").folder
    (planned / "env.json").write_text((done / "env.json").read_text())
    assert "two machines" not in repr(lab.compare(done, planned))
    machine = lab.load("memory", mine=True)["machine"].iloc[0]
    assert repr(lab.compare(done, planned)).count(machine) == 2
