"""How frames, tables and objects show themselves as the last value of a cell, in HTML and in a
terminal."""

from __future__ import annotations

import inspect
import io
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from conftest import below_cell, write_run
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_core.base.tables import Part, as_text, values
from lsai_lab.runs.difference import overrides_in
from lsai_lab.runs.frames import Frame
from lsai_lab.runs.plain import in_frame

RECORDED = "h100/memory.bf16"


def one_line(text: str) -> str:
    return " ".join(text.split())


def summary() -> pd.DataFrame:
    trained = lab.recorded("memory").query("part == 'train'")
    return lab.summarize(trained, ["tokens_per_s", "mem_peak_allocated_gib"])


def test_a_summary_shows_who_and_the_figures_in_the_width_of_a_screen(empty: Path) -> None:
    rows = summary()
    text, html = repr(rows), rows._repr_html_()
    assert max(map(len, text.splitlines())) <= 120 and "170,944" in text and "/memory/" not in text
    assert "_low</th>" not in html and "170,944" in html and "<th>run</th>" not in html
    assert "447,956 (447,806–449,552)" in text and "447,956 (447,806–449,552)" in html
    assert "8.3617 (" not in text, "repeats that are alike have no range"
    assert "others: <metric>_low" in one_line(text) and "&lt;metric&gt;_low" in html
    assert {"run", "tokens_per_s_low", "outcome"} <= {*rows}, "they are there"
    assert "/memory/" in repr(rows[["label", "run"]]), "who names a column sees it"
    failed = rows.assign(outcome="failed")
    assert one_line(text).endswith("The others: <metric>_low, <metric>_high, outcome, reason, run")
    quiet = one_line(repr(rows[rows["disturbed"] == 0]))
    assert quiet.endswith("<metric>_high, outcome, disturbed, reason, run"), "what is hidden"
    assert one_line(repr(failed)).endswith("<metric>_high, reason, run")
    assert "failed" in repr(failed) and "x" in repr(rows.assign(share="x"))


def test_frames_of_steps_and_kernels_show_rounded_figures(empty: Path) -> None:
    steps = lab.steps(RECORDED)
    assert "1,175.1" in repr(steps) or "1175.1" in repr(steps)
    assert "9.304625" not in steps._repr_html_() and "400 rows" in steps._repr_html_()
    assert max(map(len, repr(steps).splitlines())) <= 160
    for frame, wrong in ((steps, "los"), (lab.points("h100/gemm.machine.products"), "tflop")):
        with pytest.raises(KeyError, match="did you mean"):
            frame[wrong]


def test_a_choice_of_no_runs_says_so(empty: Path) -> None:
    none = lab.recorded("memory").query("seq_len == 3")
    assert repr(none) == none._repr_html_().removeprefix("<p>").removesuffix("</p>")
    assert repr(none) == "no rows: no row has seq_len 3; known: 512"
    nothing = lab.recorded("memory").drop(index=lab.recorded("memory").index)
    assert repr(nothing) == "no runs: none is there, or none is as it was asked for"


def test_mfu_above_its_peak_says_why(empty: Path) -> None:
    peak = {"mfu_peak_tflops": 0.116, "mfu_peak_source": "own measured ceiling"}
    folder = write_run(empty, "memory", "bf16", results={"mfu": 1.22, **peak})
    why = "MFU is above 100 %, for the run was faster than its peak (0.116 TFLOP/s, own measured"
    run = lab.find_run(folder)
    for text in (repr(run.results), run.results._repr_html_()):
        assert why in text
    other = write_run(empty, "memory", "baseline", results={"mfu": 0.9, **peak})
    assert f"the first: {why}" in repr(lab.compare(run, other))
    assert "above" not in repr(lab.find_run(other).results)


def test_curves_and_comparisons_take_lists_and_frames(empty: Path) -> None:
    two = [RECORDED, "h100/memory.baseline"]
    rows = lab.recorded("memory").query("part == 'train' and machine == 'h100' and repeat == 0")
    drawn = [lab.curves(two), lab.curves(rows.head(3))]
    assert [len(fig.axes[0].lines) for fig in drawn] == [2, 3]
    assert repr(lab.compare(two)) == repr(lab.compare(*two))
    assert "baseline" in repr(lab.compare(rows.head(2)))
    for wrong in (lambda: lab.compare(*two, "h200/memory.bf16"), lambda: lab.compare(RECORDED)):
        with pytest.raises(UserError, match=r"takes two runs, not [31]; lab.curves\(a, b, c\)"):
            wrong()
    with pytest.raises(UserError, match="a picture takes at most 20"):
        lab.curves(lab.recorded("memory"))


def test_a_picture_is_returned_and_shown_once(empty: Path) -> None:
    shell = InteractiveShell.instance()
    run, rows = lab.find_run(RECORDED), pd.DataFrame({"a": ["x"], "b": [1.0]})
    for fig in (
        lab.curves(RECORDED, "h200/memory.bf16"),
        run.plot(),
        lab.compare(RECORDED, "h100/memory.baseline").plot(),
        lab.bars(rows, "a", "b", axis="b"),
        lab.panels(2)[0],
    ):
        fig.savefig(io.BytesIO())
        assert plt.fignum_exists(fig.number), "open: a cell that goes on shows it below"
        with capture_output() as shown:
            shell.display_formatter.format(fig)
        assert [*shown.outputs[0].data] == ["image/svg+xml", "image/png", "text/plain"]
        assert len(shown.outputs) == 1 and not plt.fignum_exists(fig.number), "never again"
    for axes in lab.curves(RECORDED, "h200/memory.bf16").axes:
        assert axes.get_legend() is None, "a legend within the axes covers curves"


def test_a_table_in_a_terminal_has_no_entities(empty: Path) -> None:
    names = [in_frame("void at::f<4, (a|b)>"), in_frame("aten::mm")]
    shown = lab.table(pd.DataFrame({"name": names, "ms": [1.5, 2.5]}))
    assert "&#58;" in shown.data, "Markdown takes it for no mark"
    assert "| void at::f<4, (a|b)> | 1.50 |" in repr(shown) and "&" not in repr(shown)


def test_behind_a_dot_stands_what_a_reader_asks_for(empty: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    seen = lab.watch(layer, torch.optim.SGD(layer.parameters(), 0.1))
    with lab.simulated_gpu("h100") as gpu:
        pass
    run, study = lab.find_run(RECORDED), lab.study("memory")
    of_memory = {"memory", "moments", "phases", "plot"}
    for thing, there in (
        (seen, of_memory | {"kernels", "reserved_gib", "step_ms", "steps"}),
        (run, {"config", "env", "kernels", "phases", "plot", "results", "steps", "timeline"}),
        (study, {"base", "baseline", "measured", "parts", "question", "title", "variants"}),
        (gpu, of_memory | {"operators", "verdict", "verdict_on", "fits", "gpu", "remark"}),
    ):
        names = {name for name in dir(thing) if name[0] != "_"}
        assert there <= names and names.isdisjoint({"record", "shown", "found", "first"})
    assert {name for name in dir(seen) if name[0] != "_"} == of_memory | {
        "kernels",
        "reserved_gib",
        "step_ms",
        "steps",
    }


def test_the_machine_of_a_run_is_a_table(empty: Path) -> None:
    env = lab.find_run(RECORDED).env
    for text in (repr(env), env._repr_html_()):
        assert "NVIDIA H100 80GB HBM3" in text and "packages" not in text and "None" not in text
    assert env["packages"]["torch"], "it is there"
    for wrong, said in ((lambda: env.gpu, r'it is \["gpu"\]'), (lambda: env.cpus, "mean cpu")):
        with pytest.raises(AttributeError, match=said) as error:
            wrong()
        assert len(below_cell(error.value)) == 1


def test_numbers_of_a_column_have_equal_decimals(empty: Path) -> None:
    steps = lab.recorded("memory").query("variant == 'baseline' and part == 'train'")
    assert {"95.844", "95.850"} <= {*repr(steps).split()}
    assert ">95.850<" in steps._repr_html_()
    found = lab.predict("llama3-8b", "h100")
    for text in (repr(found.memory), repr(found), found._repr_html_().replace("</td>", " ")):
        assert "14.9575" in text and "0.0625" in text
    assert values([1.0, 2.5, float("nan")]) == ["1.0", "2.5", "–"]
    assert values([0.001, 0.003]) == ["0.001", "0.003"]
    assert values([0.0317, 0.00105, 4.77e-07, 0.0]) == ["0.03170", "0.00105", "4.8e-07", "0.00000"]
    rows = [("tokens_per_s", 14528.25, 9953.5), ("mfu", 0.67925, 0.5), ("steps", 30, 30)]
    told = as_text([Part("", ("what", "first", "second"), rows, by_row=True)]).splitlines()
    assert told[1:] == [
        "tokens_per_s  14,528        9,954",
        "mfu                0.67925      0.50000",
        "steps             30           30",
    ], "points below each other"


def test_points_say_what_of_them_is_not_shown(empty: Path) -> None:
    shown = one_line(repr(lab.points("h100/gemm.machine.products")))
    assert "The others: own, run, step, reason, tflops_p25, tflops_p75, repeats" in shown


def test_a_column_is_named_once_among_those_that_are_not_shown(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    for points in (lab.points("h100/attention.gqa128.kernels"), lab.points(lab.recorded("gemm"))):
        others = one_line(repr(points)).partition("The others: ")[2]
        names = re.findall(r"\w+", others)
        assert names and len(names) == len({*names}), others
    equal = pd.DataFrame({name: ["", ""] for name in ("claim", "text", "b" * 90)})
    assert "All rows" not in repr(Frame(equal))


def test_a_row_shows_what_it_says_and_names_the_column_that_was_meant(empty: Path) -> None:
    row = lab.recorded("memory").query("part == 'train'").iloc[0]
    assert "NaN" not in repr(row) and "h100" in repr(row) and len(repr(row).splitlines()) < 20
    assert "lab.find_run(row) opens it" in repr(row) and lab.find_run(row).kind == "train"
    for wrong in (lambda: row["learning_rate"], lambda: row.learning_rate):
        with pytest.raises((KeyError, AttributeError), match=r"did you mean optim\.lr") as error:
            wrong()
        assert len(below_cell(error.value)) == 1
    column = lab.recorded("memory")["tokens_per_s"]
    assert "Name: tokens_per_s" in repr(column)
    assert column.dropna().to_frame().shape[1] == 1


def test_claims_show_their_figures_in_the_width_of_a_screen(empty: Path) -> None:
    found = lab.judged("flash_speed", "hopper_fp8_gain")
    assert max(map(len, repr(found).splitlines())) <= 110 and "held" in repr(found)
    assert "sentence, value" in repr(found) and {"sentence", "runs"} <= {*found}
    told = lab.judged("same_quality", "bf16_speed").loc[:, ["claim", "measured", "bound"]]
    assert told.loc["same_quality"].tolist()[1:] == ["−0.5% ± 4.2% (n = 3)", "≤ 1%"]
    assert told.loc["bf16_speed"].tolist()[1:] == ["2.62x (2.62 to 2.63, n = 3)", "≥ 1.8x"]
    assert list(lab.claims_table("flash_speed")["name"]) == ["flash_speed"]


def test_a_run_shows_its_first_results_and_texts_stand_on_the_left(empty: Path) -> None:
    html = lab.find_run(RECORDED)._repr_html_()
    assert "449,552 tokens/s, 4.1193 val loss, 7.0941 peak GiB" in html
    comparison = lab.compare(RECORDED, "h100/memory.baseline")._repr_html_()
    assert '<th style="text-align:left">what</th><th>first</th>' in comparison


def test_a_runs_line_says_what_makes_it_itself(empty: Path) -> None:
    batch = lab.find_run("h100/memory.baseline.batch")
    assert repr(batch).endswith("ok, 305 max batch") and len(repr(batch)) < 100
    told = {"outcome": "oom", "reason": "CUDA out of memory. " * 40}
    assert "…\n  /" in repr(lab.find_run(write_run(empty, "memory", "bf16", **told)))
    changed = lab.open_run("memory", "bf16", overrides={"steps": 7, "optim.lr": 0.01})
    said = "(bf16 autocast, changed)\n  overrides steps: 7, optim.lr: 0.01\n  planned"
    assert said in repr(changed), "a line each, where one has no room for all"
    command = "lsai train --set steps=3 --set optim.lr=1e-3"
    assert overrides_in(command) == "steps=3, optim.lr=1e-3"


def test_a_whole_config_as_overrides_is_told_by_what_it_changes(empty: Path) -> None:
    asked = {"model.n_layers": 1, "seq_len": 64}
    config = lab.predict("memory.flash_gradcp", overrides=asked, profile="cpu").config
    changed = lab.open_run("memory", "baseline", overrides=config, profile="cpu")
    for words in ("model.n_layers: 1", "seq_len: 64", "precision: bf16_autocast", "changed"):
        assert words in repr(changed)
    assert "vocab_size" not in changed.command and len(repr(changed)) < 500
    assert changed.config.model_dump() == config.model_dump()
    assert "changed" not in repr(lab.open_run("memory", "baseline"))
    assert "baseline (fp32), changed" in changed._repr_html_()


def test_a_signature_is_short_enough_to_be_read(empty: Path) -> None:
    for function in (lab.curves, lab.compare, lab.find_run, lab.predict, lab.steps):
        assert "collections.abc" not in str(inspect.signature(function)), function


def test_points_show_what_they_are_and_their_rates(empty: Path) -> None:
    text = repr(lab.points(lab.load("attention")))
    heads = text.splitlines()[0].split()
    assert {"machine", "variant", "backend", "length", "training_tflops"} <= {*heads}
    assert max(map(len, text.splitlines())) <= 160 and " points; " in text
    assert "training_tflops_p25" not in heads and "own" not in heads


def test_a_prediction_says_what_a_step_is_and_keeps() -> None:
    for overrides, said in (
        ({}, "a step is 1 micro-batch of 1 sequence, with bf16 weights and bf16 states"),
        (
            {
                "batch_size": 2,
                "grad_accum": 4,
                "precision": "bf16_autocast",
                "optim.states": "8bit",
            },
            "a step is 4 micro-batches of 2 sequences, with fp32 weights and 8-bit states",
        ),
    ):
        assert said in one_line(repr(lab.predict("lab-tiny", 24, overrides=overrides)))


def test_a_prediction_and_a_plan_of_a_study_say_whose_settings_they_are(empty: Path) -> None:
    for gpu, profile in (("H100", "h100"), (24, "gpu"), ("H200", "h200")):
        found = lab.predict("memory.bf16", gpu)
        assert f"settings of the study under profile {profile}" in repr(found)
        assert found.config == lab.predict("memory.bf16", gpu, profile=profile).config
    assert "profile" not in repr(lab.predict("lab-tiny", 24))
    planned = lab.plan("memory.bf16", "H100", overrides={"model.n_layers": 1, "seq_len": 64})
    assert "settings of the study under profile h100" in planned._repr_html_()


def test_the_frames_inside_of_objects_show_five_digits_and_name_what_was_meant(
    empty: Path,
) -> None:
    found = lab.predict("llama3-8b", "h100")
    run, both = lab.find_run(RECORDED), lab.compare(RECORDED, "h200/memory.bf16")
    for frame, text in (
        (found.memory, "14.9575\n"),
        (found.phases, "60.504\n"),
        (found.gpus, "tokens_per_s"),
        (run.phases, "7.0941"),
        (run.steps, "1,175.1"),
        (both.results, "449,552"),
    ):
        assert text in repr(frame), repr(frame)
    assert {"gpu", "memory_gib", "step_s", "tokens_per_s"} <= {*found.gpus}
    assert found.tokens_per_s == found.gpus["tokens_per_s"][0] and 0 < (found.step_s or 0) < 10
    assert "Peak of 60.504 GiB" in repr(found), "as many digits as its parts have"


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda: lab.predict("lab-tiny").memory["weigths"], "no 'weigths'; did you mean weights"),
        (lambda: lab.predict("lab-tiny").phases.forwards, "did you mean forward"),
        (lambda: lab.find_run(RECORDED).phases["peak"], "no column 'peak'; did you mean peak_gib"),
        (lambda: lab.recorded("memory").dropna(subset=["los"]), "did you mean loss"),
        (lambda: lab.recorded("memory").loc[0, "tokens_per_sec"], "did you mean tokens_per_s?"),
        (lambda: lab.recorded("memory").at[0, "tokens_per_sec"], "did you mean tokens_per_s?"),
        (lambda: lab.recorded("memory").loc[0, ["label", "los"]], "no column 'los'; did you mean"),
        (lambda: lab.recorded("memory").loc[1234], "no row 1234; the rows are 0 to 98"),
        (lambda: lab.judged("flash_speed").loc["flash_sped"], "did you mean flash_speed?"),
        (lambda: lab.predict("lab-tiny").step_s, "step_s is one number a GPU: see .gpus"),
    ],
)
def test_a_wrong_name_in_an_inner_frame_is_one_line(empty: Path, wrong: Any, said: str) -> None:
    with pytest.raises((KeyError, AttributeError, UserError)) as error:
        wrong()
    assert said in str(error.value) and len(below_cell(error.value)) == 1


def test_an_empty_frame_says_so(empty: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    seen = lab.watch(layer, torch.optim.SGD(layer.parameters(), 0.1))
    assert repr(seen.memory) == "no values"
    assert repr(seen.kernels) == "no rows; columns: name, class, ms, calls"
    assert "no rows; columns: name" in seen.kernels._repr_html_()
    assert repr(lab.compare(RECORDED, RECORDED).settings).startswith("no rows; columns: what")


def test_a_run_in_one_line_says_its_loss_and_who_disturbed_it(empty: Path) -> None:
    assert "ok, 449,552 tokens/s, 4.1193 val loss, 7.0941 peak GiB" in repr(lab.find_run(RECORDED))
    results = {"tokens_per_s": 5.0, "disturbed": "2 other runs"}
    run = lab.find_run(write_run(empty, "memory", "bf16", results=results))
    assert "5 tokens/s, disturbed: 2 other runs" in repr(run)
    assert "2 other runs" in run._repr_html_().partition("<details>")[0]


def test_curves_are_smoothed_over_whole_steps(empty: Path) -> None:
    for smooth in (-3, 0, 1.5):
        with pytest.raises(UserError, match=f"smooth is a whole number .*, not {smooth}"):
            lab.curves(RECORDED, smooth=smooth)


def test_loc_reads_and_writes_as_in_pandas(empty: Path) -> None:
    runs = lab.recorded("memory")
    assert runs.loc[runs["variant"] == "bf16", ["label"]].shape[1] == 1
    assert list(runs.loc(axis=1)[["label"]]) == ["label"]
    runs.loc[0, "label"] = "mine"
    runs.at[1, "label"] = "mine, too"
    assert list(runs["label"][:2]) == ["mine", "mine, too"]


def test_a_prediction_draws_its_step() -> None:
    found = lab.predict("lab-tiny", "h100", overrides={"batch_size": 64})
    tensors = found.peak_gib - found.memory["libraries"]
    assert f"peak {tensors:.3g} GiB" in repr(found.plot()) and "<svg" in found.plot().data
