"""Every way of sharing a model against one process: gradients, losses, weights and checkpoints,
over real gloo processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fsdp_fixture import SEQUENCES, config, dataset
from torch import Tensor
from ways_job import RESUMED, RUNS, random_tokens, run_of

from lsai_core.base.errors import Unavailable, UserError
from lsai_core.base.files import read_jsonl
from lsai_core.config.affects import key_values
from lsai_core.config.train import TrainConfig
from lsai_core.model.hf import load_hf, to_hf
from lsai_core.model.transformer import build_model
from lsai_core.prediction.roofline import untimed
from lsai_core.profiling.gpus import find_gpu
from lsai_core.training.combinations import checked
from lsai_core.training.loop import train
from lsai_core.training.step import require
from lsai_lab.launch.launch import on_this_machine, torchrun


@dataclass
class Jobs:
    """Runs by several processes, and the same by one; each number of processes starts once."""

    root: Path
    text: Path
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)

    def resumed(self, size: int, name: str) -> dict[str, Any]:
        """The run that goes on from another's checkpoint."""
        self.of(RESUMED[size][name][0])
        if -size not in self.facts:
            self.facts[-size] = self.start(size, list(RESUMED[size]))
        return self.facts[-size][name]

    def of(self, name: str) -> dict[str, Any]:
        size = next(size for size, runs in RUNS.items() if name in runs)
        if size not in self.facts:
            self.facts[size] = self.start(size, list(RUNS[size]))
        return self.facts[size][name]

    def start(self, size: int, names: list[str]) -> dict[str, Any]:
        script = Path(__file__).parent / "ways_job.py"
        environment = {
            **on_this_machine(),
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parent.parent),
        }
        words = [*torchrun(size), str(script), str(self.root), str(self.text), ",".join(names)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6000:]
        found: dict[str, Any] = json.loads((self.root / f"facts{size}.json").read_text())
        return found

    def rows(self, name: str) -> list[dict[str, Any]]:
        return read_jsonl(self.root / name / "metrics.jsonl")

    def weights(self, name: str) -> dict[str, Tensor]:
        model = load_hf(self.root / name / "model")
        return to_hf(model.state_dict(), model.config)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    from fsdp_fixture import write_text

    torch.set_num_threads(1)  # tiny models: a second thread only waits
    root = tmp_path_factory.mktemp("ways")
    text = write_text(root)
    for vocabulary in (400, 401):
        dataset(config(text, model={"vocab_size": vocabulary}), root / "data")
    yield Jobs(root, text)


def names(*sizes: int) -> list[str]:
    return [name for size in sizes for name in RUNS[size]]


def resumed(*sizes: int) -> list[str]:
    return [name for size in sizes for name, run in RUNS[size].items() if "checkpoint" in run]


slow = pytest.mark.slow
EVERY = [
    *names(2),
    *(pytest.param(name, marks=slow) for name in names(*RUNS) if name not in RUNS[2]),
]


REFUSED = {
    "keeps whole weights in every process, and parallel.fsdp does not": {"kind": "ddp", "fsdp": 2},
    "keeps whole weights in every process, and parallel.cpu_off": {
        "kind": "zero1",
        "replicate": 2,
        "cpu_offload": True,
    },
    "ddp needs parallel.replicate > 1": {"kind": "ddp"},
    "zero2 needs parallel.fsdp > 1": {"kind": "zero2"},
    "zero2 always keeps weights": {"kind": "zero2", "fsdp": 2, "reshard_after_forward": False},
    "need fsdp > 1": {"kind": "fsdp", "replicate": 2},
}


TENSOR_REFUSED = {
    "parallel.tp=3 does not divide model.n_heads=4": {"parallel": {"tp": 3}},
    "does not divide seq_len=513": {"seq_len": 513},
    "parallel.tp=2 does not divide seq_len / parallel.cp=81": {
        "parallel": {"tp": 2, "cp": 2, "cp_method": "ring"},
        "seq_len": 162,
    },
    "ulysses: 3 key-value heads over 2 ranks": {
        "parallel": {"tp": 2, "cp": 2, "cp_method": "ulysses"},
        "model": {"preset": "lab-tiny", "d_model": 96, "n_heads": 12, "n_kv_heads": 6},
    },
    "cp_method torch, a peer to compare with, does not go with parallel.tp": {
        "parallel": {"tp": 2, "cp": 2, "cp_method": "torch"},
        "precision": "bf16",
    },
    "needs parallel.cpu_offload False": {"parallel": {"tp": 2, "cpu_offload": True}},
    "parallel.async_tp needs parallel.tp > 1 and compile": {
        "parallel": {"tp": 2, "async_tp": True}
    },
    "needs fp8.recipe none, not fused": {"precision": "bf16", "fp8": {"recipe": "fused"}},
    "needs loss fused, not full": {"loss": "full"},
    "needs mlp_chunk None": {"mlp_chunk": 64},
    "needs saved_inputs gpu": {"saved_inputs": "host", "grad_checkpoint": "full"},
    "needs optim.states full": {"optim": {"states": "8bit"}},
    "needs optim.rounding nearest": {"optim": {"rounding": "stochastic"}},
    "ddp keeps whole weights in every process, and parallel.tp": {
        "parallel": {"kind": "ddp", "replicate": 2, "tp": 2}
    },
}
PIPELINE_REFUSED = {
    "parallel.pp=2, pp_schedule 1f1b: grad_accum must be a multiple": {"grad_accum": 3},
    "pp_schedule interleaved: grad_accum must be .* at least 4": {
        "grad_accum": 2,
        "parallel": {"pp": 2, "pp_schedule": "interleaved"},
    },
    "16 stages need as many layers": {"grad_accum": 16, "parallel": {"pp": 16}},
    "parallel.pp > 1 needs parallel.tp 1, not 2": {"parallel": {"pp": 2, "tp": 2}},
    "parallel.pp > 1 needs parallel.kind fsdp, not zero2": {
        "parallel": {"pp": 2, "fsdp": 2, "kind": "zero2"}
    },
    "parallel.pp > 1 needs parallel.reshard_after_forward True, not False": {
        "parallel": {"pp": 2, "fsdp": 2, "reshard_after_forward": False}
    },
    "needs model.tie_embeddings False": {"model": {"preset": "lab-tiny", "tie_embeddings": True}},
    "needs precision bf16, fp32 or tf32": {"precision": "bf16_autocast"},
}
ALL_REFUSED = {
    **{reason: {"parallel": {"pp": 2}, **run} for reason, run in PIPELINE_REFUSED.items()},
    **{reason: {"parallel": parallel} for reason, parallel in REFUSED.items()},
    **{reason: {"parallel": {"tp": 2}, **run} for reason, run in TENSOR_REFUSED.items()},
}


@pytest.mark.parametrize("reason", ALL_REFUSED)
def test_what_does_not_go_together_is_refused_in_one_line(reason: str) -> None:
    run = {"model": {"preset": "lab-tiny"}, **ALL_REFUSED[reason]}
    with pytest.raises(UserError, match=reason) as raised:
        checked(TrainConfig, run, "test")
    assert "\n" not in str(raised.value)


def test_hidden_messages_need_gpus_and_have_no_known_time() -> None:
    parallel = {"tp": 2, "async_tp": True}
    run = {"model": {"preset": "lab-tiny"}, "parallel": parallel, "compile": True}
    asked = checked(TrainConfig, run, "test")
    with pytest.raises(Unavailable, match="async_tp needs CUDA GPUs") as raised:
        require(asked, torch.device("cpu"))
    assert "\n" not in str(raised.value)
    assert "what parallel.async_tp hides is not measured" in str(untimed(asked, find_gpu("h100")))


@pytest.mark.parametrize(("version", "runs"), [("2.11.0+cu130", True), ("2.13.1+cpu", False)])
def test_compiled_blocks_are_recomputed_where_the_compiler_can(
    version: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    run = {"model": {"preset": "lab-tiny"}, "parallel": {"tp": 2}, "compile": True}
    monkeypatch.setattr(torch, "__version__", version)
    require(checked(TrainConfig, run | {"grad_checkpoint": "selective"}, "test"), cpu)
    asked = checked(TrainConfig, run | {"grad_checkpoint": "full"}, "test")
    if runs:
        require(asked, cpu)
        return
    with pytest.raises(Unavailable, match="take grad_checkpoint selective"):
        require(asked, cpu)


def test_run_keys_are_what_they_were_before_there_were_kinds() -> None:
    usual = checked(TrainConfig, {"model": {"preset": "lab-tiny"}}, "test")
    assert set(key_values(usual)["parallel"]) == {
        *("fsdp", "replicate", "cp", "cp_method"),
        *("reshard_after_forward", "cpu_offload", "fp8_gather"),
    }
    copies = {"kind": "ddp", "replicate": 2}
    other = checked(TrainConfig, {"model": {"preset": "lab-tiny"}, "parallel": copies}, "test")
    assert key_values(other)["parallel"]["kind"] == "ddp"


def curve(rows: list[dict[str, Any]], column: str) -> Tensor:
    return torch.tensor([row[column] for row in rows], dtype=torch.float64)


def furthest(found: Tensor, wanted: Tensor) -> float:
    return float(((found - wanted).abs() / wanted.abs()).max())


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_those_of_one_process_in_float64(jobs: Jobs, name: str) -> None:
    jobs.of(name)
    run = run_of(jobs.text, name)
    model = build_model(run.model, run.attention, seed=run.seed).double()
    x_NS, y_NS = random_tokens(run)
    loss = F.cross_entropy(model(x_NS).flatten(0, 1), y_NS.flatten())
    loss.backward()
    found = torch.load(jobs.root / name / "gradients.pt")
    assert float(found["loss"]) == pytest.approx(float(loss.detach()), rel=1e-6)
    wanted = {key: p.grad for key, p in model.named_parameters()}
    assert found["gradients"].keys() == wanted.keys()
    for key, gradient in found["gradients"].items():
        assert relative(gradient, wanted[key]) < 1e-5, key


@pytest.mark.parametrize("name", EVERY)
def test_losses_are_those_of_one_process(jobs: Jobs, name: str, tmp_path: Path) -> None:
    facts, run = jobs.of(name), run_of(jobs.text, name)
    one = run.model_copy(
        update={
            "parallel": type(run.parallel)(),
            "batch_size": run.batch_size * run.parallel.readers,
        }
    )
    alone = train(one, dataset(one, jobs.root / "data"), tmp_path)
    rows = jobs.rows(name)
    assert rows[0]["tokens_in_step"] == alone.rows[0]["tokens_in_step"]
    for column in ("loss", "grad_norm"):
        assert furthest(curve(rows, column), curve(alone.rows, column)) <= 1e-5
    assert facts["validation_loss"] == pytest.approx(alone.validation_loss, rel=1e-5)
    wanted, found = to_hf(alone.model.state_dict(), alone.model.config), jobs.weights(name)
    assert found.keys() == wanted.keys()
    # AdamW divides by the root of tiny second moments, which magnifies rounding.
    assert max(relative(found[key], value) for key, value in wanted.items()) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", resumed(*RUNS))
def test_a_resumed_run_is_the_same_to_the_last_bit(jobs: Jobs, name: str) -> None:
    facts = jobs.of(name)
    assert facts["resumed_at"] == 18
    assert facts["resumed_loss"] == facts["validation_loss"]
    rows, again = jobs.rows(name), jobs.rows(f"{name}_again")
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]
    first, second = jobs.weights(name), jobs.weights(f"{name}_again")
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, runs in RESUMED.items() for name in runs]
)
def test_another_way_goes_on_from_a_checkpoint(jobs: Jobs, size: int, name: str) -> None:
    facts, first = jobs.resumed(size, name), RESUMED[size][name][0]
    assert facts["resumed_at"] == 18
    wanted = jobs.of(first)["validation_loss"]
    assert facts["resumed_loss"] == pytest.approx(wanted, rel=1e-5)
    assert furthest(curve(jobs.rows(name), "loss"), curve(jobs.rows(first), "loss")) <= 1e-5
    found, whole = jobs.weights(name), jobs.weights(first)
    assert max(relative(found[key], value) for key, value in whole.items()) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("first", ["tp_fsdp", "pp_fsdp", "zero1", "ddp"])
def test_one_process_goes_on_from_four(jobs: Jobs, first: str, tmp_path: Path) -> None:
    wanted = jobs.of(first)["validation_loss"]
    shutil.copytree(jobs.root / first, tmp_path / "run")
    run = run_of(jobs.text, first)
    batch = SEQUENCES // run.grad_accum
    one = run.model_copy(update={"parallel": type(run.parallel)(), "batch_size": batch})
    found = train(one, dataset(one, jobs.root / "data"), tmp_path / "run")
    assert found.resumed_at == 18
    assert found.validation_loss == pytest.approx(wanted, rel=1e-5)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert furthest(curve(rows, "loss"), curve(jobs.rows(first), "loss")) <= 1e-5
