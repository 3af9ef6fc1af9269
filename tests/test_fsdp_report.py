"""The chapter on sharding over records with known numbers: comparisons, efficiencies, ends of memory, and what was not run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import CHECKOUT

from lsai_lab.report.fsdp import ablation, chapter, grid, largest, scaling, titan
from lsai_lab.report.fsdp.results import Sharding, load_sharding
from lsai_lab.runs.records import Summary
from lsai_lab.runs.session import Session

GPU = {"machine": "h200", "gpu": "NVIDIA H200", "gpu_count": 8, "cpu": "a CPU", "cpu_cores": 64, "torch": "2.11.0"}


def write(root: Path, outcome_of: Any) -> None:
    """A record of every run that the profile h200 plans; `outcome_of(run)` gives outcome, results and metrics."""
    session = Session("h200")
    session.dataset_id = lambda config: "none"  # type: ignore[method-assign]  # prepare no text for this
    for study in ("ablation", "fsdp", "largest"):
        for run in session.plan(study):
            outcome, results, metrics = outcome_of(run)
            folder = root / study / run.folder.name
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(run.config.model_dump(mode="json")))
            (folder / "env.json").write_text(json.dumps(GPU))
            if metrics:
                (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
            reason = None if outcome == "ok" else f"the reason of {outcome}"
            day = 2 if run.id.variant in ("weak_2", "all_4_auto_1") else 1
            started = f"2025-01-0{day}T00:00:00+00:00"
            Summary(run.id, run.kind, outcome, reason, started, 9.0, "lsai study", {}, results).write(folder)


def made_up(run: Any) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    if run.id.study == "largest":
        return searched(run)
    parallel, model = run.config.parallel, run.config.model
    processes = parallel.world_size
    if run.id.variant == "fsdp2":
        return "unavailable", {}, []
    size = model.n_layers * model.d_model**2 * 16
    fused = run.kind == "peer" or run.config.attention.backend != "eager"
    peak = 16 * size / processes / 2**30 + (2 if fused else 0.2 * model.n_layers * model.d_model / 256)
    if run.id.study == "fsdp" and peak > 140:
        return "oom", {}, []
    rate = 5000 * processes * (1 if processes == 1 else 0.95) * (1.5 if fused else 1)
    rate *= 0.8 if run.kind == "peer" else 1
    results = {
        "tokens_per_s": rate, "tokens_per_s_per_gpu": rate / processes, "step_ms": 1000.0, "mfu": 0.4 + 0.01 * processes, "tflops": 300.0,
        "mem_peak_allocated_gib": peak, "parameters": size, "train_loss": 3.0, "validation_loss": 3.1, "kernel_communication_ms": 200.0,
    }  # fmt: skip
    results |= {"exposed_communication_ms": 50.0} if processes > 1 else {}
    if run.kind == "train":
        results["gpu_busy_share"] = 0.3 if model.n_layers < 16 else 0.9
        apart = 300.0 if run.id.variant in ("all_1_eager_2", "weak_2") else 20.0
        results |= {
            "step_ms_p25": 1000 - apart,
            "step_ms_p75": 1000 + apart,
            "host_forward_ms": 300.0,
            "host_backward_ms": 500.0,
            "host_optimizer_ms": 200.0,
        }
    steps = 300 if run.id.study == "ablation" else 2
    off = 0.0 if processes == 1 else 1e-6 * processes
    seed = getattr(run.config, "seed", 0)  # another seed is another curve
    if run.id.variant == "bf16_fsdp8" and seed == 0:
        return "failed", {}, []
    if run.id.variant == "bf16_fsdp1":
        off = 5e-6
    if run.id.variant.startswith("fp8_"):
        off, results["validation_loss"] = 3 * off, 3.1 * (1.002 + 0.002 * seed)
    return "ok", results, [{"step": n, "loss": (9 + seed) / (1 + n / 50) + off * n} for n in range(steps)]


def searched(run: Any) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    processes = run.config.train.parallel.world_size
    if run.id.variant == "plain_8":
        return "timeout", {}, []
    size = 10 * processes
    tries = [
        {"size": size, "outcome": "ok", "note": None},
        {"size": size + 1, "outcome": "oom", "note": "CUDA out of memory"},
    ]
    if run.id.variant == "bf16_8":
        tries.append({"size": size + 2, "outcome": "failed", "note": "an illegal access"})
    results = {
        "largest_size": size, "estimated_size": size - 1, "parameters": size * 10**9, "n_layers": size, "d_model": 4096, "weights_share": 0.98,
        "search_resolution": 0.0, "search_s": 60.0, "search_capped": False, "search_out_of_time": False, "search_limit_gib": 140.0, "states_gib": None if run.id.variant == "bf16_2" else 1.0,
        "search_limit_kind": "GPU memory" + " and 109 GiB of the host's" * run.config.train.parallel.cpu_offload, "tries": tries,
    }  # fmt: skip
    return "ok", results, []


@pytest.fixture(scope="module")
def sharding(tmp_path_factory: pytest.TempPathFactory) -> Sharding:
    root = tmp_path_factory.mktemp("sharding") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LSAI_ROOT", str(CHECKOUT))
        patch.setenv("LSAI_RUNS", str(root))
        write(root, made_up)
        return next(found for found in load_sharding([], "h200") if found.machine.startswith("h200 ("))


def test_losses_are_compared_seed_by_seed_with_what_computes_alike(sharding: Sharding) -> None:
    found = ablation.compared(sharding).set_index("variant")
    assert dict(found["reference"]) == {
        "fsdp4": "one", "fsdp8": "one", "bf16_fsdp1": "bf16_one", "bf16_fsdp4": "bf16_fsdp1", "bf16_fsdp8": "bf16_fsdp1",
        "fp8_fsdp4": "bf16_fsdp4", "fp8_fsdp8": "bf16_fsdp8",
    }  # fmt: skip
    assert found["seeds"]["fsdp8"] == [0, 1, 2] and found["seeds"]["fp8_fsdp8"] == found["seeds"]["bf16_fsdp8"] == [
        1,
        2,
    ]
    assert found["largest"]["fsdp8"] == pytest.approx(8e-6 * 299) and found["at_step"]["fsdp8"] == 299
    assert found["mean"]["fsdp4"] == pytest.approx(4e-6 * 149.5)
    assert found["speed"]["fsdp4"] == found["speed"]["bf16_fsdp4"] == pytest.approx(4 * 0.95)
    text = "\n".join(ablation.sentences(sharding))
    assert (
        "steps of each of 3 seeds 6 sharded runs differ from one process in the training loss by at most 2.4e-03"
        in text
    )
    assert "in the first 10 steps by at most 7.2e-05. The largest exceeds 0.001" in text
    # fp8 and what FSDP computes otherwise than autocast are no cases of "the same run".
    assert found["largest"]["fp8_fsdp4"] == pytest.approx(2 * 4e-6 * 299)
    assert "differs from that of FSDP over 4, bf16 by +0.40%, the mean over 3 seeds (+0.20% to +0.60%)" in text
    assert "differs from that of 1 process, bf16 by +0.00%" in text
    short = ablation.in_short(sharding)
    assert [line.split(":*")[0] for line in short] == ["*Loss, fp32", "*Loss, bf16_autocast"]
    assert "6 sharded runs differ" in short[0] and "5 sharded runs differ" in short[1]
    assert "in 300 steps, 7.2e-05 in the first 10 (" in short[0]


def test_without_one_that_computes_alike_losses_are_held_against_one_process(sharding: Sharding) -> None:
    runs = [run for run in sharding.runs if run.summary.id.variant not in ("bf16_fsdp1", "one")]
    found = ablation.compared(replace(sharding, runs=runs)).set_index("variant")
    assert found["reference"]["bf16_fsdp4"] == "bf16_one" and "fsdp4" not in found.index


def test_efficiency_is_against_one_process(sharding: Sharding) -> None:
    weak = sharding.rows("fsdp", "weak")
    assert list(weak["processes"]) == [1, 2, 4, 8, 2, 4, 8]
    assert list(scaling.efficiency(weak, on_gpu=True)) == pytest.approx([1] + 6 * [0.95])
    assert scaling.efficiency(weak[weak["processes"] > 1], on_gpu=True).isna().all()
    text = "\n".join(scaling.sentences(sharding))
    assert "run at 95.0% of 8 times the speed of one" in text and "25% of that, 5.0% of the step, is not hidden" in text


def test_torchtitan_stands_beside_the_same_work(sharding: Sharding, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = titan.compared(sharding)
    assert len(pairs) == 12 and "kept" not in " ".join(pairs["variant_ours"])
    wanted = [
        f"titan_{variant.removeprefix('llama_').replace('alternating', 'selective')}"
        for variant in pairs["variant_ours"]
    ]
    assert list(pairs["variant_titan"]) == wanted
    assert list(pairs["ratio"]) == pytest.approx([1.25] * 12)
    bf16, fp8 = titan.sentences(sharding)
    assert "bf16, 8 GPUs" in bf16 and "1.25 times" in bf16 and "in 100% of its memory" in bf16 and "fp8, 8 GPUs" in fp8
    tables: list[Any] = []
    monkeypatch.setattr(titan, "show_table", lambda table, *_, **__: tables.append(table))
    monkeypatch.setattr(titan, "show_text", lambda text: None)
    titan.show_titan(sharding)
    assert list(tables[0]["GPUs"]) == [2, 2, 2, 4, 4, 4, 8, 8, 8, 2, 4, 8] and "ended" not in tables[0]
    assert set(tables[0]["checkpointing"]) == {"none", "selective", "alternating / selective"}


def test_the_grid_says_where_memory_ends_and_what_both_techniques_do(sharding: Sharding) -> None:
    rows = sharding.rows("fsdp", "grid")
    assert set(rows["factor"]) == {1, 4, 8, 11, 14} and (rows["outcome"] == "oom").any()
    text = "\n".join(grid.sentences(sharding))
    assert "fused on 1 up to 8 and not at 11" in text
    assert "fused attention makes training 1.50 times as fast on one process and 1.50 times on 8" in text
    assert "keeps 95% of the speed per GPU" in text
    assert "A GPU works for 90% of a step with eager and 90% with fused attention alone, 90% and 90% sharded." in text
    # Steps of 1,000 ms over 8 blocks; only models of one factor keep the GPU waiting.
    waiting = (grid.good(rows)["factor"] == 1).sum()
    assert (
        f"*Waiting for the host:* in {waiting} of {len(grid.good(rows))} runs the GPU works for less than 80%" in text
    )
    assert "costs 125.0 ms on 1 and 125.0 ms on 2" in text
    assert f"*Unsteady:* in 1 of {len(grid.good(rows))} runs" in text and "(700 to 1,300 ms)" in text
    assert "30% goes to the forward pass, 50% to the backward pass and 20% to clipping and the optimizer" in text


def test_runs_of_another_day_are_named(sharding: Sharding) -> None:
    for section, variant in ((grid, "all_4_auto_1"), (scaling, "weak_2")):
        (line,) = [line for line in section.sentences(sharding) if line.startswith("*Not one sitting:*")]
        assert f"2025-01-02 00:00 ({variant})" in line
    assert sharding.sittings("large") == ""


def test_the_largest_models_are_compared_by_technique_and_odd_ends_are_said(sharding: Sharding) -> None:
    rows = largest.searched(sharding)
    # On each number of GPUs: weights loaded, and seven techniques trained, all by two ways to grow.
    assert len(rows) == 16 * rows["processes"].nunique() and set(rows["does"]) == {"loads", "trains"}
    text = "\n".join(largest.sentences(rows, on_gpu=True))
    assert "8 processes train a model 8.00 times as large as one does" in text
    assert "fill 98.0% of the memory" in text and "[10 B](#run-" in text
    assert "a try ended otherwise than by memory (failed: an illegal access)" in text
    assert "*fp32 states, by layers:* 4 processes" in text  # on 8 it timed out
    assert "*Checkpointing on 4:* the largest model is 1.00 to 1.00 times as large with it. What fills" in text
    trained = (rows["does"] == "trains") & (rows["outcome"] == "ok")
    assert f"*First steps:* of {trained.sum()} training steps 2 were a model's very first" in text
    assert "*CPU offload, checkpointing:* the search was bounded by GPU memory and 109 GiB of the host's." in text


def test_the_chapter_shows_everything_once_and_names_what_was_not_run(
    sharding: Sharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, str]] = []
    for module in (ablation, grid, largest, scaling, chapter):
        for name in ("show_table", "show_figure", "show_text"):
            if hasattr(module, name):
                monkeypatch.setattr(
                    module,
                    name,
                    lambda first, label="text", caption="", **_: shown.append((label, caption or str(first))),
                )
    chapter.show_machines([sharding])
    chapter.show_conclusions([sharding])
    for show in (chapter.show_ablation, chapter.show_grid, chapter.show_scaling, chapter.show_largest):
        show(sharding)
    chapter.show_missing([sharding])
    labels = [label for label, _ in shown if label != "text"]
    assert len(set(labels)) == len(labels)
    assert {label.split("-")[0] for label in labels} == {"fig", "tbl"} and len(labels) >= 12
    text = "\n".join(caption for _, caption in shown)
    assert "**unavailable**, the reason of unavailable: [fsdp2](#run-" in text and "**timeout**" in text
    assert "nan" not in text.replace("attenan", "")


def test_parts_that_nobody_has_run_are_named(sharding: Sharding, capsys: pytest.CaptureFixture[str]) -> None:
    chapter.show_missing([sharding])
    assert "no record" not in capsys.readouterr().out
    some = [
        run for run in sharding.runs if run.summary.id.study == "ablation" or run.summary.id.part in ("weak", "titan")
    ]
    chapter.show_missing([replace(sharding, runs=some)])
    shown = capsys.readouterr().out
    missing = "no record** yet of grid and strong and large of study fsdp (`lsai study fsdp --parts grid,strong,large`)"
    assert missing in shown and "; study largest (`lsai study largest`)." in shown


def test_without_records_the_chapter_says_how_to_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "project"
    root.mkdir()
    for name in ("params", "notebooks"):
        (root / name).symlink_to(CHECKOUT / name)
    monkeypatch.setenv("LSAI_ROOT", str(root))
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path / "runs"))
    assert chapter.load([], "cpu") == []
    assert "make run STUDY=largest" in capsys.readouterr().out
