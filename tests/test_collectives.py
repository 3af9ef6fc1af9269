"""The bench of messages between processes, over two real gloo processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lsai_core.base.errors import UserError
from lsai_core.base.files import read_jsonl
from lsai_core.training.combinations import checked
from lsai_lab.benches.collectives import bus_share
from lsai_lab.benches.config import OPERATIONS, CollectivesConfig
from lsai_lab.launch.launch import launch
from lsai_lab.runs.execute import write_plan
from lsai_lab.runs.records import RunId
from lsai_lab.runs.study import PlannedRun


def test_every_message_is_timed_alone_and_beside_products(tmp_path: Path) -> None:
    config = checked(
        CollectivesConfig,
        {"device": "cpu", "dtype": "float32", "bytes": [4096], "product": 64, "point_ms": 1.0},
        "test",
    )
    folder = tmp_path / "runs" / "test" / "messages"
    folder.mkdir(parents=True)
    run_id = RunId(study="test", variant="messages", key="0")
    write_plan(PlannedRun(run_id, "collectives", config, "test", 60.0, folder, {}), "pytest")
    results = launch(folder, tmp_path / "data", 2)
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [(row["operation"], row["beside"]) for row in rows] == [
        (operation, beside) for beside in (False, True) for operation in OPERATIONS
    ]
    for row in rows:
        assert row["outcome"] == "ok" and row["ms"] > 0
        share = {"all_reduce": 1.0, "send_receive": 1.0}.get(row["operation"], 0.5)
        assert row["bus_gb_per_s"] == pytest.approx(4096 / row["ms"] / 1e6 * share, rel=1e-3)
        assert ("product_slowdown" in row) is row["beside"]
    assert results["points_ok"] == len(rows)
    assert results["all_reduce_bus_gb_per_s"] == rows[0]["bus_gb_per_s"]


@pytest.mark.parametrize(
    ("operation", "share"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("all_to_all", 0.75), ("send_receive", 1.0)],
)
def test_a_bus_carries_what_each_of_four_processes_must_send(operation: str, share: float) -> None:
    assert bus_share(operation, 4) == share  # type: ignore[arg-type]


def test_messages_need_two_processes() -> None:
    with pytest.raises(UserError, match="processes: Input should be greater than 1"):
        checked(CollectivesConfig, {"processes": 1}, "test")
