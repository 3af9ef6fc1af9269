"""The gemm kind on a CPU, and the example of rounding of the chapter on states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
import torch
from conftest import CHECKOUT

from lsai_core.base.files import read_jsonl
from lsai_core.config.strict import validated
from lsai_lab.analysis.summary import block_times
from lsai_lab.benches import gemm as gemm_bench
from lsai_lab.benches.config import GemmConfig
from lsai_lab.benches.gemm import Point
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import resolve

SMALL = {
    "n_layers": 2,
    "d_model": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_ff": 128,
    "vocab_size": 320,
}
WAYS = ("bf16", "fp8", "fp8_rowwise", "fp8_casts")


def gemm_config(**changes: Any) -> GemmConfig:
    base = {
        "model": SMALL,
        "tokens": [32],
        "squares": [16, 32],
        "point_s": 0.001,
        "budget_s": 30.0,
        "device": "cpu",
    }
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
            found[way] = gemm_bench._work(
                Point("down", product, way, 48, 32, 64), torch.device("cpu")
            )().float()
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
    shape = {
        "n_layers": 2,
        "d_model": 1024,
        "n_heads": 8,
        "n_kv_heads": 4,
        "d_ff": 2048,
        "vocab_size": 4096,
    }
    changes = {"model": shape, "tokens": [2048, 1024], "squares": [1024], "point_s": 0.01}
    results, rows = measure(gemm_config(device="cuda", **changes), tmp_path)
    assert {row["outcome"] for row in rows} == {"ok"}, [
        row for row in rows if row["outcome"] != "ok"
    ]
    assert (results["fp8_unavailable"] is None) == ({row["way"] for row in rows} == set(WAYS))


def test_a_block_s_products_are_added_by_way() -> None:
    """An fp8 twice as fast, half of it lost to casts: 218,103,808 parameters in a block, three
    products of 2 FLOPs each over the tokens."""
    config = resolve(Session("h200").study("gemm"), "machine", "products", 0, {})
    assert isinstance(config, GemmConfig)
    rate = {"bf16": 630.0, "fp8": 1260.0, "fp8_rowwise": 1080.0, "fp8_casts": 945.0}
    points = pd.DataFrame(
        [{**p.__dict__, "ms": p.flops / rate[p.way] / 1e9} for p in gemm_bench.points(config, WAYS)]
    )
    block = block_times(points, 8192)
    assert block["bf16"] == pytest.approx(3 * 2 * 218_103_808 * 8192 / 630e12 * 1e3)
    assert block["bf16"] / block["fp8"] == pytest.approx(2) and block["bf16"] / block[
        "fp8_casts"
    ] == pytest.approx(1.5)
    assert block_times(points, 4096)["bf16"] == pytest.approx(block["bf16"] / 2)
    lacking = points[
        ~((points["way"] == "fp8") & (points["layer"] == "down") & (points["product"] == "dgrad"))
    ]
    assert set(block_times(lacking, 8192).index) == set(WAYS) - {"fp8"}


def test_the_chapter_s_example_of_rounding_is_what_bf16_does() -> None:
    """An update below half a gap leaves a bf16 weight where it was, from the magnitude that the
    chapter names on, and not below it; by chance it adds up in the mean."""
    found: dict[str, Any] = {"torch": torch}
    for cell in nbformat.read(CHECKOUT / "notebooks" / "35-states.ipynb", as_version=4).cells:
        if cell.id == "try":
            exec(cell.source, found)
    weight, update, edge = found["weight"], found["update"], 2.0**-6
    assert found["nearest"] == torch.tensor(weight).bfloat16()
    by_chance = float(found["stochastic"])
    assert by_chance == pytest.approx(weight + 100 * update, abs=100 * update / 2)
    weights = torch.linspace(edge, 1, 1000).bfloat16()
    assert ((weights.float() + update).bfloat16() == weights).all()
    below = torch.linspace(edge / 2, edge * 0.99, 100).bfloat16()
    assert ((below.float() + update).bfloat16() != below).all()
