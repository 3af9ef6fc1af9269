"""The ways of sharing a model side by side: what was said before the runs, what came out, and the
bytes that each way keeps."""

from __future__ import annotations

import pandas as pd
import pytest
from fsdp_fixture import config

import lsai_lab as lab
from lsai_lab.chapters.ways import bytes_per_parameter, ways_measured


@pytest.fixture(scope="module")
def ways() -> pd.DataFrame:
    return ways_measured(lab.recorded("sharing"))


def test_what_was_said_before_the_runs_came_out(ways: pd.DataFrame) -> None:
    assert len(ways) >= 12 and ways["way"].notna().all()
    assert ways["active_error"].abs().max() < 0.03
    pipelines = ways["variant"].str.startswith("pp")  # said to reserve up to a tenth too much
    missed = (ways["part"] == "long") & (ways["variant"] == "tp_4")  # the one beyond 5 %
    assert ways[missed]["reserved_error"].between(-0.051, -0.05).all()
    assert ways[~pipelines & ~missed]["reserved_error"].abs().max() < 0.05
    assert (ways[pipelines]["reserved_error"].between(0, 0.1)).all()


def test_every_way_begins_with_one_loss() -> None:
    runs = lab.recorded("sharing")
    runs = runs[(runs["outcome"] == "ok") & (runs["part"] == "small")]
    for _, seed in runs.groupby(["repeat", "gpu", "tokens"]):  # two GPUs have half the sequences
        first = [lab.steps(run)["loss"].iloc[0] for _, run in seed.iterrows()]
        assert max(first) / min(first) - 1 < 5e-5  # bf16: equal up to the order of sums


@pytest.mark.parametrize(
    ("parallel", "kept"),
    [
        ({"kind": "ddp", "replicate": 4}, 16),
        ({"kind": "zero1", "replicate": 4}, 8 + 8 / 4),
        ({"kind": "zero2", "fsdp": 4}, 16 / 4),
        ({"fsdp": 2, "replicate": 2}, 16 / 2),
        ({"fsdp": 2, "tp": 2}, 16 / 4),
        ({"cp": 4}, 16 / 4),
    ],
)
def test_bytes_of_a_parameter(parallel: dict[str, object], kept: float, tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = config(tmp_path / "text", parallel=parallel, precision="fp32")
    assert bytes_per_parameter(run) == kept
