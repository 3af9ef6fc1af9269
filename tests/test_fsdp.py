"""Sharded training against one process: losses, gradients, weights, checkpoints and export, over
real gloo processes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_fixture import STEPS, config, dataset, plan
from fsdp_job import RESUMED, RUNS

from lsai_core.base.errors import UserError
from lsai_core.base.files import read_jsonl
from lsai_core.config.parallel import ParallelConfig
from lsai_core.config.train import TrainConfig
from lsai_core.model.hf import load_hf, to_hf
from lsai_core.parallel.world import World
from lsai_core.training.combinations import checked
from lsai_core.training.loop import Trained, train
from lsai_lab.launch.launch import launch, torchrun

EXACT = ("fsdp", "kept", "hsdp", "offload", "tied")
CLOSE = [
    ("bf16_autocast", 5e-3),
    ("bf16", 5e-3),
    ("fp8", 1e-2),
    ("fp8_fused", 1e-2),
    ("fp8_gather", 1e-2),
    ("fp8_gather_fp32", 1e-2),
    ("adam8bit", 1e-3),
]


@dataclass
class Job:
    root: Path
    text: Path
    facts: dict[str, Any]

    def rows(self, name: str) -> list[dict[str, Any]]:
        return read_jsonl(self.root / name / "metrics.jsonl")

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        model = load_hf(self.root / name / "model")
        return {
            key: value.double() for key, value in to_hf(model.state_dict(), model.config).items()
        }

    def alone(self, name: str, folder: Path, **changes: Any) -> Trained:
        """The same run by one process, at the same sequences per step."""
        run = config(
            self.text,
            **{key: value for key, value in RUNS[name].items() if key != "parallel"} | changes,
        )
        folder.mkdir(exist_ok=True)
        return train(run, dataset(run, self.root / "data"), folder)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """All runs of `fsdp_job.py`, by four processes."""
    from fsdp_fixture import write_text

    torch.set_num_threads(1)  # tiny models: a second thread only waits
    root = tmp_path_factory.mktemp("fsdp")
    text = write_text(root)
    dataset(config(text), root / "data")
    script = Path(__file__).parent / "fsdp_job.py"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    done = subprocess.run(
        [*torchrun(4), str(script), str(root), str(text)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    yield Job(root, text, json.loads((root / "facts.json").read_text()))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def curve(rows: list[dict[str, Any]], column: str) -> torch.Tensor:
    return torch.tensor([row[column] for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("name", EXACT)
def test_four_processes_train_as_one_does(job: Job, name: str, tmp_path: Path) -> None:
    alone = job.alone(name, tmp_path)
    rows = job.rows(name)
    assert [row["step"] for row in rows] == list(range(STEPS))
    for column in ("loss", "grad_norm"):
        wanted = curve(alone.rows, column)
        assert ((curve(rows, column) - wanted).abs() / wanted).max() <= 1e-5
    assert rows[0]["tokens_in_step"] == alone.rows[0]["tokens_in_step"]
    assert rows[-1]["validation_loss"] == pytest.approx(alone.validation_loss, rel=1e-5)
    wanted_weights = to_hf(alone.model.state_dict(), alone.model.config)
    found = job.weights(name)
    assert found.keys() == wanted_weights.keys()
    # AdamW divides by the root of tiny second moments, which magnifies rounding in the update, not
    # in the weight.
    assert (
        max(relative(found[key], value.double()) for key, value in wanted_weights.items()) <= 1e-5
    )


@pytest.mark.parametrize(("name", "tolerance"), CLOSE)
def test_bf16_stays_close_to_one_process(
    job: Job, name: str, tolerance: float, tmp_path: Path
) -> None:
    wanted = curve(job.alone(name, tmp_path).rows, "loss")
    assert ((curve(job.rows(name), "loss") - wanted).abs() / wanted).max() <= tolerance
    dtype = "torch.float32" if RUNS[name].get("precision", "fp32") != "bf16" else "torch.bfloat16"
    assert job.facts[name]["dtype"] == dtype


def test_in_bf16_sharding_sets_runs_apart_less_than_the_residual_stream_does(
    job: Job, tmp_path: Path
) -> None:
    """One process computes as several do if FSDP holds its model, or nearly so with bf16 values
    between its blocks."""
    held = plan(
        config(job.text, precision="bf16_autocast", parallel={"cpu_offload": True}),
        tmp_path / "held",
    )
    launch(held, job.root / "data", 1)
    alike = curve(read_jsonl(held / "metrics.jsonl"), "loss")
    autocast = curve(job.alone("bf16_autocast", tmp_path / "alone").rows, "loss")
    residual = job.alone("bf16_autocast", tmp_path / "residual", precision="bf16_residual").rows
    apart = (autocast - alike).abs().max()
    assert (curve(job.rows("bf16_autocast"), "loss") - alike).abs().max() < 0.1 * apart
    assert (curve(residual, "loss") - alike).abs().max() < 0.5 * apart


def test_every_process_holds_its_share_only(job: Job) -> None:
    total = sum(p.numel() for p in load_hf(job.root / "fsdp" / "model").parameters())
    assert sum(job.facts["fsdp"]["held"]) == total
    assert max(job.facts["fsdp"]["held"]) <= 0.3 * total
    assert sum(job.facts["hsdp"]["held"]) == 2 * total
    measured = job.facts["fsdp"]["measured"]
    assert 0 < measured["mem_peak_allocated_gib_min_rank"] <= measured["mem_peak_allocated_gib"]


@pytest.mark.parametrize(("name", "whole"), RESUMED.items())
def test_resumed_run_is_the_same_to_the_last_bit(job: Job, name: str, whole: str) -> None:
    assert job.facts[name]["resumed_at"] == 3
    assert job.facts[name]["validation_loss"] == job.facts[whole]["validation_loss"]
    assert [row["loss"] for row in job.rows(name)] == [row["loss"] for row in job.rows(whole)]
    first, second = job.weights(whole), job.weights(name)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_eight_bit_states_are_cut_as_the_weights_are(job: Job, tmp_path: Path) -> None:
    run = config(job.text, optim={"states": "8bit"})
    for name in ("sharded-00000003", "metrics.jsonl"):
        source = job.root / "adam8bit" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    found = train(run, dataset(run, job.root / "data"), tmp_path)
    assert found.resumed_at == 3
    wanted = curve(job.rows("adam8bit"), "loss")
    assert (
        (curve(read_jsonl(tmp_path / "metrics.jsonl"), "loss") - wanted).abs() / wanted
    ).max() <= 1e-3


@pytest.mark.parametrize("processes", [1, 2])
def test_another_number_of_processes_goes_on(job: Job, processes: int, tmp_path: Path) -> None:
    run = config(job.text, parallel={"fsdp": processes}, checkpoint={"export": True})
    folder = plan(run, tmp_path / "runs" / "test" / "resumed")
    for name in ("sharded-00000003", "metrics.jsonl"):
        source = job.root / "fsdp" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    if processes == 1:
        found = train(run, dataset(run, job.root / "data"), folder)
        resumed, validation_loss = found.resumed_at, found.validation_loss
        weights = {
            k: v.double() for k, v in to_hf(found.model.state_dict(), found.model.config).items()
        }
    else:
        results = launch(folder, job.root / "data", processes)
        resumed, validation_loss = results["resumed_at"], results["validation_loss"]
        model = load_hf(folder / "model")
        weights = to_hf(model.state_dict(), model.config)
        assert results["world_size"] == 2
        assert results["tokens_per_s_per_gpu"] == pytest.approx(results["tokens_per_s"] / 2)
    assert resumed == 3
    assert validation_loss == pytest.approx(job.facts["fsdp"]["validation_loss"], rel=1e-5)
    rows = read_jsonl(folder / "metrics.jsonl")
    wanted = curve(job.rows("fsdp"), "loss")
    assert ((curve(rows, "loss") - wanted).abs() / wanted).max() <= 1e-5
    uninterrupted = job.weights("fsdp")
    assert (
        max(relative(weights[key].double(), value) for key, value in uninterrupted.items()) <= 1e-5
    )


def test_one_process_may_keep_its_states_on_the_host(job: Job, tmp_path: Path) -> None:
    run = config(job.text, parallel={"cpu_offload": True}, checkpoint={"every": 3, "export": True})
    folder = plan(run, tmp_path / "runs" / "test" / "offload1")
    results = launch(folder, job.root / "data", 1)
    assert (results["world_size"], results["resumed_at"]) == (1, 0)
    wanted = curve(job.alone("fsdp", tmp_path / "alone").rows, "loss")
    assert (
        (curve(read_jsonl(folder / "metrics.jsonl"), "loss") - wanted).abs() / wanted
    ).max() <= 1e-5
    model = load_hf(folder / "model")
    weights = to_hf(model.state_dict(), model.config)
    assert (
        max(relative(weights[key].double(), value) for key, value in job.weights("fsdp").items())
        <= 1e-5
    )
    with pytest.raises(UserError, match="needs a process group"):
        train(run, dataset(run, job.root / "data"), tmp_path / "here")


def test_one_process_with_states_on_the_host_goes_on_from_four(job: Job, tmp_path: Path) -> None:
    run = config(job.text, parallel={"cpu_offload": True})
    folder = plan(run, tmp_path / "runs" / "test" / "resumed")
    for name in ("sharded-00000003", "metrics.jsonl"):
        source = job.root / "fsdp" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    results = launch(folder, job.root / "data", 1)
    assert results["resumed_at"] == 3
    assert results["validation_loss"] == pytest.approx(
        job.facts["fsdp"]["validation_loss"], rel=1e-5
    )


def resume_alone(job: Job, folder: Path, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    if not (folder / "sharded-00000003").exists():
        shutil.copytree(job.root / "fsdp" / "sharded-00000003", folder / "sharded-00000003")
    run = config(job.text, **changes)
    train(run, dataset(run, job.root / "data"), folder, world=World())


def test_checkpoints_that_cannot_be_used_are_refused_in_one_line(job: Job, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="8 sequences per step, this run has 4"):
        resume_alone(job, tmp_path / "a", batch_size=4)
    with pytest.raises(UserError, match="does not fit this run's model"):
        resume_alone(job, tmp_path / "b", model={"n_layers": 3})
    shutil.copytree(job.root / "fsdp" / "sharded-00000003", tmp_path / "c" / "sharded-00000003")
    part = next((tmp_path / "c" / "sharded-00000003").glob("*.distcp"))
    whole = part.read_bytes()
    for damaged in (
        whole[:-1],
        whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:],
        bytes(4096) + whole[4096:],
    ):
        part.write_bytes(damaged)
        with pytest.raises(UserError, match=f"is damaged .{part.name}"):
            resume_alone(job, tmp_path / "c")


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("place", [".metadata", "value"])
def test_a_checkpoint_from_elsewhere_runs_no_code(job: Job, place: str, tmp_path: Path) -> None:
    """The checksums hold, for whoever wrote the pickles wrote them, too."""
    folder = tmp_path / "run" / "sharded-00000003"
    shutil.copytree(job.root / "fsdp" / "sharded-00000003", folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    if place == "value":
        stored, (index, info) = (
            io.BytesIO(),
            next(item for item in metadata.storage_data.items() if ".lr" in item[0].fqn),
        )
        torch.save(Payload(tmp_path / "ran"), stored)
        file = folder / info.relative_path
        metadata.storage_data[index] = replace(
            info, offset=file.stat().st_size, length=len(stored.getvalue())
        )
        file.write_bytes(file.read_bytes() + stored.getvalue())
    else:
        metadata.planner_data = Payload(tmp_path / "ran")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    facts = json.loads((folder / "complete.json").read_text())
    facts["files"] = {
        name: hashlib.blake2b((folder / name).read_bytes()).hexdigest() for name in facts["files"]
    }
    (folder / "complete.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="sharded-00000003"):
        resume_alone(job, folder.parent)
    assert not (tmp_path / "ran").exists()


def test_an_unfinished_checkpoint_does_not_count(job: Job, tmp_path: Path) -> None:
    half = tmp_path / "run" / "sharded-00000005"
    shutil.copytree(job.root / "fsdp" / "sharded-00000003", half)
    (half / "complete.json").unlink()
    run = config(job.text)
    shutil.copytree(job.root / "fsdp" / "sharded-00000003", tmp_path / "run" / "sharded-00000003")
    assert train(run, dataset(run, job.root / "data"), tmp_path / "run").resumed_at == 3
    assert not half.exists()


def test_impossible_parallel_settings_are_refused() -> None:
    model = {"preset": "lab-tiny"}
    with pytest.raises(UserError, match="need fsdp > 1"):
        checked(TrainConfig, {"model": model, "parallel": {"replicate": 2}}, "test")
    with pytest.raises(UserError, match="need fsdp > 1"):
        checked(TrainConfig, {"model": model, "parallel": {"reshard_after_forward": False}}, "test")


def test_a_record_may_name_the_way_that_stayed() -> None:
    """`collectives` was a setting for a day; who asks for the other way is told that there is
    none."""
    model = {"preset": "lab-tiny"}
    kept = checked(TrainConfig, {"model": model, "parallel": {"collectives": "backend"}}, "test")
    assert kept.parallel == ParallelConfig()
    with pytest.raises(UserError, match=r"parallel\.collectives"):
        checked(TrainConfig, {"model": model, "parallel": {"collectives": "copies"}}, "test")


ON_GPUS = {
    "bf16_autocast": {"precision": "bf16_autocast"},
    "fp8": {"precision": "bf16_autocast", "fp8": {"recipe": "fused"}},
    "fp8_gather": {
        "precision": "bf16_autocast",
        "fp8": {"recipe": "fused"},
        "parallel": {"fp8_gather": True},
    },
    "adam8bit": {"precision": "bf16", "optim": {"states": "8bit"}},
}


def gpu_losses(tmp_path: Path, name: str, changes: dict[str, Any], processes: int) -> torch.Tensor:
    model = {"n_layers": 3, "d_model": 128, "d_ff": 256}
    changes = {"device": "cuda", "compile": True, "model": model, "steps": 12, **changes}
    changes["parallel"] = {"fsdp": processes, **changes.get("parallel", {})}
    run = config(tmp_path / "text.txt", **changes)
    dataset(run, tmp_path / "data")
    folder = plan(run, tmp_path / "runs" / "test" / name)
    launch(folder, tmp_path / "data", processes)
    return curve(read_jsonl(folder / "metrics.jsonl"), "loss")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("name", ON_GPUS)
def test_two_gpus_train_alike_in_every_way(tmp_path: Path, name: str) -> None:
    from fsdp_fixture import write_text

    write_text(tmp_path)
    plain = gpu_losses(tmp_path, "plain", {"precision": "bf16"}, 2)
    found = gpu_losses(tmp_path, name, ON_GPUS[name], 2)
    assert ((found - plain).abs() / plain).max() < 2e-2 and found[-1] < found[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_one_gpu_trains_with_its_states_on_the_host(tmp_path: Path) -> None:
    from fsdp_fixture import write_text

    write_text(tmp_path)
    changes = {"precision": "bf16_autocast", "parallel": {"cpu_offload": True}}
    run = config(
        tmp_path / "text.txt",
        device="cuda",
        precision="bf16_autocast",
        model={"n_layers": 3},
        steps=12,
    )
    (tmp_path / "alone").mkdir()
    alone = train(run, dataset(run, tmp_path / "data"), tmp_path / "alone")
    found = gpu_losses(
        tmp_path, "offload", {**changes, "compile": False, "model": {"n_layers": 3}}, 1
    )
    wanted = curve(alone.rows, "loss")
    assert abs(found[0] / wanted[0] - 1) < 1e-4  # it begins with the same weights
    assert ((found - wanted).abs() / wanted).max() < 2e-2
