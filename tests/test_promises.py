"""What the project promises, each by the command that keeps it, at the smallest size on a CPU: the
course's jobs, a loss that sharding does not change, and the techniques that save memory on Polish
text. How each works is tested where it is made."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from conftest import CHECKOUT, Project
from speakleash_server import SpeakleashServer

from lsai_lab.runs.records import Run
from lsai_lab.runs.session import Session

EIGHT = ["baseline", "bf16", "flash_attn", "window_512", "window_256"]
EIGHT += ["grad_checkpoint", "bf16_gradcp", "flash_gradcp"]
QUICK = ("--profile", "quick")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The shipped studies, with runs and data of its own."""
    root = tmp_path_factory.mktemp("promises")
    shutil.copytree(CHECKOUT / "params", root / "params")
    for name in ("notebooks", "reports", "envs"):
        (root / name).symlink_to(CHECKOUT / name)
    return Project(root, {"LSAI_PROFILE": "quick"})


def ran(project: Project, *words: str) -> dict[str, Run]:
    """The good runs by name, after `lsai <words>`, which must have ended well."""
    code, out, err = project.lsai(*words)
    assert code == 0, out + err
    return {name: run for name, run in project.found().items() if run.summary.outcome == "ok"}


def asked(project: Project, *words: str) -> str:
    """What `lsai <words>` as a process prints; it must end well."""
    process = project.start(*words)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out


@pytest.mark.slow
def test_the_course_trains_baseline_fused_and_fp8_logs_steps_and_draws_its_plots(
    project: Project,
) -> None:
    runs = ran(project, "study", "course", *QUICK)
    assert {"baseline", "flash_attn", "fp8"} <= set(runs)
    for name in ("baseline", "flash_attn", "fp8"):
        lines = (runs[name].folder / "metrics.jsonl").read_text().splitlines()
        steps = [row for row in map(json.loads, lines) if "loss" in row]
        assert len(steps) == 16 and all(row["step_ms"] > 0 for row in steps), name
        results = runs[name].summary.results
        assert {"tokens_per_s", "mem_peak_allocated_gib", "train_s", "train_loss"} <= {*results}
    out = asked(project, "plot", "course", "--out", "plots")
    drawn = {path.stem for path in (project.root / "plots").glob("*.svg")}
    assert {"speed", "memory", "time", "loss"} <= drawn and "mfu" in out


def test_the_course_is_jobs_of_a_cluster_in_its_container(project: Project) -> None:
    words = ("submit", "course", "--cluster", "alps", "--per-variant", "--account", "a")
    code, out, err = project.lsai(*words, "--dry-run")
    assert code == 0, err
    assert "#SBATCH --array=0-2\n" in out and "(baseline flash_attn fp8)" in out
    assert "--environment=" in out and "  study course\n" in out
    assert "--dependency" in out and "report" in out  # the report follows


def test_fsdp_and_fused_attention_are_a_grid_over_models_of_two_kinds(project: Project) -> None:
    project.write_yaml("params/profiles/whole.yaml", {"profile": "whole", "description": "all"})
    study = Session("whole", project.root).study("fsdp")
    grid = {
        f"{strategy}_{factor}_{attention}_{processes}"
        for strategy in ("all", "layers")
        for factor in range(1, 15)
        for attention in ("eager", "auto")
        for processes in (1, 2, 4, 8)
    }
    assert set(study.measured("grid")) == grid


@pytest.mark.slow
def test_fsdp_attention_scaling_and_seed_are_flags(project: Project) -> None:
    flags = {
        "model.scaling_factor": 2,
        "model.scaling_strategy": "n_layers",
        "attention.backend": "eager",
        "seed": 3,
        "steps": 4,
        "log_every": 1,
    }
    settings = [word for name, value in flags.items() for word in ("--set", f"{name}={value}")]
    runs = ran(
        project, "train", "--study", "fsdp", "--technique", "all_1_auto_2", *settings, *QUICK
    )
    run = runs["all_1_auto_2.grid"]
    assert run.config["model"]["n_layers"] == 16 and run.config["seed"] == 3
    assert run.summary.results["attention_kernel"] == "eager"
    assert run.summary.results["world_size"] == 2 and run.config["parallel"]["fsdp"] == 2


@pytest.mark.slow
def test_every_way_of_sharing_attention_is_timed_traced_and_compared_with_float64(
    project: Project,
) -> None:
    run = ran(project, "study", "context", "--set", "budget_s=200", *QUICK)["gqa64_2.methods"]
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["outcome"] == "ok"]
    timed = [row for row in rows if row["measure"] == "time"]
    methods = {"zigzag", "lightseq", "ulysses", "ring", "usp"}  # torch's own needs GPUs
    assert {row["method"] for row in timed} == {"one", *methods}
    for row in timed:
        assert row["training_ms"] > row["forward_ms"] > 0 and row["training_tflops"] > 0
        assert (row["sent_training_mib"] > 0) == (row["method"] != "one")
    traced = {row["method"] for row in rows if row["measure"] == "trace"}
    errors = [row for row in rows if row["measure"] == "error" and row["method"] in methods]
    assert methods <= traced and {row["method"] for row in errors} == methods
    for row in errors:
        assert all(row[name] < 1e-5 for name in ("out", "dq", "dk", "dv")), row


@pytest.mark.slow
@pytest.mark.parametrize("part", ["load_all", "load_layers"])  # training steps: test_model_search
def test_the_largest_model_is_searched_by_really_making_it(project: Project, part: str) -> None:
    [run] = [
        run
        for run in ran(project, "study", "largest", "--parts", part, *QUICK).values()
        if (run.summary.id.study, run.summary.id.part) == ("largest", part)
    ]
    results = run.summary.results
    tries = {row["size"]: row["outcome"] for row in results["tries"]}
    assert results["largest_size"] >= 1 and results["parameters"] > 0
    assert tries[results["largest_size"]] == "ok" and not results["search_capped"]
    assert "oom" in tries.values()


@pytest.mark.slow
def test_sharding_does_not_change_the_loss(project: Project) -> None:
    runs = ran(project, "study", "ablation", *QUICK)
    one, two = (runs[name].summary.results["validation_loss"] for name in ("one", "fsdp2"))
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
def test_eight_techniques_are_compared_with_what_to_take(project: Project) -> None:
    runs = ran(project, "study", "memory", "--parts", "train", *QUICK)
    phases = ("forward_peak", "backward_peak", "peak_allocated")
    for name in EIGHT:
        results = runs[name].summary.results
        assert all(results[f"mem_{phase}_gib"] > 0 for phase in phases), name
        assert results["tokens_per_s"] > 0 and results["train_s"] > 0
        assert results["validation_perplexity"] > 1
    batch = ran(project, "find-batch", "--technique", "grad_checkpoint", *QUICK)
    assert batch["grad_checkpoint.batch"].summary.results["largest_batch"] >= 1
    code, out, err = project.lsai("compare", "memory", *QUICK)
    assert code == 0, err
    for column in ("tokens/s", "peak GiB", "val loss", "max batch"):
        assert column in out
    for words in ("Best against baseline", "  memory  ", "  speed   ", "  both    ", "When to use"):
        assert words in out
    assert "val ppl" in project.lsai("compare", "memory", "--full", *QUICK)[1]


@pytest.mark.slow
def test_polish_text_of_speakleash_is_prepared_and_trained_on(project: Project) -> None:
    texts = [{"text": f"Zażółć gęślą jaźń numer {n}, potem {n * n}. " * 20} for n in range(200)]
    with SpeakleashServer() as server:
        server.add("polski", texts)
        project.environment["LSAI_SPEAKLEASH_URL"] = server.url
        said = project.lsai("data", "list", "--speakleash")[1]
        assert "speakleash:polski" in said
        code, out, err = project.lsai("data", "prepare", "speakleash:polski", "--vocab-size", "400")
        assert code == 0 and re.search(r"^train +\d", out, re.M), err
        sizes = ("--set", "data.vocab_size=400", "--set", "model.vocab_size=400")
        words = ("--dataset", "speakleash:polski", *sizes, "--set", "data.max_mb=null")
        said = ("--technique", "flash_attn", *words, "--set", "steps=4", "--name", "polish")
        ran(project, "train", *said, *QUICK)
    [row] = json.loads(
        project.lsai("runs", "list", "--where", "data.source=speakleash:polski", "--json")[1]
    )
    assert row["outcome"] == "ok" and row["name"] == "polish"
