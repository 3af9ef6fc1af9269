"""Resuming to the last bit after an exception, a SIGKILL and a SIGTERM; saving that never costs the
older checkpoint."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKOUT, Project, losses, tiny

from lsai_core.base.errors import UserError
from lsai_core.config.train import TrainConfig
from lsai_core.training import checkpoint
from lsai_core.training.loop import Trained, train
from lsai_lab.data import Dataset

CONFIG = tiny(steps=40, checkpoint={"every": 5}, profile={"memory_steps": 2, "skip_steps": 2})

# Trains slowly enough to be killed in the middle of it.
CHILD = """
import sys, time, torch
from pathlib import Path
from lsai_core.config.train import TrainConfig
from lsai_lab.data import Dataset
from lsai_core.training.loop import train
config = TrainConfig.model_validate_json(sys.argv[1])
train(config, Dataset(Path(sys.argv[2])), Path(sys.argv[3]), on_rows=lambda rows: time.sleep(0.05))
"""


pytestmark = pytest.mark.usefixtures("one_thread")


class Interrupted(Exception):
    pass


def stop_at(step: int) -> Callable[[list[dict[str, Any]]], None]:
    def on_rows(rows: list[dict[str, Any]]) -> None:
        if any(row["step"] >= step for row in rows):
            raise Interrupted

    return on_rows


def weights(trained: Trained) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trained.model.parameters()])


def resumed_as_never_stopped(config: TrainConfig, dataset: Dataset, folder: Path) -> Trained:
    """A whole run, in `folder`/whole; one that is stopped behind a checkpoint at its seventh step
    at the latest and goes on, in `folder`/again, has its losses and its weights."""
    whole = train(config, dataset, folder / "whole")
    with pytest.raises(Interrupted):
        train(config, dataset, folder / "again", on_rows=stop_at(6))
    again = train(config, dataset, folder / "again")
    assert again.resumed_at > 0 and losses(folder / "again") == losses(folder / "whole")
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(again), strict=True))
    return whole


def recorded_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(
    condition: Callable[[], Any], process: subprocess.Popen[Any], seconds: float = 120
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended before its time: {process.communicate()}"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_resuming_equals_never_having_stopped(dataset: Dataset, tmp_path: Path) -> None:
    whole = train(CONFIG, dataset, tmp_path / "whole")
    # Twice interrupted, once between checkpoints and once right behind one.
    for step in (13, 25):
        with pytest.raises(Interrupted):
            train(CONFIG, dataset, tmp_path / "parts", stop_at(step))
    resumed = train(CONFIG, dataset, tmp_path / "parts")
    assert resumed.resumed_at == 25
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.validation_loss == whole.validation_loss
    assert [row["lr"] for row in resumed.rows] == [row["lr"] for row in whole.rows]


def test_metered_steps_of_every_sitting_are_left_out_of_the_speed(
    dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        train(CONFIG, dataset, tmp_path, stop_at(13))
    with pytest.raises(Interrupted):
        train(CONFIG, dataset, tmp_path, stop_at(27))
    trained = train(CONFIG, dataset, tmp_path)
    # Each sitting begins with a first step and two metered ones: 0-2, 10-12, 25-27.
    expected = [
        row["step_ms"]
        for row in trained.rows
        if row["step"] not in {0, 1, 2, 10, 11, 12, 25, 26, 27}
    ]
    assert trained.timed_ms == expected


@pytest.mark.slow
def test_kill_9_in_mid_run_costs_nothing_but_time(dataset: Dataset, tmp_path: Path) -> None:
    whole = train(CONFIG, dataset, tmp_path / "whole")
    folder = tmp_path / "killed"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, CONFIG.model_dump_json(), str(dataset.folder), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)},
        stderr=subprocess.PIPE,
    )
    wait_for(lambda: checkpoint.checkpoints(folder) and recorded_steps(folder) % 5 > 2, child)
    child.kill()
    child.communicate()
    assert recorded_steps(folder) < CONFIG.steps
    resumed = train(CONFIG, dataset, folder)
    assert resumed.resumed_at >= 5
    assert losses(folder) == losses(tmp_path / "whole")
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.slow
def test_sigterm_leaves_a_checkpoint_and_the_next_command_goes_on(
    new_project: Callable[..., Project], dataset: Dataset, tmp_path: Path
) -> None:
    project = new_project({"baseline": {}}, steps=900, checkpoint={"every": 50})
    project.environment["OMP_NUM_THREADS"] = "1"
    process = project.start("study", "memory", "--parts", "train")
    folder = project.runs / "memory"
    wait_for(lambda: any(recorded_steps(path) > 60 for path in folder.glob("*")), process)
    # Meanwhile a second command for the same run is refused in one line, and the first is unharmed.
    code, _, err = project.lsai("study", "memory", "--parts", "train")
    assert code == 2 and len(err.splitlines()) == 1, err
    assert f"memory.baseline is being run by process {process.pid} on " in err and " since " in err
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM, (out, err)
    assert "stopped after step" in out
    assert "Traceback" not in err and "the same command goes on from here" in err.splitlines()[-1]
    stopped = project.found()["baseline"]
    at = recorded_steps(stopped.folder)
    assert stopped.summary.outcome == "preempted" and 60 < at < 900
    assert [path.name for path in checkpoint.checkpoints(stopped.folder)] == [
        f"checkpoint-{at:08d}.pt"
    ]

    code, out, _ = project.lsai("study", "memory", "--parts", "train")
    run = project.found()["baseline"]
    assert (code, run.summary.outcome, run.summary.results["resumed_at"]) == (0, "ok", at), out
    assert not list(run.folder.glob("*checkpoint*"))  # a finished run keeps none
    train(tiny(steps=900, log_every=100, profile={"memory_steps": 0}), dataset, tmp_path)
    assert losses(run.folder) == losses(tmp_path)


def test_what_a_kill_during_saving_leaves_costs_only_the_new_checkpoint(
    dataset: Dataset, tmp_path: Path
) -> None:
    whole = train(CONFIG, dataset, tmp_path / "whole")
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(CONFIG, dataset, folder, stop_at(12))
    # killed while writing
    (folder / ".checkpoint-00000015.pt.x1y2z3.part").write_bytes(b"half of it")
    # killed between the two files
    (folder / "checkpoint-00000020.pt").write_bytes(b"no .json beside it")
    resumed = train(CONFIG, dataset, folder)
    assert resumed.resumed_at == 10
    assert torch.equal(weights(resumed), weights(whole)) and losses(folder) == losses(
        tmp_path / "whole"
    )
    assert not list(folder.glob("*.part"))
    checkpoint.remove_all(folder)
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_during_saving_keeps_the_older_checkpoint(
    dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        train(CONFIG, dataset, tmp_path, stop_at(12))
    before = checkpoint.checkpoints(tmp_path)[-1].read_bytes()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, old[1]))
    try:
        with pytest.raises(
            OSError, match=r"checkpoint of step 15 could not be saved: .*File too large"
        ):
            train(CONFIG, dataset, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert [path.read_bytes() for path in checkpoint.checkpoints(tmp_path)] == [before]
    assert not list(tmp_path.glob("*.part"))
    assert train(CONFIG, dataset, tmp_path).resumed_at == 10


def test_the_newest_ones_are_kept(dataset: Dataset, tmp_path: Path) -> None:
    train(tiny(steps=22, checkpoint={"every": 5, "keep": 2}), dataset, tmp_path)
    names = sorted(path.name for path in tmp_path.glob("*checkpoint*"))
    assert names == [
        f"checkpoint-000000{step}.{end}" for step in (15, 20) for end in ("json", "pt")
    ]


def test_a_torn_last_line_of_the_metrics_is_written_again(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(CONFIG, dataset, tmp_path, stop_at(13))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "lo')
    train(CONFIG, dataset, tmp_path)
    assert len(losses(tmp_path)) == CONFIG.steps


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one bit": (flip, "is damaged: size or checksum do not match"),
    "cut off": (
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        "is damaged: size or checksum",
    ),
    "gone": (lambda path: path.unlink(), "cannot be read"),
    "bad json": (lambda path: path.with_suffix(".json").write_text("{"), "cannot be read"),
    "other json": (lambda path: path.with_suffix(".json").write_text("[1]"), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_one_clear_line(
    dataset: Dataset, tmp_path: Path, damage: str
) -> None:
    with pytest.raises(Interrupted):
        train(CONFIG, dataset, tmp_path, stop_at(12))
    apply, message = DAMAGES[damage]
    apply(checkpoint.checkpoints(tmp_path)[-1])
    metrics = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match=message) as caught:
        train(CONFIG, dataset, tmp_path)
    assert "checkpoint-00000010" in str(caught.value) and "delete" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "metrics.jsonl").read_text() == metrics  # what was measured is still there


def test_a_checkpoint_of_another_model_is_one_clear_line(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(CONFIG, dataset, tmp_path, stop_at(12))
    with pytest.raises(UserError, match="does not fit this run's model"):
        train(tiny(model={"n_layers": 3}), dataset, tmp_path)


def test_a_checkpoint_states_its_size_and_checksum(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(CONFIG, dataset, tmp_path, stop_at(12))
    path = checkpoint.checkpoints(tmp_path)[-1]
    facts = json.loads(path.with_suffix(".json").read_text())
    assert facts["bytes"] == path.stat().st_size and facts["step"] == 10
    assert checkpoint.load(path)["step"] == 10
