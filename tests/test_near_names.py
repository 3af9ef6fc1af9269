"""What a person writes who calls a thing as other programs do: an error names it as it is called
here, for settings, columns, results, attributes and functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import below_cell, write_run
from IPython.core.interactiveshell import InteractiveShell

import lsai_core
import lsai_lab as lab
from lsai_core.base.errors import OTHER_WORDS, UnknownName, UserError, nearest
from lsai_core.base.shown import Shown, WrongCall
from lsai_core.config.strict import dotted
from lsai_core.config.train import TrainConfig
from lsai_lab.interactive.run import Run
from lsai_lab.interactive.sweep import plan_sweep
from lsai_lab.runs.result_names import is_result
from lsai_lab.runs.session import Session

RECORDED = "h100/memory.bf16"


def runs() -> pd.DataFrame:
    return lab.recorded("memory")


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda: runs()["learning_rate"], "no column 'learning_rate'; did you mean optim.lr"),
        (lambda: runs()["lr"], "did you mean optim.lr"),
        (lambda: runs().learning_rate, "did you mean optim.lr"),
        (lambda: runs()["batch"], "did you mean batch_size"),
        (lambda: runs()["GPU"], "did you mean gpu or env.gpu?"),
        (lambda: runs()["gpus"], "did you mean world_size or parallel.fsdp?"),
        (lambda: runs()["layers"], "did you mean model.n_layers"),
        (lambda: runs()["throughput"], "did you mean tokens_per_s?"),
        (lambda: runs().query("peak_memory > 1"), "did you mean mem_peak_allocated_gib?"),
        (lambda: lab.summarize(runs(), "speed"), "did you mean tokens_per_s?"),
        (lambda: lab.steps(RECORDED)["learning_rate"], "did you mean lr?"),
        (lambda: lab.steps(RECORDED).plot(x="time", y="loss"), "did you mean step_ms or elapsed_s"),
        (lambda: lab.curves(RECORDED, y="speed"), "did you mean tokens_per_s"),
        (lambda: lab.find_run(RECORDED).results["val_loss"], "did you mean validation_loss?"),
        (lambda: lab.find_run(RECORDED).results.perplexity, "did you mean validation_perplexity?"),
        (lambda: lab.find_run(RECORDED).status, "did you mean outcome or state?"),
        (lambda: lab.find_run(RECORDED).metrics, "did you mean results?"),
        (lambda: lab.find_run(RECORDED).tokens_per_s, "it is run.results.tokens_per_s"),
        (lambda: lab.find_run(RECORDED).loss, 'it is run.steps["loss"]'),
        (lambda: lab.find_run(RECORDED).generate("a", tokns=3), "did you mean tokens?"),
        (lambda: lab.find_run(RECORDED).env["gpuu"], "there is no 'gpuu'; did you mean gpu"),
        (lambda: lab.study("memory").variants["bf15"], "no 'bf15'; did you mean bf16?"),
        (lambda: lab.style("x"), "lab.style()"),
        (lambda: lab.over_repeats(runs(), "x"), "lab.over_repeats takes a text as 'metric'"),
        (lambda: lab.predict("H100", "llama3-8b"), "the model the first: 'llama3-8b', 'H100'"),
        (lambda: lab.plan("H100", "llama3-8b"), "the model the first: 'llama3-8b', 'H100'"),
        (lambda: lab.predict("/no/such/folder"), "there is no folder or file '/no/such/folder'"),
        (lambda: lab.train, "no attribute 'train'; did you mean open_run?"),
        (lambda: lab.config(RECORDED).optim.learning_rate, "no attribute 'learning_rate' (did you"),
        (lambda: lab.config(RECORDED).learning_rate, "(did you mean 'optim.lr'?)"),
        (lambda: lab.study("memory").titel, "Study has no attribute 'titel' (did you mean 'title'"),
    ],
)
def test_what_others_call_so_is_told_by_its_name_here(empty: Path, wrong: Any, said: str) -> None:
    with pytest.raises((UserError, UnknownName, KeyError, WrongCall)) as error:
        wrong()
    assert said in str(error.value)
    assert len(below_cell(error.value)) == 1


def test_a_model_config_is_predicted_as_its_preset(empty: Path) -> None:
    asked = lab.predict(lsai_core.ModelConfig(preset="lab-tiny"), "24GiB")
    assert asked.peak_gib == lab.predict("lab-tiny", "24GiB").peak_gib


def test_options_of_a_runs_methods_stand_in_their_signature(empty: Path) -> None:
    shell = InteractiveShell.instance()
    shell.user_ns["run"] = lab.find_run(RECORDED)
    for name, options in (("generate", ("temperature", "seed")), ("annotate", ("tags", "note"))):
        told = shell.object_inspect_mime(f"run.{name}", detail_level=0)["text/plain"]
        assert all(f"{option}:" in told for option in options), told


@pytest.mark.parametrize(
    "name, said",
    [
        ("claims", "did you mean claims_table?; !lsai claims is a command"),
        ("runs", "did you mean load?; !lsai runs is a command"),
        ("presets", 'within lab.predict("'),
        ("variants", "lab.study"),
        ("gpus", "lab.predict"),
        ("report", "!lsai report"),
        ("largest_batch", 'largest="batch"'),
        ("techniques", "'techniques'; !lsai techniques is a command"),
        ("doctor", "'doctor'; !lsai doctor is a command"),
        ("probe", "'probe'; !lsai probe is a command"),
        ("find_batch", 'part="batch").execute() measures it'),
        ("xyzzy", "the Tab key behind lab. lists what there is"),
    ],
)
def test_a_first_guess_is_answered(name: str, said: str) -> None:
    with pytest.raises(UnknownName) as error:
        lab.__getattr__(name)  # parts of the package that were imported are attributes
    assert said in str(error.value)


@pytest.mark.parametrize(
    "name, meant",
    [
        ("learning_rate", "optim.lr"),
        ("context_length", "seq_len"),
        ("num_hidden_layers", "model.n_layers"),
        ("gradient_checkpointing", "grad_checkpoint"),
        ("optimizer", "optim.name"),
        ("Batch Size", "batch_size"),
    ],
)
def test_a_setting_by_another_name_is_refused_with_its_own(
    empty: Path, name: str, meant: str
) -> None:
    with pytest.raises(UserError, match=rf"unknown key '{name}' \(did you mean '{meant}'\?\)"):
        lab.open_run("memory", "bf16", overrides={name: 1})


def test_every_word_of_others_leads_to_a_name_that_there_is(empty: Path) -> None:
    known = {*dotted(TrainConfig), *runs(), *lab.steps(RECORDED), *dir(lab), *dir(Run)}
    known |= {*vars(lab.find_run(RECORDED))}
    known |= {name.rpartition(".")[2] for name in known}
    lost = [name for name in OTHER_WORDS if name not in known and not is_result(name)]
    assert not lost, "of what nothing is called"
    for name, words in OTHER_WORDS.items():
        assert [word for word in words.split() if name not in nearest(word, [name])] == []
    assert nearest("xyz", known) == []


def test_what_cannot_be_set_says_so_in_one_line(empty: Path) -> None:
    write_run(empty, "memory", "bf16")
    study, config, run = lab.study("memory"), lab.config(RECORDED), lab.find_run(RECORDED)
    for owner, name, said in (
        (study, "titel", "Study has no attribute 'titel' (did you mean 'title'?)"),
        (study, "title", "Study stays as it is; where a run is planned or predicted, overrides="),
        (config.optim, "learning_rate", "(did you mean 'lr'?)"),
        (config.optim, "lr", "OptimConfig stays as it is"),
        (run, "name", "Run.name can only be read"),
        (run, "nmae", "a run has no 'nmae' to set; run.annotate(name=..., tags=..., note=...)"),
    ):
        with pytest.raises(UnknownName) as error:
            setattr(owner, name, "x")
        assert said in str(error.value)
    assert config.optim.lr == 6e-4 and study.title == lab.study("memory").title
    assert not hasattr(config, "points") and isinstance(run, Shown)


def test_a_wrong_attribute_of_a_config_is_one_line_below_the_cell(empty: Path) -> None:
    shell = InteractiveShell.instance()
    shell.user_ns["config"] = lab.config(RECORDED)
    for cell in ("config.optim.learning_rate", "config.lr = 1"):
        error = shell.run_cell(cell, silent=True).error_in_exec
        assert isinstance(error, UnknownName) and len(below_cell(error)) == 1


def test_an_error_says_which_line_of_a_cell_and_tb_shows_the_way(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = InteractiveShell.instance()
    shell.run_cell("import lsai_lab as lab\na = 1\nc = lab.load('memry')\nd = 2")
    first, error = capsys.readouterr().out.strip().splitlines()
    assert first == "line 3: c = lab.load('memry')" and error.startswith("error: there is no")
    shell.run_line_magic("tb", "")
    told = capsys.readouterr().out
    assert "c = lab.load('memry')" in told and "report/load.py" in told
    shell.run_cell("lab.load('memry')")
    assert capsys.readouterr().out.startswith("error: "), "a cell of one line needs no line"


def test_swapped_letters_of_a_short_name() -> None:
    assert nearest("rl", ["name", "lr", "eps"]) == ["lr"]
    with pytest.raises(UserError, match=r"unknown key 'optim\.rl' \(did you mean 'optim\.lr'\?\)"):
        lab.predict("lab-tiny", overrides={"optim.rl": 1e-3})


def test_numbers_of_numpy_are_settings(empty: Path) -> None:
    overrides = {"steps": np.int64(5), "optim.betas": np.array([0.9, 0.95])}
    config = lab.open_run("memory", "bf16", profile="quick", overrides=overrides).config
    assert (vars(config)["steps"], list(vars(config)["optim"].betas)) == (5, [0.9, 0.95])
    over = {"seq_len": np.array([64, 32]), "optim.lr": np.float32(0.5)}
    planned = plan_sweep(Session("quick"), "memory", ["bf16"], over, "", {})
    assert [varied for _, varied in planned] == [
        {"seq_len": 64, "optim.lr": 0.5},
        {"seq_len": 32, "optim.lr": 0.5},
    ]


def test_an_argument_of_another_type_is_told_in_a_line(empty: Path) -> None:
    rows = lab.summarize(lab.recorded("memory").query("part == 'train'"), "tokens_per_s")
    for call, said in (
        (lambda: lab.judged(["flash_speed"]), "takes names, which stand one by one: lab.judged('f"),
        (lambda: lab.claims_table(["a", "b"]), "one by one: lab.claims_table('a', 'b')"),
        (lambda: lab.study(3), "lab.study takes a text as 'name', not 3"),
        (lambda: lab.draw(["fusing"]), "lab.draw takes a text as 'name'"),
        (lambda: lab.figure("memory"), "lab.figure shows a figure of matplotlib, not 'memory'"),
        (lambda: lab.relative(rows, "label", "baseline"), "label is no number, so it has no ratio"),
        (lambda: lab.machines(3), "a frame is wanted here"),
        (lambda: lab.predict("lab", "h100", overrides=["a=3"]), "overrides is a mapping from set"),
        (
            lambda: lab.lines(rows, "label", "tokens_per_s", "machine"),
            "'label' is no column of num",
        ),
    ):
        with pytest.raises((TypeError, UserError), match=re.escape(said)) as found:
            call()
        assert len(below_cell(found.value)) == 1
