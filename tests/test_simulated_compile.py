"""torch.compile on a simulated GPU: as this package's own compiled runs are predicted, by hand, and
what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anybody
import anybody_compiled
import anybody_more
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import CHECKOUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lsai_core import TrainConfig, predict, simulated_gpu
from lsai_core.base.errors import UserError
from lsai_core.config.precision import autocast, weight_dtype
from lsai_core.config.strict import validated
from lsai_core.model.transformer import build_model
from lsai_core.optimizers.build import build_optimizer
from lsai_core.parallel.adapt import adapt
from lsai_core.prediction.fake_kernels import attention_as, expected_kernel
from lsai_core.training.step import train_step

GIB = 2**30
CUDA = torch.device("cuda")
compiled_before = torch.compile(lambda x: x + 1)


@pytest.mark.parametrize(
    ("precision", "checkpointing"),
    [("bf16", "none"), ("bf16_autocast", "none"), ("bf16", "full"), ("bf16", "selective")],
)
def test_compiled_blocks_come_to_what_predict_says(precision: str, checkpointing: str) -> None:
    shape = {"n_layers": 3, "d_model": 512, "n_heads": 8, "n_kv_heads": 2, "d_ff": 1408}
    data = {"model": {**shape, "vocab_size": 8192}, "data": {"vocab_size": 400}}
    settings = {"precision": precision, "grad_checkpoint": checkpointing, "blocks": "plain"}
    settings |= {"compile": True, "seq_len": 1024, "batch_size": 4}
    config = validated(TrainConfig, {**data, **settings}, "test")
    with simulated_gpu("h100") as gpu:
        model = build_model(
            config.model,
            config.attention,
            grad_checkpoint=config.grad_checkpoint,
            device="cuda",
            dtype=weight_dtype(config.precision),
        )
        for block in model.blocks:
            block.compile()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(400, (4, 1025), device="cuda")
        for _ in range(3):
            with autocast(config.precision, CUDA):
                loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    own = predict(config)
    active = own.on_gpu_with(80).allocated / GIB
    assert gpu.peak_active_gib == pytest.approx(active, rel=0.01)
    assert gpu.peak_reserved_gib == pytest.approx(own.reserved, rel=0.02)


def test_a_recorded_compiled_run() -> None:
    """Of one H100, with the trainer's own step, fused blocks and optimizer."""
    folder = CHECKOUT / "reports/recorded/h100/fsdp/all_1_auto_1.grid-966eed2a5e1c"
    config = TrainConfig.model_validate(json.loads((folder / "config.json").read_text()))
    recorded = json.loads((folder / "summary.json").read_text())["results"]
    assert config.compile
    with simulated_gpu("h100") as gpu:
        dtype = weight_dtype(config.precision)
        model = build_model(config.model, config.attention, device="cuda", dtype=dtype)
        adapt(model, config)
        for block in model.blocks:  # the kernel that ran there may not be installed here
            block.attention.attend = attention_as(expected_kernel(config))
        optimizer = build_optimizer(model, config.optim)
        ids = torch.randint(100, (config.batch_size * config.grad_accum, config.seq_len + 1))
        for _ in range(2):
            train_step(model, optimizer, ids[:, :-1], ids[:, 1:], config, CUDA)
    active, reserved = recorded["mem_peak_active_gib"], recorded["mem_peak_reserved_gib"]
    assert gpu.peak_active_gib == pytest.approx(active, rel=0.01)
    assert gpu.peak_reserved_gib == pytest.approx(reserved, rel=0.03)


def kept(function: Callable[..., Tensor], *tensors: Tensor) -> int:
    """Bytes that wait for the backward pass of `function`, its result included."""
    before = torch.cuda.memory_allocated()
    result = function(*tensors)
    return torch.cuda.memory_allocated() - before - 0 * result.numel()


def test_fused_values_are_never_made() -> None:
    def many(x: Tensor) -> Tensor:
        return (x.sin() * 2).exp().tanh() + x

    with simulated_gpu("h100"):
        x = torch.randn(2**20, device="cuda", requires_grad=True)
        eager, compiled = kept(many, x), kept(torch.compile(many), x)
        assert torch.compile(many, disable=True) is many
    assert eager == 3 * x.nbytes and compiled == x.nbytes


class Tied(nn.Module):
    """An embedding, a normalization with dropout, and a loss over all words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(50_000, 256), nn.RMSNorm(256)
        self.out = nn.Linear(256, 50_000, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.out(F.dropout(self.norm(self.table(ids)), 0.1))
        return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


class Words(nn.Module):
    """An output layer with its loss, and with its logits if they are asked for."""

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.told, self.out = told, nn.Linear(256, 8192, bias=False)

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = self.out(x)
        return F.cross_entropy(logits.float(), words), logits if self.told else None


def test_what_compiled_code_returns_it_does_not_write_over() -> None:
    """Logits that a model returns are there three times in the backward pass, as seen on an H200:
    saved, the zeros of their gradient that nobody asked for, and the gradient of the loss."""

    def peak(told: bool) -> float:
        with simulated_gpu("h100") as gpu:
            model = torch.compile(Words(told).to("cuda", torch.bfloat16))
            x = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16)
            words = torch.randint(8192, (4096,), device="cuda")
            for _ in range(2):
                model(x, words)[0].backward()
                model.zero_grad(set_to_none=True)
        return gpu.peak_allocated_gib

    logits = 2 * 4096 * 8192 / GIB
    assert peak(told=True) - peak(told=False) == pytest.approx(2 * logits, rel=0.1)


@pytest.mark.parametrize("how", ["module", "method", "function"])
def test_a_whole_model(how: str) -> None:
    def step(compiled: bool) -> Any:
        with simulated_gpu("h100") as gpu:
            model = call = Tied().to(torch.bfloat16).cuda()
            if compiled and how == "method":
                model.compile()
            elif compiled:
                call = torch.compile(model if how == "module" else lambda ids: model(ids))
            loss = call(torch.randint(100, (4, 1024), device="cuda"))
            loss.backward()
        return gpu

    eager, found = step(False), step(True)
    logits = 2 * 4 * 1024 * 50_000 / GIB
    # logits in bf16 alone: not in fp32, nor their logarithms; their gradient is written over them
    assert eager.phases["backward"] > 5 * logits
    assert logits < found.phases["forward"] < 1.2 * logits
    assert logits < found.phases["backward"] < 1.4 * logits
    if how != "function":  # whose module is not seen
        assert found.memory["weights"] == eager.memory["weights"]


def test_an_embeddings_gradient_is_summed_in_fp32() -> None:
    def step(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table).sum()

    with simulated_gpu("h100"):
        table = torch.randn(2**15, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        loss = torch.compile(step)(table, torch.randint(100, (2048,), device="cuda"))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert 3 * table.nbytes <= peak < 3.1 * table.nbytes  # the sums, and they in bf16


def breaks(x: Tensor) -> Tensor:
    y = (x.sin() * 2).exp()
    print("here")
    return (y.tanh() + x).cos()


def test_a_broken_graph_is_followed() -> None:
    """Each part keeps what it needs, as one of its own."""
    with simulated_gpu("h100"):
        x = torch.randn(2**20, device="cuda", requires_grad=True)
        broken = kept(torch.compile(breaks), x)
        first = kept(torch.compile(lambda x: (x.sin() * 2).exp()), x)
        result = torch.compile(breaks)(x)
        result.sum().backward()
        assert x.grad is not None
    assert first == x.nbytes and broken == 2 * x.nbytes  # the result of either


def test_operators_between_two_graphs_count() -> None:
    def between(x: Tensor) -> Tensor:
        y = torch.sort(x * 2).values  # of no graph: Dynamo is told to leave it alone
        return y

    def step(x: Tensor) -> Tensor:
        y = x.sin() + 1
        return torch.compiler.disable(between)(y).exp() + y

    with simulated_gpu("h100"):
        x = torch.randn(2**20, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        result = torch.compile(step)(x)
        result.sum().backward()
        peak = torch.cuda.max_memory_allocated()
    assert peak >= 6 * x.nbytes  # x, y, its double, the sorted one, their places (8 bytes each)


def test_layers_of_torch_that_dynamo_leaves_alone_run_as_before() -> None:
    def peak(compiled: bool) -> float:
        with simulated_gpu("h100") as gpu:
            layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
            model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
            if compiled:
                model.compile()
            x = torch.randn(8, 256, 256, device="cuda")
            for _ in range(2):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(x).square().mean()
                loss.backward()
        return gpu.peak_allocated_gib

    assert peak(compiled=True) == pytest.approx(peak(compiled=False), rel=1e-6)


def test_attention_without_a_mask_that_is_not_causal_is_plain_operations() -> None:
    """So an H200 ran BERT and ViT; the same attention was one kernel without torch.compile."""

    def attend(causal: bool) -> Callable[[Tensor], Tensor]:
        return lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=causal)

    with simulated_gpu("h100"):
        options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        x = torch.randn(2, 4, 512, 64, **options)
        scores = 4 * 2 * 4 * 512**2
        eager, full = kept(attend(False), x), kept(torch.compile(attend(False)), x)
        causal = kept(torch.compile(attend(True)), x)
    assert eager == causal < scores < full


@torch.compiler.disable
def made(x: Tensor) -> Tensor:
    return torch.zeros(2**20, device=x.device)


def makes(x: Tensor) -> Tensor:
    return x.sum() + made(x)


def of_two_shapes(x: Tensor) -> Tensor:
    function = torch.compile(lambda y: y * 2)
    return function(x) + function(x[:4]).sum()


class Patches(nn.Module):
    """Pictures become tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 512, 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x).flatten(2).mT.square().mean()


def test_a_convolution_of_patches() -> None:
    with simulated_gpu("h100") as gpu:
        model = Patches().cuda()
        pictures = torch.randn(32, 3, 224, 224, device="cuda")
        for _ in range(2):
            torch.compile(model)(pictures).backward()
    tokens, weights = 4 * 32 * 14 * 14 * 512 / GIB, 4 * 512 * (3 * 256 + 1) / GIB
    data = pictures.nbytes / GIB
    assert gpu.phases["forward"] == pytest.approx(data + tokens + 2 * weights, rel=0.05)
    assert gpu.phases["backward"] < data + 2.1 * tokens + 3 * weights


def split_by_buckets(_: Tensor) -> None:
    dist.init_process_group("nccl", world_size=2, rank=0)
    torch.compile(DistributedDataParallel(nn.Linear(2, 2).cuda()))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (compiled_before, "compiled before it began"),
        (lambda x: torch.compile(makes)(x), "is made between two graphs"),
        (of_two_shapes, "shapes that vary"),
        (lambda x: torch.compile(breaks, mode="reduce-overhead"), "mode=reduce-overhead"),
        (lambda x: torch.compile(breaks, dynamic=True), "dynamic=True"),
        (lambda x: torch.compile(breaks, backend="eager"), "backend=eager"),
        (lambda x: torch.compile(nn.Conv1d(8, 8, 3).cuda())(x), "aten::convolution"),
        (split_by_buckets, "DistributedDataParallel"),
    ],
)
def test_what_is_not_simulated_is_refused_in_one_line(
    call: Callable[[Any], Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as found, simulated_gpu("h100"):
        call(torch.randn(8, 8, device="cuda", requires_grad=True))
    assert len(str(found.value).splitlines()) == 1


def whole_models(file: str) -> dict[str, dict[str, float]]:
    path = CHECKOUT / "reports/predictions" / f"anybody_compiled{file}.json"
    return json.loads(path.read_text())  # type: ignore[no-any-return]


FAR = {"falcon_bf16_compiled"}  # 6 % too low: when the last layer's gradient is made


def test_whole_models_against_an_h200() -> None:
    """In sample: all of them were measured before this code was. BERT's and Gemma 2's sizes of
    blocks told what their predictions lacked; nothing of GPT-2, Falcon, ViT and torch's encoder
    was changed behind their first prediction."""
    measured, said = whole_models(".h200.measured"), whole_models(".in_sample")
    served = {name for name, found in said.items() if "error" not in found}
    assert len(served) == 17 and {"bert_autocast_compiled", "gemma2_bf16_compiled"} <= served
    for name in served:
        error = said[name]["allocated"] / measured[name]["active"] - 1
        assert abs(error) < (0.07 if name in FAR else 0.03), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2_bf16_compiled", "gpt2_fp32_no_dropout_compiled"])
def test_predictions_in_sample_are_those_of_the_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(anybody.CONFIGURATIONS, name, anybody_compiled.COMPILED[name])
    both = ((anybody, "from_config"), (anybody, "built"), (anybody_more, "built"))
    for module, function in both:
        monkeypatch.setattr(module, function, getattr(module, function))  # compiled for this test
    found, said = anybody.predict(name), whole_models(".in_sample")[name]
    for which in ("allocated", "reserved"):
        assert found[which] == pytest.approx(said[which], rel=1e-3)


def test_other_whole_models_were_predicted_before_they_are_measured() -> None:
    said = whole_models("")
    assert set(said) == set(anybody_compiled.COMPILED)
    assert not [name for name in said if name.startswith("drawn") and "error" in said[name]]


def test_torch_compiles_as_before_afterwards() -> None:
    original = torch.compile
    with simulated_gpu("h100"):
        torch.compile(lambda x: x * 2)(torch.randn(8, device="cuda"))
    assert torch.compile is original
    norm = torch.compile(nn.RMSNorm(8), backend="aot_eager")
    x = torch.randn(4, 8, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None and norm.weight.grad is not None
    assert torch.allclose(norm(x), F.rms_norm(x, (8,)))


def test_a_shape_that_was_compiled_before_the_simulation_does_not_make_its_shapes_vary() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ x.T).sum()

    torch.compile(layer, backend="eager")(torch.randn(8, 64))
    with simulated_gpu("h100") as gpu:
        compiled = torch.compile(layer)
        for _ in range(2):
            compiled(torch.randn(4096, 64, device="cuda"))
    assert gpu.peak_allocated_gib > 0.06  # the product in fp32
