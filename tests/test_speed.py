"""The chapters on speed (levers, attention, the course's jobs) from tiny real runs and from records as a GPU makes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKOUT, tiny, write_run

from lsai_core.config import ModelConfig
from lsai_core.model import count_parameters
from lsai_core.profiling.trace import result_name
from lsai_core.strict import validated
from lsai_core.training.loop import train
from lsai_lab.data import Dataset
from lsai_lab.report.speed import chapter
from lsai_lab.report.speed.analysis import on_attention, on_levers
from lsai_lab.report.speed.ideal import Ceilings, fp8_parameters, ideal_step, linear_tflops
from lsai_lab.report.speed.loss import curves_of, sentences, show_losses
from lsai_lab.report.speed.results import Speed, class_ms, load_speed
from lsai_lab.runs.keep import record_runs
from lsai_lab.runs.records import find_runs
from lsai_lab.runs.study import load_profile, load_study, resolve

CLASSES = {"matmul": 600.0, "attention": 70.0, "norm/pointwise": 60.0, "optimizer": 40.0, "memcpy": 5.0}
CEILINGS = {"matmul_bf16_tflops": 700.0, "matmul_fp8_tflops": 1400.0}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A session on the shipped studies whose runs lie in the returned folder."""
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path))
    return tmp_path


def write(
    root: Path, study: str, variant: str, part: str = "train", *, step_ms: float = 800.0, outcome: str = "ok",
    kernels: dict[str, float] | None = None, profile: str = "h200", **results: Any,
) -> Path:  # fmt: skip
    """A record of a shipped study's variant as a GPU of this profile would make it."""
    described = load_study(CHECKOUT, study, load_profile(CHECKOUT, profile))
    config = resolve(described, variant, part, 0, {})
    tokens = config.batch_size * config.seq_len  # type: ignore[attr-defined]
    found: dict[str, Any] = {
        "step_ms": step_ms, "tokens_per_s": tokens / step_ms * 1e3, "mfu": 0.4, "mfu_peak_source": "a data sheet",
        "train_s": 60.0, "setup_s": 5.0, "first_step_s": 30.0, "train_loss": 7.0, "validation_loss": 7.1,
        "rss_peak_gib": 4.0, "mem_peak_allocated_gib": 90.0, "parameters": 8e9, **results,
    }  # fmt: skip
    if kernels:
        busy = sum(kernels.values())
        found |= {result_name(label): ms for label, ms in kernels.items()}
        found |= {"gpu_busy_ms": busy, "kernel_idle_ms": step_ms - busy, "gpu_busy_share": busy / step_ms}
    rows = [
        {"step": s, "loss": 9.0 - s / 9, "tokens_in_step": tokens, "step_ms": step_ms, "mfu": 0.4, "tokens_per_s": 1.0}
        for s in range(12)
    ]
    good = outcome == "ok"
    folder = write_run(
        root, study, variant, part, outcome=outcome, reason=None if good else "the reason of it",
        results=found if good else {}, config=json.loads(config.model_dump_json()), metrics=rows if good else None,
    )  # fmt: skip
    env = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps({**env, "gpu": "NVIDIA H200", "machine": "h200"}))
    if good and kernels:
        top = [{"name": "nvjet_x", "class": "matmul", "ms": kernels["matmul"], "calls": 64.0}]
        (folder / "kernels.json").write_text(json.dumps({"per": "step", "kernels": top}))
    return folder


def test_a_traced_run_leaves_its_longest_kernels(dataset: Dataset, tmp_path: Path, monkeypatch: Any) -> None:
    config = tiny(profile={"memory_steps": 1, "skip_steps": 2, "trace": True})
    trained = train(config, dataset, tmp_path)
    assert trained.measured["kernel_matmul_ms"] > 0 and trained.measured["rss_peak_gib"] > 0
    assert "gpu_busy_ms" not in trained.measured  # on a CPU nothing is idle
    top = json.loads((tmp_path / "kernels.json").read_text())["kernels"]
    assert 0 < len(top) <= 25 and top == sorted(top, key=lambda row: -row["ms"])
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
    shape = {"n_layers": 2, "d_model": 8, "n_heads": 2, "n_kv_heads": 1, "d_ff": 16, "vocab_size": 32}
    return validated(ModelConfig, {**shape, **changes}, "test")


def test_the_ideal_step_by_hand() -> None:
    shape = model()
    linear = 2 * (8 * (8 + 2 * 4) + 8 * 8 + 2 * 8 * 16 + 16 * 8)
    layers = ("qkv", "attention_output", "gate_up", "down")
    assert fp8_parameters(shape, {"recipe": "tensorwise", "layers": layers}) == linear
    assert fp8_parameters(shape, {"recipe": "tensorwise", "layers": (*layers, "output")}) == linear + 8 * 32
    assert fp8_parameters(shape, {"recipe": "tensorwise", "layers": ["down"]}) == 2 * 16 * 8
    assert fp8_parameters(shape, {"recipe": "none", "layers": layers}) == 0
    counted = count_parameters(shape).non_embedding
    config = {
        "model": shape.model_dump(), "precision": "bf16", "seq_len": 4, "batch_size": 3, "grad_accum": 2,
        "attention": {"window": None}, "fp8": {"recipe": "none", "layers": layers},
    }  # fmt: skip
    ceilings = Ceilings(None, "NVIDIA H200")
    ideal = ideal_step(config, ceilings)
    assert ideal is not None and ideal.dtypes == ("bf16",)
    assert ideal.matmul_ms == pytest.approx(24 * 6 * counted / 989.5e12 * 1e3)
    assert ideal.attention_ms == pytest.approx(24 * 6 * 2 * 8 * 4 / 989.5e12 * 1e3)  # causal: half of 12 L d T
    faster = ideal_step({**config, "fp8": {"recipe": "tensorwise", "layers": layers}}, ceilings)
    assert faster is not None and faster.dtypes == ("bf16", "fp8")
    assert faster.matmul_ms == pytest.approx(24 * 6 * (linear / 1979e12 + (counted - linear) / 989.5e12) * 1e3)
    narrow = ideal_step({**config, "attention": {"window": 2}}, ceilings)
    assert narrow is not None and narrow.attention_ms == pytest.approx(24 * 12 * 2 * 8 * 1.5 / 989.5e12 * 1e3)
    assert linear_tflops(config, ideal.matmul_ms) == pytest.approx(989.5)
    assert ideal_step(config, Ceilings(None, None)) is None and "data sheet" in ceilings.source("bf16")


def test_the_chapter_says_what_the_records_say(session: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(session, "machine", "machine", "ceilings", kind="ceilings", results=CEILINGS)
    env = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps({**env, "machine": "h200"}))
    write(session, "speed", "eager", "levers", step_ms=900, kernels=CLASSES)
    write(session, "speed", "compiled", "levers", outcome="oom")
    write(session, "speed", "fused_loss", "levers", step_ms=750, kernels=CLASSES | {"matmul": 570.0})
    write(session, "speed", "fp8", "levers", step_ms=600, kernels=CLASSES | {"matmul": 400.0, "fp8 cast": 20.0})
    write(session, "speed", "att_sdpa_cudnn", "attention", step_ms=760, kernels=CLASSES)
    write(session, "speed", "att_fa4", "attention", step_ms=740, kernels=CLASSES, validation_loss=7.2)
    write(session, "speed", "att_fa2", "attention", outcome="unavailable")
    speed = next(one for one in load_speed([], "cpu") if "(" in one.machine)  # not what is committed
    assert speed.machine == "h200 (this machine)" and speed.on_gpu
    levers = speed.levers.set_index("variant")
    assert levers["gain"]["fused_loss"] == pytest.approx(900 / 750 - 1)  # over eager: the one between them did not run
    assert levers["cold_start_s"]["eager"] == 35
    times = class_ms(levers.loc["fp8"])
    assert (
        times["other"] == 5
        and times["fp8 cast"] == 20
        and times["idle"] == 600 - sum(v for k, v in times.items() if k != "idle")
    )
    ideal = speed.ideal(levers["key"]["fp8"])
    assert ideal is not None and ideal.dtypes == ("bf16", "fp8")
    text = "\n".join(on_levers(speed))
    assert "1.50 times" in text and "matmul 400 ms (67%)" in text and "idle for 5 ms (0.8%)" in text
    assert (
        f"runs at {ideal.ms / 600:.0%} of the ideal speed" in text and "700 TFLOP/s in bf16 ([measured](#run-" in text
    )
    assert "*+ compiled blocks* ended as **oom**: the reason of it." in text
    assert "*Not measured on h200 (this machine):* + fused blocks; + fused optimizer; + best attention." in text
    text = "\n".join(on_attention(speed))
    assert "**[FlashAttention-4](#run-" in text and "between 7.1000 and 7.2000 nats" in text
    assert "*FlashAttention-2* ended as **unavailable**" in text and "SDPA math" in text
    chapter.show_setting([speed])
    chapter.show_levers(speed)
    chapter.show_attention(speed)
    shown = capsys.readouterr().out
    assert "Figure fig-speed-levers-h200-own" in shown and "Figure fig-speed-attention-h200-own" in shown
    assert "nvjet_x" in shown


@pytest.mark.parametrize("outcomes", [{}, {"eager": "failed", "fp8": "unavailable"}, {"eager": "ok"}])
def test_the_chapter_can_be_written_whatever_happened(
    session: Path, outcomes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for variant, outcome in outcomes.items():
        write(session, "speed", variant, "levers", outcome=outcome, profile="cpu")
    found = chapter.load(["none"] if not outcomes else [], "cpu")
    chapter.show_setting(found)
    for speed in found:
        chapter.show_levers(speed)
        chapter.show_attention(speed)
        show_losses([speed])
    text = capsys.readouterr().out
    assert not re.search(r"\bnan\b", text) and "Traceback" not in text
    if outcomes.get("fp8") == "unavailable":
        assert "*+ fp8* ended as **unavailable**: the reason of it." in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_traced_run_says_how_long_the_gpu_waits(dataset: Dataset, tmp_path: Path) -> None:
    wide = {"n_layers": 2, "d_model": 1024, "n_heads": 8, "n_kv_heads": 8, "d_ff": 4096}
    changes = {"model": wide, "device": "cuda", "precision": "bf16", "batch_size": 64, "seq_len": 128, "compile": True}
    trained = train(tiny(**changes, profile={"memory_steps": 1, "skip_steps": 4, "trace": True}), dataset, tmp_path)
    measured, median = trained.measured, sorted(trained.timed_ms)[len(trained.timed_ms) // 2]
    classes = ("matmul", "attention", "norm/pointwise", "loss", "optimizer")
    assert all(measured[result_name(label)] > 0 for label in classes), measured
    total = sum(ms for name, ms in measured.items() if name.startswith("kernel_"))
    assert measured.get("kernel_other_ms", 0.0) < 0.1 * total, json.loads((tmp_path / "kernels.json").read_text())
    assert 0 < measured["gpu_busy_ms"] <= total * 1.001 and measured["gpu_busy_ms"] < 1.2 * median


def test_the_loss_curves_lie_as_far_apart_as_the_records_say(session: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write_curve(variant: str, factor: float, outcome: str = "ok") -> None:
        folder = write(session, "speed", variant, "loss", outcome=outcome, validation_loss=5.0 * factor)
        rows = [{"step": step, "loss": (9 - step / 60) * (factor if step >= 150 else 1)} for step in range(300)]
        if outcome == "ok":
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def mine() -> Speed:
        return next(one for one in load_speed([], "cpu") if "(" in one.machine)

    write_curve("eager", 1.0)
    assert curves_of(mine()) is None  # nothing to compare it with
    write_curve("fused_loss", 1.002)
    write_curve("att_fa4", 0.999)
    write_curve("att_fa2", 1.0, "unavailable")
    curves = curves_of(mine())
    assert curves is not None and list(curves.runs) == ["eager", "fused_loss", "att_fa4"]
    # Smoothed over 15 steps, the distance is whole from the 15th step of the change on.
    spread = curves.apart.max(axis=1) - curves.apart.min(axis=1)
    assert spread[149] == 0 and spread[164] == pytest.approx(0.003, rel=1e-2)
    path, end = sentences(curves)
    assert "curves of 3 variants, smoothed over 15 steps, lie at most 0.3% apart" in path
    assert "FlashAttention-4 below fused loss" in path and "training losses lie 0.3% apart" in end
    assert "validation losses 0.3%" in end
    show_losses([mine()])
    shown = capsys.readouterr().out
    assert "Figure fig-speed-loss-h200-own" in shown and "eager" in shown and "nan" not in shown
