"""What a notebook's one-liners answer is of like with like: repeats of one part, runs that have the
value, all repeats of a name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from conftest import write_run

import lsai_lab as lab
from lsai_core.base.errors import UserError


def test_parts_and_studies_are_no_repeats_of_each_other(empty: Path) -> None:
    runs = lab.load("fp8").query("machine == 'h100'")
    rows = lab.summarize(runs, ["tokens_per_s"])
    rows["speed"] = lab.relative(rows, "tokens_per_s", "bf16")
    fused = rows.query("variant == 'fused'").iloc[0]
    direct = runs.query("part == 'speed'").set_index("variant")["tokens_per_s"]
    assert (fused["part"], fused["n"]) == ("speed", 1)
    assert fused["speed"] == pytest.approx(direct["fused"] / direct["bf16"])
    assert "part" in repr(rows), "shown"
    parts = lab.summarize(lab.load("largest"), "tokens_per_s").query(
        "variant == 'bf16_1' and n > 0"
    )
    assert dict(zip(parts["part"], parts["n"], strict=True)) == {"loss": 5, "long_loss": 5}
    both = lab.summarize(lab.recorded("memory", "speed"), "tokens_per_s")
    assert {"study", "part"} <= {*both} and lab.relative(both, "tokens_per_s", "bf16").max() < 10
    for by in ("variant", ["machine", "variant"]):
        assert "part" in lab.summarize(runs, "tokens_per_s", by=by)


def test_a_search_is_no_repeat_of_a_training(empty: Path) -> None:
    runs = lab.recorded("memory").query("machine == 'h100'")
    rows = lab.summarize(runs, ["tokens_per_s", "largest_batch"])
    one = rows.set_index("variant").loc["bf16"]
    train = runs.query("variant == 'bf16' and part == 'train'")
    assert one["n"] == len(train) == 3 and one["run"] in set(train["run"])
    assert one["largest_batch"] > 0, "one row tells both, for no metric is of two parts"
    one = lab.relative(rows, "tokens_per_s", "bf16")
    assert one[rows["variant"] == "bf16"].tolist() == [1] and one.notna().all()
    lost = runs.assign(tokens_per_s=runs["tokens_per_s"].where(runs["repeat"] > 0))
    one = lab.summarize(lost, ["tokens_per_s"]).set_index("variant").loc["bf16"]
    assert one["n"] == 2 and one["run"] == train.set_index("repeat")["run"][1]


def test_what_has_no_value_at_all_stays_a_row(empty: Path) -> None:
    rows = lab.summarize(lab.recorded("speed"), "tokens_per_s")
    oom = rows.query("variant == 'att_sdpa_math'").iloc[0]
    assert (oom["n"], oom["outcome"]) == (0, "oom") and pd.isna(oom["tokens_per_s"])
    none = lab.summarize(lab.recorded("largest"), "tokens_per_s").query("variant == 'offload_1'")
    assert {*none["n"]} == {0} and {*none["part"]} == {"train_all", "train_layers"}


def test_a_baseline_that_no_row_has_is_one_line(empty: Path) -> None:
    rows = lab.summarize(lab.recorded("memory"), "tokens_per_s")
    with pytest.raises(UserError, match="no row is the variant 'misspelt'; known: baseline, bf16"):
        lab.relative(rows, "tokens_per_s", "misspelt")


def test_a_comparison_of_names_tells_all_their_repeats(empty: Path) -> None:
    one, other = "h100/memory.bf16", "h100/memory.flash_attn"
    found = lab.compare(one, other)
    speed = found.repeats.set_index("what").loc["tokens_per_s"]
    runs = lab.recorded("memory").query("machine == 'h100' and part == 'train'")
    medians = runs.groupby("variant")["tokens_per_s"].median()
    assert speed["second / first"] == pytest.approx(medians["flash_attn"] / medians["bf16"])
    low = runs.query("variant == 'bf16'")["tokens_per_s"].min()
    assert speed["first_low"] == low and not speed["within_spread"]
    for words in (
        "memory.bf16, seed 0, one of 3 repeats",
        "Results over 3 and 3 repeats",
        f"({low:,.0f}–",
    ):
        assert words in repr(found)
    assert "two machines" not in repr(found)
    elsewhere = lab.compare(one, "h200/memory.bf16")
    assert "speeds of two machines do not compare: h100 and h200" in repr(elsewhere)
    for frame in (elsewhere.results, elsewhere.repeats):
        ratios = frame.set_index("what")["second / first"]
        assert ratios[["tokens_per_s", "step_ms", "mfu"]].isna().all()
        assert ratios["mem_peak_allocated_gib"] > 0
    own = write_run(empty, "memory", "bf16", results={"tokens_per_s": 2.0})
    alone = lab.compare(own, write_run(empty, "memory", "baseline", results={"tokens_per_s": 1.0}))
    assert alone.repeats.empty and "repeat" not in repr(alone)
    failed = write_run(empty, "memory", "window_256", outcome="failed", reason="no such kernel")
    assert "failed: no such kernel" in repr(lab.compare(own, failed))


def test_a_result_called_none_is_missing(empty: Path) -> None:
    runs = lab.recorded("fp8", "memory")
    found = runs[runs.fp8_recipe.notna()]
    assert {*found["study"]} == {"fp8"} and len(found)
    assert found.index.equals(runs[runs["fp8.recipe"].fillna("none") != "none"].index)


def test_the_best_is_told_of_each_machine_and_who_was_disturbed(empty: Path) -> None:
    runs = lab.recorded("memory").query("part == 'train'")
    rows = lab.summarize(runs, ["tokens_per_s", "mem_peak_allocated_gib"])
    front = lab.pareto(rows, "mem_peak_allocated_gib", "tokens_per_s")
    best = lab.equal_to_best(rows, "tokens_per_s")
    for machine in ("h100", "h200", "h200-d"):
        one = rows[rows["machine"] == machine]
        alone = lab.pareto(one, "mem_peak_allocated_gib", "tokens_per_s")
        assert front[front["machine"] == machine].equals(alone) and len(alone)
        equal = lab.equal_to_best(one, "tokens_per_s")
        assert best[best["machine"] == machine].equals(equal) and len(equal)
    far = rows[(rows["machine"] == "h200-d") & (rows["variant"] == "flash_gradcp")].iloc[0]
    assert (far["disturbed"], far["n"]) == (4, 5) and "disturbed" in repr(rows)
    assert "disturbed" not in repr(rows[rows["disturbed"] == 0]).split("The others")[0]
    assert " yes" in repr(runs) and "interquartile" not in repr(runs)
    quiet = runs[runs["disturbed"].isna()]
    assert "disturbed" not in repr(quiet), "a column of nothing is not shown"


def test_losses_are_told_by_their_difference(empty: Path) -> None:
    found = lab.compare("h100/memory.bf16", "h100/memory.flash_attn")
    loss = found.results.set_index("what").loc["validation_loss"]
    assert loss["second - first"] == pytest.approx(loss["second"] - loss["first"])
    assert pd.isna(loss["second / first"]) and "-0.00104, within" in repr(found)
    told = found.repeats.set_index("what").loc["validation_loss"]
    assert told["first_low"] <= told["second_high"] and told["within_spread"], "they overlap"


def test_a_run_beside_itself_or_a_repeat_says_so(empty: Path) -> None:
    runs = lab.recorded("memory").query("machine == 'h200-d' and variant == 'bf16'")
    same = repr(lab.compare(runs.iloc[0], runs.iloc[0]))
    assert "both are the same run" in same and "Results" not in same and "Over" not in same
    two = repr(lab.compare(runs.iloc[0], runs.iloc[2]))
    assert "two repeats of one setting" in two and "Over" not in two and "seed 2, one of 5" in two


def test_repeats_of_a_sweep_over_seeds_are_called_by_their_seeds(empty: Path) -> None:
    first = write_run(empty, "memory", "bf16", config={"seed": 0}, results={"tokens_per_s": 2.0})
    other = Path(f"{str(first)[:-12]}0123456789ab")
    shutil.copytree(first, other)
    key, text = first.name.rpartition("-")[2], (other / "summary.json").read_text()
    (other / "summary.json").write_text(text.replace(key, "0123456789ab"))
    (other / "config.json").write_text('{"seed": 7}')
    found = repr(lab.compare(first, other))
    assert "seed 0, one of 2 repeats" in found and "seed 7, one of 2 repeats" in found


def test_mfu_of_repeats_with_several_peaks_has_no_ratio(empty: Path) -> None:
    for variant, peaks in (("bf16", (1.0, 17.0)), ("baseline", (1.0, 1.01))):
        for repeat, peak in enumerate(peaks):
            results = {"mfu": 0.5 / peak, "mfu_peak_tflops": peak, "tokens_per_s": 2.0}
            folder = write_run(empty, "memory", variant, repeat=repeat, results=results)
            (folder / "config.json").write_text(json.dumps({"seed": repeat}))
    runs = lab.load("memory", mine=True).query("repeat == 0").sort_values("variant")
    found = lab.compare(runs)
    rows = found.repeats.set_index("what")
    assert pd.isna(rows.loc["mfu", "second / first"]) and rows.loc["tokens_per_s"].notna().sum() > 4
    assert "no ratio of MFU: they are shares of several peaks, 1 to 17 TFLOP/s" in repr(found)


def test_a_predicted_speed_is_that_of_all_gpus_as_a_measured_one(empty: Path) -> None:
    runs = lab.recorded("fsdp").query("variant == 'llama_4_alternating' and outcome == 'ok'")
    run = runs.iloc[0]
    assert run["world_size"] == 4
    predicted = lab.predict(run["run"], "h200")
    assert predicted.tokens_per_s == pytest.approx(run["tokens_per_s"], rel=0.1)
    assert predicted.gpus["tokens_per_s"][0] == predicted.tokens_per_s
    many = lab.predict("llama3-8b", "h200", gpus=8)
    tokens = many.config.tokens_per_step
    assert many.tokens_per_s == pytest.approx(tokens / (many.step_s or 0))


def test_the_best_is_the_least_memory_and_time_and_the_most_speed(empty: Path) -> None:
    metrics = ["mem_peak_allocated_gib", "step_ms", "validation_loss", "tokens_per_s", "mfu"]
    runs = lab.recorded("memory").query("machine == 'h100' and part == 'train'")
    rows = lab.summarize(runs, metrics)
    for metric, least in zip(metrics, (True, True, True, False, False), strict=True):
        best = rows[metric].min() if least else rows[metric].max()
        assert lab.equal_to_best(rows, metric)[metric].iloc[0] == best, metric
        other = lab.equal_to_best(rows, metric, larger=least)[metric].iloc[0]
        assert other != best, metric
    front = lab.pareto(rows, "mem_peak_allocated_gib", "step_ms")
    assert front["step_ms"].is_monotonic_decreasing and rows["step_ms"].min() in {*front["step_ms"]}
    both = rows.assign(score=1.0)
    for choose in (
        lambda: lab.equal_to_best(both, "score"),
        lambda: lab.pareto(both, "n", "score"),
    ):
        with pytest.raises(UserError, match="'score' is better is not known: add larger=True or"):
            choose()
    assert len(lab.equal_to_best(both, "score", larger=True)) == len(rows)


def test_a_speed_of_several_machines_is_no_number(empty: Path) -> None:
    runs = lab.recorded("memory").query("part == 'train'")
    rows = lab.summarize(runs, "tokens_per_s", by="variant")
    both = lab.summarize(runs, "tokens_per_s").set_index(["variant", "machine"])
    assert {*rows["machine"]} == {"h100", "h200", "h200-d"} and rows["n"].max() == 5
    assert rows.set_index(["variant", "machine"])["tokens_per_s"].equals(both["tokens_per_s"])
    one = lab.summarize(runs.query("machine == 'h100'"), "tokens_per_s", by="variant")
    assert "machine" not in one, "one machine needs no column"


def test_a_summary_is_of_runs_and_of_numbers(empty: Path) -> None:
    runs = lab.recorded("memory")
    rows = lab.summarize(runs, "tokens_per_s")
    with pytest.raises(UserError, match="these rows are summaries already: give runs"):
        lab.summarize(rows, "tokens_per_s")
    for metric in ("machine", "run"):
        with pytest.raises(UserError, match=f"{metric} is no number, so it has no summary"):
            lab.summarize(runs, metric)


def test_a_choice_is_among_figures_that_compare(empty: Path) -> None:
    runs = lab.load("memory").query("part == 'train' and machine == 'h100'")
    rows = lab.summarize(runs, ["tokens_per_s", "mem_peak_allocated_gib"])
    with pytest.raises(UserError, match="it is no cost"):
        lab.pareto(rows, "tokens_per_s", "mem_peak_allocated_gib")
    with pytest.raises(UserError, match=r"make one of them with lab.summarize"):
        lab.equal_to_best(runs, "tokens_per_s")
    with pytest.raises(UserError, match="by needs a column"):
        lab.summarize(runs, "tokens_per_s", by=[])
    studies = lab.summarize(lab.load("memory", "speed"), "tokens_per_s")
    assert {*lab.equal_to_best(studies, "tokens_per_s")["study"]} == {"memory", "speed"}
    pooled = lab.summarize(runs, "tokens_per_s", by="precision")
    assert len(pooled) == len(rows) and pooled["n"].max() == 3  # repeats alone, of one variant
    chosen = rows[["variant", "n", "disturbed", "tokens_per_s"]]
    assert "yes" not in repr(chosen)
    changed = rows.assign(tokens_per_s=rows["tokens_per_s"] / 1000)
    assert "(170,9" not in repr(changed) and "(170,9" in repr(rows)
    off = rows.assign(
        tokens_per_s_low=[rows["tokens_per_s"].iloc[0], *rows["tokens_per_s_low"][1:]]
    )
    off["tokens_per_s"] -= [1e-9, *[0.0] * (len(rows) - 1)]  # as the mean of equal repeats may be
    assert off["tokens_per_s"].iloc[0] < off["tokens_per_s_low"].iloc[0]
    assert "(447,806" in repr(off)
