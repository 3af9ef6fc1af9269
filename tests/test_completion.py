"""What the Tab key completes in a notebook: within quotes the names that may stand there, after a
dot what a thing has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jedi
import pandas as pd
import pytest
from conftest import write_run
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import lsai_core
import lsai_lab as lab
from lsai_core import ModelConfig, TrainConfig, simulated_gpu

RECORDED = "h100/memory.bf16"


@pytest.fixture
def shell(empty: Path) -> InteractiveShell:
    """A shell with some variables, in the checkout's laboratory, with two runs of its own."""
    folder = write_run(empty, "memory", "bf16")
    (folder / "run.json").write_text('{"name": "first", "tags": ["long"]}')
    (folder / "model").mkdir()
    write_run(empty, "memory", "baseline")
    shell = InteractiveShell.instance()
    runs = lab.recorded("memory").query("part == 'train'")
    rows = pd.DataFrame({"machine": ["h100"], "variant": ["bf16"], "tokens_per_s": [1.0]})
    both = lab.compare(RECORDED, "h200/memory.bf16")
    with simulated_gpu("24GiB") as gpu:
        pass
    shell.user_ns.update(lsai_core=lsai_core, simulated_gpu=simulated_gpu, gpu=gpu)
    shell.user_ns.update(TrainConfig=TrainConfig, ModelConfig=ModelConfig, row=runs.iloc[0])
    shell.user_ns["p"] = lab.predict("lab-tiny", "24GiB")
    shell.user_ns.update(lab=lab, runs=runs, rows=rows, both=both, run=lab.find_run(RECORDED))
    lab._offer_names()
    return shell


def offered(shell: InteractiveShell, text: str) -> list[str]:
    """What the Tab key offers at the end of `text`."""
    with provisionalcompleter():
        return [one.text for one in shell.Completer.completions(text, len(text))]


@pytest.mark.parametrize(
    "text, wanted",
    [
        ('lab.load("mem', "memory"),
        ('lab.load(["speed", "mem', "memory"),
        ('lab.recorded("mem', "memory"),
        ('lab.study("spe', "speed"),
        ('lab.parameters("profiles/qu', "profiles/quick"),
        ('lab.open_run(study="memory", variant="flash_g', "flash_gradcp"),
        ('lab.open_run("memory", "flash_g', "flash_gradcp"),
        ('lab.open_run(study="memory", variant="bf16", profile="qu', "quick"),
        ('lab.open_run("memory", "bf16", part="ba', "batch"),
        ('lab.open_run("memory", "bf16", overrides={"opt', "optim.lr"),
        ('lab.open_run("memory", "bf16", overrides={"steps": 2, "opt', "optim.lr"),
        ('lab.open_run("memory", "bf16", overrides={"precision": "bf16_a', "bf16_autocast"),
        ('lab.open_run("memory", "bf16", overrides={"attention.backend": "fl', "flex"),
        ('lab.open_run("memory", "bf16", overrides=dict(se', "seq_len="),
        ('lab.open_run("memory", "bf16", overrides=dict(steps=3, ', "grad_accum="),
        ('lab.curves(runs, y="grad', "grad_norm"),
        ('lab.sweep("memory", ["bf16", "window_2', "window_256"),
        ('lab.sweep("memory", "bf16", {"seq_len": [1], "optim.l', "optim.lr"),
        ('lab.sweep("memory", "bf16", {"loss": ["fused", "fu', "full"),
        ('lab.predict("llama3.2', "llama3.2-1b"),
        ('lab.predict("llama3-8b", gpu="h20', "H200"),
        ('lab.predict("llama3-8b", "h20', "H200"),
        ('lab.plan("llama3-8', "llama3-8b"),
        ('lab.plan("memory.flash_g', "memory.flash_gradcp"),
        ('lab.plan("fir', "first"),
        ('lab.plan("llama3-8b", "h20', "H200"),
        ('lab.plan("llama3-8b", "h100", numerics="harm', "harmless"),
        ('lab.explore("roof', "roofline"),
        ('lab.draw("fsdp', "fsdp_step"),
        ('lab.judged("flash_speed", "four_gpus_mem', "four_gpus_memory"),
        ('lab.find_run("fi', "first"),
        ('lab.points("h100/attention.g', "h100/attention.gqa128.kernels"),
        ("lab.compare('memory.x', 'h100/memory.bf16_g", "h100/memory.bf16_gradcp"),
        ('lab.curves("h10', "h100/"),
        ('lab.curves("first", "h100/memory.bf16", y="grad', "grad_norm"),
        ('run.plot("grad', "grad_norm"),
        ('both.plot("loss", x="ela', "elapsed_s"),
        ('run.results["tokens_per_s_per', "tokens_per_s_per_gpu"),
        ('run.steps["grad', "grad_norm"),
        ('lab.steps(run).plot(x="ela', "elapsed_s"),
        ('lab.steps("h100/memory.bf16").plot(x="step", y=["ela', "elapsed_s"),
        ('lab.steps(runs.iloc[0]).plot(x="ela', "elapsed_s"),
        ('lab.study("memory").variants["flash_g', "flash_gradcp"),
        ('lab.summarize(runs, ["tokens_per_s_per', "tokens_per_s_per_gpu"),
        ('lab.summarize(runs.query("repeat == 0"), "tokens_per_s_per', "tokens_per_s_per_gpu"),
        ('lab.relative(rows, "tok', "tokens_per_s"),
        ('lab.relative(rows, "tokens_per_s", "bf', "bf16"),
        ('lab.table(rows[["machine", "tok', "tokens_per_s"),
        ('lab.table(rows, {"tok', "tokens_per_s"),
        ('lab.bars(rows, "machine", "tok', "tokens_per_s"),
        ('lab.lines(rows, x="tok', "tokens_per_s"),
        ('sns.scatterplot(rows, x="tok', "tokens_per_s"),
        ('runs.groupby(["machine", "vari', "variant"),
        ('runs.sort_values("tokens_per_s_per', "tokens_per_s_per_gpu"),
        ('runs.query("vari', "variant"),
        ('runs.query("repeat == 0 and optim.l', "`optim.lr`"),
        ("runs.query(\"machine == 'h10", "h100"),
        ('runs[runs["variant"] == "flash_g', "flash_gradcp"),
        ('lab.load("memory").query("vari', "variant"),
        ('import seaborn as sns\nfor x in [1]:\n    if x:\n        lab.load("mem', "memory"),
        ('%matplotlib inline\nlab.load("mem', "memory"),
        ('lab.open_run("memory", "bf16", overrides={"data.source": "std', "stdlib"),
        ('lab.sweep("memory", "bf16", over={"optim.l', "optim.lr"),
        ('lab.find_run("first").execute(beside=["fir', "first"),
        ('run.execute(beside="fir', "first"),
        ('lab.open_run("memory", "bf16", tags=["lon', "long"),
        ('lab.study("memory").var', "variants"),
        ('lab.config("h100/memory.bf16").', "seq_len"),
        ("gpu.peak_al", "peak_allocated_gib"),
        ('simulated_gpu("h20', "H200"),
        ('lsai_core.simulated_gpu("h20', "H200"),
        ('lsai_core.find_gpu("h20', "H200"),
        ("TrainConfig(precision='bf16_a", "bf16_autocast"),
        ("ModelConfig(preset='llama3.2", "llama3.2-1b"),
        ('TrainConfig(model={"pre', "preset"),
        ('TrainConfig(model={"preset": "llama3.2', "llama3.2-1b"),
        ('p.memory["we', "weights"),
        ('p.phases["', "forward"),
        ('row["tokens_per_s_per', "tokens_per_s_per_gpu"),
        ("run.results.tokens_per_s_per", "tokens_per_s_per_gpu"),
        ("runs[runs.variant=='flash_g", "flash_gradcp"),
        ("runs[runs.variant.isin(['flash_g", "flash_gradcp"),
        ("runs[runs['variant'].isin(['bf16', 'flash_g", "flash_gradcp"),
        ("lab.load('speed')  # it's\nlab.load(\"mem", "memory"),
    ],
)
def test_names_complete(shell: InteractiveShell, text: str, wanted: str) -> None:
    found = offered(shell, text)
    assert wanted in [name.strip("'\"]") for name in found], found


def test_only_what_may_stand_there_is_offered(shell: InteractiveShell) -> None:
    assert "memory.baseline" in offered(shell, 'lab.find_run("')
    for with_a_model in ('lab.load_model("', 'lab.generate("'):
        assert offered(shell, with_a_model) == ["first"]
    asked = offered(shell, 'lab.plan("')
    assert asked.index("llama3-8b") < asked.index("first") < asked.index("memory.")
    assert offered(shell, 'lab.summarize(runs, "')[:2] == ["machine", "study"], "the frame's order"
    for elsewhere in ('open("', 'lab.predict(hf="', 'lab.open_run("memory", "bf16", name="', '"'):
        assert not {"memory", "bf16", "first"} & {*offered(shell, elsewhere)}
    assert "tokens_per_s" not in offered(shell, 'lab.bars(rows, "machine", "n", axis="')


def test_no_magic_and_no_file_stands_where_a_name_is_wanted(shell: InteractiveShell) -> None:
    for text in ('lab.open_run("memory", "bf16", name="', 'lab.sweep("memory", "bf16", note="'):
        assert offered(shell, text) == [""]


def test_series_and_frames_offer_their_names_in_their_order(shell: InteractiveShell) -> None:
    assert offered(shell, 'p.phases["') == ["forward", "backward", "optimizer"]
    assert (
        offered(shell, 'runs["')[:2] == offered(shell, 'runs.query("')[:2] == ["machine", "study"]
    )
    assert not {"clear", "popitem"} & {*offered(shell, "run.results.")}


def test_what_a_base_class_has_is_not_offered(shell: InteractiveShell) -> None:
    for text in ('lab.study("memory").', 'lab.config("h100/memory.bf16").'):
        assert not {"model_fields", "model_dump", "construct"} & {*offered(shell, text)}


def test_nothing_of_a_persons_own_is_called(shell: InteractiveShell) -> None:
    called: list[str] = []
    shell.user_ns["mine"] = called.append
    assert offered(shell, 'lab.summarize(mine("x"), "tok') == [] and not called


@pytest.mark.parametrize(
    "made",
    [
        lambda: lab.find_run(RECORDED),
        lambda: lab.find_run(RECORDED).results,
        lambda: lab.compare(RECORDED, "h200/memory.bf16"),
        lambda: lab.predict("lab-tiny", "24GiB"),
        lambda: simulated_gpu("24GiB"),
        lambda: lab.study("memory"),
        lambda: lab.config(RECORDED),
        lambda: lab,
    ],
)
def test_what_follows_the_dot_completes(shell: InteractiveShell, made: Any) -> None:
    """By jedi, which reads the annotations, as JupyterLab's Tab key does."""
    thing = made()
    shell.user_ns["thing"] = thing
    public = [name for name in dir(thing) if not name.startswith("_")][:1]
    for text in ("thing.", *(f"thing.{name}." for name in ("outcome", "state", "id", "folder"))):
        for one in jedi.Interpreter(text, [shell.user_ns]).complete():
            assert one.name and one.type is not None
    names = {one.name for one in jedi.Interpreter("thing.", [shell.user_ns]).complete()}
    assert {*public} <= names
