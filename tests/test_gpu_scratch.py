"""What CUDA's operators keep and take for a while: the sizes of blocks that an H100 recorded
(`reports/predictions/anybody.measured.json`), and PyTorch's rules."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import CHECKOUT
from torch import Tensor, nn

from lsai_core import simulated_gpu
from lsai_core.prediction.gpu_scratch import GPU_SCRATCH, convolution, recurrent, reduction

MEASURED = json.loads((CHECKOUT / "reports/predictions/anybody.measured.json").read_text())
HALF = torch.bfloat16


def asked(name: str) -> set[int]:
    """Bytes that the recorded run of a configuration asked its allocator for."""
    return {size for size, _ in MEASURED[name]["asked"]}


def peak_of(call: Any, *shape: int, dtype: torch.dtype = HALF) -> tuple[int, int]:
    """Bytes beside the input: at most, and after `call`, which wait for the backward pass."""
    with simulated_gpu("h100"):
        x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call(x)
        assert result is not None
        found = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    return found


@pytest.mark.parametrize(
    ("rows", "columns", "name"),
    [
        (16 * 512, 3072, "bert_autocast"),
        (32 * 256, 16_000, "lstm_fp32"),
        (64 * 196, 512, "mixer_recomputed"),
        (64 * 56 * 56, 96, "convnext_fp32"),
    ],
)
def test_sums_over_rows_take_what_an_h100_took(rows: int, columns: int, name: str) -> None:
    parts, counters = reduction(torch.empty(rows, columns, device="meta"), [0], 4)
    assert parts in asked(name) and counters in asked(name)


def test_other_sums_take_little_or_nothing() -> None:
    matrix = torch.empty(8192, 768, device="meta")
    assert sum(reduction(matrix, None, 4)) < 2**20  # threads that share an output add in registers
    assert reduction(matrix, [1], 4) == []
    assert reduction(torch.empty(64, 768, device="meta"), [0], 4) == []
    assert reduction(torch.empty(0, 768, device="meta"), [0], 4) == []
    assert reduction(torch.empty((), device="meta"), None, 4) == []
    # Leading dimensions that are one range of addresses are one; the sum's dtype has its bytes.
    assert reduction(matrix.view(16, 512, 768), [0, 1], 4) == reduction(matrix, [0], 4)
    assert reduction(matrix, [0], 8)[0] == 2 * reduction(matrix, [0], 4)[0]


def test_the_sum_of_a_bias_gradient_is_seen_by_the_step() -> None:
    with simulated_gpu("h100"):
        layer = nn.Linear(64, 3072, device="cuda", dtype=HALF)
        out = layer(torch.randn(8192, 64, device="cuda", dtype=HALF))
        before = torch.cuda.memory_allocated() + out.nbytes
        torch.cuda.reset_peak_memory_stats()
        out.backward(torch.empty_like(out))
        most = torch.cuda.max_memory_allocated() - before
    assert 138_412_032 <= most < 138_412_032 + 2**20


@pytest.mark.parametrize(
    ("x", "weight", "out", "dtype", "name", "more"),
    [
        (
            (64, 64, 56, 56),
            (64, 64, 3, 3),
            (64, 64, 56, 56),
            torch.float32,
            "resnet50_fp32_sgd",
            147,
        ),
        ((4, 512, 15_999), (512, 512, 3), (4, 512, 7_999), torch.float32, "wav2vec2_fp32", 147),
        (
            (8, 512, 3_000),
            (512, 512, 3),
            (8, 512, 1_500),
            torch.float16,
            "whisper_fp16_scaler",
            147,
        ),
        # of one place that leaves others out: without the weight
        *(
            (
                (64, 4 * width, size, size),
                (8 * width, 4 * width, 1, 1),
                (64, 8 * width, size // 2, size // 2),
                torch.float32,
                "resnet50_fp32_sgd",
                147,
            )
            for width, size in ((64, 56), (128, 28), (256, 14))
        ),
        # three channels of 16 bits become eight
        ((64, 3, 224, 224), (768, 3, 16, 16), (64, 768, 14, 14), HALF, "vit_autocast", 16),
    ],
)
def test_convolutions_copy_what_an_h100_copied(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    out: tuple[int, ...],
    dtype: torch.dtype,
    name: str,
    more: int,
) -> None:
    tensors = (torch.empty(shape, dtype=dtype, device="meta") for shape in (x, weight, out))
    (found,) = convolution(*tensors)
    assert found + more in asked(name)


def test_convolutions_of_channels_last_and_of_one_place_copy_nothing() -> None:
    def copied(x: Tensor, *weight: int) -> list[int]:
        return convolution(x, torch.empty(weight, device="meta"), x)

    x = torch.empty(8, 64, 32, 32, device="meta")
    assert copied(x, 64, 64, 3, 3)
    assert not copied(x, 64, 64, 1, 1)
    assert not copied(x, 64, 1, 3, 3)  # depthwise
    assert not copied(x.to(memory_format=torch.channels_last), 64, 64, 3, 3)


def test_recurrent_layers_reserve_what_an_h100_reserved() -> None:
    """256 more bytes there are the state of dropout."""
    for kind, layers, dtype, name, reserved in (
        (nn.LSTM, 3, torch.float32, "lstm_fp32", 572_522_752 - 256),
        (nn.GRU, 2, HALF, "gru_autocast", 219_152_640 - 256),
    ):
        assert reserved + 256 in asked(name)
        with simulated_gpu("h100"):
            model = kind(1024, 1024, layers, dropout=0.1).to("cuda", dtype)
            x = torch.randn(256, 32, 1024, device="cuda", dtype=dtype)
            before = torch.cuda.memory_allocated()
            out = model(x)
            kept = torch.cuda.memory_allocated() - before - out[0].nbytes
            states = sum(state.nbytes for state in (out[1] if kind is nn.LSTM else out[1:]))
            assert reserved <= kept <= reserved + 3 * states, kind
            before = torch.cuda.memory_allocated()
            out[0].sum().backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            assert len({g.untyped_storage()._cdata for g in gradients if g is not None}) == 1
        hx = torch.empty(layers, 32, 1024, dtype=dtype, device="meta")
        x = torch.empty(256, 32, 1024, dtype=dtype, device="meta")
        (workspace,) = recurrent(4 if kind is nn.LSTM else 3, x, hx)
        assert any(abs(workspace / size - 1) < 0.02 for size in asked(name))


def test_autocast_of_recurrent_layers_casts_their_weights() -> None:
    with simulated_gpu("h100"):
        model = nn.GRU(512, 512).cuda()
        x = torch.randn(64, 8, 512, device="cuda")
        with torch.autocast("cuda", dtype=HALF):
            out, last = model(x)
        assert out.dtype == last.dtype == HALF
        out.sum().backward()
        assert (
            model.weight_hh_l0.grad is not None and model.weight_hh_l0.grad.dtype == torch.float32
        )
    evaluated, _ = peak_of(lambda x: nn.GRU(64, 64).eval()(x)[0], 256, 32, 64, dtype=torch.float32)
    assert evaluated > 0


@pytest.mark.parametrize("call", [F.softmax, F.log_softmax])
def test_a_softmax_that_widens_fp16_makes_no_copy(call: Any) -> None:
    size = 2**22
    for dtype, copies in ((torch.float16, 0), (HALF, 1)):
        most, kept = peak_of(lambda x: call(x, -1, dtype=torch.float32), 2**12, 2**10, dtype=dtype)
        assert (most, kept) == (4 * size * (1 + copies), 4 * size)
        with simulated_gpu("h100"):
            x = torch.randn(64, 64, device="cuda", dtype=dtype, requires_grad=True)
            call(x, -1, dtype=torch.float32).sum().backward()
            assert x.grad is not None and x.grad.dtype == dtype


def test_a_loss_under_autocast_has_16_bit_log_probabilities() -> None:
    """Of the size of the logits in a step of BERT's on an H100: two fp32 tensors, four of 16 bits
    (logits, log probabilities, and the gradients of both)."""
    logits, seen = 16 * 512 * 30_522, MEASURED["bert_autocast"]["asked"]
    assert [4 * logits, 2 * 3] in seen and [2 * logits, 4 * 3] in seen

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=HALF):
            return F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device="cuda"))

    _, kept = peak_of(loss, 2**12, 2**10)
    assert kept == pytest.approx((2 + 4) * 2**22, rel=0.01)


def test_autocast_leaves_alone_what_a_gpu_leaves_alone() -> None:
    with simulated_gpu("h100"), torch.autocast("cuda", dtype=torch.float16):
        x = torch.randn(8, 8, 8, 8, device="cuda", dtype=torch.float16)
        assert F.pad(x, (1, 1, 1, 1), mode="reflect").dtype == torch.float16
        assert torch.cat([x, x]).dtype == torch.stack([x, x]).dtype == torch.float16
        assert F.adaptive_avg_pool3d(x, 2).dtype == torch.float16
        assert x.sum().dtype == x.prod().dtype == torch.float32
        kernel = torch.randn(8, 8, 3, 3, device="cuda")
        assert F.conv2d(x.float(), kernel, padding="same").dtype == torch.float16


def test_attention_with_a_bias_that_is_a_view_is_plain_operations() -> None:
    """T5's learned bias, heads last in memory: the scores exist, in fp32."""
    heads, length = 8, 512

    def attended(copied: bool) -> Any:
        def call(q: Tensor) -> Tensor:
            table = torch.randn(length, length, heads, device="cuda", dtype=HALF)
            bias = table.permute(2, 0, 1).unsqueeze(0)
            return F.scaled_dot_product_attention(q, q, q, bias.contiguous() if copied else bias)

        return peak_of(call, 4, heads, length, 64)[1]

    scores = 4 * 4 * heads * length**2
    assert attended(True) < 0.7 * scores <= scores <= attended(False)


def test_causal_attention_of_two_lengths_is_not_flash() -> None:
    def call(q: Tensor) -> Tensor:
        k = torch.randn(2, 4, 256, 64, device="cuda", dtype=HALF)
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    out, q = peak_of(call, 2, 4, 100, 64)[1], 2 * 4 * 100
    k = 2 * 2 * 4 * 256 * 64
    assert out >= k + 2 * q * 64 + 4 * 2 * 4 * 128  # log-sum-exp of rows in blocks of 32


def test_operators_with_scratch_exist() -> None:
    for name in GPU_SCRATCH:
        space, _, operator = name.partition("::")
        assert hasattr(getattr(torch.ops, space), operator), name
