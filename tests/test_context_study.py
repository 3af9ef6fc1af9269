"""The study on distributed attention: what a run of two processes keeps, what ends its processes, and the chapter's numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
import torch
from conftest import CHECKOUT

from lsai_core.context.methods import Setting
from lsai_core.context.peer import torch_sent_bytes
from lsai_core.errors import UserError
from lsai_core.files import read_jsonl, write_json
from lsai_core.profiling.predict import find_gpu
from lsai_core.strict import validated
from lsai_lab.benches.attention.config import Shape
from lsai_lab.benches.context.config import ALONE, ContextBenchConfig
from lsai_lab.benches.context.rows import outlook, row_of
from lsai_lab.benches.context.timing import merged
from lsai_lab.report.context import analysis, chapter, figures, longest, training
from lsai_lab.report.context.data import Shared, load_shared
from lsai_lab.report.headlines import HEADLINES
from lsai_lab.runs.driver import run_one
from lsai_lab.runs.execute import write_plan
from lsai_lab.runs.kinds import Context, get_kind
from lsai_lab.runs.notebook import execute_notebook
from lsai_lab.runs.records import RunId, Summary, find_runs
from lsai_lab.runs.session import Session

CPU = torch.device("cpu")
TINY = {"heads": 4, "kv_heads": 2, "head_dim": 16, "processes": 2, "dtype": "float32", "device": "cpu", "point_ms": 1.0}
SWEEPS = [
    {"lengths": [64, 128], "methods": ["one", "zigzag"]},
    {"measure": "trace", "lengths": [128], "methods": ["ring"]},
    {"measure": "error", "lengths": [64]},
    {"lengths": [66], "methods": ["zigzag"]},
]


def config(**changes: Any) -> ContextBenchConfig:
    return validated(ContextBenchConfig, {**TINY, "sweeps": SWEEPS, **changes}, "test")


def launched(folder: Path, settings: ContextBenchConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results and points of a run whose processes are started from here."""
    run = RunId("context", "tiny", "methods", 0, "abc")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", settings.model_dump(mode="json"))
    write_json(folder / "run.json", {"id": run.__dict__, "kind": "context", "label": "", "command": "", "code": {}})
    results = get_kind("context").function()(settings, Context(folder, folder, folder))
    return results, read_jsonl(folder / "metrics.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "heads=4 is not divisible by kv_heads=3"),
        ({"methods": ["zigzak"]}, "unknown context-parallel method 'zigzak'; did you mean zigzag?"),
        ({"sweeps": [{"lengths": [64], "methods": ["tow"]}]}, "unknown context-parallel method 'tow'"),
        ({"sweeps": [{"lengths": [64, 32]}]}, "must ascend"),
        ({"sweeps": [{"measure": "speed", "lengths": [64]}]}, "measure"),
        ({"processes": 0}, "processes"),
        ({"processes": 1, "sweeps": [{"lengths": [64]}]}, "one process measures `one` and `one_torch` only"),
        ({"lenghts": [64]}, "unknown key 'lenghts'"),
    ],
)
def test_bad_configs_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        config(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of two processes through papermill, as the driver makes it."""
    root = tmp_path_factory.mktemp("context") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LSAI_ROOT", str(CHECKOUT))
        patch.setenv("LSAI_RUNS", str(root))
        sweeps = {"base": {"sweeps": SWEEPS, "device": "cpu", "dtype": "float32", "point_ms": 1.0}, "sweeps": {}}
        session = Session("quick")
        session.profile.studies["context"] = sweeps | {
            "sweeps": {"gqa64": {"config": {"heads": 4, "kv_heads": 2, "head_dim": 16}}}
        }
        (plan,) = session.plan("context", only=["gqa64_2"])
        summary = run_one(plan, title="test", root=CHECKOUT, data_root=root, command="test")
        assert summary.outcome == "ok", summary.reason
        return plan.folder


@pytest.mark.slow
def test_two_processes_measure_every_point(run_folder: Path) -> None:
    rows = read_jsonl(run_folder / "metrics.jsonl")
    by_place = {(row["measure"], row["method"], row["length"]): row for row in rows}
    assert len(by_place) == len(rows) == 4 + 1 + 6 + 1
    shared, alone = by_place["time", "zigzag", 128], by_place["time", "one", 128]
    assert shared["outcome"] == alone["outcome"] == "ok" and shared["repeats"] >= 3
    flops = 3.5 * Shape(1, 128, 4, 2, 16, True).forward_flops
    assert shared["training_tflops"] == pytest.approx(flops / 2 / shared["training_ms"] / 1e9, rel=1e-3)
    assert alone["training_tflops"] == pytest.approx(flops / alone["training_ms"] / 1e9, rel=1e-3)
    assert shared["training_ms"] > shared["forward_ms"] and len(shared["rank_training_ms"]) == 2
    # Of two ranks in zigzag each sends its earlier chunk's or all its keys and values, fp32; see the plan for which.
    tiles = Setting("zigzag", 128).plan(2).steps[1]
    needed = {task.k_owner: task.k_range[1] - task.k_range[0] for task in tiles}
    sent = max(needed.values()) * 2 * 2 * 16 * 4 / 2**20
    assert shared["sent_forward_mib"] == pytest.approx(sent, abs=1e-3) and alone["sent_training_mib"] == 0
    trace = by_place["trace", "ring", 128]
    assert trace["busy_balance"] > 1 and trace["plan_imbalance"] > 2.5 and trace["exposed_share"] is None
    for parts in trace["timeline"]:
        assert parts["compute"] and all(a <= b for a, b in parts["compute"]) and parts["communication"] == []
    errors = [row for row in rows if row["measure"] == "error"]
    for row in errors[:-1]:
        assert 0 < max(row["out"], row["dq"], row["dk"], row["dv"]) < 2e-6, row
    assert errors[-1]["method"] == "torch" and errors[-1]["outcome"] == "unavailable"
    refused = by_place["time", "zigzag", 66]
    assert refused["outcome"] == "unsupported" and "cannot be cut into 4 equal parts" in refused["reason"]
    summary = Summary.read(run_folder)
    assert summary.results["points"] == 5 and summary.results["points_ok"] == 4 and summary.results["world_size"] == 2
    text = (run_folder / "notebook.ipynb").read_text()
    assert "tbl-times" in text and "tbl-traces" in text and "cannot be cut" in text


@pytest.mark.slow
def test_points_that_end_their_processes_are_kept_and_the_rest_goes_on(tmp_path: Path) -> None:
    """No point can end within a microsecond: each method ends its processes once and is not tried again.

    The points are long enough for the thread that watches the time to have its turn, also on a busy machine.
    """
    sweeps = [
        {"lengths": [2048, 4096], "methods": ["zigzag"]},
        {"measure": "error", "lengths": [2048], "methods": ["zigzag", "ring"]},
    ]
    results, rows = launched(tmp_path / "run", config(sweeps=sweeps, point_timeout_s=1e-6))
    assert [(row["method"], row["outcome"]) for row in rows] == [
        ("zigzag", "timeout"), ("zigzag", "skipped"), ("zigzag", "skipped"), ("ring", "timeout"),
    ]  # fmt: skip
    assert "no end within 1e-06 s" in rows[0]["reason"] and rows[1]["reason"] == "its processes ended at length 2048"
    assert results["points_ok"] == 0


def test_a_second_start_measures_what_is_left(tmp_path: Path) -> None:
    sweeps = [{"lengths": [64], "methods": ["one", "one_torch"]}, {"lengths": [128], "methods": ["one"]}]
    settings = config(processes=1, sweeps=sweeps)
    _, rows = launched(tmp_path, settings)
    assert [row["outcome"] for row in rows] == ["ok", "unavailable", "ok"]
    path = tmp_path / "metrics.jsonl"
    kept = path.read_text().splitlines(keepends=True)
    path.write_text("".join(kept[:2]) + kept[2][:20])  # torn by a kill
    results, again = launched(tmp_path, settings)
    assert again[:2] == rows[:2] and again[2]["outcome"] == "ok" and again[2] != rows[2]
    assert results["one_128_tflops"] == again[2]["training_tflops"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    sweeps = [
        {"lengths": [2048], "methods": ["one", "one_torch", "zigzag", "lightseq", "ulysses", "torch"]},
        {"measure": "trace", "lengths": [2048], "methods": ["ring", "zigzag", "torch"]},
        {"measure": "error", "lengths": [512]},
    ]
    settings = config(device="cuda", dtype="bfloat16", head_dim=64, sweeps=sweeps)
    _, rows = launched(tmp_path / "run", settings)
    assert {row["outcome"] for row in rows} == {"ok"}
    for row in rows:
        if row["measure"] == "error":
            assert max(row[name] / row[f"bound_{name}"] for name in ("out", "dq", "dk", "dv")) < 2, row
        if row["measure"] == "trace":
            assert 0 < row["exposed_share"] < 1 and row["sent_gb_per_s"] > 0 and min(row["rank_compute_ms"]) > 0
            assert all(parts["compute"] and parts["communication"] for parts in row["timeline"])
        if row["measure"] == "time":
            assert row["memory_gib"] > 0


def known(method: str, length: int, **values: Any) -> dict[str, Any]:
    place = {"measure": "time", "method": method, "length": length, "outcome": "ok", "took_s": 1.0}
    return {**place, "training_ms": 100.0, "memory_gib": 4.0, **values}


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [
        ([], 1024, (None, None)),
        ([known("zigzag", 1024)], 2048, (400.0, None)),
        ([known("lightseq", 1024)], 2048, (None, None)),
        ([known("zigzag", 1024)], 8192, (6400.0, ("skipped", "about 6.4 s a step expected, the limit is 4 s"))),
        ([known("zigzag", 1024, training_ms=0.1)], 131072, (None, ("skipped", "about 512 GiB expected, the GPU has 140 GiB"))),
        ([known("zigzag", 1024, outcome="oom")], 2048, (None, ("oom", "out of memory already at length 1024"))),
        ([known("zigzag", 4096, outcome="oom")], 2048, (None, None)),
        ([known("zigzag", 4096, outcome="timeout")], 2048, (None, ("skipped", "its processes ended at length 4096"))),
        ([known("ring", 64, took_s=101.0)], 2048, (None, ("skipped", "the 100 s of this run were over"))),
    ],
)  # fmt: skip
def test_earlier_points_tell_what_is_not_worth_trying(rows: list[Any], length: int, expected: Any) -> None:
    assert outlook(config(budget_s=100), rows, "time", "zigzag", length, 140.0) == expected


def test_a_step_takes_as_long_as_its_slowest_process() -> None:
    base = {
        "kernel": "fa4",
        "plan_imbalance": 1.0,
        "memory_gib": 3.0,
        "sent_forward_mib": 1.0,
        "sent_training_mib": 4.0,
        "first_call_s": 1.0,
    }
    answers = [
        {**base, "forward_ms": [1.0, 3.0, 1.0], "training_ms": [5.0, 9.0, 5.0]},
        {
            **base,
            "forward_ms": [2.0, 1.0, 4.0],
            "training_ms": [6.0, 5.0, 7.0],
            "memory_gib": 5.0,
            "sent_training_mib": 2.0,
        },
    ]
    row = row_of(config(), "time", "zigzag", 128, answers, torch.device("cuda"))
    assert (row["forward_ms"], row["training_ms"], row["rank_training_ms"]) == (3.0, 7.0, [5.0, 6.0])
    assert (row["memory_gib"], row["rank_memory_gib"], row["rank_sent_training_mib"]) == (5.0, [3.0, 5.0], [4.0, 2.0])
    traces = [
        {
            "step_ms": 10.0,
            "compute_ms": c,
            "communication_ms": 4.0,
            "exposed_ms": e,
            "sent_training_mib": 1000.0,
            "timeline": {},
            **base,
        }
        for c, e in ((8.0, 2.0), (5.0, 1.0))
    ]
    row = row_of(config(), "trace", "zigzag", 128, [{**t, "sent_training_mib": 1000.0} for t in traces], CPU)
    assert (row["busy_balance"], row["exposed_share"]) == (1.6, 0.2)
    assert row["sent_gb_per_s"] == pytest.approx(2000 * 2**20 / 8e-3 / 1e9, rel=1e-4)


def test_intervals_are_merged() -> None:
    assert merged([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.05, 2.5)], 0.1) == [(0.0, 2.5), (3.0, 4.0)]
    assert merged([], 1.0) == []


def test_what_torch_sends_follows_its_source() -> None:
    k = torch.empty(1, 8, 2, 4, dtype=torch.bfloat16)
    values = 2 * k.numel()
    assert torch_sent_bytes(k, k, 4, backward=False) == 3 * values * 2
    assert torch_sent_bytes(k, k, 4, backward=True) == 3 * values * 2 + 4 * values * 4
    assert torch_sent_bytes(k, k, 1, backward=True) == 0


GPU = {"machine": "h200", "gpu": "NVIDIA H200", "gpu_count": 8, "cpu": "a CPU", "cpu_cores": 64, "torch": "2.11.0"}
SPEED = {"zigzag": 0.9, "lightseq": 0.85, "ulysses": 0.88, "usp": 0.87, "ring": 0.5, "torch": 0.72}


def made_up(settings: ContextBenchConfig) -> list[dict[str, Any]]:
    """Points of made-up GPUs: alone 600 TFLOP/s (cuDNN 500); shared less by 200 us a step and a share of the method."""
    rows = []
    for measure, method, length in settings.points():
        processes = settings.processes
        place: dict[str, Any] = {
            "step": len(rows),
            "measure": measure,
            "method": method,
            "length": length,
            "batch": 1,
            "took_s": 1.0,
        }
        kernel, rate = ("sdpa_cudnn", 500.0) if "torch" in method else ("fa4", 600.0)
        row = {
            **place,
            "outcome": "ok",
            "reason": None,
            "kernel": kernel,
            "plan_imbalance": 3.0 if method == "ring" else 1.0,
        }
        work = 3.5 * settings.work(method, length)
        ms = work / rate / 1e9 / SPEED.get(method, 1.0) + (0.0 if method in ALONE else 0.2)
        if method == "ulysses" and length <= 8192:
            ms *= 0.5
        ranks = 1 if method in ALONE else processes
        if ms > 1e3 * settings.max_call_s:
            row = {**place, "outcome": "skipped", "reason": "about 9 s a step expected, the limit is 7 s"}
        elif measure == "time":
            row |= {
                "repeats": 3,
                "first_call_s": 1.0,
                "rank_training_ms": [ms] * ranks,
                "memory_gib": length / 2**14 / ranks,
            }
            for name, part in (("forward", ms / 3.5), ("training", ms)):
                row |= {f"{name}_ms": part, f"{name}_ms_p25": part, f"{name}_ms_p75": part}
                row |= {
                    f"{name}_tflops": work / (1 if name == "training" else 3.5) / part / 1e9,
                    f"sent_{name}_mib": 64.0,
                }
        elif measure == "trace":
            share = {"ring": 0.4, "torch": 0.2}.get(method, 0.05)
            row |= {
                "step_ms": ms,
                "busy_balance": 2.5 if method == "ring" else 1.02,
                "exposed_share": share,
                "sent_gb_per_s": 150.0 + length % 7,
            }
            times = {
                "compute": [[0.0, 0.3 * ms], [0.35 * ms, (1 - share) * ms]],
                "communication": [[0.0, 0.1 * ms], [(1 - share) * ms, ms]],
            }
            row |= {"rank_compute_ms": [ms] * ranks, "timeline": [times] * ranks}
        else:
            row |= {f"{prefix}{name}": 3e-3 for prefix in ("", "bound_") for name in ("out", "dq", "dk", "dv")}
            row |= {"dk": 9e-3} if method == "usp" else {}
        rows.append(row)
    return rows


def write(root: Path, points: Callable[[ContextBenchConfig], list[dict[str, Any]]] = made_up) -> None:
    """A record of every run that the profile h200 plans."""
    for plan in Session("h200").plan("context"):
        folder = root / "context" / plan.folder.name
        folder.mkdir(parents=True)
        write_plan(type(plan)(**{**plan.__dict__, "folder": folder}), "lsai study")
        write_json(folder / "env.json", GPU)
        assert isinstance(plan.config, ContextBenchConfig)
        gone = plan.id.variant == "gqa64_8"
        if not gone:
            rows = points(plan.config)
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        outcome, reason = ("unavailable", "needs 8 GPUs and torch sees 4 here") if gone else ("ok", None)
        Summary(plan.id, "context", outcome, reason, "2026-01-01T00:00:00+00:00", 9.0, "lsai", {}, {"points": 1}).write(
            folder
        )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LSAI_ROOT", str(CHECKOUT))
        write(root)
    return root


@pytest.fixture
def shared(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    monkeypatch.setenv("LSAI_RUNS", str(recorded))
    return next(found for found in load_shared([], "h200") if found.machine.startswith("h200 ("))


def test_efficiency_is_against_one_gpu_with_the_same_kernel(shared: Shared) -> None:
    assert [(g.heads, g.processes) for g in shared.shared][:3] == [("32 x 128", 2), ("32 x 128", 4), ("32 x 128", 8)]
    group = shared.shared[0]
    rows = group.at(131072)
    assert rows.loc["zigzag", "efficiency"] == pytest.approx(0.9, abs=0.005)
    assert rows.loc["torch", "efficiency"] == pytest.approx(0.72, abs=0.005)  # of cuDNN's 500, not of 600
    assert rows.index[0] == "zigzag" and group.at(2048).index[0] == "ulysses"


def test_sentences_say_who_wins_where_and_by_how_much(shared: Shared) -> None:
    group = shared.shared[0]
    assert [method for _, _, method in analysis.winners(group)] == ["ulysses", "zigzag"]
    text = "\n".join(analysis.sentences(shared, group))
    assert "`ulysses` from 2,048 to 8,192, `zigzag` from 16,384 to 262,144" in text
    assert "an efficiency of 80% is reached from" in text
    ratios = analysis.ratios_to_torch(group).set_index("length")["ratio"]
    assert ratios[131072] == pytest.approx(600 * 0.9 / (500 * 0.72), rel=0.01)
    assert "ahead at every length" in text and "`ring` 2.50 (3.00)" in text and "most `ring`'s with 40.0%" in text
    assert "too far: `usp`" in analysis.error_sentence(analysis.error_rows(group))
    lines = "\n".join(analysis.scaling_sentences(shared, shared.shared[:3]))
    assert "Strong scaling" in lines and "Weak scaling" in lines and "on 8 GPUs" in lines


def test_scaling_is_shown_at_lengths_that_every_number_of_gpus_has(shared: Shared) -> None:
    groups = shared.shared[:3]
    strong, weak = analysis.strong(groups), analysis.weak(groups)
    assert set(strong["processes"]) == set(weak["processes"]) == {2, 4, 8}
    assert strong["length"].nunique() == weak["slice"].nunique() == 1
    assert figures.scaling(shared, strong, weak) is not None
    assert figures.scaling(shared, analysis.strong(groups[:1]), analysis.weak(groups[:1])) is None


def test_the_table_of_rates_marks_the_best_and_names_what_is_missing(shared: Shared) -> None:
    table = chapter.rate_table(shared.shared[0], 1.0).set_index("tokens")
    assert table.loc["131,072", "zigzag"].startswith("**5") and table.loc["131,072", "zigzag"].endswith("(90%)**")
    assert table.loc["1,048,576", "zigzag"] == "skipped" and not table.loc["131,072", "torch"].startswith("**")


def test_the_front_page_has_the_most_gpus(shared: Shared) -> None:
    (row,) = [row for row in HEADLINES["context"]([], "h200") if row["machine"] == shared.machine]
    assert row["question"] == "fastest attention over 8 GPUs, 131,072 tokens, 32 x 128" and row["answer"] == "`zigzag`"
    assert "TFLOP/s per GPU, 90% of a GPU alone, 1.50x torch's own" in row["result"]


def run_chapter(target: Path) -> tuple[list[str], str]:
    """Labels and texts of the executed chapter."""
    source = CHECKOUT / "notebooks" / "55-context.ipynb"
    problem = execute_notebook(source, target, {"own_runs": [], "profile": "quick"}, root=CHECKOUT, timeout_s=150)
    assert problem is None, problem
    cells = nbformat.read(target, as_version=4).cells
    outputs = [o for cell in cells if cell.cell_type == "code" for o in cell.outputs if "lsai" in o.get("metadata", {})]
    labels = [o.metadata["lsai"]["label"] for o in outputs if o.metadata["lsai"].get("label")]
    return labels, "\n".join(o.data.get("text/markdown", "") for o in outputs)


def test_the_longest_sequences_are_predicted_for_known_gpus_and_models_that_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[pd.DataFrame] = []
    monkeypatch.setattr(longest, "show_table", lambda table, *_args, **_more: shown.append(table))
    monkeypatch.setattr(longest, "_gpu", lambda _name: find_gpu("rtx4090"))
    longest.show_longest([], "quick")
    (table,) = shown
    assert table["tokens"].iloc[0] < table["tokens"].iloc[1] and "real step" not in table
    assert (table["peak each (GiB)"] <= 0.9 * 23.5).all() and table["host, all (GiB)"].iloc[1] > 1
    (row,) = longest.predicted(find_gpu("rtx4090"), (("llama3-8b", 1, ("full checkpointing",)),)).to_dict("records")
    assert "tokens" not in row


@pytest.mark.slow
def test_the_chapter_over_gpu_records(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSAI_RUNS", str(recorded))
    labels, text = run_chapter(tmp_path / "55-context.ipynb")
    assert len(set(labels)) == len(labels)
    for name in (
        "fig-context-rate-mha128",
        "fig-context-scaling-gqa64",
        "fig-context-memory-gqa128",
        "fig-context-exposed-mha128-8",
    ):
        assert f"{name}-h200-own" in labels
    for name in ("tbl-context-rate-mha128-2", "tbl-context-cost-gqa64-4", "fig-context-timeline-mha128-8"):
        assert f"{name}-h200-own" in labels
    assert "needs 8 GPUs and torch sees 4 here" in text and "**skipped**" in text and "nan" not in text


@pytest.mark.slow
def test_the_chapter_over_a_cpu_run(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSAI_RUNS", str(run_folder.parent.parent))
    labels, text = run_chapter(tmp_path / "55-context.ipynb")
    assert find_runs(run_folder.parent.parent)
    assert any(label.startswith("fig-context-rate-gqa16-") for label in labels)
    assert any(label.startswith("fig-context-timeline-gqa16-2") for label in labels)
    assert not any(label.startswith("fig-context-exposed-gqa16") for label in labels)
    assert "share one processor" in text and "tells neither exposed communication" in text and "nan" not in text


def test_the_chapter_says_when_there_are_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path / "none"))
    monkeypatch.setattr(chapter, "load_shared", lambda *_: [])
    said: list[str] = []
    monkeypatch.setattr(chapter, "show_text", said.append)
    machines = chapter.load([], "cpu")
    chapter.show_conclusions(machines)
    chapter.show_missing(machines)
    assert len(said) == 1 and "make run STUDY=context" in said[0]


def trained_run(root: Path, variant: str, processes: int, offset: float, lr: float = 1e-5) -> None:
    """A training run of three steps over `processes`, its losses `offset` higher in the last."""
    run = RunId("longcontext", variant, "steps", 0, f"{variant}-key")
    folder = root / "longcontext" / run.folder
    folder.mkdir(parents=True)
    model, parallel = {"preset": "llama3.2-1b"}, {"fsdp": 1, "replicate": 1, "cp": processes, "cp_method": "zigzag"}
    write_json(folder / "config.json", {"model": model, "parallel": parallel, "seq_len": 32768, "optim": {"lr": lr}})
    write_json(folder / "env.json", GPU)
    losses = [9.0, 8.0, 7.0 + offset]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, "loss": x}) + "\n" for i, x in enumerate(losses))
    )
    results = {
        "step_ms": 500.0,
        "tokens_per_s_per_gpu": 1e4,
        "mfu": 0.5,
        "exposed_communication_ms": 10.0 * (processes - 1),
        "train_loss": 8.0,
    }
    Summary(run, "train", "ok", None, "2026-01-01T00:00:00+00:00", 9.0, "lsai", {}, results).write(folder)


def test_training_over_shared_sequences_is_held_against_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path))
    trained_run(tmp_path, "llama1b_32k_1", 1, 0.0)
    trained_run(tmp_path, "llama1b_32k_2", 2, 3e-4)
    trained_run(tmp_path, "llama1b_128k_4", 4, 1.0, lr=1e-4)  # learns otherwise, and is compared with nothing
    search = RunId("longcontext", "longest_8b_1", "longest_8b", 0, "search-key")
    folder = tmp_path / "longcontext" / search.folder
    folder.mkdir(parents=True)
    train = {"model": {"preset": "llama3-8b"}, "parallel": {"fsdp": 1, "replicate": 1}, "seq_len": 460800}
    write_json(folder / "config.json", {"train": train, "max_size": 32})
    write_json(folder / "env.json", GPU)
    tries = [
        {
            "size": 32,
            "outcome": "ok",
            "note": None,
            "peak_gib": 120.5,
            "seconds": 480.0,
            "step_s": 462.0,
            "states_gib": 29.875,
        }
    ]
    results = {"largest_size": 32, "tries": tries}
    Summary(search, "model_search", "ok", None, "2026-01-01T00:00:00+00:00", 9.0, "lsai", {}, results).write(folder)
    (trained,) = [found for found in training.load_trained([], "h200") if found.machine.startswith("h200 (")]
    assert trained.longest["step_s"].tolist() == [462.0]
    (gap,) = training.loss_differences(trained).itertuples()
    assert all(0.5 < share < 0.95 for share in trained.steps["causal"])
    assert gap.largest == pytest.approx(3e-4) and gap.steps == 3 and gap.processes == 2
    shown: list[str] = []
    monkeypatch.setattr(training, "show_text", shown.append)
    monkeypatch.setattr(
        training,
        "show_table",
        lambda table, label, caption, **_: shown.append(f"{label} {caption} {table.to_string()}"),
    )
    training.show_training([trained])
    text = "\n".join(shown)
    assert "by 0.0e+00 nats per token in the first step" in text
    assert "at most 3.0e-04 (4.3e-05 of the loss) over 3 steps" in text
    assert "29.875" in text
    assert "32 of 32" in text and "460,800" in text and "120.5" in text and "462" in text and "zigzag" in text
    assert GPU["gpu"] == find_gpu("h200").driver_name
    link = longest.really_taken([trained], find_gpu("h200"), "llama3-8b", 1)
    assert link is not None and "460,800" in link and "search-key" in link
    assert longest.really_taken([trained], find_gpu("h200"), "llama3-8b", 8) is None
    assert longest.really_taken([trained], find_gpu("h100"), "llama3-8b", 1) is None
    shown.clear()
    training.show_training([])
    assert len(shown) == 1 and "make run STUDY=longcontext" in shown[0]
