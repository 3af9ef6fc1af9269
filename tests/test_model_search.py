"""The search for the largest model: real process groups on a CPU, within an allocation limit, and
its estimate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

from lsai_core.base.errors import UserError
from lsai_core.base.files import read_jsonl
from lsai_core.config.strict import deep_merge
from lsai_core.model.transformer import count_parameters
from lsai_core.prediction.memory import predict
from lsai_lab.runs.kinds import Context
from lsai_lab.searches.config import ModelSearchConfig
from lsai_lab.searches.model_search import first_size, run
from lsai_lab.searches.tries import attempt, limit_allocations, server


@pytest.fixture(autouse=True)
def tries_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def config(**changes: Any) -> ModelSearchConfig:
    shape = {"model": {"d_model": 256, "n_heads": 2, "n_kv_heads": 2, "d_ff": 1024}, "seq_len": 32}
    train = tiny(**deep_merge(shape, changes.pop("train", {})))
    settings = {
        "train": train,
        "grow": "n_layers",
        "measure": "train",
        "cpu_limit_gib": 0.2,
        "resolution": 0.3,
    }
    return ModelSearchConfig.model_validate({**settings, **changes})


def search(folder: Path, **changes: Any) -> dict[str, Any]:
    return run(config(**changes), Context(folder, folder, folder))


def no_thread(rank: int, limited: bool) -> dict[str, float]:
    if limited:
        limit_allocations(1)
    # what starting a thread raises; 2.11 starts one late
    raise RuntimeError("Resource temporarily unavailable")


@pytest.mark.parametrize(("limited", "outcome"), [(True, "oom"), (False, "failed")])
def test_no_memory_for_a_thread_is_no_memory(limited: bool, outcome: str) -> None:
    found, _ = attempt(
        server(["lsai_lab.searches.model_search"], on_gpu=False),
        no_thread,
        limited,
        processes=1,
        timeout_s=60,
    )
    assert found["outcome"] == outcome and "temporarily unavailable" in found["note"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_found_model_fits_and_a_larger_one_does_not(tmp_path: Path, processes: int) -> None:
    found = search(tmp_path, train={"parallel": {"fsdp": processes}})
    outcomes = {t["size"]: t["outcome"] for t in found["tries"]}
    assert outcomes[found["largest_size"]] == "ok" and set(outcomes.values()) == {"ok", "oom"}, (
        found["tries"]
    )
    beyond = min(size for size, outcome in outcomes.items() if outcome == "oom")
    assert found["largest_size"] < beyond <= found["largest_size"] * 1.3 + 1
    assert found["n_layers"] == found["largest_size"] and found["world_size"] == processes
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["size"] for row in rows] == [t["size"] for t in found["tries"]]
    # Of the step itself: random tokens cost log(V) nats and a little; torch alone takes some 0.1
    # GiB of host memory.
    assert found["loss"] == pytest.approx(math.log(320), abs=0.5) and 0 < found["step_s"] < 60
    assert 0.1 * processes < found["host_gib"] < 10 * processes
    # Both moments of this process's slice, in fp32.
    assert found["states_gib"] == pytest.approx(
        8 * found["parameters"] / processes / 2**30, rel=0.05
    )
    assert all(("loss" in t) == (t["outcome"] == "ok") for t in found["tries"])


@pytest.mark.slow
def test_weights_alone_fill_most_of_the_limit_and_two_processes_hold_more(tmp_path: Path) -> None:
    one, two = (
        search(
            tmp_path,
            measure="load",
            resolution=0.1,
            train={"precision": "bf16", "parallel": {"fsdp": n}},
        )
        for n in (1, 2)
    )
    assert 0.8 < one["weights_share"] <= 1.0
    assert one["largest_size"] == pytest.approx(one["estimated_size"], rel=0.2)
    assert two["parameters"] > 1.5 * one["parameters"]
    assert len(one["tries"]) <= 5


def test_a_search_has_an_end_in_time_and_in_size(tmp_path: Path) -> None:
    short = search(tmp_path, measure="load", budget_s=0.001, resolution=0.0)
    assert len(short["tries"]) == 1 and short["search_out_of_time"]
    capped = search(tmp_path, measure="load", grow="all", max_size=1)
    assert capped["search_capped"] and capped["largest_size"] == 1
    # The token table alone is 268 MB. A much smaller limit would leave Python itself no memory to
    # say so.
    large = {
        "model": {"vocab_size": 65_536, "d_model": 1024, "n_heads": 8},
        "data": {"vocab_size": 65_536},
    }
    nothing = search(tmp_path, measure="load", cpu_limit_gib=0.1, max_size=2, train=large)
    assert nothing["largest_size"] == 0 and nothing["parameters"] == 0


def test_a_process_that_does_not_fit_ends_all_of_its_group(tmp_path: Path) -> None:
    hanging = search(tmp_path, max_size=1, try_timeout_s=0.01, train={"parallel": {"fsdp": 2}})
    assert [t["outcome"] for t in hanging["tries"]] == ["timeout"]


def first(usable_gib: float, on_host_gib: float | None = None, **changes: Any) -> int:
    return first_size(config(**changes), usable_gib, on_host_gib)


def test_weights_alone_begin_at_their_bytes() -> None:
    shape: dict[str, Any] = {"measure": "load", "max_size": 5000}
    bytes_of_100 = 4 * count_parameters(config().sized(100).model).total
    exact = bytes_of_100 * (1 + 1e-9) / 2**30
    assert (
        first(exact, **shape) == first(exact / 2, train={"parallel": {"fsdp": 2}}, **shape) == 100
    )
    assert first(2 * exact, train={"precision": "bf16"}, **shape) > 390
    assert first(1e-9, **shape) == 1 and first(99, measure="load", max_size=2) == 2
    scaled = config(grow="all").sized(3).model
    assert (scaled.d_model, scaled.n_layers) == (768, 24)


@pytest.mark.slow
@pytest.mark.parametrize("grow", ["all", "n_layers"])
@pytest.mark.parametrize("parallel", [{}, {"fsdp": 2}, {"fsdp": 2, "cpu_offload": True}], ids=str)
def test_the_search_begins_at_the_largest_step_that_is_predicted_to_fit(
    grow: Any, parallel: dict[str, Any]
) -> None:
    shape: dict[str, Any] = {
        "grow": grow,
        "train": {"grad_checkpoint": "full", "parallel": parallel},
        "max_size": 400,
    }
    host = 0.25 if parallel.get("cpu_offload") else None
    found = first(0.5, host, **shape)
    at, beyond = (predict(config(**shape).sized(n)) for n in (found, found + 1))
    if host:
        assert 2 * at.host <= host < 2 * beyond.host * 1.01
    else:
        assert at.needs <= 0.5 and beyond.needs > 0.97 * 0.5
    assert first(0.001, host, **shape) == 1
    assert first(99, host and 99, **{**shape, "max_size": 2}) == 2


def test_a_search_keeps_what_decides_memory_only() -> None:
    base = {
        "model": {"preset": "lab-tiny"},
        "optim": {"lr": 1.0},
        "seq_len": 64,
        "precision": "bf16",
    }
    kept = ModelSearchConfig.from_study(base, {"measure": "load", "grow": "all"})
    assert kept == ModelSearchConfig.from_study(
        {**base, "optim": {"lr": 2.0}}, {"measure": "load", "grow": "all"}
    )
    assert kept["train"]["seq_len"] == 64 and kept["train"]["precision"] == "bf16"
    with pytest.raises(UserError, match="unknown key 'seqlen'"):
        ModelSearchConfig.from_study({**base, "seqlen": 3}, {"measure": "load", "grow": "all"})
