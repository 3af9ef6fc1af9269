"""AdamW with 8-bit moments: the type and its errors, training close to full moments, exact
resuming, and the kernel on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import losses, tiny
from test_checkpoint import Interrupted, resumed_as_never_stopped, stop_at

from lsai_core.base.errors import UserError
from lsai_core.config.train import OptimConfig
from lsai_core.optimizers.adam8bit import moments_of, quantized, restored, type_values
from lsai_core.optimizers.build import build_optimizer, clip_and_update
from lsai_core.prediction.memory import predict
from lsai_core.profiling.live_tensors import LiveTensors
from lsai_core.training.combinations import require_possible
from lsai_core.training.loop import train
from lsai_lab.data import Dataset

pytestmark = pytest.mark.usefixtures("one_thread")
EIGHT = {"states": "8bit"}


def test_the_types_are_those_of_the_paper() -> None:
    for signed, count in ((True, 129), (False, 256)):
        values = type_values(signed)
        assert (
            len(values) == count
            and values[0] == 0
            and values[-1] == 1
            and (values.diff() > 0).all()
        )
    # The finest decade, 0.1 to 1, is cut into 64 and 128 steps, the coarsest into 1 and 2.
    assert type_values(True)[1] == pytest.approx(5.5e-7) and type_values(True)[-2] == pytest.approx(
        1 - 0.9 / 128
    )
    assert type_values(False)[1] == pytest.approx(3.25e-7) and type_values(False)[
        -2
    ] == pytest.approx(1 - 0.9 / 256)


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_errors_stay_within_half_a_step(signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x_NK = torch.randn(37, 700, generator=generator) * 10 ** (
        6 * torch.rand(37, 700, generator=generator) - 6
    )
    x_NK = x_NK if signed else x_NK**2
    codes_NK, scale_NB = quantized(x_NK, signed)
    assert (
        codes_NK.dtype == torch.uint8 and codes_NK.shape == x_NK.shape and scale_NB.shape == (37, 3)
    )
    found_NK = restored(codes_NK, scale_NB, signed)
    a = x_NK.abs() / scale_NB.repeat_interleave(256, 1)[:, :700]
    # of the decade above: 0..6
    level = torch.floor(torch.log10(a.double().clamp(min=1e-12))).clamp(min=-7) + 7
    half = 0.45 / 2 ** (level + (0 if signed else 1)) * 10 ** (level - 6)
    error = (found_NK - x_NK).abs().double() / scale_NB.repeat_interleave(256, 1)[:, :700]
    assert (error <= half * 1.0001 + (2.75e-7 if signed else 3.25e-7)).all()
    at_edge = a == 1
    assert (error[at_edge & (x_NK > 0)] == 0).all()
    # What has been rounded stays as it is.
    again = quantized(found_NK, signed)[0] if not signed else codes_NK
    assert torch.equal(restored(again, scale_NB, signed), found_NK)


def test_zero_stays_zero_and_a_second_moment_is_never_rounded_to_it() -> None:
    x_NK = torch.tensor([[0.0, 1e-12, 1.0], [0.0, 0.0, 0.0]])
    found_NK = restored(*quantized(x_NK, False), False)
    assert (
        found_NK[0, 0] == 0 and found_NK[0, 1] == pytest.approx(3.25e-7) and not found_NK[1].any()
    )
    assert not restored(*quantized(x_NK[:, :2] * 0, True), True).any()


def test_a_row_without_gradient_does_not_run_away() -> None:
    table = torch.nn.Parameter(torch.randn(4, 256))
    optimizer = build_optimizer(
        torch.nn.ParameterList([table]), OptimConfig(lr=1e-3, states="8bit", weight_decay=0.0)
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        table.grad = torch.randn(4, 256, generator=generator) * 10 ** (
            4 * torch.rand(4, 256, generator=generator) - 8
        )
        if step >= 5:
            table.grad[1] = 0
        before = table.detach().clone()
        optimizer.step()
        # AdamW's step is at most lr (1 - beta1) / sqrt(1 - beta2), a little more after a moment's
        # rounding.
        assert (table - before).abs().max() < 5e-3


def test_the_first_step_is_that_of_adamw_and_later_ones_stay_close() -> None:
    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(300, 64), torch.nn.Linear(64, 16))

    mine, theirs = made(), made()
    first = build_optimizer(mine, OptimConfig(lr=1e-2, states="8bit"))
    second = build_optimizer(theirs, OptimConfig(lr=1e-2))
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        norms = clip_and_update(first, 1.0), clip_and_update(second, 1.0)
        assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-5)
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert (p - q).abs().max() <= (1e-6 if step == 0 else 2e-2)
    whole = sum(
        t.numel() * t.element_size()
        for s in first.state.values()
        for k, t in s.items()
        if k != "step"
    )
    matrices = 300 * 64 + 64 * 16
    assert whole == 2 * (matrices + 4 * (64 * 2 + 16) + 4 * (64 + 16))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loss_falls_as_with_full_moments(
    dataset: Dataset, tmp_path: Path, precision: str
) -> None:
    curves = []
    for name, states in (("full", "full"), ("eight", "8bit")):
        train(
            tiny(precision=precision, steps=40, optim={"states": states}), dataset, tmp_path / name
        )
        curves.append(torch.tensor(losses(tmp_path / name)))
    assert curves[1][0] == curves[0][0] and curves[1][-1] < curves[1][0] - 0.5
    assert (curves[1] - curves[0]).abs().max() < 0.05


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resuming_equals_never_having_stopped(
    dataset: Dataset, tmp_path: Path, precision: str
) -> None:
    config = tiny(precision=precision, optim=EIGHT, checkpoint={"every": 4})
    resumed_as_never_stopped(config, dataset, tmp_path)


def test_states_of_another_kind_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tiny(checkpoint={"every": 4}), dataset, tmp_path, on_rows=stop_at(6))
    with pytest.raises(UserError, match="does not fit"):
        train(tiny(checkpoint={"every": 4}, optim=EIGHT), dataset, tmp_path)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="8bit"):
        require_possible(tiny(optim={"states": "8bit", "kernel": "torch"}), "run")
    with pytest.raises(UserError, match="use one of them"):
        require_possible(tiny(optim=EIGHT, parallel={"fsdp": 2, "cpu_offload": True}), "run")


def test_an_update_on_a_cpu_needs_less_than_the_states_save() -> None:
    """2.3 million parameters in fp32: 17.4 MiB of moments, 4.5 in 8 bits; in between, an update
    decodes some rows at a time."""
    model = torch.nn.Linear(1500, 1520, bias=False)
    model.weight.grad = torch.randn(1520, 1500)
    optimizer = build_optimizer(model, OptimConfig(states="8bit"))
    optimizer.step()
    with LiveTensors() as tracker:
        tracker.add([model, optimizer])
        before = tracker.live
        optimizer.step()
    full, eight = (
        8 * 1500 * 1520,
        sum(t.nbytes for s in optimizer.state.values() for t in s.values()),
    )
    assert 0 < tracker.peak - before < (full - eight) / 2


@pytest.mark.parametrize("parallel", [{}, {"fsdp": 4}], ids=["alone", "fsdp4"])
def test_the_prediction_knows_the_smaller_states(parallel: dict[str, int]) -> None:
    model = {"d_model": 256, "d_ff": 512, "vocab_size": 4096}
    full, eight = (
        predict(tiny(model=model, precision="bf16", parallel=parallel, optim={"states": s}))
        for s in ("full", "8bit")
    )
    share = eight.parts["optimizer"] / full.parts["optimizer"]
    assert share == pytest.approx((2 + 8 / 256) / 4, rel=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [256, 700, 33])
def test_the_kernel_computes_what_plain_operations_do(dtype: torch.dtype, columns: int) -> None:
    from lsai_core.optimizers.adamw8_kernel import adamw8_
    from lsai_core.optimizers.plain_update import plain_adamw_

    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(77, columns, device="cuda", generator=generator).to(dtype)
    states = [[t.clone() for t in moments_of(weight).values()] for _ in range(2)]
    weights_ = [weight.clone(), weight.clone()]
    factor = torch.tensor(0.5, device="cuda")
    for step in range(1, 6):
        spread = 10 ** (4 * torch.rand(77, columns, device="cuda", generator=generator) - 4)
        gradient = (torch.randn(77, columns, device="cuda", generator=generator) * spread).to(dtype)
        settings = dict(step=step, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        adamw8_(weights_[0], gradient, *states[0], factor, **settings)  # type: ignore[arg-type]
        plain_adamw_(weights_[1], gradient, *states[1], factor, **settings)  # type: ignore[arg-type]
        # A value at the edge between two steps may go either way; beyond that all is equal.
        for kernel, plain in zip(states[0][::2], states[1][::2], strict=True):
            off = (kernel.int() - plain.int()).abs()
            assert (off > 0).float().mean() < 5e-3 and off[off < 127].max() <= 1
        for kernel, plain in zip(states[0], states[1], strict=True):
            plain.copy_(kernel)
        torch.testing.assert_close(
            weights_[0], weights_[1], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )
        weights_[1].copy_(weights_[0])
