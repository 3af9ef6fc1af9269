"""What changes on many nodes: the formulas by hand, what they predict against what real processes send, and the chapter."""

from __future__ import annotations

import json

import nbformat
import pytest
from conftest import CHECKOUT, write_run

from lsai_core.config import ModelConfig
from lsai_core.errors import UserError
from lsai_core.model import count_parameters
from lsai_core.strict import validated
from lsai_lab.analysis_scale import (
    daly,
    fastest_that_fits,
    fit,
    groupings,
    state_bytes,
    step_seconds,
    step_traffic,
)
from lsai_lab.benches.scale import Assumptions, ScaleConfig, run
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.notebook import execute_notebook
from lsai_lab.runs.records import Summary
from lsai_lab.runs.session import Session

TINY = {"n_layers": 2, "d_model": 8, "n_heads": 2, "n_kv_heads": 1, "d_ff": 16, "vocab_size": 32}


def model(**changes) -> ModelConfig:
    return validated(ModelConfig, {**TINY, **changes}, "test")


def test_traffic_by_hand():
    # A block: q and o 8x8, k and v 4x8, three of 16x8, two norms of 8; nothing needs padding over two processes.
    block, table, end = 2 * 64 + 2 * 32 + 3 * 128 + 16, 32 * 8, 8 + 32 * 8
    total = 2 * block + table + end
    assert total == count_parameters(model()).total
    traffic = step_traffic(model(), 2, 4)
    # bf16; the last block, the table and the last unit are gathered once
    assert traffic.bytes["all_gather"] == 2 * (2 * block + block + table + end)
    assert traffic.bytes["reduce_scatter"] == 4 * total  # fp32
    assert traffic.bytes["all_reduce"] == 4 * total // 2
    assert traffic.calls == {"all_gather": 5, "reduce_scatter": 4, "all_reduce": 4}
    assert traffic.sent["reduce_scatter"] == 4 * total / 2
    assert traffic.sent["all_reduce"] == pytest.approx(2 * 3 / 4 * 4 * total / 2)
    assert state_bytes(model(), 2) == 16 * total / 2
    assert step_traffic(model(), 2, 1).bytes["all_reduce"] == 0
    assert step_traffic(model(tie_embeddings=True), 2, 1).calls["all_gather"] == 4


def test_slices_are_padded_to_equal_size():
    # Over 32 processes qkv (16 x 8), o (8 x 8) and the MLP's output (8 x 16) get 32 rows, each norm of 8 gets 32 entries.
    block = 2 * 32 * 8 + 32 * 8 + 32 * 16 + 2 * 32  # the MLP's fused input has 32 rows already
    assert step_traffic(model(), 32, 1).bytes["reduce_scatter"] == 4 * (2 * block + 2 * 32 * 8 + 32)


def test_time_within_a_node_and_beyond():
    assume = Assumptions(
        gpus_per_node=2, nvlink_gb_per_s=100.0, network_gb_per_s=10.0, nvlink_latency_us=1.0, network_latency_us=10.0
    )
    inside, across, hybrid = step_traffic(model(), 2, 1), step_traffic(model(), 4, 1), step_traffic(model(), 2, 2)
    sent = inside.sent["all_gather"] + inside.sent["reduce_scatter"]
    assert step_seconds(inside, assume) == pytest.approx((sent / 100e9, 9 * 1 * 1e-6))
    sent = across.sent["all_gather"] + across.sent["reduce_scatter"]
    assert step_seconds(across, assume) == pytest.approx((sent / 20e9, 9 * 3 * 10e-6))  # two adapters a node
    bandwidth, latency = step_seconds(hybrid, assume)
    assert bandwidth == pytest.approx(step_seconds(inside, assume)[0] + hybrid.sent["all_reduce"] / 10e9)
    assert latency == pytest.approx(9e-6 + 4 * 2 * 10e-6)


def test_checkpoint_interval_is_the_best_one():
    interval, lost = daly(50.0, 10_000.0)
    assert (interval, lost) == (1000.0, pytest.approx(0.1))
    assert all(50 / t + t / 20_000 > lost for t in (900.0, 1100.0))


def test_fit_finds_the_law_and_never_falls():
    assert fit([2, 4, 8], [1 + 0.5 * n**2 for n in (2, 4, 8)], 2) == pytest.approx((1.0, 0.5))
    assert fit([2, 4, 8], [3.0, 2.0, 1.0], 1) == (2.0, 0.0)
    assert fit([1, 2], [0.5, 2.0], 1)[0] == 0.0


def test_real_processes_send_and_save_what_is_predicted(tmp_path):
    small = {"n_layers": 1, "d_model": 64, "n_heads": 2, "n_kv_heads": 1, "d_ff": 126, "vocab_size": 510}
    config = validated(
        ScaleConfig,
        {
            "model": small,
            "layouts": [[4, 1], [2, 2]],
            "agents": [2],
            "clients": [2, 6],
            "repeats": 1,
            "shapes": {"s": small},
            "nodes": [1, 8],
            "shard_nodes": [1],
        },
        "test",
    )
    results = run(config, Context(tmp_path, tmp_path, tmp_path))
    even = step_traffic(config.model, 2, 1).bytes["reduce_scatter"]
    assert results["layouts"][0]["reduce_scatter_bytes"] > even, "four processes pad this model, two do not"
    for row in results["layouts"]:
        traffic = step_traffic(config.model, row["shard"], row["replicate"])
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            assert row[f"{name}_bytes"] == traffic.bytes[name], name
            assert row[f"{name}_calls"] == traffic.calls[name], name
    assert all(row["seconds"] > 0 for row in (*results["agents"], *results["clients"]))


def test_bad_configs_are_one_line():
    base = {"model": TINY, "layouts": [[2, 1, 3]], "agents": [2], "clients": [2], "shapes": {}, "nodes": [1]}
    with pytest.raises(UserError, match="layouts") as error:
        validated(ScaleConfig, {**base, "shard_nodes": [1]}, "test")
    assert "\n" not in str(error.value)


def test_groupings_and_the_best_of_them():
    base = {
        "model": TINY,
        "layouts": [],
        "agents": [],
        "clients": [],
        "shapes": {"s": TINY},
        "nodes": [1, 4],
        "shard_nodes": [1, 2, 3],
    }
    config = validated(ScaleConfig, base, "test")
    groups = groupings(config, config.assume)
    assert list(zip(groups["nodes"], groups["shard"], groups["replicas"], strict=True)) == [
        (1, 4, 1), (4, 16, 1), (4, 4, 4), (4, 8, 2),
    ], "three nodes do not divide four; one node of one is FSDP over all"  # fmt: skip
    assert (groups["share"] * groups["compute_s"]).tolist() == pytest.approx(groups["communication_s"].tolist())
    best = fastest_that_fits(groups, memory_gib=1.0)
    assert (
        best["nodes"].tolist() == [1, 4] and best["communication_s"].iloc[1] == groups["communication_s"].iloc[1:].min()
    )
    smallest = groups["states_gib"].min()
    assert fastest_that_fits(groups, smallest)["nodes"].tolist() == [4], "on one node the states do not fit"


def test_the_chapter_checks_a_record_of_this_machine(tmp_path, monkeypatch):
    layout = {"shard": 2, "replicate": 2, "all_gather_bytes": 1, "reduce_scatter_bytes": 1, "all_reduce_bytes": 1}
    results = {
        "layouts": [layout],
        "agents": [{"agents": n, "seconds": 1 + n**2 / 1e4} for n in (2, 8, 64)],
        "clients": [{"clients": n, "seconds": n / 1e4, "slowest_s": n / 1e3} for n in (2, 32, 256)],
    }
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path))
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    (planned,) = Session("cpu").plan("scale")
    folder = write_run(tmp_path, "scale", "scale", "measure", kind="scale", results=results)
    (folder / "run.json").write_text(json.dumps({"machine": planned.machine}))
    summary = Summary.read(folder.rename(planned.folder))
    summary.id = planned.id
    summary.write(planned.folder)
    target = tmp_path / "60-scale.ipynb"
    assert execute_notebook(CHECKOUT / "notebooks" / "60-scale.ipynb", target, {}, root=CHECKOUT, timeout_s=120) is None
    outputs = [o for c in nbformat.read(target, as_version=4).cells if c.cell_type == "code" for o in c.outputs]
    text = "\n".join(o.data.get("text/markdown", "") for o in outputs if "data" in o)
    assert "0 of 1 layouts" in text, "a wrong count is told"
    (row,) = (line for line in text.splitlines() if "agent" in line and "| 512 |" in line)
    assert float(row.split("|")[5]) == pytest.approx(1 + 512**2 / 1e4, rel=0.05), "the fit carries the times further"
