"""The study on distributed attention: what a run of two processes keeps, what ends its processes,
and the chapter's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKOUT

from lsai_core.base.errors import UserError
from lsai_core.base.files import read_jsonl, write_json
from lsai_core.config.strict import validated
from lsai_core.context.methods import ContextSetting
from lsai_core.context.peer import torch_sent_bytes
from lsai_lab.benches.attention.config import Shape
from lsai_lab.benches.context.bench import refusal_of, row_of
from lsai_lab.benches.context.config import ContextBenchConfig, Point
from lsai_lab.runs.driver import run_one
from lsai_lab.runs.kinds import Context, get_kind
from lsai_lab.runs.records import RunId, Summary
from lsai_lab.runs.session import Session

CPU = torch.device("cpu")
TINY = {
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "processes": 2,
    "dtype": "float32",
    "device": "cpu",
    "point_ms": 1.0,
}
SWEEPS = [
    {"lengths": [64, 128], "methods": ["one", "zigzag"]},
    {"measure": "trace", "lengths": [128], "methods": ["ring"]},
    {"measure": "error", "lengths": [64]},
    {"lengths": [66], "methods": ["zigzag"]},
]


def config(**changes: Any) -> ContextBenchConfig:
    return validated(ContextBenchConfig, {**TINY, "sweeps": SWEEPS, **changes}, "test")


def launched(
    folder: Path, settings: ContextBenchConfig
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results and points of a run whose processes are started from here."""
    run = RunId("context", "tiny", "methods", 0, "abc")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", settings.model_dump(mode="json"))
    write_json(
        folder / "run.json",
        {"id": run.__dict__, "kind": "context", "label": "", "command": "", "code": {}},
    )
    results = get_kind("context").function()(settings, Context(folder, folder, folder))
    return results, read_jsonl(folder / "metrics.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "heads=4 is not divisible by kv_heads=3"),
        ({"methods": ["zigzak"]}, "unknown context-parallel method 'zigzak'; did you mean zigzag?"),
        (
            {"sweeps": [{"lengths": [64], "methods": ["tow"]}]},
            "unknown context-parallel method 'tow'",
        ),
        ({"sweeps": [{"lengths": [64, 32]}]}, "must ascend"),
        ({"sweeps": [{"measure": "speed", "lengths": [64]}]}, "measure"),
        ({"processes": 0}, "processes"),
        (
            {"processes": 1, "sweeps": [{"lengths": [64]}]},
            "one process measures `one` and `one_torch` only",
        ),
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
        sweeps = {
            "base": {"sweeps": SWEEPS, "device": "cpu", "dtype": "float32", "point_ms": 1.0},
            "sweeps": {},
        }
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
    assert shared["training_tflops"] == pytest.approx(
        flops / 2 / shared["training_ms"] / 1e9, rel=1e-3
    )
    assert alone["training_tflops"] == pytest.approx(flops / alone["training_ms"] / 1e9, rel=1e-3)
    assert shared["training_ms"] > shared["forward_ms"] and len(shared["rank_training_ms"]) == 2
    # Of two ranks in zigzag each sends its earlier chunk's or all its keys and values, fp32; see
    # the plan for which.
    tiles = ContextSetting("zigzag", 128).plan(2).steps[1]
    needed = {task.k_owner: task.k_range[1] - task.k_range[0] for task in tiles}
    sent = max(needed.values()) * 2 * 2 * 16 * 4 / 2**20
    assert (
        shared["sent_forward_mib"] == pytest.approx(sent, abs=1e-3)
        and alone["sent_training_mib"] == 0
    )
    trace = by_place["trace", "ring", 128]
    assert (
        trace["busy_balance"] > 1
        and trace["plan_imbalance"] > 2.5
        and trace["exposed_share"] is None
    )
    assert (
        all(0 < ms <= trace["step_ms"] for ms in trace["rank_compute_ms"])
        and trace["rank_communication_ms"] is None
    )
    errors = [row for row in rows if row["measure"] == "error"]
    for row in errors[:-1]:
        assert 0 < max(row["out"], row["dq"], row["dk"], row["dv"]) < 2e-6, row
    assert errors[-1]["method"] == "torch" and errors[-1]["outcome"] == "unavailable"
    refused = by_place["time", "zigzag", 66]
    assert (
        refused["outcome"] == "unsupported"
        and "cannot be cut into 4 equal parts" in refused["reason"]
    )
    summary = Summary.read(run_folder)
    assert (
        summary.results["points"] == 5
        and summary.results["points_ok"] == 4
        and summary.results["world_size"] == 2
    )
    text = (run_folder / "notebook.ipynb").read_text()
    assert "points_ok" in text


@pytest.mark.slow
def test_points_that_end_their_processes_are_kept_and_the_rest_goes_on(tmp_path: Path) -> None:
    """No point can end within a microsecond: each method ends its processes once and is not tried
    again.

    The points are long enough for the launcher to look, which it does five times a second.
    """
    sweeps = [
        {"lengths": [8192, 16384], "methods": ["zigzag"]},
        {"measure": "error", "lengths": [8192], "methods": ["zigzag", "ring"]},
    ]
    results, rows = launched(tmp_path / "run", config(sweeps=sweeps, point_timeout_s=1e-6))
    assert [(row["method"], row["outcome"]) for row in rows] == [
        ("zigzag", "timeout"),
        ("zigzag", "skipped"),
        ("zigzag", "skipped"),
        ("ring", "timeout"),
    ]
    assert (
        "no end within 1e-06 s" in rows[0]["reason"]
        and rows[1]["reason"] == "its processes ended at length 8192"
    )
    assert results["points_ok"] == 0


def test_a_second_start_measures_what_is_left(tmp_path: Path) -> None:
    sweeps = [
        {"lengths": [64], "methods": ["one", "one_torch"]},
        {"lengths": [128], "methods": ["one"]},
    ]
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
        {
            "lengths": [2048],
            "methods": ["one", "one_torch", "zigzag", "lightseq", "ulysses", "torch"],
        },
        {"measure": "trace", "lengths": [2048], "methods": ["ring", "zigzag", "torch"]},
        {"measure": "error", "lengths": [512]},
    ]
    settings = config(device="cuda", dtype="bfloat16", head_dim=64, sweeps=sweeps)
    _, rows = launched(tmp_path / "run", settings)
    assert {row["outcome"] for row in rows} == {"ok"}
    for row in rows:
        if row["measure"] == "error":
            assert (
                max(row[name] / row[f"bound_{name}"] for name in ("out", "dq", "dk", "dv")) < 2
            ), row
        if row["measure"] == "trace":
            assert (
                0 < row["exposed_share"] < 1
                and row["sent_gb_per_s"] > 0
                and min(row["rank_compute_ms"]) > 0
            )
        if row["measure"] == "time":
            assert row["memory_gib"] > 0


def known(method: str, length: int, **values: Any) -> dict[str, Any]:
    place = {
        "measure": "time",
        "method": method,
        "length": length,
        "batch": 1,
        "outcome": "ok",
        "took_s": 1.0,
    }
    return {**place, "training_ms": 100.0, "memory_gib": 4.0, **values}


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [
        ([], 1024, None),
        ([known("zigzag", 1024)], 2048, None),
        ([known("lightseq", 1024, outcome="oom")], 2048, None),
        (
            [known("zigzag", 1024)],
            8192,
            ("skipped", "about 6.4 s a call expected, the limit is 4 s"),
        ),
        (
            [known("zigzag", 1024, outcome="oom")],
            2048,
            ("oom", "out of memory already at length 1024"),
        ),
        ([known("zigzag", 4096, outcome="oom")], 2048, None),
        (
            [known("zigzag", 4096, outcome="timeout")],
            2048,
            ("skipped", "its processes ended at length 4096"),
        ),
        ([known("ring", 64, took_s=101.0)], 2048, ("skipped", "the 100 s of this run were over")),
    ],
)
def test_earlier_points_tell_what_is_not_worth_trying(
    rows: list[Any], length: int, expected: Any
) -> None:
    assert refusal_of(config(budget_s=100), rows, Point("time", "zigzag", length)) == expected


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
    row = row_of(config(), Point("time", "zigzag", 128), answers, 50)
    assert (row["forward_ms"], row["training_ms"], row["rank_training_ms"]) == (
        3.0,
        7.0,
        [5.0, 6.0],
    )
    assert (row["memory_gib"], row["rank_memory_gib"], row["rank_sent_training_mib"]) == (
        5.0,
        [3.0, 5.0],
        [4.0, 2.0],
    )
    traces = [
        {
            "step_ms": 10.0,
            "compute_ms": c,
            "communication_ms": 4.0,
            "exposed_ms": e,
            "sent_training_mib": 1000.0,
            **base,
        }
        for c, e in ((8.0, 2.0), (5.0, 1.0))
    ]
    row = row_of(
        config(),
        Point("trace", "zigzag", 128),
        [{**t, "sent_training_mib": 1000.0} for t in traces],
        0,
    )
    assert (row["busy_balance"], row["exposed_share"]) == (1.6, 0.2)
    assert row["sent_gb_per_s"] == pytest.approx(2000 * 2**20 / 8e-3 / 1e9, rel=1e-4)


def test_what_torch_sends_follows_its_source() -> None:
    k = torch.empty(1, 8, 2, 4, dtype=torch.bfloat16)
    values = 2 * k.numel()
    assert torch_sent_bytes(k, k, 4, backward=False) == 3 * values * 2
    assert torch_sent_bytes(k, k, 4, backward=True) == 3 * values * 2 + 4 * values * 4
    assert torch_sent_bytes(k, k, 1, backward=True) == 0
