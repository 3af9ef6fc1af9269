"""fp8: each recipe against bf16 and fp32, the memory it keeps, what it refuses, and a run through
the train kind."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from conftest import TINY_MODEL, tiny
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from lsai_core.base.errors import Unavailable, UserError
from lsai_core.config.model import ModelConfig
from lsai_core.config.strict import validated
from lsai_core.config.train import Fp8Config, TrainConfig
from lsai_core.fp8 import packages
from lsai_core.fp8 import recipes as fp8
from lsai_core.fp8.recipes import RECIPES, linear_names
from lsai_core.fp8.tensorwise import (
    GRAD_DTYPE,
    INPUT_DTYPE,
    Fp8Linear,
    cast,
    cast_transposed,
    scale_of,
)
from lsai_core.model.hf import to_hf
from lsai_core.model.rope import rope_tables
from lsai_core.model.transformer import Transformer, build_model
from lsai_core.training.step import compute_context
from lsai_lab.benches.training import run
from lsai_lab.data import Dataset
from lsai_lab.machine.checks import check_fp8
from lsai_lab.runs.kinds import Context

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
WIDE = dict(n_layers=2, d_model=64, n_heads=4, n_kv_heads=2, d_ff=128, vocab_size=320)
ON_CPU = [name for name, reason in fp8.available_recipes("cpu").items() if reason is None]
ON_GPU = [name for name, reason in fp8.available_recipes("cuda").items() if reason is None]


def relative(value: Tensor, expected: Tensor) -> float:
    """||value - expected|| / ||expected||"""
    value, expected = value.detach().double(), expected.detach().double()
    return float((value - expected).norm() / expected.norm())


def run_config(recipe: str, **changes) -> TrainConfig:
    return tiny(model=WIDE, precision="bf16", fp8={"recipe": recipe}, **changes)


def converted(recipe: str, model: Transformer, **changes) -> Transformer:
    model = copy.deepcopy(model)
    fp8.convert(model, validated(Fp8Config, {"recipe": recipe, **changes}, "test"))
    return model


def one_layer(
    recipe: str, device: str, dtype: torch.dtype, compiled: bool = False
) -> dict[str, float]:
    """Relative errors of output and gradients of one linear layer with random input against fp32 on
    the same values."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (4, 32, 64), "w": (128, 64), "g": (4, 32, 128)}
    x, w, g = (
        torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in shapes.values()
    )
    holder = Transformer(validated(ModelConfig, {**WIDE, "n_layers": 1}, "test")).to(device, dtype)
    layer = converted(recipe, holder, layers=("qkv",)).blocks[0].attention.qkv
    layer.weight.data = w.to(dtype)
    assert type(layer) is not nn.Linear
    if compiled:
        layer.compile()
    a = x.clone().requires_grad_()
    config = (
        run_config(recipe)
        if dtype == torch.bfloat16
        else tiny(precision="bf16_autocast", fp8={"recipe": recipe})
    )
    with compute_context(config, torch.device(device)):
        y = layer(a)
    y.backward(g)
    assert (y.dtype, a.grad.dtype, layer.weight.grad.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        dtype,
    )
    flat_x, flat_g = x.float().flatten(0, 1), g.float().flatten(0, 1)
    exact = {
        "y": x.float() @ w.float().t(),
        "x": (flat_g @ w.float()).view_as(x),
        "w": flat_g.t() @ flat_x,
    }
    return {
        name: relative(v, exact[name])
        for name, v in (("y", y), ("x", a.grad), ("w", layer.weight.grad))
    }


def bounds(recipe: str) -> dict[str, tuple[float, float]]:
    """Rounding to e4m3 has a relative error of about 2.6 % of a tensor's norm, to e5m2 twice that;
    two rounded operands add up in squares. Far below, there was no fp8; above, something is wrong
    with scales or layouts."""
    gradient = (0.015, 0.06) if recipe in ("torchao_rowwise", "te_block") else (0.03, 0.09)
    return {"y": (0.015, 0.06), "x": gradient, "w": gradient}


def check_errors(found: dict[str, float], recipe: str) -> None:
    for name, (low, high) in bounds(recipe).items():
        assert low < found[name] < high, (recipe, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", ON_CPU)
def test_a_layer_on_a_cpu(recipe: str, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and recipe.startswith("torchao_"):
        pytest.skip("torchao asks for the GPU's autocast only")
    check_errors(one_layer(recipe, "cpu", dtype), recipe)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_on_a_gpu(recipe: str, dtype: torch.dtype, compiled: bool) -> None:
    if (reason := fp8.missing(recipe, torch.device("cuda"))) is not None:
        pytest.skip(reason)
    torch._dynamo.reset()
    check_errors(one_layer(recipe, "cuda", dtype, compiled), recipe)


def block_results(
    model: Transformer, device: str, recipe: str, compiled: bool
) -> tuple[Tensor, list[Tensor]]:
    block = model.blocks[0]
    cos, sin = rope_tables(model.config, torch.arange(128, device=device))
    x = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(1)).to(
        device, torch.bfloat16
    )
    x.requires_grad_()
    if compiled:
        block.compile()
    with compute_context(run_config(recipe), torch.device(device)):
        y = block(x, cos, sin)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    return y - x, [x.grad, *(p.grad for p in block.parameters())]


def larger_weights(model: Transformer) -> Transformer:
    """Weights at which each sublayer adds as much as passes by, so that their errors are seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


def check_block(recipe: str, device: str, compiled: bool) -> None:
    model = larger_weights(
        build_model(validated(ModelConfig, WIDE, "test"), device=device, dtype=torch.bfloat16)
    )
    expected, gradients = block_results(copy.deepcopy(model), device, "none", False)
    got, got_gradients = block_results(converted(recipe, model), device, recipe, compiled)
    assert 0.01 < relative(got, expected) < 0.1
    for value, wanted in zip(got_gradients, gradients, strict=True):
        assert relative(value, wanted) < 0.2


@pytest.mark.parametrize("recipe", ON_CPU)
def test_a_block_on_a_cpu(recipe: str) -> None:
    check_block(recipe, "cpu", compiled=False)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_on_a_gpu(recipe: str, compiled: bool) -> None:
    if (reason := fp8.missing(recipe, torch.device("cuda"))) is not None:
        pytest.skip(reason)
    torch._dynamo.reset()
    check_block(recipe, "cuda", compiled)


def kept_bytes(model: Transformer, length: int) -> int:
    """Bytes that the first block, compiled, keeps for its backward pass beside its parameters."""
    block = model.blocks[0]
    cos, sin = rope_tables(model.config, torch.arange(length))
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # the partition that inductor compiles, without its compiler
    block.compile(backend="aot_eager_decomp_partition")
    x = torch.randn(1, length, model.config.d_model, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, cos, sin)
    return sum(kept.values())


def test_a_compiled_block_keeps_no_more_than_in_bf16() -> None:
    torch._dynamo.reset()
    model = build_model(validated(ModelConfig, WIDE, "test"), dtype=torch.bfloat16)
    plain = kept_bytes(copy.deepcopy(model), 256)
    torch._dynamo.reset()
    assert 0 < kept_bytes(converted("tensorwise", model), 256) < plain


def peak_bytes(model: Transformer, length: int) -> int:
    """Peak memory of forward and backward of the model's compiled blocks beyond what was there
    before, second step."""
    x = torch.randn(
        1, length, model.config.d_model, dtype=torch.bfloat16, device="cuda", requires_grad=True
    )
    cos, sin = rope_tables(model.config, torch.arange(length, device="cuda"))
    for block in model.blocks:
        block.compile()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, hidden = torch.cuda.memory_allocated(), x
        for block in model.blocks:
            hidden = block(hidden, cos, sin)
        hidden.sum().backward()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@needs_cuda
def test_compiled_blocks_need_no_more_memory_than_in_bf16() -> None:
    if (reason := fp8.missing("tensorwise", torch.device("cuda"))) is not None:
        pytest.skip(reason)
    shape = dict(n_layers=4, d_model=1024, n_heads=8, n_kv_heads=2, d_ff=3584, vocab_size=512)
    model = build_model(validated(ModelConfig, shape, "test"), device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()
    plain = peak_bytes(copy.deepcopy(model), 4096)
    torch._dynamo.reset()
    assert peak_bytes(converted("tensorwise", model), 4096) <= plain


def test_casts_use_the_whole_range_and_keep_zeros() -> None:
    x = torch.randn(48, 32) * 1e-4
    for dtype in (INPUT_DTYPE, GRAD_DTYPE):
        scale = scale_of(x, dtype)
        assert float(cast(x, scale, dtype).float().abs().max()) == torch.finfo(dtype).max
        turned = cast_transposed(x, scale, dtype)
        assert turned.is_contiguous() and torch.equal(
            turned.float(), cast(x, scale, dtype).float().t()
        )
        assert float(scale_of(torch.zeros(3), dtype)) == 1.0
    assert not Fp8Linear.from_linear(nn.Linear(32, 16, bias=False))(
        torch.zeros(16, 32, dtype=torch.bfloat16)
    ).any()


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e4, 3e38])
def test_no_magnitude_overflows(scale: float) -> None:
    x = (torch.rand(64, 64) * scale).to(torch.bfloat16)
    for dtype in (INPUT_DTYPE, GRAD_DTYPE):
        stretched = scale_of(x, dtype)
        assert torch.isfinite(cast(x, stretched, dtype).float()).all()
        assert relative(cast(x, stretched, dtype).double() / stretched, x) < 0.06


def test_conversion_changes_the_named_layers_and_nothing_else() -> None:
    config = validated(ModelConfig, WIDE, "test")
    model = build_model(config, dtype=torch.bfloat16)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    fp8.convert(model, Fp8Config(recipe="tensorwise"))
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    kinds = {
        name: type(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert kinds.pop("output") is nn.Linear, "the output layer stays in bf16 unless it is named"
    assert len(kinds) == 8 and set(kinds.values()) == {Fp8Linear}
    assert set(to_hf(model.state_dict(), config)) == set(
        to_hf(build_model(config).state_dict(), config)
    )
    some = converted("tensorwise", build_model(config), layers=("down", "output"))
    names = [name for name, module in some.named_modules() if isinstance(module, Fp8Linear)]
    assert names == ["blocks.0.mlp.down", "blocks.1.mlp.down", "output"]
    assert names == linear_names(some, Fp8Config(recipe="tensorwise", layers=("down", "output")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp8": {"recipe": "tensorwise", "layers": ["output"]}}, "use loss full"),
        (
            {
                "fp8": {"recipe": "tensorwise", "layers": ["output"]},
                "model": {**WIDE, "tie_embeddings": True},
            },
            "tied",
        ),
        ({"model": {**WIDE, "d_ff": 136}}, "down is 64 x 136"),
        ({"seq_len": 40}, "seq_len"),
        ({"fp8": {"recipe": "te_current"}, "grad_checkpoint": "full"}, "grad_checkpoint none"),
        ({"fp8": {"recipe": "te_block"}, "parallel": {"fsdp": 2}}, "single process"),
        ({"fp8": {"recipe": "te_delayed"}, "checkpoint": {"every": 5}}, "te_current"),
        ({"precision": "fp32"}, "bf16"),
    ],
)
def test_impossible_requests_are_one_line(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        tiny(**{"model": WIDE, "precision": "bf16", "fp8": {"recipe": "tensorwise"}, **changes})
    assert "\n" not in str(error.value)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(Unavailable, match="fp8 recipe te_current needs a CUDA GPU"):
        run(run_config("te_current"), Context(tmp_path, tmp_path, tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    packages.no_torchao.cache_clear()
    assert "torchao" in str(packages.no_torchao())
    packages.no_torchao.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    fp8.missing.cache_clear()
    for recipe in RECIPES:
        assert "compute capability 8.9 or newer), this one has 8.0" in str(
            fp8.missing(recipe, torch.device("cuda"))
        )
    fp8.missing.cache_clear()
    assert fp8.missing("tensorwise", cpu) is None or "CPU" in str(fp8.missing("tensorwise", cpu))


def test_the_doctor_lists_every_recipe() -> None:
    named = {check.name: check for check in check_fp8()}
    assert {f"fp8 {recipe}" for recipe in RECIPES} <= set(named)
    assert all(check.detail for check in named.values())


def test_a_layer_outside_of_compiled_graphs_is_compiled_around_once() -> None:
    """What keeps the compiler out of Transformer Engine's layers, with a stand-in: one compilation
    for all blocks."""

    class Outside(nn.Linear):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            assert not torch.compiler.is_compiling()
            return super().forward(x)

    torch._dynamo.reset()
    model = build_model(validated(ModelConfig, {**WIDE, "n_layers": 10}, "test"))
    for name in linear_names(model, Fp8Config(recipe="te_current")):
        parent, _, child = name.rpartition(".")
        old = model.get_submodule(name)
        new = Outside(old.in_features, old.out_features, bias=False)
        new.weight = old.weight
        setattr(model.get_submodule(parent), child, new)
    tokens = torch.randint(320, (1, 32))
    expected = model(tokens)
    counter = CompileCounter()
    for block in model.blocks:
        block.compile(backend=counter)
    torch.testing.assert_close(model(tokens), expected)
    model(tokens).sum().backward()
    assert 0 < counter.frame_count <= 12, "a frame per piece of a block, not per block"


def test_a_training_run(dataset: Dataset, corpus: Path, tmp_path: Path) -> None:
    data_root = dataset.folder.parent
    shared = {
        "data": {"source": f"file:{corpus}", "vocab_size": 320},
        "steps": 10,
        "precision": "bf16",
    }
    found = {}
    for recipe in ("none", "tensorwise"):
        config = tiny(model=TINY_MODEL, **shared, fp8={"recipe": recipe})
        folder = tmp_path / recipe
        folder.mkdir()
        found[recipe] = run(config, Context(folder, data_root, tmp_path))
    plain, got = found["none"], found["tensorwise"]
    assert plain["fp8_recipe"] == "none" and got["fp8_recipe"] == "tensorwise"
    assert got["fp8_layers"] == "qkv, attention_output, gate_up, down"
    linear = 2 * (64 * 32 + 32 * 32 + 128 * 32 + 64 * 32)
    assert got["fp8_parameter_share"] == pytest.approx(linear / (linear + 5 * 32 + 320 * 32))
    assert 0 < abs(got["train_loss"] - plain["train_loss"]) < 0.05
