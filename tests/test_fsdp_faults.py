"""Faults while a sharded checkpoint is written: a full disk, a process killed in the middle. The
older one goes on."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from fsdp_fixture import config, dataset, plan, write_text

from lsai_core.base.files import read_jsonl
from lsai_core.training.sharded_checkpoint import sharded_checkpoints
from lsai_lab.launch.launch import WorkerFailed, launch, torchrun

pytestmark = pytest.mark.slow
STEPS = 14
# Starts a worker whose rank 1 dies while it writes its slices of step 8.
DYING = """
import os, signal, sys
from pathlib import Path
from torch.distributed.checkpoint import filesystem
from lsai_lab.runs.worker import main

write = filesystem.FileSystemWriter.write_data

def write_data(self, *arguments):
    if os.environ["RANK"] == "1" and Path(self.path).name == "sharded-00000008":
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, *arguments)

filesystem.FileSystemWriter.write_data = write_data
main(Path(sys.argv[3]), Path(sys.argv[4]))
"""


def planned(tmp_path: Path, **changes: Any) -> tuple[Path, Path]:
    """A run of two processes that saves every four steps, and where its data lies."""
    text, data = write_text(tmp_path), tmp_path / "data"
    settings = {
        "steps": STEPS,
        "checkpoint": {"every": 4},
        "profile": {"memory_steps": 0},
        **changes,
    }
    run = config(text, parallel={"fsdp": 2}, **settings)
    dataset(run, data)
    return plan(run, tmp_path / "runs" / "test" / "faults"), data


def die_in_the_second_save(tmp_path: Path, folder: Path, data: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    with pytest.raises(WorkerFailed, match="rank 1 was ended by SIGKILL"):
        launch(folder, data, 2, command=[*torchrun(2), str(script)])


def test_a_kill_in_mid_save_costs_only_the_new_checkpoint(tmp_path: Path) -> None:
    folder, data = planned(tmp_path)
    die_in_the_second_save(tmp_path, folder, data)
    assert [path.name for path in sharded_checkpoints(folder)] == ["sharded-00000004"]
    assert (folder / "sharded-00000008").exists(), "it died while it wrote"
    results = launch(folder, data, 2)
    assert results["resumed_at"] == 4
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == list(range(STEPS))


def test_a_full_disk_is_told_and_the_older_checkpoint_goes_on(tmp_path: Path) -> None:
    folder, data = planned(tmp_path)
    die_in_the_second_save(tmp_path, folder, data)
    older = folder / "sharded-00000004"
    largest = max(path.stat().st_size for path in older.glob("*.distcp"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, limits[1]))
    try:
        with pytest.raises(
            WorkerFailed, match=r"the checkpoint of step 8 could not be saved: .*File too large"
        ) as told:
            launch(folder, data, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(told.value)
    assert sharded_checkpoints(folder) == [older]
    assert launch(folder, data, 2)["resumed_at"] == 4
