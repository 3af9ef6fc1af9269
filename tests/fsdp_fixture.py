"""A tiny data set, a tiny model and planned runs of them, for the tests of training over several
processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lsai_core.config.strict import deep_merge
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.memory import predict
from lsai_core.training.combinations import checked
from lsai_lab.data import Dataset, prepare
from lsai_lab.runs.execute import write_plan
from lsai_lab.runs.records import RunId
from lsai_lab.runs.study import PlannedRun

STEPS = 6
SEQUENCES = 8  # per optimizer step, over all processes
METERED = {"memory_steps": 4}


def write_text(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    words = [
        "zażółć",
        "gęślą",
        "jaźń",
        "kot",
        "pies",
        "dom",
        "las",
        "rzeka",
        "góra",
        "chmura",
        "wiatr",
        "deszcz",
    ]
    path = folder / "text.txt"
    path.write_text("\n\n".join(" ".join(rng.choice(words, 60)) for _ in range(200)))
    return path


def config(text: Path, **changes: Any) -> TrainConfig:
    """`batch_size` follows from the number of processes, so that every variant trains on the same
    sequences."""
    base: dict[str, Any] = {
        "model": dict(n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, d_ff=64, vocab_size=400),
        "data": {"source": f"file:{text}", "vocab_size": 400},
        "device": "cpu",
        "seq_len": 32,
        "steps": STEPS,
        "log_every": 1,
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "profile": {"memory_steps": 1, "skip_steps": 1},
    }
    merged = deep_merge(base, changes)
    parallel = merged.get("parallel", {})
    world = parallel.get("fsdp", 1) * parallel.get("replicate", 1)
    merged.setdefault("batch_size", SEQUENCES // merged.get("grad_accum", 1) // world)
    return checked(TrainConfig, merged, "test")


def dataset(config: TrainConfig, root: Path) -> Dataset:
    return prepare(config.data, root, progress=False)


def plan(config: TrainConfig, folder: Path) -> Path:
    """Write what a worker needs into `folder`, which becomes a planned run."""
    folder.mkdir(parents=True, exist_ok=True)
    run_id = RunId(study="test", variant=folder.name, key="0")
    write_plan(PlannedRun(run_id, "train", config, "test", 60.0, folder, {}), "pytest")
    return folder


def pids(folder: Path) -> list[int]:
    """The processes of a run that have started and not left in good order."""
    texts = [path.read_text() for path in (folder / "logs").glob("rank-*.pid")]
    return [int(text) for text in texts if text]  # one that is being written is empty


def assert_predicted(config: TrainConfig, mean_peak_gib: float) -> None:
    """The mean of the peaks of `METERED` steps by processes that talk over gloo, in live tensors.

    One step may show too much: on a busy machine a thread of gloo sometimes holds a message, the
    gathered weights of a block, after the step has gone on.
    """
    predicted = predict(config, on="cpu").peak
    assert 0.99 * predicted <= mean_peak_gib <= 1.05 * predicted
