"""The fused loss against plain logits and cross-entropy: values, gradients, chunks, precision, tied
and sharded weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny

from lsai_core.model.loss import linear_cross_entropy
from lsai_core.model.transformer import build_model
from lsai_core.training.step import loss_fn


def case(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    tokens: int = 37,
    words: int = 301,
    width: int = 24,
):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, width, generator=generator).to(device, dtype).requires_grad_()
    weight = (
        (0.3 * torch.randn(words, width, generator=generator)).to(device, dtype).requires_grad_()
    )
    return hidden, weight, torch.randint(words, (1, tokens), generator=generator).to(device)


def reference(hidden, weight, targets, reduction="mean"):
    """Loss and gradients in float64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    loss = F.cross_entropy(
        F.linear(hidden, weight).flatten(0, 1), targets.flatten(), reduction=reduction
    )
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def error(out, ref):
    return float((out.detach().double() - ref).norm() / ref.norm())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [1, 5, 36, 37, 1000])
def test_equals_the_plain_loss_for_every_chunk_size(rows: int, reduction: str) -> None:
    hidden, weight, targets = case()
    loss = linear_cross_entropy(hidden, weight, targets, reduction, chunk=rows)
    (3 * loss).backward()
    ref_loss, ref_hidden, ref_weight = reference(hidden, weight, targets, reduction)
    assert loss.dtype == torch.float32
    assert error(loss, ref_loss) < 1e-6
    assert error(hidden.grad, 3 * ref_hidden) < 1e-5
    assert error(weight.grad, 3 * ref_weight) < 1e-5


def test_bf16_errors_are_those_of_bf16_products() -> None:
    hidden, weight, targets = case(dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, targets, chunk=10)
    loss.backward()
    ref_loss, ref_hidden, ref_weight = reference(hidden, weight, targets)
    assert error(loss, ref_loss) < 2e-3
    assert error(hidden.grad, ref_hidden) < 1e-2
    assert error(weight.grad, ref_weight) < 1e-2


def test_autocast_multiplies_in_bf16_and_keeps_fp32_gradients() -> None:
    hidden, weight, targets = case()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
        plain = F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), targets.flatten())
    loss.backward()
    assert float(loss) == pytest.approx(float(plain), rel=1e-3)
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_without_gradients_it_is_the_loss_alone() -> None:
    hidden, weight, targets = case()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    assert error(loss, reference(hidden, weight, targets)[0].detach()) < 1e-6


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_learns_the_same_with_both_losses(tied: bool) -> None:
    grads, losses = [], []
    for name in ("fused", "full"):
        config = tiny(loss=name, model={"tie_embeddings": tied})
        model = build_model(config.model, config.attention)
        tokens = torch.randint(320, (2, 33), generator=torch.Generator().manual_seed(1))
        loss = loss_fn(model, tokens[:, :-1], tokens[:, 1:], config)
        loss.backward()
        losses.append(float(loss))
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert error(grads[0], grads[1].double()) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype, chunks: int) -> None:
    hidden, weight, targets = case("cuda", dtype, tokens=500, words=40_001, width=256)
    rows = -(-500 // chunks)
    loss = linear_cross_entropy(hidden, weight, targets, chunk=rows)
    (0.5 * loss).backward()
    ref_loss, ref_hidden, ref_weight = reference(hidden, weight, targets)
    limit = 1e-2 if dtype == torch.bfloat16 else 2e-3  # fp32 products may use TF32
    assert error(loss, ref_loss) < limit / 5
    assert error(hidden.grad, 0.5 * ref_hidden) < limit
    assert error(weight.grad, 0.5 * ref_weight) < limit


@pytest.mark.gpu
def test_memory_on_a_gpu_is_one_chunk_and_the_gradients() -> None:
    hidden, weight, targets = case("cuda", torch.bfloat16, tokens=4096, words=65_536, width=256)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets, chunk=1024).backward()
    chunk = 1024 * 65_536 * 2
    gradients = (
        hidden.numel() + 4 * weight.numel()
    ) * 4  # the weight's sum in fp32, its product, and what is handed on
    assert torch.cuda.max_memory_allocated() - before < 1.5 * chunk + gradients
