"""Training: deterministic, equal to a plain loop, schedule, accumulation, validation, learning,
divergence."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CHECKOUT, TINY_MODEL, losses, tiny, write_corpus

from lsai_core.base.errors import Diverged, Unavailable, UserError
from lsai_core.config.train import DataConfig, EvalConfig, OptimConfig, TrainConfig
from lsai_core.model.transformer import build_model
from lsai_core.training.combinations import checked
from lsai_core.training.loop import train
from lsai_core.training.step import learning_rate
from lsai_lab.data import BatchStream, Dataset, prepare

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_two_runs_with_one_seed_are_equal_to_the_last_bit(dataset: Dataset, tmp_path: Path) -> None:
    first, second = (train(tiny(), dataset, tmp_path / name) for name in ("a", "b"))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert torch.equal(weights(first.model), weights(second.model))
    assert first.validation_loss == second.validation_loss
    train(tiny(seed=1), dataset, tmp_path / "c")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_measuring_changes_no_loss(dataset: Dataset, tmp_path: Path) -> None:
    train(tiny(), dataset, tmp_path / "plain")
    watched = tiny(
        profile={"memory_steps": 3}, log_every=5, eval={"every": 4}, checkpoint={"every": 3}
    )
    measured = train(watched, dataset, tmp_path / "watched").measured
    assert losses(tmp_path / "plain") == losses(tmp_path / "watched")
    assert 0 < measured["mem_forward_peak_gib"] < 1


def test_the_phases_of_timed_steps_make_up_their_time(dataset: Dataset, tmp_path: Path) -> None:
    done = train(tiny(steps=30, seq_len=256, log_every=30), dataset, tmp_path / "run")
    phases = [done.measured[f"host_{phase}_ms"] for phase in ("forward", "backward", "optimizer")]
    assert all(phase > 0 for phase in phases)
    assert 0.4 < sum(phases) / statistics.median(done.timed_ms) < 1.25


def test_training_equals_a_plain_loop(dataset: Dataset, tmp_path: Path) -> None:
    """The same steps in ten lines of textbook PyTorch, with the schedule written out."""
    config = tiny(steps=6, optim={"grad_clip": 0.5, "weight_decay": 0.2})
    trained = train(config, dataset, tmp_path)

    model = build_model(
        config.model, config.attention, device=CPU, dtype=torch.float32, seed=config.seed
    )
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    stream, expected = BatchStream(dataset.tokens("train"), 4, 32, config.seed), []
    # warm-up of 3; half a cosine down to a tenth
    for step, rate in enumerate([1e-3, 2e-3, 3e-3, 3e-3, 1.65e-3, 3e-4]):
        for group in optimizer.param_groups:
            group["lr"] = rate
        x_BS, y_BS = stream.batch(step)
        loss = -torch.log_softmax(model(x_BS), dim=-1).gather(-1, y_BS[..., None]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1.0, 0.5 / float(norm + 1e-6))
        optimizer.step()
        expected.append(loss.item())
    assert losses(tmp_path) == pytest.approx(expected, abs=2e-6)
    torch.testing.assert_close(weights(trained.model), weights(model), atol=1e-5, rtol=1e-4)


def test_accumulation_equals_the_large_batch(dataset: Dataset, tmp_path: Path) -> None:
    large = train(tiny(batch_size=8), dataset, tmp_path / "large")
    parts = train(tiny(batch_size=2, grad_accum=4), dataset, tmp_path / "parts")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "large"), abs=1e-5)
    torch.testing.assert_close(weights(parts.model), weights(large.model), atol=2e-5, rtol=1e-4)
    assert {row["tokens_in_step"] for row in parts.rows} == {8 * 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_checkpoint": "full"},
        {"grad_checkpoint": "selective"},
        {"grad_checkpoint": "alternating"},
        {"grad_checkpoint": "full", "checkpoint_blocks": 1, "checkpoint_others": "selective"},
        {"loss_chunk": 48},
    ],
)
def test_what_saves_memory_alone_changes_no_loss(
    dataset: Dataset, tmp_path: Path, changes: dict[str, Any]
) -> None:
    train(tiny(), dataset, tmp_path / "plain")
    train(tiny(**changes), dataset, tmp_path / "other")
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "plain"), abs=1e-6)


def test_learning_rate_rises_linearly_then_falls_along_a_cosine() -> None:
    optim = OptimConfig(lr=1.0, min_lr_ratio=0.2, warmup_steps=10)
    rates = [learning_rate(step, 110, optim) for step in range(110)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(1.0) and rates[-1] == pytest.approx(0.2)
    assert rates[10 + 33] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 3)))
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    # Degenerate lengths: no warm-up, warm-up longer than the run, a single step.
    assert learning_rate(0, 10, OptimConfig(lr=1.0, warmup_steps=0)) == 1.0
    assert learning_rate(4, 5, optim) == pytest.approx(0.5)
    assert learning_rate(0, 1, OptimConfig(lr=1.0, warmup_steps=0)) == 1.0


def test_metrics_state_the_rate_that_was_used(dataset: Dataset, tmp_path: Path) -> None:
    config = tiny()
    rows = train(config, dataset, tmp_path).rows
    assert [row["lr"] for row in rows] == [
        learning_rate(s, config.steps, config.optim) for s in range(config.steps)
    ]
    on_disk = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert on_disk == rows
    assert all(row["step_ms"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert all(row["tokens_per_s"] == pytest.approx(4 * 32 / row["step_ms"] * 1e3) for row in rows)


@pytest.mark.parametrize("sequences", [0, 10])
def test_validation_loss_equals_an_independent_computation(
    dataset: Dataset, tmp_path: Path, sequences: int
) -> None:
    trained = train(tiny(eval={"sequences": sequences}), dataset, tmp_path)
    tokens = np.fromfile(dataset.folder / "validation.bin", dtype="<u2").astype(np.int64)
    windows = (len(tokens) - 1) // 32
    chosen = [index * windows // sequences for index in range(sequences)] or list(range(windows))
    assert len(chosen) % 4, (
        "the last batch should be a partial one, or weighting it wrongly would not show"
    )
    total = 0.0
    with torch.no_grad():
        for index in chosen:
            window = torch.from_numpy(tokens[index * 32 : index * 32 + 33])
            logits = trained.model(window[None, :-1])[0].double()
            total += float(F.nll_loss(torch.log_softmax(logits, -1), window[1:], reduction="sum"))
    assert trained.validation_loss == pytest.approx(total / (len(chosen) * 32), abs=1e-5)


def test_the_text_that_is_judged_depends_on_no_batch(dataset: Dataset, tmp_path: Path) -> None:
    def judged(name: str, **changes: Any) -> float:
        still = {"lr": 1e-30, "warmup_steps": 0}  # so that all judge the model of the same seed
        config = tiny(steps=1, optim=still, eval={"sequences": 10}, **changes)
        return train(config, dataset, tmp_path / name).validation_loss

    whole = judged("whole")
    for batch_size, grad_accum in ((1, 4), (2, 2), (3, 1), (64, 1)):
        name = f"{batch_size}-{grad_accum}"
        found = judged(name, batch_size=batch_size, grad_accum=grad_accum)
        assert found == pytest.approx(whole, rel=1e-6), name


def test_batches_of_older_configs_are_read_as_the_sequences_that_they_were() -> None:
    old = {"model": TINY_MODEL, "batch_size": 4, "parallel": {"fsdp": 2}}
    old["data"] = {"vocab_size": 320}

    def read(**judged: Any) -> TrainConfig:
        return checked(TrainConfig, {**old, "eval": judged}, "test")

    assert read(every=5, batches=3).eval == EvalConfig(every=5, sequences=24)
    assert read(batches=0).eval.sequences == 0
    with pytest.raises(UserError, match=r"unknown key 'eval\.batches'"):
        read(batches=3, sequences=24)
    with pytest.raises(UserError, match=r"unknown key 'eval\.batches'"):
        read(batches="3")
    paths = (CHECKOUT / "reports" / "recorded").glob("*/*/*/config.json")
    configs = [json.loads(path.read_text()) for path in paths]
    configs = [config.get("train", config) for config in configs]
    before = [config for config in configs if config.get("eval", {}).get("batches")]
    assert before
    for config in before:
        parallel = config.get("parallel", {})
        readers = parallel.get("fsdp", 1) * parallel.get("replicate", 1)
        wanted = config["eval"]["batches"] * config["batch_size"] * readers
        assert checked(TrainConfig, config, "test").eval.sequences == wanted


def test_a_tiny_corpus_is_learnt_by_heart(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "few.jsonl", documents=12)
    data = DataConfig(source=f"file:{source}", vocab_size=320)
    few = prepare(data, tmp_path / "data", progress=False)
    config = tiny(
        steps=150, optim={"lr": 1e-2, "warmup_steps": 5}, batch_size=8, eval={"sequences": 8}
    )
    train(config, few, tmp_path / "run")
    curve = losses(tmp_path / "run")
    # at the start every token is as likely
    assert curve[0] == pytest.approx(math.log(320), abs=0.5)
    assert np.mean(curve[-5:]) < 0.7


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(
    dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(Diverged, match=r"not finite at step \d+"):
        train(tiny(optim={"lr": 1e30, "warmup_steps": 0, "grad_clip": 0.0}), dataset, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] > 0 and rows[-1]["loss"] is None


def test_a_corpus_smaller_than_a_batch_is_one_clear_line(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fewer than one batch of batch_size=4000"):
        train(tiny(batch_size=4000), dataset, tmp_path)
    with pytest.raises(
        UserError, match=r"less than one window of seq_len=4000|fewer than one batch"
    ):
        train(tiny(seq_len=4000, batch_size=1), dataset, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_what_this_machine_lacks_is_unavailable(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="needs a CUDA GPU"):
        train(tiny(device="cuda"), dataset, tmp_path)
    with pytest.raises(Unavailable):
        train(tiny(attention={"backend": "fa2"}, precision="bf16"), dataset, tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()
