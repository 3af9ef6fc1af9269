"""Records of before 28 November 2026 count fused kernels as copies of FSDP; read, they are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import write_run

import lsai_lab as lab
from lsai_lab.runs.records import Summary

FUSED = "triton_poi_fused__to_copy_add_cat_mul_split_split_with_sizes_sub_view_1"
KERNELS = [
    {"name": FUSED, "class": "fsdp copies", "ms": 1.25, "calls": 32.0},
    {"name": "split_with_sizes_copy_out", "class": "fsdp copies", "ms": 2.0, "calls": 1.0},
    {"name": "triton_poi_fused_add_0", "class": "norm/pointwise", "ms": 4.0, "calls": 1.0},
]


def old_record(root: Path, copies: float) -> Path:
    results = {"kernel_fsdp_copies_ms": copies, "kernel_norm_pointwise_ms": 4.0}
    folder = write_run(root, "memory", "bf16", results=results)
    table = {"per": "step", "kernels": KERNELS}
    (folder / "kernels.json").write_text(json.dumps(table))
    return folder


def test_a_fused_kernel_is_no_copy_of_fsdp(empty: Path) -> None:
    folder = old_record(empty, 3.25)
    found = lab.kernels(folder).set_index("name")["class"]
    assert found[FUSED] == "norm/pointwise"
    assert found["split_with_sizes_copy_out"] == "fsdp copies"
    (row,) = lab.load("memory", mine=True).to_dict("records")
    for results in (row, lab.find_run(folder).results):
        assert results["kernel_fsdp_copies_ms"] == 2.0
        assert results["kernel_norm_pointwise_ms"] == 5.25


def test_what_was_put_right_is_not_put_right_again(empty: Path) -> None:
    folder = old_record(empty, 3.25)
    replace(Summary.read(folder)).write(folder)  # as a copy for another study is written
    assert Summary.read(folder).results["kernel_norm_pointwise_ms"] == 5.25


def test_a_sum_whose_kernels_cannot_be_read_stays(empty: Path) -> None:
    folder = old_record(empty, 3.25)
    (folder / "kernels.json").write_text("{")
    assert Summary.read(folder).results["kernel_fsdp_copies_ms"] == 3.25


def test_no_step_of_one_gpu_with_all_its_kernels_copies_for_fsdp(empty: Path) -> None:
    runs = lab.recorded("sharing", "peers").query("world_size == 1")
    whole = runs[runs["machine"].isin(["h100-b", "h100-e", "h200-i", "h200-h"])]
    assert len(whole) >= 8 and whole["kernel_fsdp_copies_ms"].max() == 0.0
    assert whole["kernel_norm_pointwise_ms"].min() > 1.0
    named = lab.kernels("h100/speed.fp8.levers").query("name.str.contains('split_with_sizes')")
    assert len(named) and named["class"].unique().tolist() == ["norm/pointwise"]


@pytest.mark.parametrize("variant", ["fp8"])
def test_the_time_of_a_step_stays_the_same(empty: Path, variant: str) -> None:
    run = lab.recorded("speed").query("variant == @variant and part == 'levers'").iloc[0]
    raw = json.loads((Path(run["run"]) / "summary.json").read_text())["results"]
    both = ("kernel_fsdp_copies_ms", "kernel_norm_pointwise_ms")
    assert sum(run[name] for name in both) == pytest.approx(sum(raw[name] for name in both))
