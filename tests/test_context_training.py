"""Training with context parallelism against one process: losses, gradient norms, weights,
checkpoints, faults; over gloo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from context_training_job import LEAN, RUNS, STEPS
from fsdp_fixture import assert_predicted, config, dataset, pids, plan, write_text

from lsai_core.base.errors import UserError
from lsai_core.base.files import read_jsonl
from lsai_core.model.hf import load_hf, save_hf, to_hf
from lsai_core.model.transformer import build_model
from lsai_core.training.loop import Trained, train
from lsai_lab.launch import launch as launcher
from lsai_lab.launch.launch import WorkerFailed, launch, torchrun
from lsai_lab.runs.execute import ActiveRun
from lsai_lab.runs.records import outcome_of

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@dataclass
class Job:
    root: Path
    text: Path
    facts: dict[str, Any]
    known: dict[str, Trained]

    def rows(self, name: str) -> list[dict[str, Any]]:
        return read_jsonl(self.root / name / "metrics.jsonl")

    def alone(self, name: str) -> Trained:
        """The same sequences by one process that keeps everything; equal ones once."""
        left_out = {"parallel", "checkpoint", "compile", *LEAN}
        changes = {key: value for key, value in RUNS[name].items() if key not in left_out}
        key = json.dumps(changes, sort_keys=True)
        if key not in self.known:
            run = config(self.text, **changes)
            folder = self.root / f"alone-{len(self.known)}"
            folder.mkdir()
            self.known[key] = train(run, dataset(run, self.root / "data"), folder)
        return self.known[key]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """All runs of `context_training_job.py`, by two and by four processes."""
    torch.set_num_threads(1)  # tiny models: a second thread only waits
    root = tmp_path_factory.mktemp("context-training")
    text = write_text(root)
    dataset(config(text), root / "data")
    script = Path(__file__).parent / "context_training_job.py"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    facts = {}
    for size in (2, 4):
        command = [*torchrun(size), str(script), str(root), str(text)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        facts |= json.loads((root / f"facts-{size}.json").read_text())
    yield Job(root, text, facts, {})


def curve(rows: list[dict[str, Any]], column: str) -> torch.Tensor:
    return torch.tensor([row[column] for row in rows], dtype=torch.float64)


def difference(found: list[dict[str, Any]], wanted: list[dict[str, Any]], column: str) -> float:
    """The largest relative difference of a column over all steps."""
    return float((curve(found, column) / curve(wanted, column) - 1).abs().max())


@pytest.mark.parametrize("name", [name for name in RUNS if name != "bf16"])
def test_processes_that_share_sequences_train_as_one_does(job: Job, name: str) -> None:
    alone, rows = job.alone(name), job.rows(name)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert rows[0]["tokens_in_step"] == alone.rows[0]["tokens_in_step"]
    for column in ("loss", "grad_norm"):
        assert difference(rows, alone.rows, column) <= 1e-5
    assert job.facts[name]["validation_loss"] == pytest.approx(alone.validation_loss, rel=1e-5)
    model = load_hf(job.root / name / "model")
    found, wanted = (
        to_hf(model.state_dict(), model.config),
        to_hf(alone.model.state_dict(), alone.model.config),
    )
    for key, value in wanted.items():
        assert (found[key] - value).norm() <= 1e-4 * value.norm(), key


def test_bf16_stays_close_to_one_process(job: Job) -> None:
    alone = job.alone("bf16")
    assert difference(job.rows("bf16"), alone.rows, "loss") <= 5e-3
    assert job.facts["bf16"]["validation_loss"] == pytest.approx(alone.validation_loss, rel=5e-3)


def test_weights_are_sharded_over_all_processes_of_a_copy(job: Job) -> None:
    total = sum(p.numel() for p in load_hf(job.root / "zigzag-4" / "model").parameters())
    for name in ("zigzag-4", "sharded"):
        assert sum(job.facts[name]["held"]) == total and max(job.facts[name]["held"]) <= 0.3 * total
    assert sum(job.facts["replicated"]["held"]) == 2 * total
    assert job.facts["zigzag-4"]["kernel"] == "sdpa_flash"


@pytest.mark.parametrize("name", ["zigzag-4", "ulysses-2", "sharded", "full", "lean"])
def test_memory_is_predicted(job: Job, name: str) -> None:
    assert_predicted(config(job.text, **RUNS[name]), job.facts[name]["peak_gib"])


@pytest.mark.parametrize("processes", [1, 4])
def test_a_checkpoint_of_two_slices_goes_on_with_others(
    job: Job, processes: int, tmp_path: Path
) -> None:
    run = config(job.text, steps=STEPS, parallel={"cp": processes, "cp_method": "usp"})
    folder = plan(run, tmp_path / "runs" / "test" / "resumed")
    shutil.copytree(job.root / "stopped" / "sharded-00000012", folder / "sharded-00000012")
    shutil.copy(job.root / "stopped" / "metrics.jsonl", folder)
    if processes == 1:
        resumed = train(run, dataset(run, job.root / "data"), folder).resumed_at
    else:
        results = launch(folder, job.root / "data", processes)
        resumed = results["resumed_at"]
        assert results["world_size"] == 4 and results["tokens"] == STEPS * run.tokens_per_step
    assert resumed == 12
    rows = read_jsonl(folder / "metrics.jsonl")
    assert len(rows) == STEPS and difference(rows, job.rows("stopped"), "loss") <= 1e-5


def test_training_starts_from_the_weights_of_a_folder(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = config(job.text).model
    start = build_model(shape, seed=5)
    save_hf(start, tmp_path / "models" / "mine")
    monkeypatch.setenv("LSAI_DATA", str(tmp_path))
    results = {}
    for cp in (1, 2):
        run = config(job.text, steps=2, init_from="mine", parallel={"cp": cp})
        folder = plan(run, tmp_path / "runs" / "test" / f"from-{cp}")
        summary = ActiveRun(folder, job.root / "data").execute()
        assert summary.outcome == "ok", summary.reason
        results[cp] = read_jsonl(folder / "metrics.jsonl")
        assert summary.results["weights"] == "mine"
    assert difference(results[2], results[1], "loss") <= 1e-5
    run = config(job.text, steps=2, seed=5)
    (tmp_path / "random").mkdir()
    random = train(
        run.model_copy(update={"seed": 0}), dataset(run, job.root / "data"), tmp_path / "random"
    )
    assert difference(results[1], random.rows, "loss") > 1e-5
    elsewhere = plan(config(job.text, init_from="yours"), tmp_path / "runs" / "test" / "missing")
    summary = ActiveRun(elsewhere, job.root / "data").execute()
    assert summary.outcome == "unavailable" and "needs the weights 'yours'" in str(summary.reason)
    other = plan(
        config(job.text, init_from="mine", model={"n_layers": 3}),
        tmp_path / "runs" / "test" / "other",
    )
    summary = ActiveRun(other, job.root / "data").execute()
    assert summary.outcome == "failed" and "n_layers=2, the model n_layers=3" in str(summary.reason)


# Faults


def faulty(root: Path, device: str) -> Path:
    run = config(
        write_text(root), steps=5000, parallel={"cp": 2}, profile={"memory_steps": 0}, device=device
    )
    dataset(run, root / "data")
    return plan(run, root / "runs" / "test" / "faulty")


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_two_gpus])]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_no_rank_outlives_one_that_is_killed(device: str, tmp_path: Path) -> None:
    folder, killed = faulty(tmp_path, device), list[float]()

    def kill(rows: list[dict[str, Any]]) -> None:
        if rows and rows[-1]["step"] >= 3 and not killed:
            os.kill(int((folder / "logs" / "rank-1.pid").read_text()), signal.SIGKILL)
            killed.append(time.monotonic())

    with pytest.raises(WorkerFailed, match="rank 1 was ended by SIGKILL"):
        launch(folder, tmp_path / "data", 2, on_rows=kill)
    assert time.monotonic() - killed[0] < 60
    assert not any(psutil.pid_exists(pid) for pid in pids(folder))


OUT_OF_MEMORY = """
import os, sys, time
from pathlib import Path
import torch
from lsai_core.context import operators
from lsai_lab.runs.worker import main

attend, calls = operators.planned_forward, []

def planned_forward(*arguments):
    calls.append(0)
    if os.environ["RANK"] == "1" and len(calls) == 9:  # in the fifth step, between two layers
        Path(sys.argv[-2], "raised").write_text(str(time.time()))
        if torch.cuda.is_available():
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.43 GiB")
    return attend(*arguments)

operators.planned_forward = planned_forward
main(Path(sys.argv[-2]), Path(sys.argv[-1]))
"""


@pytest.mark.parametrize("device", DEVICES)
def test_no_rank_waits_for_one_that_is_out_of_memory(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, worker = faulty(tmp_path, device), tmp_path / "worker.py"
    worker.write_text(OUT_OF_MEMORY)
    monkeypatch.setattr(launcher, "torchrun", lambda nproc: [*torchrun(nproc), str(worker)])
    with pytest.raises(MemoryError, match=r"rank 1: .*out of memory") as caught:
        launch(folder, tmp_path / "data", 2)
    assert time.time() - float((folder / "raised").read_text()) < 60
    assert outcome_of(caught.value)[0] == "oom"
    assert not any(psutil.pid_exists(pid) for pid in pids(folder))


# On GPUs


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *(
            (method, {"compile": True, **LEAN, "mlp_chunk": 300})
            for method in ("zigzag", "lightseq", "ulysses")
        ),
        *((method, {"grad_checkpoint": "full"}) for method in ("zigzag", "usp", "torch")),
        ("torch", {"grad_checkpoint": "full", "compile": True}),
    ],
    ids=str,
)
def test_two_gpus_train_as_one_does(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    text, rows = write_text(tmp_path), []
    model = dict(n_layers=4, d_model=256, n_heads=4, n_kv_heads=2, d_ff=512)
    base = {
        "device": "cuda",
        "precision": "bf16",
        "seq_len": 512,
        "steps": 10,
        "model": model,
        "batch_size": 2,
    }
    for parallel in ({}, {"cp": 2, "cp_method": method}):
        run = config(text, **base, **(changes if parallel else {}), parallel=parallel)
        dataset(run, tmp_path / "data")
        folder = plan(run, tmp_path / "runs" / "test" / f"gpus-{len(rows)}")
        summary = ActiveRun(folder, tmp_path / "data").execute()
        assert summary.outcome == "ok", summary.reason
        rows.append(read_jsonl(folder / "metrics.jsonl"))
    assert difference(rows[1], rows[0], "loss") <= 5e-3


# What is refused before anything starts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"seq_len": 36, "parallel": {"cp": 4}},
            "36 cannot be cut into 8 equal parts over 4 ranks; use 32 or 40",
        ),
        (
            {"parallel": {"cp": 3, "cp_method": "ulysses"}, "seq_len": 48},
            "2 key-value heads over 3 ranks",
        ),
        (
            {"parallel": {"cp": 2}, "attention": {"backend": "flex"}},
            "'flex' returns no log-sum-exp",
        ),
        ({"parallel": {"cp": 2, "cp_method": "torch"}}, "cp_method torch needs 16-bit inputs"),
        (
            {
                "parallel": {"cp": 2, "cp_method": "torch"},
                "precision": "bf16",
                "attention": {"window": 8},
            },
            "cp_method torch has no sliding window",
        ),
        ({"parallel": {"replicate": 2}}, r"need fsdp > 1 \(or cp > 1\)"),
        ({"saved_inputs": "host"}, "use grad_checkpoint full or attention"),
        ({"mlp_chunk": 8, "blocks": "plain"}, "mlp_chunk needs blocks: fused"),
        (
            {"mlp_chunk": 8, "precision": "bf16", "fp8": {"recipe": "fused"}},
            "leave them out of fp8.layers",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        config(Path("text.txt"), **changes)
    assert "\n" not in str(refused.value)
