"""The optimizer: which kernel is used where, the norm, and (on a GPU) the Triton kernel against
torch's AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import losses, tiny

from lsai_core.base.errors import Unavailable, UserError
from lsai_core.config.train import OptimConfig, TrainConfig
from lsai_core.optimizers.build import (
    build_optimizer,
    clip_and_update,
    gradient_norm,
    kept_states,
    make_states,
    way_of,
)
from lsai_core.optimizers.kinds.adamw import optimizer_kernel
from lsai_core.training.checkpoint import WholeCheckpoints
from lsai_core.training.combinations import refusal
from lsai_core.training.loop import train
from lsai_lab.data import Dataset


def model(device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(33, 129), torch.nn.RMSNorm(129), torch.nn.Linear(129, 70_001)
    ).to(device, dtype)


def fill_gradients(module: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in module.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p)


def test_auto_is_torch_on_a_cpu_and_triton_there_is_refused() -> None:
    assert optimizer_kernel(OptimConfig(), torch.zeros(1)) == "torch"
    assert isinstance(build_optimizer(model(), OptimConfig()), torch.optim.AdamW)
    with pytest.raises(Unavailable, match="needs a CUDA GPU"):
        build_optimizer(model(), OptimConfig(kernel="triton"))


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e9])
def test_clipping_scales_to_the_limit(limit: float) -> None:
    module = model()
    fill_gradients(module, 0)
    before = torch.cat([p.grad.flatten() for p in module.parameters()])
    norm = clip_and_update(build_optimizer(module, OptimConfig()), limit)
    after = torch.cat([p.grad.flatten() for p in module.parameters()])
    assert float(norm) == pytest.approx(float(before.double().norm()), rel=1e-5)
    assert float(after.double().norm()) == pytest.approx(
        min(float(norm), limit or float(norm)), rel=1e-4
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("states", ["full", "8bit"])
def test_states_can_be_made_before_the_first_step(states: str, device: str) -> None:
    module = model(device, torch.bfloat16)
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = build_optimizer(module, OptimConfig(lr=1e-2, states=states))
    made = make_states(optimizer)
    assert all(
        torch.equal(p, old) and p.grad is None
        for p, old in zip(module.parameters(), before, strict=True)
    )
    weights = sum(p.nbytes for p in module.parameters())
    assert made == pytest.approx(2 * weights if states == "full" else weights, rel=0.05)
    fill_gradients(module, 0)
    clip_and_update(optimizer, 1.0)
    assert not any(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))
    assert sum(state.nbytes for state in kept_states(optimizer)) == made


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_equals_torch(dtype: torch.dtype) -> None:
    mine, theirs = model("cuda", dtype), model("cuda", dtype)
    optim = OptimConfig(lr=1e-2, weight_decay=0.1)
    first = build_optimizer(mine, optim)
    second = build_optimizer(theirs, optim.model_copy(update={"kernel": "torch"}))
    assert type(first) is not type(second)
    start = torch.cat([p.detach().flatten() for p in theirs.parameters()]).double()
    for step in range(5):
        for module in (mine, theirs):
            fill_gradients(module, step)
        # With bf16 gradients torch rounds the clipped ones; without clipping both see the same.
        limit = 0.5 if dtype == torch.float32 else 0.0
        norms = [clip_and_update(optimizer, limit) for optimizer in (first, second)]
        assert float(norms[0]) == pytest.approx(
            float(norms[1]), rel=1e-5 if dtype == torch.float32 else 5e-3
        )
    a, b = (
        torch.cat([p.detach().flatten() for p in m.parameters()]).double() for m in (mine, theirs)
    )
    assert float((b - start).norm()) > 0
    assert float((a - b).norm() / (b - start).norm()) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert first.state_dict()["state"][0].keys() == second.state_dict()["state"][0].keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_norm_is_exact_and_knows_no_cuts(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(size, generator=generator).to(dtype) for size in (3, 70_001, 2_000_003)
    ]
    exact = float(torch.sqrt(sum((g.double() ** 2).sum() for g in gradients)))
    cut = [piece for gradient in gradients for piece in gradient.chunk(7)]
    assert float(gradient_norm(gradients)) == pytest.approx(exact, rel=1e-7)
    assert float(gradient_norm(cut)) == float(gradient_norm(gradients))
    assert gradient_norm(gradients).dtype == torch.float32


@pytest.mark.gpu
def test_the_norm_is_exact_for_large_and_odd_sizes() -> None:
    gradients = [
        torch.randn(size, device="cuda", dtype=torch.bfloat16)
        for size in (1, 7, 65_536, 65_537, 3_000_001)
    ]
    exact = torch.sqrt(sum((g.double() ** 2).sum() for g in gradients))
    assert float(gradient_norm(gradients)) == pytest.approx(float(exact), rel=1e-5)
    assert float(gradient_norm(gradients)) == float(gradient_norm(gradients))


@pytest.mark.gpu
def test_a_gpu_run_learns_the_same_with_both_and_resumes(dataset: Dataset, tmp_path: Path) -> None:
    for name in ("torch", "triton"):
        train(tiny(device="cuda", optim={"kernel": name}), dataset, tmp_path / name)
    assert losses(tmp_path / "triton") == pytest.approx(losses(tmp_path / "torch"), abs=2e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("states", ["full", "8bit"])
def test_rounding_by_chance_keeps_small_updates_in_the_mean(states: str, device: str) -> None:
    """2,000 updates of 1e-4 of a weight of 1, each a thirty-ninth of what bf16 can add: nearest
    loses all of them."""
    ends = {}
    for rounding in ("nearest", "stochastic"):
        weight = torch.nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16, device=device))
        module = torch.nn.ParameterList([weight])
        optim = OptimConfig(lr=1e-4, weight_decay=0.0, states=states, rounding=rounding)
        optimizer = build_optimizer(module, optim)
        for step in range(2000):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            if step == 0:
                assert weight.unique().numel() == (1 if rounding == "nearest" else 2)
        ends[rounding] = weight.detach().double().cpu()
    assert ends["nearest"].unique().tolist() == [1.0]
    # the moments are rounded, too
    assert ends["stochastic"].mean() == pytest.approx(1 - 2000 * 1e-4, abs=1e-2)
    # weights walk alone: as steps of 2^-8 with the chance of 1e-4 2^8 do
    assert ends["stochastic"].std() < 0.03


def test_rounding_by_chance_is_not_torchs() -> None:
    asked = {"rounding": "stochastic", "kernel": "torch"}
    config = TrainConfig.model_validate({"model": {"preset": "lab-tiny"}, "optim": asked})
    assert "rounding stochastic" in (refusal(config) or "")


def test_what_updates_is_told() -> None:
    for dtype, optim, told in (
        (torch.bfloat16, {}, ("torch", "nearest")),
        (torch.float32, {"rounding": "stochastic"}, ("plain", "none")),
        (torch.bfloat16, {"rounding": "stochastic"}, ("plain", "stochastic, 7 Philox rounds")),
        (torch.bfloat16, {"states": "8bit"}, ("plain", "nearest")),
    ):
        assert (
            tuple(way_of(build_optimizer(model(dtype=dtype), OptimConfig(**optim))).values())
            == told
        )


class Deaf(torch.optim.SGD):
    """Takes a checkpoint's states for nothing."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


def test_an_optimizer_that_does_not_take_its_states_back_is_refused(tmp_path: Path) -> None:
    for kind, refused in ((torch.optim.SGD, False), (Deaf, True)):
        saved = WholeCheckpoints(tmp_path / kind.__name__, keep=1)
        saved.folder.mkdir()
        module = model()
        fill_gradients(module, 0)
        optimizer = kind(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        saved.save(1, module, optimizer, 0.0)
        again = kind(module.parameters(), lr=0.1, momentum=0.9)
        if not refused:
            assert saved.restore(module, again) == (1, 0.0)
            continue
        with pytest.raises(UserError, match=r"momentum_buffer of parameter 0 was not restored"):
            saved.restore(module, again)
