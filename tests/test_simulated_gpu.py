"""Anybody's training step on a simulated GPU: what it keeps, by hand, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anybody
import anybody_more
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CHECKOUT, Project
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lsai_core import (
    TrainConfig,
    find_gpu,
    largest_batch,
    predict,
    simulated_gpu,
    usable_gib,
)
from lsai_core.base.errors import UserError
from lsai_core.config.strict import validated
from lsai_core.model.transformer import build_model
from lsai_core.prediction.gpu_context import SimulatedGpu

GIB = 2**30
MIB = 1 / 1024  # GiB
FP32 = torch.float32


def simulated(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
) -> SimulatedGpu:
    with simulated_gpu("h100") as gpu:
        with torch.device("cuda"):
            model = make().to(dtype)
            x = torch.randn(shape, dtype=dtype)
        updated = optimizer(model.parameters())
        for _ in range(steps):
            call(model, x).float().square().mean().backward()
            updated.step()
            updated.zero_grad()
    return gpu


def wide(layers: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))


def kept(call: Callable[[Tensor], Tensor], *shape: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that wait for the backward pass of `call`, beside its input."""
    with simulated_gpu("h100"):
        x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
        before = torch.cuda.memory_allocated()
        result = call(x)
        return torch.cuda.memory_allocated() - before - 0 * result.numel()


def test_weights_gradients_and_states_by_hand() -> None:
    gpu = simulated(wide, (64, 1024))
    assert repr(gpu).startswith("simulated H100: fits; ") and "weights" in repr(gpu)
    causes, matrix = gpu.memory, 4 * MIB
    assert causes["weights"] == pytest.approx(4 * matrix)
    # Moments from the first step on, and beside them roots of all squares at once in the update.
    assert gpu.phases["optimizer"] == pytest.approx((4 + 4 + 8 + 4) * matrix, rel=0.05)
    fused = simulated(wide, (64, 1024), optimizer=lambda p: torch.optim.AdamW(p, fused=True))
    assert fused.phases["optimizer"] == pytest.approx((4 + 4 + 8) * matrix, rel=0.05)
    plain = simulated(wide, (64, 1024), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert plain.phases["optimizer"] == pytest.approx((4 + 4) * matrix, rel=0.05)
    # Two workspaces of cuBLAS come to what tensors take.
    assert gpu.peak_allocated_gib == pytest.approx(max(gpu.phases.values()) + 64 * MIB, rel=0.02)
    assert gpu.peak_reserved_gib >= gpu.peak_allocated_gib and gpu.verdict == "fits" and gpu.fits


def test_the_forward_pass_holds_no_gradients() -> None:
    matrix = 4 * MIB

    def step(clip: bool) -> SimulatedGpu:
        with simulated_gpu("h100") as gpu:
            model = wide().cuda()
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(3):
                loss = model(torch.randn(64, 1024, device="cuda")).sum()
                loss.backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    loss.item()
                optimizer.step()
                optimizer.zero_grad()
        return gpu

    for clip in (False, True):
        gpu = step(clip)
        # weights and moments, and the results of layers of 64 rows
        assert gpu.phases["forward"] == pytest.approx((4 + 8) * matrix, rel=0.05)
        assert gpu.phases["backward"] > (4 + 8 + 3) * matrix
        changes = [each.phase for each in gpu.moments]
        shown = [one for one, before in zip(changes, ["", *changes], strict=False) if one != before]
        assert shown == 3 * ["forward", "backward", "optimizer"]


def test_activations_by_hand() -> None:
    size = 2**22
    assert kept(lambda x: F.dropout(x, 0.1), size) == 2 * size + size  # a mask of one byte
    assert kept(lambda x: F.dropout(x, 0.1), size, dtype=FP32) == 4 * size + size
    assert kept(F.gelu, size) == 2 * size
    rows = 2**12
    normed = kept(lambda x: F.layer_norm(x, (1024,)), rows, 1024)
    assert normed == 2 * rows * 1024 + 2 * 4 * rows  # mean and deviation in fp32
    attended = kept(lambda x: F.scaled_dot_product_attention(x, x, x), 2, 8, 1024, 64)
    assert attended == 2 * 2 * 8 * 1024 * 64 + 4 * 2 * 8 * 1024  # output, and fp32 per row
    padded = kept(lambda x: F.scaled_dot_product_attention(x, x, x), 2, 8, 1024, 60)
    assert padded == attended + 3 * 2 * 2 * 8 * 1024 * 64
    scores = 4 * 2 * 8 * 1024**2  # no kernel takes such fp32 heads: plain operations
    single = kept(lambda x: F.scaled_dot_product_attention(x, x, x), 2, 8, 1024, 63, dtype=FP32)
    assert single > scores


def test_heads_that_are_there_once_for_several_go_through_plain_operations() -> None:
    """Fused kernels take as many of keys as of queries, unless `enable_gqa` says otherwise."""
    scores = 2 * 2 * 8 * 1024**2

    def attend(x: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], **options)

    assert kept(attend, 2, 8, 1024, 64) > scores
    assert kept(lambda x: attend(x, enable_gqa=True), 2, 8, 1024, 64) < scores
    with pytest.raises(RuntimeError, match="must match"):
        kept(lambda x: F.scaled_dot_product_attention(x, x[:, :3], x[:, :3]), 2, 8, 1024, 64)


def test_autocast_runs_norms_and_softmax_in_fp32_and_keeps_casts_of_weights() -> None:
    weight: list[Tensor] = []

    def call(x: Tensor) -> Tensor:
        if not weight:
            weight.append(torch.randn(1024, 1024, device="cuda", requires_grad=True))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = F.linear(F.linear(x, weight[0]), weight[0])
            assert y.dtype == torch.bfloat16
            assert F.layer_norm(y, (1024,)).dtype == y.softmax(-1).dtype == torch.float32
            assert (y @ y.mT).dtype == torch.bfloat16 and torch.is_autocast_enabled("cuda")
        return y

    x, matrix = 4096 * 1024, 1024 * 1024
    # the weight and its one cast; the input's cast, and both results
    assert kept(call, 4096, 1024, dtype=torch.float32) == (4 + 2) * matrix + 3 * 2 * x


def test_checkpointing_of_either_kind_recomputes() -> None:
    def call(reentrant: bool | None) -> Callable[[Any, Tensor], Tensor]:
        def run(model: Any, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            for layer in model:
                if reentrant is None:
                    x = layer(x).relu().sin()
                else:
                    x = checkpoint(lambda y, f=layer: f(y).relu().sin(), x, use_reentrant=reentrant)
            return x

        return run

    peaks = [
        simulated(lambda: wide(8), (8192, 1024), call=call(kind)).peak_allocated_gib
        for kind in (None, False, True)
    ]
    assert peaks[1] < 0.7 * peaks[0] and peaks[2] == pytest.approx(peaks[1], rel=0.05)


def test_a_scaler_and_the_host() -> None:
    with simulated_gpu("h100") as gpu:
        model = wide().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        x = torch.randn(64, 1024).pin_memory().to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        before = torch.cuda.memory_allocated()
        copy = model[0].weight.cpu()
        assert torch.cuda.memory_allocated() == before and copy.shape == (1024, 1024)
        assert loss.item() == 0.0 and torch.cuda.is_available()
        assert torch.cuda.max_memory_allocated() >= before > 0
    assert gpu.moments[-1].allocated_gib > 0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x[x > 0], "aten::nonzero|aten::index"),
    ],
)
def test_what_cannot_be_followed_is_named(call: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(UserError, match=said) as found, simulated_gpu("h100"):
        call(torch.randn(8, device="cuda"))
    assert len(str(found.value).splitlines()) == 1


def test_what_is_no_whole_step_is_remarked() -> None:
    with simulated_gpu("h100") as empty:
        pass
    assert empty.remark == "no tensor was made on the GPU" and empty.remark in repr(empty)
    with simulated_gpu("h100") as forward:
        wide()(torch.randn(2, 1024))
    said = "no optimizer step was seen: gradients and states of the optimizer do not count"
    assert forward.remark == said and said in repr(forward) and said in forward._repr_html_()
    with simulated_gpu("h100") as backward:
        wide()(torch.randn(2, 1024)).sum().backward()
    assert backward.remark == "no optimizer step was seen: states of the optimizer do not count"
    one, two = (simulated(wide, (2, 1024), steps=steps) for steps in (1, 2))
    assert one.remark.startswith("one optimizer step was seen") and not two.remark


def test_a_model_from_outside_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters())
    said = "weights of a Linear were made outside of the context .*; build the model and its opt"
    with pytest.raises(UserError, match=said), simulated_gpu("h100"):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    for move in (lambda: model.cuda(), lambda: model.to(torch.bfloat16)):
        with pytest.raises(UserError, match=said), simulated_gpu("h100"):
            move()
    assert model(torch.zeros(2, 8)).isfinite().all(), "it is as before"
    with torch.device("meta"):
        empty = nn.Linear(8, 8)
    with simulated_gpu("h100"):
        empty.to_empty(device="cuda")(torch.randn(2, 8, device="cuda"))


@pytest.mark.parametrize("read", [np.asarray, lambda x: x.numpy()])
def test_values_for_numpy_are_refused_in_one_line(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UserError, match="no values for NumPy"), simulated_gpu("h100"):
        read(torch.randn(2, device="cuda").sum().detach().cpu())


def test_torch_is_as_before_afterwards() -> None:
    answers = torch.cuda.is_available(), torch.cuda.device_count()
    with pytest.raises(RuntimeError, match="mine"), simulated_gpu("24GiB"):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        raise RuntimeError("mine")
    assert answers == (torch.cuda.is_available(), torch.cuda.device_count())
    x = torch.randn(64, 64, requires_grad=True)
    assert set(F.dropout(torch.ones(1000), 0.5).tolist()) == {0.0, 2.0}
    q = torch.randn(1, 2, 8, 4)
    assert F.scaled_dot_product_attention(q, q, q).isfinite().all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.layer_norm((x @ x), (64,)).dtype == torch.bfloat16
    assert nn.Linear(2, 2).to(torch.bfloat16).weight.dtype == torch.bfloat16


def test_the_verdict_is_of_the_gpu() -> None:
    with pytest.raises(UserError, match="unknown GPU"):
        simulated_gpu("h1000")
    for name, said in (("h100", "fits"), ("0.7GB", "too large")):
        with simulated_gpu(name) as gpu:
            model = nn.Linear(8192, 8192, device="cuda")
            model(torch.randn(8192, 8192, device="cuda")).sum().backward()
        assert gpu.verdict == said and gpu.fits == (said == "fits")
    with pytest.raises(UserError, match="closed"), simulated_gpu("h100") as gpu:
        gpu.peak_reserved_gib  # noqa: B018


def test_the_projects_own_model_comes_to_what_predict_says() -> None:
    shape = {"n_layers": 4, "d_model": 512, "n_heads": 8, "n_kv_heads": 2, "d_ff": 1024}
    data = {"model": {**shape, "vocab_size": 8192}, "data": {"vocab_size": 400}}
    settings = {"precision": "bf16", "seq_len": 1024, "batch_size": 8, "blocks": "plain"}
    config = validated(TrainConfig, {**data, **settings}, "test")
    with simulated_gpu("h100") as gpu:
        model = build_model(config.model, config.attention, device="cuda", dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(400, (8, 1025), device="cuda")
        for _ in range(2):
            model(ids[:, :-1], ids[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert gpu.peak_allocated_gib == pytest.approx(predict(config).peak, rel=0.02)


SCRIPT = """
import sys
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(4096, 4096).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(int(sys.argv[1]), 4096).to(device)).square().mean().backward()
    optimizer.step()
if len(sys.argv) > 2:
    sys.exit("no more arguments, please")
"""


def test_a_script_ends_with_its_third_step(shared: Project, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("range(2)", "range(10**9)"))
    code, out, _ = shared.lsai("predict", "--script", str(path), "--json", "--", "4096")
    found = json.loads(out)
    assert code == 0 and found["optimizer_steps"] == 3 and not found["remark"]
    code, out, _ = shared.lsai("predict", "--script", str(path), "--gpu", "8GB", "--", "4096")
    assert code == 0 and "Seen: 3 optimizer steps" in out


def test_a_script_as_it_is(shared: Project, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    script = ("predict", "--script", str(path))
    code, out, _ = shared.lsai(*script, "--json", "--", "4096")
    found = json.loads(out)
    assert code == 0 and found["verdict"] == "fits"
    assert found["causes_gib"]["weights"] == pytest.approx(64 * MIB, rel=0.01)
    code, out, _ = shared.lsai(*script, "--gpu", "0.7GB", "--", "4096")
    assert code == 1 and "too large" in out.splitlines()[0] and "optimizer" in out
    for words, said in (
        ((*script, "--", "8", "more"), "ended with no more arguments"),
        (("predict", "--script", str(tmp_path / "none.py")), "no such file"),
        ((*script, "--model", "lab"), "--script goes with"),
        (("predict", "--model", "lab", "--", "8"), "'8' belongs to a script"),
    ):
        code, _, err = shared.lsai(*words)
        assert code == 2 and said in err and len(err.splitlines()) == 1


def wide_step(batch: int) -> None:
    model = wide().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(batch, 64, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_largest_batch_fits_and_the_next_larger_ones_do_not() -> None:
    found = largest_batch(wide_step, "5GB")
    limit = usable_gib(find_gpu("5GB"))
    assert found.limited and 0.97 * limit < found.peaks[found.batch] <= limit
    with simulated_gpu("5GB") as gpu:
        wide_step(found.batch * 11 // 10)
    assert gpu.peak_reserved_gib > limit and len(found.peaks) <= 8
    assert largest_batch(wide_step, "h100", last=8) == largest_batch(wide_step, "h200", last=8)
    for step, said in ((lambda _: wide_step(8), "take the same memory"),):
        with pytest.raises(UserError, match=said):
            largest_batch(step, "5GB")
    with pytest.raises(UserError, match="not even a batch of 1"):
        largest_batch(lambda batch: wide_step(10_000 * batch), "5GB")


def test_a_script_that_lacks_a_package(shared: Project, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\nimport not_a_package\n")
    code, _, err = shared.lsai("predict", "--script", str(path))
    assert code == 2 and err.endswith("train.py, line 2: No module named 'not_a_package'\n")
    assert len(err.splitlines()) == 1


def test_the_largest_batch_of_a_script(shared: Project, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    script = ("predict", "--script", str(path), "--largest-batch", "--gpu", "4GB")
    code, out, _ = shared.lsai(*script, "--json", "--", "{}")
    found = json.loads(out)
    assert code == 0 and found["limited"] and str(found["batch"]) in found["peaks"]
    code, out, _ = shared.lsai(*script, "--", "{}")
    assert code == 0 and f"the largest batch is {found['batch']}" in out
    for words, said in (((*script, "--", "8"), "write {} where"),):
        code, _, err = shared.lsai(*words)
        assert code == 2 and said in err and len(err.splitlines()) == 1


def test_every_configuration_was_predicted_before_it_is_measured() -> None:
    for configurations, name in (
        (set(anybody.CONFIGURATIONS) - set(anybody_more.MORE), "anybody.json"),
        (set(anybody_more.MORE), "anybody_more.json"),
    ):
        found = json.loads((CHECKOUT / "reports/predictions" / name).read_text())
        assert set(found) == configurations
        assert not [key for key, said in found.items() if "error" in said]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("torch_encoder_fp32", "gru_autocast", "mixer_recomputed", "resnet50_fp32_sgd"),
        *("bart_autocast", "t5_bf16", "vit_autocast", "whisper_fp16_scaler"),
    ],
)
def test_committed_predictions_are_those_of_the_code(name: str) -> None:
    """Those made after the measurement; the earlier ones are what an earlier code said."""
    path = CHECKOUT / "reports/predictions/anybody.in_sample.json"
    kept_there = json.loads(path.read_text())[name]
    found = anybody.predict(name)
    for which in ("allocated", "reserved"):
        assert found[which] == pytest.approx(kept_there[which], rel=1e-3)
