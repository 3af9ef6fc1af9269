"""The decoder: counts, initialisation, causality, checkpointing and compilation, through its public
interface."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lsai_core.attention import resolve
from lsai_core.base.errors import Unavailable
from lsai_core.config.model import AttentionConfig, BlockCheckpoint, GradCheckpoint, ModelConfig
from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import Transformer, build_model, count_parameters
from lsai_core.training.combinations import refusal

SMALL = ModelConfig.model_validate(
    {
        "n_layers": 2,
        "d_model": 32,
        "n_heads": 4,
        "n_kv_heads": 2,
        "d_ff": 80,
        "vocab_size": 97,
        "rope_theta": 1e4,
    }
)
TOKENS = torch.randint(0, 97, (2, 19), generator=torch.Generator().manual_seed(0))


def gradients(model: Transformer, tokens: Tensor = TOKENS) -> list[Tensor]:
    model(tokens).float().logsumexp(-1).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    "preset", ["lab", "lab-tiny", "course", "llama2-7b", "llama3-8b", "llama3.2-1b"]
)
def test_counts_equal_the_built_model(preset: str) -> None:
    config = ModelConfig.model_validate({"preset": preset})
    with torch.device("meta"):
        model = Transformer(config)
    counts = count_parameters(config)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert counts.embedding == model.embedding.weight.numel()
    assert counts.non_embedding == counts.total - counts.embedding


def test_known_counts() -> None:
    """Published sizes: Llama 3 8B and Llama 3.2 1B."""
    assert (
        count_parameters(ModelConfig.model_validate({"preset": "llama3-8b"})).total == 8_030_261_248
    )
    assert (
        count_parameters(ModelConfig.model_validate({"preset": "llama3.2-1b"})).total
        == 1_235_814_400
    )


def test_untrained_loss_is_that_of_a_uniform_guess() -> None:
    logits = build_model(SMALL)(TOKENS)
    assert logits.shape == (2, 19, 97)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    assert abs(loss.item() - math.log(97)) < 0.05


@pytest.mark.parametrize("tie", [False, True])
def test_logits_come_from_hidden_and_output_weight(tie: bool) -> None:
    model = build_model(SMALL.model_copy(update={"tie_embeddings": tie}))
    torch.testing.assert_close(model.hidden(TOKENS) @ model.output_weight.T, model(TOKENS))
    assert (model.output_weight is model.embedding.weight) == tie


@pytest.mark.parametrize("backend", ["eager", "sdpa_flash"])
def test_later_tokens_do_not_change_earlier_logits(backend: str) -> None:
    model = build_model(SMALL, AttentionConfig.model_validate({"backend": backend}))
    changed = TOKENS.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 97
    before, after = model(TOKENS), model(changed)
    assert torch.equal(before[:, :11], after[:, :11])
    assert (before[:, 11:] != after[:, 11:]).any(dim=-1).all()


def test_window_limits_how_far_a_token_reaches() -> None:
    """With window 3 and two layers, a token reaches the four positions after it and no others."""
    model = build_model(SMALL, AttentionConfig(backend="eager", window=3))
    changed = TOKENS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 97
    moved = (model(TOKENS) - model(changed)).abs().amax(dim=(0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == [5, 6, 7, 8, 9]


def test_only_relative_positions_matter_and_positions_can_be_given() -> None:
    model = build_model(SMALL, dtype=torch.float64)
    here, shifted = model.hidden(TOKENS), model.hidden(TOKENS, torch.arange(19) + 7)
    torch.testing.assert_close(here, shifted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(
        here, model.hidden(TOKENS, torch.arange(19) * 2), rtol=1e-4, atol=1e-5
    )


def test_initialisation_follows_seed_and_name_alone() -> None:
    first, again, other = (
        build_model(SMALL, seed=1),
        build_model(SMALL, seed=1),
        build_model(SMALL, seed=2),
    )
    direct = Transformer(SMALL)
    direct.init_weights(1)
    deeper = build_model(SMALL.model_copy(update={"n_layers": 3}), seed=1)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])
        assert torch.equal(parameter, dict(direct.named_parameters())[name])
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
            continue
        assert not torch.equal(parameter, dict(other.named_parameters())[name])
        residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        std = 1 if name == "embedding.weight" else 0.02 / 2 if residual else 0.02
        assert parameter.std().item() == pytest.approx(std, rel=0.1)
        if not residual:  # their scale depends on the depth
            assert torch.equal(parameter, dict(deeper.named_parameters())[name])


def test_a_tied_embedding_starts_as_small_as_an_output_layer() -> None:
    tied = build_model(SMALL.model_copy(update={"tie_embeddings": True}))
    assert tied.embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["selective", "alternating", "full", ["full", "none"]])
def test_checkpointing_does_not_change_gradients(
    mode: GradCheckpoint | list[BlockCheckpoint], autocast: bool
) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, recomputed = (
            gradients(build_model(SMALL)),
            gradients(build_model(SMALL, grad_checkpoint=mode)),
        )
    assert len(plain) == len(recomputed) and all(map(torch.equal, plain, recomputed))


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


def test_checkpointing_recomputes_what_it_says() -> None:
    """`full` runs every block's forward twice; `selective` repeats no matrix product and no
    attention kernel, `alternating` the feed-forward layer's products of every second block."""
    counts: dict[str, Counter[str]] = {}
    modes: tuple[GradCheckpoint, ...] = ("none", "selective", "alternating", "full")
    for mode in modes:
        with Calls() as calls:
            gradients(build_model(SMALL, grad_checkpoint=mode))
        counts[mode] = calls.count
    product, kernel = "aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert counts["selective"][product] == counts["none"][product] < counts["full"][product]
    assert (
        counts["selective"][kernel] == counts["none"][kernel] == 2 and counts["full"][kernel] == 4
    )
    assert counts["alternating"][kernel] == counts["none"][kernel]
    again = [counts[mode][product] - counts["none"][product] for mode in ("alternating", "full")]
    assert (
        1 <= again[0] <= 2 and again[1] > 2 * again[0]
    )  # gate and up, and down where nothing sees that it is not needed
    assert counts["selective"]["aten::silu"] == counts["full"]["aten::silu"] == 4
    with Calls() as calls:
        gradients(build_model(SMALL, grad_checkpoint=["full", "none"]))
    assert calls.count[kernel] == 3 and calls.count["aten::silu"] == 3


@pytest.mark.parametrize(
    "mode", ["none", "selective", "alternating", "full", ["full", "attention"]]
)
def test_blocks_compile_without_graph_breaks(
    mode: GradCheckpoint | list[BlockCheckpoint],
) -> None:
    """aot_eager traces forward and backward as the real compiler does, without generating code."""
    torch._dynamo.reset()
    compiled = build_model(SMALL, grad_checkpoint=mode)
    for block in compiled.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for value, expected in zip(gradients(compiled), gradients(build_model(SMALL)), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("window", [None, 7])
def test_compiled_blocks_take_changing_lengths(window: int | None) -> None:
    """Evaluation often has another sequence length than training."""
    torch._dynamo.reset()
    attention = AttentionConfig(backend="auto", window=window)
    plain, compiled = build_model(SMALL, attention), build_model(SMALL, attention)
    for block in compiled.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for seq_len in (19, 11, 5, 1, 17):
        torch.testing.assert_close(compiled(TOKENS[:, :seq_len]), plain(TOKENS[:, :seq_len]))


def test_whole_model_compiles_without_graph_breaks() -> None:
    torch._dynamo.reset()
    model = build_model(SMALL)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(TOKENS), model(TOKENS))


def parity(device: str, backend: str, window: int | None, precision: torch.dtype) -> float:
    """Largest relative difference of logits and gradients from the fp32 model with eager attention,
    both in training."""
    config = SMALL.model_copy(update={"d_model": 256, "n_heads": 4, "n_kv_heads": 2, "d_ff": 512})
    tokens = torch.randint(0, 97, (2, 160), generator=torch.Generator().manual_seed(1)).to(device)
    found: list[list[Tensor]] = []
    for name, dtype in ((backend, precision), ("eager", torch.float32)):
        attention = AttentionConfig.model_validate({"backend": name, "window": window})
        model = build_model(config, attention, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
            found.append([model(tokens).detach().float(), *gradients(model, tokens)])
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True))


# Every attention variant that trains, with the windows that it takes; the rounding of bf16 over a
# model is about 1 %.
CPU_VARIANTS = [
    (name, window) for name in ("auto", "eager", "sdpa_math", "sdpa_flash") for window in (None, 48)
]
CUDA_VARIANTS = [
    *[
        (name, window)
        for name in ("auto", "eager", "sdpa_math", "sdpa_efficient", "flex", "fa2", "fa3", "fa4")
        for window in (None, 48)
    ],
    ("sdpa_flash", None),
    ("sdpa_cudnn", None),
]


@pytest.mark.parametrize(
    ("backend", "window"), [v for v in CPU_VARIANTS if v != ("sdpa_flash", 48)]
)
def test_every_attention_variant_trains_like_the_fp32_reference(
    backend: str, window: int | None
) -> None:
    assert parity("cpu", backend, window, torch.float32) <= 1e-5
    assert parity("cpu", backend, window, torch.bfloat16) <= 0.03


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("backend", "window"), CUDA_VARIANTS)
def test_every_attention_variant_trains_like_the_fp32_reference_on_cuda(
    backend: str, window: int | None
) -> None:
    try:
        resolve(backend, "cuda", torch.bfloat16, 64, 160, window, grouped=True)
    except Unavailable as error:
        pytest.skip(str(error))
    torch._dynamo.reset()
    assert parity("cuda", backend, window, torch.bfloat16) <= 0.03


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", ["none", "selective", "alternating", "full"])
def test_compiled_training_on_cuda(mode: GradCheckpoint) -> None:
    """bf16, the fastest kernel here, compiled per block: gradients near those of the uncompiled
    fp32 model."""
    torch._dynamo.reset()
    config = SMALL.model_copy(update={"d_model": 256, "n_heads": 4, "n_kv_heads": 2, "d_ff": 512})
    tokens = torch.randint(0, 97, (2, 256), device="cuda")
    exact = gradients(
        build_model(config, AttentionConfig(backend="eager", window=None), device="cuda"), tokens
    )
    model = build_model(config, device="cuda", grad_checkpoint=mode)
    for block in model.blocks:
        block.compile(fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        found = gradients(model, tokens)
    for value, expected in zip(found, exact, strict=True):
        assert (value - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.parametrize(
    ("mode", "repeated"), [("full", 6), ("attention", 6), ("alternating", 1), ("selective", 0)]
)
def test_fused_blocks_repeat_no_projection_whose_result_nobody_reads(
    mode: GradCheckpoint, repeated: int
) -> None:
    """Of the four products of a block, down's result is not needed again: two blocks of qkv,
    attention output, gate and up."""
    counts, grads = [], []
    for checkpointed in ("none", mode):
        model = build_model(SMALL, grad_checkpoint=checkpointed)
        model.fuse()
        with Calls() as calls:
            grads.append(gradients(model))
        counts.append(calls.count["aten::mm"])
    assert counts[1] - counts[0] == repeated
    assert all(map(torch.equal, *grads))


def test_some_blocks_are_checkpointed_and_the_others_otherwise() -> None:
    model = SMALL.model_copy(update={"n_layers": 5, "vocab_size": 300})
    some = {"grad_checkpoint": "alternating", "checkpoint_blocks": 3}
    config = TrainConfig.model_validate(
        {"model": model.model_dump(), "data": {"vocab_size": 300}, **some}
    )
    assert config.checkpointed == ["selective", "mlp", "selective", "none", "none"]
    others = config.model_copy(update={"checkpoint_others": "full"})
    assert others.checkpointed[3:] == ["full", "full"] and others.computed_again == 2
    assert refusal(config) is None and refusal(others) is None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"checkpoint_others": "full"}, "say how many blocks"),
        ({"checkpoint_blocks": 2, "grad_checkpoint": "full"}, "must leave blocks"),
        ({"checkpoint_blocks": 1}, "must leave blocks that do otherwise"),
        (
            {"checkpoint_blocks": 1, "grad_checkpoint": "full", "saved_inputs": "host"},
            "leave out checkpoint_blocks",
        ),
    ],
    ids=str,
)
def test_blocks_that_do_nothing_else_are_refused(said: dict[str, Any], why: str) -> None:
    config = TrainConfig.model_validate({"model": SMALL.model_dump(), **said})
    assert why in (refusal(config) or "")
