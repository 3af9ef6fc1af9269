"""The chapters on speed (levers, attention, the course's jobs) from tiny real runs and from records
as a GPU makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKOUT, tiny, write_run

from lsai_core.config.model import ModelConfig
from lsai_core.config.strict import validated
from lsai_core.model.transformer import count_parameters
from lsai_core.profiling.trace import result_name
from lsai_core.training.loop import train
from lsai_lab.analysis.step_time import ideal_step
from lsai_lab.data import Dataset
from lsai_lab.runs.keep import record_runs
from lsai_lab.runs.records import find_runs
from lsai_lab.runs.study import load_profile, load_study, resolve

CLASSES = {
    "matmul": 600.0,
    "attention": 70.0,
    "norm/pointwise": 60.0,
    "optimizer": 40.0,
    "memcpy": 5.0,
}
CEILINGS = {"matmul_bf16_tflops": 700.0, "matmul_fp8_tflops": 1400.0}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A session on the shipped studies whose runs lie in the returned folder."""
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path))
    return tmp_path


def write(
    root: Path,
    study: str,
    variant: str,
    part: str = "train",
    *,
    step_ms: float = 800.0,
    outcome: str = "ok",
    kernels: dict[str, float] | None = None,
    profile: str = "h200",
    **results: Any,
) -> Path:
    """A record of a shipped study's variant as a GPU of this profile would make it."""
    described = load_study(CHECKOUT, study, load_profile(CHECKOUT, profile))
    config = resolve(described, variant, part, 0, {})
    tokens = config.batch_size * config.seq_len  # type: ignore[attr-defined]
    found: dict[str, Any] = {
        "step_ms": step_ms,
        "tokens_per_s": tokens / step_ms * 1e3,
        "mfu": 0.4,
        "mfu_peak_source": "a data sheet",
        "train_s": 60.0,
        "setup_s": 5.0,
        "first_step_s": 30.0,
        "train_loss": 7.0,
        "validation_loss": 7.1,
        "rss_peak_gib": 4.0,
        "mem_peak_allocated_gib": 90.0,
        "parameters": 8e9,
        **results,
    }
    if kernels:
        busy = sum(kernels.values())
        found |= {result_name(label): ms for label, ms in kernels.items()}
        found |= {
            "gpu_busy_ms": busy,
            "kernel_idle_ms": step_ms - busy,
            "gpu_busy_share": busy / step_ms,
        }
    rows = [
        {
            "step": s,
            "loss": 9.0 - s / 9,
            "tokens_in_step": tokens,
            "step_ms": step_ms,
            "mfu": 0.4,
            "tokens_per_s": 1.0,
        }
        for s in range(12)
    ]
    good = outcome == "ok"
    folder = write_run(
        root,
        study,
        variant,
        part,
        outcome=outcome,
        reason=None if good else "the reason of it",
        results=found if good else {},
        config=json.loads(config.model_dump_json()),
        metrics=rows if good else None,
    )
    env = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps({**env, "gpu": "NVIDIA H200", "machine": "h200"}))
    if good and kernels:
        top = [{"name": "nvjet_x", "class": "matmul", "ms": kernels["matmul"], "calls": 64.0}]
        (folder / "kernels.json").write_text(json.dumps({"per": "step", "kernels": top}))
    return folder


def test_a_traced_run_leaves_all_its_kernels(
    dataset: Dataset, tmp_path: Path, monkeypatch: Any
) -> None:
    config = tiny(profile={"memory_steps": 1, "skip_steps": 2, "trace": True})
    trained = train(config, dataset, tmp_path)
    assert trained.measured["kernel_matmul_ms"] > 0 and trained.measured["rss_peak_gib"] > 0
    assert "gpu_busy_ms" not in trained.measured  # on a CPU nothing is idle
    top = json.loads((tmp_path / "kernels.json").read_text())["kernels"]
    assert top == sorted(top, key=lambda row: -row["ms"])
    for label in {row["class"] for row in top}:  # the classes follow from them
        total = sum(row["ms"] for row in top if row["class"] == label)
        assert trained.measured[result_name(label)] == pytest.approx(total), label
    assert {row["name"] for row in top} >= {"aten::mm"} and all(row["calls"] > 0 for row in top)
    steady = [row["step"] for row in trained.rows if row["steady"]]
    assert steady == [6, 7, 8, 9, 10, 11]
    assert max(trained.timed_ms) < 1000  # reading the trace is no part of the step after it


def test_kernels_are_recorded_with_their_run(session: Path, tmp_path: Path) -> None:
    write(session, "speed", "eager", "levers", kernels=CLASSES)
    (run,) = find_runs(session)
    record_runs([run], tmp_path / "reports")
    (kept,) = find_runs(tmp_path / "reports" / "recorded" / "h200")
    assert list(kept.kernels["name"]) == ["nvjet_x"] and run.kernels.equals(kept.kernels)


def model(**changes: Any) -> ModelConfig:
    shape = {
        "n_layers": 2,
        "d_model": 8,
        "n_heads": 2,
        "n_kv_heads": 1,
        "d_ff": 16,
        "vocab_size": 32,
    }
    return validated(ModelConfig, {**shape, **changes}, "test")


def test_the_ideal_step_by_hand() -> None:
    shape = model()
    linear = 2 * (8 * (8 + 2 * 4) + 8 * 8 + 2 * 8 * 16 + 16 * 8)
    layers = ("qkv", "attention_output", "gate_up", "down")
    counted = count_parameters(shape).non_embedding
    config = {
        "model": shape.model_dump(),
        "precision": "bf16",
        "seq_len": 4,
        "batch_size": 3,
        "grad_accum": 2,
        "attention": {"window": None},
        "fp8": {"recipe": "none", "layers": layers},
    }
    ideal = ideal_step(config, "NVIDIA H200")
    assert ideal is not None and list(ideal.linear_tflop) == ["bf16"]
    assert ideal.linear_ms == pytest.approx(24 * 6 * counted / 989.5e12 * 1e3)
    # causal: half of 12 L d T
    assert ideal.attention_ms == pytest.approx(24 * 6 * 2 * 8 * 4 / 989.5e12 * 1e3)
    faster = ideal_step(
        {**config, "fp8": {"recipe": "tensorwise", "layers": layers}}, "NVIDIA H200"
    )
    assert faster is not None and set(faster.linear_tflop) == {"bf16", "fp8"}
    assert faster.linear_ms == pytest.approx(
        24 * 6 * (linear / 1979e12 + (counted - linear) / 989.5e12) * 1e3
    )
    narrow = ideal_step({**config, "attention": {"window": 2}}, "NVIDIA H200")
    assert narrow is not None and narrow.attention_ms == pytest.approx(
        24 * 12 * 2 * 8 * 1.5 / 989.5e12 * 1e3
    )
    assert ideal_step(config, "a GPU of next year") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_traced_run_says_how_long_the_gpu_waits(dataset: Dataset, tmp_path: Path) -> None:
    wide = {"n_layers": 2, "d_model": 1024, "n_heads": 8, "n_kv_heads": 8, "d_ff": 4096}
    changes = {
        "model": wide,
        "device": "cuda",
        "precision": "bf16",
        "batch_size": 64,
        "seq_len": 128,
        "compile": True,
    }
    trained = train(
        tiny(**changes, profile={"memory_steps": 1, "skip_steps": 4, "trace": True}),
        dataset,
        tmp_path,
    )
    measured, median = trained.measured, sorted(trained.timed_ms)[len(trained.timed_ms) // 2]
    classes = ("matmul", "attention", "norm/pointwise", "loss", "optimizer")
    assert all(measured[result_name(label)] > 0 for label in classes), measured
    total = sum(ms for name, ms in measured.items() if name.startswith("kernel_"))
    assert measured.get("kernel_other_ms", 0.0) < 0.1 * total, json.loads(
        (tmp_path / "kernels.json").read_text()
    )
    assert 0 < measured["gpu_busy_ms"] <= total * 1.001 and measured["gpu_busy_ms"] < 1.2 * median
    assert 200 < measured["gpu_clock_mhz"] < 4000 and 20 < measured["gpu_power_w"] < 3000, measured
