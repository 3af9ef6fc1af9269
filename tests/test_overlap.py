"""The update beside the next forward pass: the same bits as before it, whatever reads weights or
states in between, and its gradients in the memory that is predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import losses, tiny
from test_checkpoint import resumed_as_never_stopped, weights

from lsai_core.base.errors import UserError
from lsai_core.optimizers.base import complete_update, waiting_gradients
from lsai_core.optimizers.build import kept_states
from lsai_core.prediction.memory import predict
from lsai_core.profiling.memory import PhaseMemory
from lsai_core.training import loop, step
from lsai_core.training.loop import train
from lsai_lab.data import Dataset

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def overlapping(overlap: int = 16, optim: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Gradients are clipped, and updates are the project's own with and without overlap."""
    settings = {"rounding": "stochastic", "grad_clip": 0.3, **(optim or {}), "overlap": overlap}
    return tiny(optim=settings, **{"precision": "bf16", "steps": 10, **changes})


CHANGES: list[dict[str, Any]] = [
    {},
    {"precision": "fp32"},
    {"precision": "bf16_autocast"},
    {"optim": {"states": "8bit"}},
    {"optim": {"rounded": ["matrices"]}},
    {"optim": {"grad_clip": 0.0}, "model": {"tie_embeddings": True}},
    {"grad_accum": 3, "batch_size": 2, "grad_checkpoint": "full"},
    {"eval": {"every": 3}, "checkpoint": {"every": 4}, "profile": {"memory_steps": 2}},
    {"compile": True, "grad_checkpoint": "selective"},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_losses_and_weights_are_the_same_to_the_last_bit(
    dataset: Dataset, tmp_path: Path, changes: dict[str, Any], device: str
) -> None:
    # of the attention kernels for GPUs some sum in an order that changes
    where = {"device": device, "attention": {"backend": "eager"}}
    ends = {}
    for overlap in (0, 16):
        config = overlapping(overlap, **changes, **where)
        trained = train(config, dataset, tmp_path / str(overlap))
        found = (losses(tmp_path / str(overlap)), trained.validation_loss)
        ends[overlap] = (*found, weights(trained).tolist())
    assert ends[0] == ends[16]


@pytest.mark.parametrize("optim", [{}, {"states": "8bit"}], ids=str)
def test_resuming_equals_never_having_stopped(
    dataset: Dataset, tmp_path: Path, optim: dict[str, Any]
) -> None:
    config = overlapping(optim=optim, checkpoint={"every": 4})
    whole = resumed_as_never_stopped(config, dataset, tmp_path)
    before = train(overlapping(0, optim), dataset, tmp_path / "before")
    assert losses(tmp_path / "before") == losses(tmp_path / "whole")
    assert torch.equal(weights(whole), weights(before))


def after_a_step(**settings: Any) -> tuple[Any, Any]:
    """Model and optimizer right after a step, and nothing has asked for the rest of the update."""
    config = overlapping(**settings)
    model = step.prepare_model(config, CPU)
    optimizer = step.prepare_optimizer(model, config)
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    step.train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], config, CPU)
    return model, optimizer


READERS = {
    "the model's state dict": lambda model, optimizer: model.state_dict(),
    "the optimizer's": lambda model, optimizer: optimizer.state_dict(),
    "another step": lambda model, optimizer: optimizer.step(),
    "validation": lambda model, optimizer: model(torch.zeros(1, 8, dtype=torch.int64)),
    "whoever asks": lambda model, optimizer: complete_update(optimizer),
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_weights_finds_them_updated(reader: str) -> None:
    updated, _ = after_a_step(overlap=0)
    model, optimizer = after_a_step()
    pairs = [*zip(model.parameters(), updated.parameters(), strict=True)]
    assert not all(torch.equal(a, b) for a, b in pairs), "the update waits"
    assert torch.equal(model.embedding.weight, updated.embedding.weight), "but not all of it"
    assert waiting_gradients(optimizer) and all(p.grad is None for p in model.parameters())
    READERS[reader](model, optimizer)
    assert all(torch.equal(a, b) for a, b in pairs) and not waiting_gradients(optimizer)


def test_weights_that_are_loaded_stay() -> None:
    model, optimizer = after_a_step()
    saved = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model, optimizer = after_a_step()
    model.load_state_dict(saved)
    complete_update(optimizer)
    assert all((weight == 1).all() for weight in model.parameters())


def test_before_a_pause_the_update_is_in_its_steps_time(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            happened.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr(loop, "complete_update", noted("completed", complete_update))
    for name in ("mark", "restart"):
        monkeypatch.setattr(loop.StepTimer, name, noted(name, getattr(loop.StepTimer, name)))
    train(overlapping(eval={"every": 3}, checkpoint={"every": 5}), dataset, tmp_path)
    pauses = [at for at, name in enumerate(happened) if name == "restart"]
    assert len(pauses) == 5  # after 3, 5, 6, 9 and 10 steps
    assert all(happened[at - 2 : at] == ["completed", "mark"] for at in pauses), happened
    assert happened.count("completed") == 5


@pytest.mark.parametrize(
    "changes",
    [{}, {"optim": {"states": "8bit"}}, {"grad_accum": 2}, {"precision": "fp32"}],
    ids=str,
)
def test_waiting_gradients_are_predicted(changes: dict[str, Any]) -> None:
    # little text in the step, so that its beginning is not far below its peak
    config = overlapping(**changes, seq_len=8, batch_size=1)
    model = step.prepare_model(config, CPU)
    optimizer = step.prepare_optimizer(model, config)
    tokens = torch.randint(256, (config.grad_accum, 9))
    meter = PhaseMemory(CPU, [model, optimizer])
    for measuring in (None, meter):
        step.train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], config, CPU, measuring)
    measured, predicted = meter.summary(), predict(config, on="cpu")
    for phase, size in predicted.phases.items():
        assert size == pytest.approx(measured[f"mem_{phase}_peak_gib"], rel=0.01), phase
    waiting = sum(gradient.nbytes for gradient in waiting_gradients(optimizer)) / 2**30
    before = predict(overlapping(0, **changes, seq_len=8, batch_size=1), on="cpu")
    assert predicted.phases["forward"] > before.phases["forward"] + waiting / 2
    weights_and_states = [*model.parameters(), *kept_states(optimizer)]
    kept = sum(tensor.nbytes for tensor in weights_and_states) / 2**30
    assert predicted.phases["forward"] > kept + waiting


def test_on_a_gpu_gradients_live_on_into_the_next_step() -> None:
    many = {"model": {"n_layers": 8, "d_model": 256}, "seq_len": 8, "batch_size": 1}
    plain, overlapped = (predict(overlapping(overlap, **many)) for overlap in (0, 16))
    gradients = plain.parts["weights"]
    assert overlapped.phases["forward"] - plain.phases["forward"] > gradients / 2
    assert overlapped.phases["backward"] == plain.phases["backward"]
    assert plain.peak <= overlapped.peak <= plain.peak + gradients
    assert overlapped.reserved >= overlapped.peak - overlapped.parts["libraries"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": {"fsdp": 2}}, r"no parallel"),
        ({"profile": {"lost_updates": 2}}, "no profile.lost_updates"),
        ({"optim": {"kernel": "torch", "rounding": "nearest"}}, "use kernel auto or triton"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as error:
        overlapping(**changes)
    assert "\n" not in str(error.value)
