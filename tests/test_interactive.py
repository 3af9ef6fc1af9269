"""What a person sees and types in a notebook beside the runs themselves: tables instead of dumps,
one line for a name that is nearly right."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import below_cell, write_run
from IPython.lib.pretty import pretty

import lsai_core
import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_core.base.tables import Part, as_html, as_text
from lsai_lab.predictions import plan_asked as plan_asked_module
from lsai_lab.predictions.plan_asked import shown_tries

RECORDED = "h100/memory.bf16"
GEMM = "h100/gemm.machine.products"
FRAME = pd.DataFrame({"variant": ["bf16"], "tokens_per_s": [1.0]})
MODEL = torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters())


def test_runs_studies_configs_and_predictions_show_tables(empty: Path) -> None:
    run = lab.find_run(RECORDED)
    assert repr(run).startswith("h100/memory.bf16, seed 0, one of 3 repeats, ok, ")
    assert "<details>" in run._repr_html_() and "precision" in run._repr_html_()
    config = lab.config(RECORDED)
    assert re.search(r"(?m)^precision +bf16_autocast$", pretty(config))
    assert "<table>" in config._repr_html_() and "defaults" in config._repr_html_()
    study = lab.study("memory")
    assert "Memory-efficient training" in pretty(study) and len(pretty(study)) < 4000
    assert "flash attention" in study._repr_html_()
    results = run.results
    first, _, rest = results._repr_html_().partition("<details>")
    assert first.count("<tr>") == 11 and "tokens_per_s" in first and "mfu_peak_source" in rest
    ten, blank, last = repr(results).rpartition("\n\n")
    assert ten.count("\n") == 10 and blank
    assert last == f"not shown: {len(results) - 11} more; list(results) has all names"
    both = lab.compare(RECORDED, "h200/memory.bf16")
    assert "tokens_per_s" in repr(both) and "<details>" in both._repr_html_()


def test_nothing_that_is_shown_is_markup() -> None:
    part = Part("<b>", ("<i>",), [("<script>", 1.0)], note="<u>")
    text = as_html([part])
    assert not re.search(r"<(script|i|u)>", text) and "<b>&lt;b&gt;</b>" in text
    assert as_text([Part("", (), [("a\nb", None)])]) == "a b  –"


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda: lab.lod, "no attribute 'lod'; did you mean load"),
        (lambda: lab.load("memry"), "there is no study 'memry'; did you mean memory"),
        (lambda: lab.find_run("h100/memory.bf61"), "did you mean h100/memory.bf16"),
        (
            lambda: lab.steps("memory.bf16"),
            "means several runs; choose one by its machine:\n  h100/",
        ),
        (lambda: lab.kernels(RECORDED), "memory.bf16 was not traced"),
        (lambda: lab.find_run(RECORDED).results["tokens_per_sec"], "did you mean tokens_per_s"),
        (lambda: lab.curves(RECORDED, y="los"), "steps have no column 'los'; did you mean loss"),
        (lambda: lab.curves(), "lab.curves wants runs"),
        (lambda: lab.compare(RECORDED, 3), "a run is a row of lab.load"),
        (lambda: lab.predict("llama3-8", "24GiB"), "run 'llama3-8'; did you mean llama3-8b"),
        (lambda: lab.predict("memroy.bf16"), "did you mean memory.bf16"),
        (lambda: lab.predict("memory.bf61"), "no variant 'bf61'; did you mean bf16"),
        (
            lambda: lab.predict("meta-llama/Llama-3-8B"),
            'the folder of its config.json: hf="folder"',
        ),
        (lambda: lab.predict("lab", 24, gpus=0), "gpus is a whole number of at least 1, not 0"),
        (lambda: lab.predict("lab", "8xA100"), "say gpu='A100' gpus=8"),
        (lambda: lab.predict("lab", variant="x"), "in one way: what, or variant"),
        (lambda: lab.predict("lab", profile="quick"), "profile belongs to a study; add study"),
        (lambda: lab.predict(GEMM), "is of kind gemm: it trained nothing"),
        (lambda: lab.config(GEMM), "is of kind gemm: it trained nothing"),
        (lambda: lab.generate(GEMM, "x"), "is of kind gemm: it trained no model"),
        (lambda: lab.curves(GEMM), "is of kind gemm, no training; lab.points(run) has what it"),
        (lambda: lab.steps(lab.recorded("gemm").iloc[0]), "is of kind gemm, no training; lab.poi"),
        (lambda: lab.kernels(lab.recorded("gemm").iloc[0]), "was not traced, so no kernels"),
        (lambda: lab.steps(GEMM), "gemm.machine.products is of kind gemm, no training"),
        (lambda: lab.load(3), "a name, or a list of names, is wanted here, not 3"),
        (lambda: lab.load([3]), "there is no study 3"),
        (lambda: lab.summarize("memory", "tokens_per_s"), "a frame is wanted here, such as lab."),
        (lambda: lab.relative({}, "tokens_per_s", "x"), "a frame is wanted here, such as lab."),
        (lambda: lab.table("rows"), "a frame is wanted here, such as lab.load(...) gives, not 'ro"),
        (lambda: lab.table(pd.Series([1])), "a frame is wanted here"),
        (lambda: lab.bars(FRAME, "variant", "tokens", axis="x"), "no column 'tokens'; did you"),
        (lambda: lab.lines(FRAME, "x", "tokens_per_s", "variant", axis=("", "")), "no column 'x'"),
        (lambda: lab.points("gemm"), "'gemm' is a study, and a run is wanted: a row of lab.load('"),
        (lambda: lab.parameters("scal"), "no file params/scal.yaml; did you mean scale?"),
        (lambda: lab.find_run(RECORDED).step, "Run has no attribute 'step'; did you mean steps"),
        (lambda: lab.find_run(RECORDED).xyz, "no attribute 'xyz'; known: annotate, command,"),
        (lambda: lab.find_run(RECORDED).outcome.x, "'str' object has no attribute 'x'"),
        (lambda: lab.study("memory").variants["bf16"].x, "no attribute 'x'"),
        (lambda: lsai_core.TrainConfig(lr=1e-3), "model: Field required; unknown key 'lr'"),
        (lambda: lab.load(mine=True, min=3), "lab.load takes no 'min'; did you mean mine?"),
        (lambda: lab.find_run(), "lab.find_run(which): missing a required argument: 'which'"),
        (lambda: lab.find_run(RECORDED, 1), "lab.find_run(which): too many positional arguments"),
        (lambda: lab.open_run("memory", "bf16", seq_len=3), "stands in overrides={'seq_len': 3}"),
        (lambda: lab.find_run(RECORDED).execute(agin=True), "execute takes no 'agin'; did you"),
        (lambda: lab.compare(RECORDED, RECORDED).plot(z=1), "Comparison.plot takes no 'z'"),
        (
            lambda: lab.plan("lab", "h100", tokens="many"),
            "tokens is a whole number of at least 1",
        ),
        (
            lambda: lab.plan("lab", "h100", tokens=-3),
            "tokens is a whole number of at least 1",
        ),
        (lambda: lab.plan("lab", "h100", tokens=64, budget="x"), "budget is a number above 0, not"),
        (lambda: lab.open_run("memory", "bf16", overrides={"optim.l": 1}), "mean 'optim.lr'?"),
        (lambda: lab.run, "no attribute 'run'; lab.open_run opens a run"),
        (lambda: lab.sweep("memory", "bf16", ["seq_len"]), "a sweep is over settings with values"),
        (lambda: lab.watch(OPTIMIZER, MODEL), "a SGD is no model"),
        (lambda: lab.watch(MODEL, MODEL), "a Linear is none"),
        (lambda: lab.watch(torch.nn.Linear(2, 2), OPTIMIZER), "none of the model's parameters"),
        (lambda: lab.plan("lab", "h100"), "for example tokens="),
        (lambda: lab.plan("lab", "h100", tokens=77), "tokens=77 cannot be cut into"),
        (lambda: lab.plan(RECORDED, "h100", tokens=64), "a plan is made for a preset"),
        (
            lambda: lab.predict("lab", "24GiB", overrides={"seq_length": 1}),
            "unknown key 'seq_length'",
        ),
        (lambda: lab.predict("lab", "24GiB", largest="bach"), "largest is batch or length"),
        (lambda: lab.sweep("memory", "bf16", {}), "a sweep wants settings with values"),
        (lambda: lab.load_model(RECORDED), "exported no model; run it with"),
        (
            lambda: lab.find_run(RECORDED).execute(),
            "in a size for this machine: lab.open_run('memory', 'bf16', p",
        ),
        (
            lambda: lab.find_run(RECORDED).annotate(nam="x"),
            "annotate takes no 'nam'; did you mean name",
        ),
        (lambda: lab.find_run(RECORDED).annotate(note="x"), "it keeps what it was recorded with"),
    ],
)
def test_what_is_nearly_right_is_one_line_with_the_nearest_name(
    empty: Path, wrong: Any, said: str
) -> None:
    with pytest.raises((UserError, AttributeError, TypeError)) as error:
        wrong()
    assert said in str(error.value)


def test_a_misspelt_column_or_variant_is_no_missing_value(empty: Path) -> None:
    runs = lab.load(["memory"]).query("part == 'train' and machine == 'h100'")
    with pytest.raises(UserError, match="'tokens_per_sec'; did you mean tokens_per_s"):
        lab.summarize(runs, ["tokens_per_sec"])
    rows = lab.summarize(runs, ["tokens_per_s", "largest_batch"])
    assert rows["largest_batch"].isna().all(), "a result that no run has is missing"
    with pytest.raises(UserError, match="the variant 'baselin'; did you mean baseline"):
        lab.relative(rows, "tokens_per_s", "baselin")
    with pytest.raises(UserError, match="no column 'token_per_s'"):
        lab.relative(rows, "token_per_s", "baseline")
    with pytest.raises(UserError, match="3 rows of h100 are the variant baseline; choose one"):
        lab.relative(runs, "tokens_per_s", "baseline")
    with pytest.raises(UserError, match="no column 'memory_peak'"):
        lab.pareto(rows, "memory_peak", "tokens_per_s")
    with pytest.raises(UserError, match="no row is the variant 'no_such'; known: baseline, bf16"):
        lab.relative(rows, "tokens_per_s", "no_such")
    assert lab.relative(rows, "tokens_per_s", None).isna().all()
    assert list(lab.kernels(runs.iloc[0].to_dict())) == ["name", "class", "ms", "calls"]


def test_a_frame_of_runs_shows_what_people_look_for_first(empty: Path) -> None:
    folder = write_run(empty, "memory", "bf16")
    (folder / "run.json").write_text('{"name": "first", "command": "x --profile quick"}')
    runs = lab.load("memory")
    assert len(runs.columns) > 200 and max(map(len, repr(runs).splitlines())) <= 160
    assert " columns are shown" in repr(runs) and "optim.lr" in runs._repr_html_()
    shown = lab.table(runs).data.splitlines()[0]
    assert shown.count("|") < 16 and "tokens_per_s" in shown and "env" not in shown
    mine = lab.load("memory", mine=True)
    assert "first" in repr(mine) and "NaN" not in repr(mine), "columns that say nothing are not"
    assert list(runs[["variant", "step_ms"]]) == ["variant", "step_ms"]
    for wrong in (
        lambda: runs["tokens_per_sec"],
        lambda: runs[["variant", "tokens_per_sec"]],
        lambda: runs.query("tokens_per_sec > 3"),
        lambda: runs.query("repeat == 0").sort_values("tokens_per_sec"),
        lambda: runs.groupby("tokens_per_sec"),
    ):
        with pytest.raises(KeyError) as error:
            wrong()
        assert "no column 'tokens_per_sec'; did you mean tokens_per_s" in str(error.value)
        assert len(below_cell(error.value)) == 1
    with pytest.raises(KeyError, match=r"dots in `backticks`: `optim\."):
        runs.query("optim.lr > 0")
    with pytest.raises(AttributeError, match="'tokens_per_sec'; did you mean tokens_per_s"):
        runs.tokens_per_sec  # noqa: B018
    assert list(lab.steps(RECORDED))[:3] == ["step", "loss", "step_ms"]
    assert "tokens/s, " in repr(lab.find_run(RECORDED))
    with pytest.raises(UserError, match="simulated_gpu"):
        lab.predict(torch.nn.Linear(2, 2), "h100")


def test_a_prediction_refused_names_the_preset(empty: Path) -> None:
    with pytest.raises(UserError, match=r"^preset llama3-8b: seq_len: Input"):
        lab.predict("llama3-8b", overrides={"seq_len": "x"})


def test_memory_by_cause_and_peaks_by_phase_have_one_name_each(empty: Path) -> None:
    with lab.simulated_gpu(24) as gpu:
        model = torch.nn.Linear(512, 512, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(8, 512, device="cuda")).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    layer = torch.nn.Linear(512, 512)
    with lab.watch(layer, optimizer := torch.optim.AdamW(layer.parameters())) as seen:
        for _ in range(3):
            layer(torch.randn(8, 512)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    predicted = lab.predict("lab-tiny", 24)
    for one in (gpu, seen, predicted):
        assert one.memory["weights"] > 0 and isinstance(one.memory, pd.Series)
    for one in (gpu, seen):
        assert one.memory["weights"] == pytest.approx(4 * (512 * 512 + 512) / 2**30, rel=0.01)
    for mapped in (gpu.phases, predicted.phases):
        assert list(mapped.index) == ["forward", "backward", "optimizer"]
    for frame in (seen.phases, lab.find_run(RECORDED).phases):
        assert list(frame["phase"])[:3] == ["forward", "backward", "optimizer"]
    for one in (gpu, seen):
        assert {"phase", "operator"} <= {*one.moments} and "peak" in repr(one.plot())
    assert "surely fit" in repr(gpu) and "24.0 GiB" in repr(gpu)
    with pytest.raises(AttributeError, match=r"by phase run\.phases, by cause run\.timeline"):
        _ = lab.find_run(RECORDED).memory


def test_a_loop_that_is_watched_says_why_it_has_no_kernels() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with lab.watch(model, optimizer) as seen:
        for step in range(6):
            if step == 3:
                assert "none yet: steps seen: 3; memory takes 2, kernels" in repr(seen)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert "Operators of a step, on the CPU\nname " in repr(seen)
    assert "none yet" not in repr(seen) and "addmm" in repr(seen)


def test_a_profile_stands_for_all_that_it_sets(empty: Path) -> None:
    for number, (profile, steps) in enumerate([("quick", 30), ("cpu", 20), ("cpu", 9)]):
        folder = write_run(empty, "memory", "bf16", repeat=number, config={"steps": steps})
        (folder / "run.json").write_text(json.dumps({"command": f"x --profile {profile}"}))
        (folder / "env.json").write_text("{}")  # a machine without a GPU
    differs = lab.load("memory", mine=True).sort_values("repeat")["differs"]
    assert [*differs] == ["profile=quick", "", "steps=9"]


def test_the_laboratory_under_its_own_name() -> None:
    from lsai_lab import lab as same

    assert same is lab and not {"Any", "TYPE_CHECKING"} & {*dir(lsai_core)}


def test_a_table_is_one_that_a_reader_can_take_in() -> None:
    large = pd.DataFrame({f"c{n}": range(300) for n in range(50)})
    shown = lab.table(large, link="c49")
    assert "first 200 of 300 rows and the first 40 of 50 columns" in shown.data
    assert (
        shown.data.count("\n") == 203 and "c39 | \n" not in shown.data and "c40" not in shown.data
    )
    assert shown.metadata["lsai"]["csv"].count("\n") == 301 and "c49" in str(shown.metadata)
    assert "Shown are" not in lab.table(large.iloc[:200, :40]).data


def test_a_config_offers_its_fields_without_pydantics_own(empty: Path) -> None:
    offered = dir(lab.config(RECORDED))
    assert {"batch_size", "tokens_per_step", "optim"} <= {*offered}
    assert not [name for name in offered if name.startswith(("model_", "_"))]


def test_own_runs_of_other_settings_are_counted(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(empty, "memory", "bf16")
    rows = lab.load("memory")
    assert not rows["own"].any()
    assert "own runs not shown: 1 ended with other settings" in "".join(capsys.readouterr())
    assert len(lab.load("memory", mine=True)) == 1
    assert "not shown" not in "".join(capsys.readouterr())
    assert len(lab.load("speed")) and "not shown" not in "".join(capsys.readouterr())


def test_curves_of_runs_of_two_machines_lie_in_one_picture(empty: Path) -> None:
    runs = (RECORDED, "h200/memory.bf16")
    fig = lab.curves(*runs, y=["loss", "mfu"], x="elapsed_s", smooth=5)
    loss, mfu = fig.axes
    assert [line.get_label() for line in loss.lines] == [
        "bf16 autocast (h100)",
        "bf16 autocast (h200)",
    ]
    assert loss.get_xlabel() == "seconds" and loss.get_ylabel() == "loss (nats per token)"
    steps = lab.steps(RECORDED)
    smooth = steps["loss"].rolling(5, min_periods=1).mean()
    assert list(loss.lines[0].get_ydata()) == pytest.approx(list(smooth))
    assert len(mfu.lines) == 2


def test_what_a_run_is_called_is_checked_before_anything_is_written(empty: Path) -> None:
    folder = write_run(empty, "memory", "bf16")
    (folder / "run.json").write_text("{}")
    run = lab.find_run(folder)
    before = (folder / "run.json").read_bytes()
    for wrong in ({"name": 5}, {"tags": ["a", 1]}, {"tags": 5}, {"note": ["x"]}):
        with pytest.raises(
            (UserError, TypeError), match=r"is called: (name|tags|note)|takes a text as"
        ):
            run.annotate(**wrong)
        with pytest.raises(
            (UserError, TypeError), match=r"is called: (name|tags|note)|takes a text as"
        ):
            lab.open_run("memory", "bf16", **wrong)
    for taken in (RECORDED, "a,b"):
        with pytest.raises(UserError, match="cannot be the name of a run"):
            lab.open_run("memory", "bf16", name=taken)
    assert (folder / "run.json").read_bytes() == before
    assert [*empty.glob("*/*/run.json")] == [folder / "run.json"]
    run.annotate(tags="x", name="called")
    assert run.tags == ["x"] and lab.find_run("called").outcome == "ok"
    (folder / "run.json").write_text(json.dumps({"name": RECORDED}))  # as older versions allowed
    assert "recorded" in lab.find_run(RECORDED).folder.parts


def test_a_comparison_says_whose_speed_was_disturbed(empty: Path) -> None:
    def own(variant: str, **results: Any) -> Path:
        return write_run(empty, "memory", variant, results=results)

    other, quiet = own("baseline", tokens_per_s=5.0), own("window_256", tokens_per_s=4.0)
    beside = lab.compare(own("bf16", tokens_per_s=9.0, disturbed="2 other runs"), other)
    assert "speeds compare poorly: the first was disturbed" in repr(beside)
    assert "poorly" not in repr(lab.compare(other, quiet))


def test_mfu_of_two_peaks_has_no_ratio(empty: Path) -> None:
    def own(variant: str, peak: float) -> Path:
        results = {"mfu": 0.5 / peak, "mfu_peak_tflops": peak}
        return write_run(empty, "memory", variant, results=results)

    same = lab.compare(own("bf16", 1.0), own("flash_attn", 1.02))
    assert "no ratio" not in repr(same) and "0.98x" in repr(same)
    other = lab.compare(own("bf16_compile", 1.0), own("window_256", 16.0))
    assert "no ratio of MFU: they are shares of several peaks, 1 to 16 TFLOP/s" in repr(other)
    assert "0.0625x" not in repr(other)


def test_a_prediction_finds_what_its_word_means(empty: Path, tmp_path: Path) -> None:
    """A preset, a study's variant, a run, also one only planned, and a Hugging Face config."""
    settings = {"model": {"preset": "lab-tiny"}, "batch_size": 3, "seq_len": 64}
    folder = write_run(empty, "memory", "bf16", config=settings)
    (folder / "run.json").write_text('{"name": "first"}')
    assert lab.predict("first", 24).batch_size == 3
    assert lab.predict("memory.bf16", 24).batch_size != 3
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "vocab_size": 512, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | shape | heads))
    for path in (tmp_path, tmp_path / "config.json"):
        assert lab.predict(str(path), 24).config.model.d_model == 64
    given, named = (lab.predict("lab-tiny", gpu).answer for gpu in (24, "24GiB"))
    assert given == named


def test_one_name_is_a_list_of_one(empty: Path) -> None:
    part = "train"
    runs = lab.load("memory").query("part == @part")
    assert set(runs["part"]) == {part}
    many = lab.summarize(runs, ["tokens_per_s"], by=["gpu"])
    assert lab.summarize(runs, "tokens_per_s", by="gpu").equals(many)
    assert {*lab.recorded(["memory", "gemm"])["study"]} == {"memory", "gemm"}
    row = lab.load("gemm").query("machine == 'h100' and variant == 'machine'").head(1)
    assert lab.points(GEMM, keep="gpu").equals(lab.points(row, keep=["gpu"]))


def test_a_frame_of_runs_begins_with_what_people_look_for(empty: Path) -> None:
    write_run(empty, "memory", "bf16", results={"step_ms": 2.0})
    who = ["machine", "study", "variant", "label", "name", "part", "repeat", "outcome"]
    found = ["tokens_per_s", "step_ms", "mem_peak_allocated_gib", "validation_loss"]
    found += ["largest_batch", "disturbed", "run"]
    for frame in (lab.load("memory"), lab.recorded("memory")):
        assert [*frame][:15] == who + found and frame.columns.is_unique
    who.insert(5, "differs")
    assert [*lab.load("memory", mine=True)][:11] == [*who, "step_ms", "run"]


def test_rows_of_runs_stand_in_the_order_of_the_study_and_show_each_kinds_result(
    empty: Path,
) -> None:
    runs = lab.load("memory")
    assert runs.iloc[0][["variant", "part"]].tolist() == ["baseline", "train"]
    assert runs.head(2)["tokens_per_s"].notna().all()
    for study, part, result in (
        ("memory", "batch", "largest_batch"),
        ("machine", "ceilings", "matmul_bf16_tflops"),
        ("gemm", "products", "points_ok"),
        ("largest", "train_layers", "largest_size"),
    ):
        rows = lab.recorded(study).query(f"part == {part!r}").head(3)
        assert result in repr(rows) and result in repr(rows.iloc[0]) and rows[result].notna().all()


def test_what_a_study_has_is_shown_as_a_table_and_a_config_names_its_defaults() -> None:
    study = lab.study("memory")
    variants = repr(study.variants).splitlines()
    assert variants[0].split() == ["name", "label", "note", "config"] and "Variant(" not in variants
    assert any(line.startswith("bf16 ") and "precision=bf16_autocast" in line for line in variants)
    assert "batch_search" in study.parts._repr_html_() and "Part(" not in repr(study.parts)
    config = lab.config(RECORDED)
    said = pretty(config)
    assert config.seq_len == 512 and "at their defaults: " in said and "seq_len=512" in said
    assert "seed=0" in config._repr_html_()


def test_bars_have_no_exponents_and_frames_no_none(empty: Path) -> None:
    rows = pd.DataFrame({"label": ["a", "b"], "speed": [170944.0, 447956.0]})
    axes = lab.bars(rows, "label", "speed", axis="tokens/s").axes[0]
    assert [each.get_text() for each in axes.texts] == ["171,000", "448,000"]
    assert "400,000" in [axes.xaxis.get_major_formatter()(at) for at in axes.get_xticks()]
    gpus = lab.predict("lab-tiny", "T4").gpus
    assert "None" not in repr(gpus) and "None" not in gpus._repr_html_()
    settings = lab.compare("h100/memory.bf16", "h100/memory.grad_checkpoint").settings
    assert "None" not in repr(settings) and "NaN" not in repr(settings)


def test_one_of_a_kind_is_singular(empty: Path) -> None:
    one, other = (
        write_run(empty, "memory", name, config={"batch_size": size})
        for name, size in (("bf16", 1), ("baseline", 2))
    )
    assert "1 setting differs" in repr(lab.compare(one, other))


def test_a_summary_of_nothing_has_its_columns(empty: Path) -> None:
    rows = lab.summarize(lab.recorded("memory").query("part == 'no such'"), ["tokens_per_s"])
    some = lab.summarize(lab.recorded("memory"), ["tokens_per_s"])
    assert rows.empty and [*rows] == [*some]
    assert lab.relative(rows, "tokens_per_s", "baseline").empty
    assert lab.pareto(rows, "n", "tokens_per_s").empty


def test_runs_that_share_a_word_are_told_apart(empty: Path) -> None:
    first = write_run(empty, "memory", "bf16", config={"optim": {"lr": 0.1}, "seed": 1})
    key, other = first.name.rpartition("-")[2], "0123456789ab"
    second = first.with_name(f"bf16-{other}")
    shutil.copytree(first, second)
    (first / "run.json").write_text('{"name": "mine"}')
    (second / "config.json").write_text('{"optim": {"lr": 0.2}, "seed": 2}')
    summary = (second / "summary.json").read_text()
    (second / "summary.json").write_text(summary.replace(key, other))
    with pytest.raises(UserError) as error:
        lab.find_run("memory.bf16")
    told = f"by its key:\n  {key} (mine, optim.lr=0.1)\n  {other} (optim.lr=0.2)"
    assert str(error.value).endswith(told)
    for number in range(10):
        third = first.with_name(f"bf16-{number:012}")
        shutil.copytree(second, third)
        (third / "summary.json").write_text(summary.replace(key, f"{number:012}"))
    with pytest.raises(UserError) as error:
        lab.find_run("memory.bf16")
    said = str(error.value)
    assert f"{key} (mine, optim.lr=0.1)" in said and f"\n  {0:012}" in said and "4 more" in said


def test_losses_of_two_texts_are_drawn_with_a_word(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def own(variant: str, text: str) -> Path:
        steps = [
            {"step": n, "loss": 1.0, "step_ms": 1.0, "tokens_in_step": 2, "tokens_per_s": 2.0}
            for n in range(3)
        ]
        return write_run(empty, "memory", variant, results={"dataset": text}, metrics=steps)

    one, same, other = own("bf16", "mine-1"), own("baseline", "mine-1"), own("flash_attn", "two-2")
    lab.curves(one, same)
    lab.compare(one, other).plot("tokens_per_s")
    assert "do not compare" not in capsys.readouterr().out
    lab.compare(one, other).plot()
    said = "losses of several texts do not compare, for each is per token of its own: "
    assert f"{said}bf16 of mine-1; flash_attn of two-2" in capsys.readouterr().out


def test_pictures_say_in_words_what_they_show(empty: Path) -> None:
    said = repr(lab.timeline(RECORDED))
    assert re.search(r"^peak [\d.]+ GiB in the backward: activations [\d.]+", said)
    assert "Measured: forward" in said and "<" not in said


def test_a_loop_that_is_watched_says_nothing_on_stderr() -> None:
    source = """
import torch, lsai_lab as lab
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with lab.watch(model, optimizer) as seen:
    for _ in range(8):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step(), optimizer.zero_grad()
print(len(seen.kernels) > 0, len(repr(seen.plot())) < 400)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True True\n", "")


def test_the_tries_of_a_plan_are_shown_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_asked_module, "_QUIET_S", 0)
    with shown_tries(shown := io.StringIO(), hidden=False) as on_next:
        for left in (9, 5, 4):
            time.sleep(0.15)
            on_next("micro-batch 1, " + "keep all activations, " * 9, left)
    lines = shown.getvalue().split("\r")
    assert re.search(r"3 of about 7 settings, 00:00 so far, 00:0\d left: micro-batch 1", str(lines))
    assert max(map(len, lines)) <= 101 and "micro-batch 1, keep all activations, …" in str(lines)
