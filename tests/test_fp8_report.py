"""The gemm kind on a CPU, and the fp8 chapter over records whose numbers are known."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from conftest import CHECKOUT, write_run

from lsai_core.files import read_jsonl
from lsai_core.strict import validated
from lsai_lab.benches import gemm as gemm_bench
from lsai_lab.benches.gemm import GemmConfig, Point
from lsai_lab.report.fp8.chapter import conclusions
from lsai_lab.report.fp8.products import block_times, ceilings
from lsai_lab.report.fp8.results import Fp8Results, results_of
from lsai_lab.report.fp8.training import memory_account
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.notebook import execute_notebook
from lsai_lab.runs.records import find_runs
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import resolve

SMALL = {"n_layers": 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_ff": 128, "vocab_size": 320}
WAYS = ("bf16", "fp8", "fp8_rowwise", "fp8_casts")


def gemm_config(**changes: Any) -> GemmConfig:
    base = {"model": SMALL, "tokens": [32], "squares": [16, 32], "point_s": 0.001, "budget_s": 30.0, "device": "cpu"}
    return validated(GemmConfig, {**base, **changes}, "test")


def measure(config: GemmConfig, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    results = gemm_bench.run(config, Context(folder, folder, folder))
    return results, read_jsonl(folder / "metrics.jsonl")


def test_products_on_a_cpu(tmp_path: Path) -> None:
    results, rows = measure(gemm_config(), tmp_path)
    assert len(rows) == results["points"] == results["points_ok"] == 2 * 2 + 5 * 3 * 2
    assert {row["way"] for row in rows} == {"fp32", "bf16"} and "CPU" in results["fp8_unavailable"]
    for row in rows:
        assert row["tflops"] == pytest.approx(2 * row["m"] * row["n"] * row["k"] / row["ms"] / 1e9)
        assert row["tflops_p25"] <= row["tflops"] <= row["tflops_p75"] and row["repeats"] >= 3
    assert {(row["n"], row["k"]) for row in rows if row["layer"] == "gate_up"} == {(256, 64)}
    assert results["square_bf16_tflops"] == max(
        r["tflops"] for r in rows if r["layer"] == "square" and r["way"] == "bf16"
    )


def test_every_way_multiplies_the_same_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is the product that it says it is: all ways agree up to rounding."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for product in gemm_bench.PRODUCTS:
        found = {}
        for way in ("fp32", *WAYS):
            torch.manual_seed(0)
            found[way] = gemm_bench._work(Point("down", product, way, 48, 32, 64), torch.device("cpu"))().float()
        for way in WAYS:
            assert found[way].shape == found["fp32"].shape
            # Random bf16 numbers are not the fp32 ones rounded, so ways are compared with bf16.
            error = float((found[way] - found["bf16"]).norm() / found["bf16"].norm())
            assert (way == "bf16") == (error == 0) and error < 0.09, (product, way, error)


def test_the_important_points_come_first_and_the_rest_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list(gemm_bench.points(gemm_config(tokens=[32, 16]), WAYS))
    assert len(order) == 2 * 2 + 15 * 4 + 15 * 2 == len(set(order))
    assert [p.layer == "square" for p in order] == [True] * 4 + [False] * 90
    assert {p.m for p in order[4:64]} == {32} and {p.way for p in order[49:64]} == {"fp8_casts"}
    assert {p.way for p in order[64:]} == {"bf16", "fp8"}

    work = gemm_bench._work

    def no_memory_for_wgrad(point: Point, device: torch.device) -> Any:
        if point.product == "wgrad":
            raise MemoryError("no memory")
        return work(point, device)

    monkeypatch.setattr(gemm_bench, "_work", no_memory_for_wgrad)
    results, rows = measure(gemm_config(), tmp_path)
    assert {row["outcome"] for row in rows if row["product"] == "wgrad"} == {"oom"}
    assert results["points_ok"] == results["points"] - 10
    with pytest.raises(RuntimeError, match="no product could be measured"):
        measure(gemm_config(budget_s=1e-9), tmp_path)
    assert {row["outcome"] for row in read_jsonl(tmp_path / "metrics.jsonl")} == {"skipped"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_products_on_a_gpu(tmp_path: Path) -> None:
    shape = {"n_layers": 2, "d_model": 1024, "n_heads": 8, "n_kv_heads": 4, "d_ff": 2048, "vocab_size": 4096}
    changes = {"model": shape, "tokens": [2048, 1024], "squares": [1024], "point_s": 0.01}
    results, rows = measure(gemm_config(device="cuda", **changes), tmp_path)
    assert {row["outcome"] for row in rows} == {"ok"}, [row for row in rows if row["outcome"] != "ok"]
    assert (results["fp8_unavailable"] is None) == ({row["way"] for row in rows} == set(WAYS))


def synthetic(root: Path) -> None:
    """An H200 that multiplies fp8 twice as fast, loses half of that to casts, and runs out of memory with te_block."""
    session = Session("h200")
    study, gemm = session.study("fp8"), session.study("gemm")
    config = resolve(gemm, "machine", "products", 0, {})
    assert isinstance(config, GemmConfig)
    rate = {"bf16": 700.0, "fp8": 1400.0, "fp8_rowwise": 1200.0, "fp8_casts": 1050.0}
    rows = []
    for point in gemm_bench.points(config, WAYS):
        speed = rate[point.way] * (1.0 if point.layer == "square" else 0.9)
        figures = {"ms": point.flops / speed / 1e9, "tflops": speed, "tflops_p25": speed, "tflops_p75": speed}
        rows.append({"step": len(rows), **point.__dict__, "outcome": "ok", "reason": None, **figures, "repeats": 9})
    rows[-1] |= {"outcome": "skipped", "ms": None, "tflops": None}
    results = {"gemm_device": "NVIDIA H200", "points": len(rows), "points_skipped": 1, "fp8_unavailable": None}
    dump = json.loads(config.model_dump_json())
    write_run(root, "gemm", "machine", "products", kind="gemm", results=results, config=dump, metrics=rows)
    speeds = {
        "bf16": (9000.0, 100.0),
        "fused": (12600.0, 98.5),
        "tensorwise": (11700.0, 89.5),
        "te_current": (10000.0, 120.0),
    }
    for name, (speed, peak) in speeds.items():
        found = {"tokens_per_s": speed, "step_ms": 8192e3 / speed, "step_ms_p25": 1.0, "step_ms_p75": 2.0, "mfu": 0.5}
        found |= {"mem_peak_allocated_gib": peak, "first_step_s": 40.0, "parameters": 8e9, "mfu_peak_source": "a sheet"}
        run_config = json.loads(resolve(study, name, "speed", 0, {}).model_dump_json())
        write_run(root, "fp8", name, "speed", results=found, config=run_config)
    run_config = json.loads(resolve(study, "te_block", "speed", 0, {}).model_dump_json())
    write_run(root, "fp8", "te_block", "speed", outcome="oom", reason="CUDA out of memory", config=run_config)
    for name, factor in (("bf16", 1.0), ("fused", 1.001)):
        for repeat in range(3):
            loss = (4.0 + 0.1 * repeat) * factor
            metrics = [{"step": step, "loss": loss + (step < 280)} for step in range(300)]
            run_config = json.loads(resolve(study, name, "loss", repeat, {}).model_dump_json())
            found = {"validation_loss": loss + 0.5}
            write_run(root, "fp8", name, "loss", repeat, results=found, config=run_config, metrics=metrics)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fp8Results:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path))
    synthetic(tmp_path)
    return results_of(Session("h200").study("fp8"), find_runs(tmp_path))[0]


def test_the_numbers_of_the_chapter(results: Fp8Results) -> None:
    assert ceilings(results.points) == {"bf16": (700.0, 16384), "fp8": (1400.0, 16384)}
    block = block_times(results.points, 8192)
    # 218,103,808 parameters in the linear layers of a block, three products of 2 FLOPs each over 8192 tokens.
    assert block["bf16"] == pytest.approx(3 * 2 * 218_103_808 * 8192 / 630e12 * 1e3)
    assert block["bf16"] / block["fp8"] == pytest.approx(2) and block["bf16"] / block["fp8_casts"] == pytest.approx(1.5)
    assert block_times(results.points, 4096)["bf16"] == pytest.approx(block["bf16"] / 2)
    speed = results.speed.set_index("variant")
    assert speed.loc["tensorwise", "speedup"] == pytest.approx(1.3) and speed.loc["te_block", "outcome"] == "oom"
    assert results.losses["train_difference"].tolist() == pytest.approx([0.001] * 3)
    assert results.losses["train_bf16"].tolist() == pytest.approx([4.0, 4.1, 4.2]), "the last 20 steps only"
    config = results.config("speed")
    assert config is not None
    account = " ".join(memory_account(results.speed, config))
    assert "-1.50 GiB against bf16 (measured). It keeps the input of each layer once" in account
    kept = [f"{count * 4096 * 8192 * 32 / 2**30:.2f} GiB" for count in (3, 4, 2)]
    assert f"{kept[0]} where bf16 keeps {kept[1]} (computed: 12,288 instead of 16,384 bytes" in account
    assert "-10.50 GiB against bf16 (measured). torch.compile" in account and f"{kept[2]} where bf16 keeps" in account
    assert f"{32 * 218_103_808 / 2**30:.3g} GiB for each layout" in account
    text = " ".join(conclusions(results))
    assert "1.40 times as fast as bf16" in text and "ended as **oom**" in text
    assert "differs from bf16 by +0.09%" in text


def test_the_chapter_renders_and_says_when_there_is_nothing(
    results: Fp8Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = CHECKOUT / "notebooks" / "30-fp8.ipynb", tmp_path / "out" / "30-fp8.ipynb"
    assert execute_notebook(source, target, {"own_runs": [], "profile": "h200"}, root=CHECKOUT, timeout_s=120) is None
    outputs = [o for cell in nbformat.read(target, as_version=4).cells for o in cell.get("outputs", [])]
    kinds = [o.metadata.get("lsai", {}) for o in outputs if "metadata" in o]
    own = [kind["label"] for kind in kinds if kind.get("label", "").endswith("-own")]
    labels = ["tbl-layers", "tbl-products", "fig-products", "tbl-training", "fig-training", "tbl-loss", "fig-loss"]
    assert [f"{label[:3]}-fp8-{label[4:]}" for label in labels] == [
        "-".join(part for part in label.split("-")[:3]) for label in own
    ]
    text = "".join(str(o.data.get("text/markdown", "")) for o in outputs if "data" in o)
    assert "recipes reach 1.40 ([fp8, fused]" in text and "and 1.30 ([fp8, tensorwise]" in text
    assert "a speed-up of" in text and "Available here:" in text and "nan" not in text.lower().replace("finance", "")
    pictures = [o.data["image/png"] for o in outputs if "data" in o and "image/png" in o.data]
    assert len(pictures) >= 3 and all(len(base64.b64decode(picture)) > 10_000 for picture in pictures)
    said: list[str] = []
    monkeypatch.setattr("lsai_lab.report.fp8.chapter.show_text", said.append)
    monkeypatch.setattr("lsai_lab.report.fp8.results.select_runs", lambda *_: [])
    from lsai_lab.report.fp8 import chapter

    assert chapter.load([], "cpu") == [] and "lsai study fp8" in said[0]
