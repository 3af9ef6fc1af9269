"""What ordinary programs do on a simulated GPU beside their steps: they log, save, load data, and
make mistakes."""

from __future__ import annotations

import copy
import io
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Project
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from lsai_core import simulated_gpu
from lsai_core.base.errors import UserError

GIB = 2**30


def on_host(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cpu")


@pytest.mark.parametrize(
    ("call", "operator"),
    [
        (lambda model, x: model(on_host(4, 64)), "aten::addmm"),
        (lambda model, x: model(x.cpu()), "aten::addmm"),
        (lambda model, x: model(x) + torch.tensor([1.0] * 8), "aten::add"),
        (lambda model, x: F.cross_entropy(model(x), torch.tensor([1] * 4)), "aten::nll_loss"),
        (lambda model, x: torch.cat([x, on_host(4, 64)]), "aten::cat"),
        (lambda model, x: F.embedding(torch.tensor([1, 2]), model.weight), "aten::embedding"),
    ],
)
def test_tensors_on_two_devices_are_refused_as_pytorch_does(
    call: Callable[[nn.Module, Tensor], Tensor], operator: str
) -> None:
    said = "Expected all tensors to be on the same device, but found at least two devices, cuda:0"
    with pytest.raises(RuntimeError, match=said) as found, simulated_gpu("h100"):
        call(nn.Linear(64, 8).cuda(), torch.randn(4, 64, device="cuda"))
    assert operator in str(found.value) and len(str(found.value).splitlines()) == 1


def test_what_pytorch_allows_of_the_host_beside_a_gpu() -> None:
    with simulated_gpu("h100") as gpu:
        x = torch.randn(4, 64, device="cuda")
        x = x * torch.tensor(2.0)  # of no dimension
        x = x[torch.tensor([0, 1])]
        x.copy_(on_host(2, 64))
        x[torch.tensor([0])] = 1.0
        model = nn.Linear(64, 8)  # whose place nobody says, as of a copy that stays on the host
        model(on_host(4, 64))
    assert gpu.fits


def test_a_collator_that_leaves_devices_out() -> None:
    """As transformers masks words: none of it was put on the GPU in words."""
    with simulated_gpu("h100"):
        words = torch.tensor([[1, 2, 3]])
        chances = torch.full(words.shape, 0.15).masked_fill_(words == 1, 0.0)
        words.masked_fill_(torch.bernoulli(chances).bool(), 0)
        more = torch.ones(3).to(words.device)  # a device that was read off a tensor
        assert (words * more * on_host(1, 3)).shape == (1, 3)
        nn.Embedding(10, 4).cuda()(words.cuda())


def test_a_loss_is_printed_and_a_state_is_saved(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    with simulated_gpu("h100"):
        model = nn.Linear(8, 8).cuda()
        loss = model(torch.randn(2, 8, device="cuda")).sum()
        assert f"{loss:.3f} {loss}" == "0.000 0.0" and f"{torch.zeros(2)}".startswith("FakeTensor")
        assert torch.zeros(2, 3, dtype=torch.int64).tolist() == [[0, 0, 0], [0, 0, 0]]
        assert torch.zeros((), device="cuda").tolist() == 0.0
        before = torch.cuda.memory_allocated()
        torch.save({"model": model.state_dict(), "loss": loss}, file)
        assert torch.cuda.memory_allocated() == before
    assert not file.exists()  # there are no values, and an older file keeps its own
    torch.save({"model": nn.Linear(2, 2).state_dict()}, file)
    assert file.exists()


def test_what_was_saved_can_be_loaded(tmp_path: Path) -> None:
    """As programs do that keep the best model and test it at their end."""
    size = 2**20 * 4
    for file in (tmp_path / "best.pt", io.BytesIO()):
        with simulated_gpu("h100"):
            model = nn.Linear(1024, 1024, bias=False).cuda()
            torch.save({"model": model.state_dict(), "epoch": 3}, file)
            before = torch.cuda.memory_allocated()
            found = torch.load(file)
            assert torch.cuda.memory_allocated() == before + size and found["epoch"] == 3
            model.load_state_dict(found["model"])
            del found
            assert torch.cuda.memory_allocated() == before
            on_cpu = torch.load(file, map_location="cpu")
            assert torch.cuda.memory_allocated() == before and not on_cpu["model"]["weight"].is_cuda
    with simulated_gpu("h100"):
        torch.save(nn.Linear(8, 8).cuda(), tmp_path / "whole.pt")
        again = torch.load(tmp_path / "whole.pt", weights_only=False)
        assert again(torch.randn(2, 8, device="cuda")).shape == (2, 8)
        with pytest.raises(FileNotFoundError):
            torch.load(tmp_path / "other.pt")


def test_statistics_of_memory() -> None:
    with simulated_gpu("h100"):
        x = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        found = torch.cuda.memory_stats()
        assert found["allocated_bytes.all.current"] == torch.cuda.memory_allocated() == x.nbytes
        assert found["reserved_bytes.all.peak"] == torch.cuda.max_memory_reserved()
        assert found["num_ooms"] == 0
        summary = torch.cuda.memory_summary()
        assert "256 MiB" in summary.replace("262144 KiB", "256 MiB")


def test_workers_of_a_data_loader_are_this_process() -> None:
    with simulated_gpu("h100") as gpu:
        data = TensorDataset(on_host(64, 4))
        workers: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 4, "timeout": 9}
        loader = DataLoader(data, 8, persistent_workers=True, **workers)
        batches = [x.cuda().shape for _ in range(2) for (x,) in loader]
    assert batches == 16 * [(8, 4)] and loader.num_workers == 2 and gpu.fits


def test_shuffled_data_begin_at_once() -> None:
    began = time.perf_counter()
    with simulated_gpu("h100"):
        data = TensorDataset(on_host(2**18, 1))
        next(iter(DataLoader(data, 8, shuffle=True)))
    assert time.perf_counter() - began < 2


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def test_a_mismatch_of_shapes_shows_the_programs_own_lines(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RuntimeError, match="4") as found, simulated_gpu("h100"):
        Wrong()(torch.randn(2, 4))
    shown = traceback.extract_tb(found.value.__traceback__)
    assert {Path(frame.filename).name for frame in shown} == {Path(__file__).name}
    assert shown[-1].line is not None and "self.layers(x)" in shown[-1].line
    assert capfd.readouterr().err == ""
    with pytest.raises(ZeroDivisionError) as own, simulated_gpu("h100"):
        1 / 0  # noqa: B018
    assert len(traceback.extract_tb(own.value.__traceback__)) == 1


def test_a_scripts_mistake_is_one_line(shared: Project, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\nmodel = torch.nn.Linear(4, 4)\nmodel(torch.randn(2, 5))\n")
    code, _, err = shared.lsai("predict", "--script", str(path))
    assert code == 2 and f"{path}, line 3: " in err and "[2, 5]" in err
    assert len(err.splitlines()) == 1


def test_a_program_gets_to_know_where_its_tensors_are() -> None:
    with simulated_gpu("h100"):
        model, here = nn.Linear(8, 8).cuda(), on_host(4, 8)
        there = here.to(next(model.parameters()).device)
        assert (there.device, there.is_cuda) == (torch.device("cuda", 0), True)
        assert (here.device, here.is_cuda) == (torch.device("cpu"), False)
        assert torch.zeros(2, device=there.device).is_cuda
        assert not torch.zeros(2, device=here.device).is_cuda
        assert not torch.zeros(2, device=torch.device("cpu")).is_cuda
        assert there.to(here.device).device == here.device
        assert torch.tensor([], device=there.device).is_cuda  # what a cache begins with
        assert not torch.tensor([]).is_cuda
        with torch.autocast(there.device.type, dtype=torch.bfloat16):
            assert model(there).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "moved",
    [
        lambda module: module.to("cpu"),
        lambda module: module.to(torch.device("cpu")),
        lambda module: module.to(device="cpu", dtype=torch.bfloat16),
        lambda module: copy.deepcopy(module).to("cpu"),
        lambda module: module.cpu(),
        lambda module: AveragedModel(module, device=torch.device("cpu")).module,
    ],
)
def test_a_module_that_is_moved_to_the_host(moved: Callable[[nn.Module], Any]) -> None:
    with simulated_gpu("h100"):
        found = moved(nn.Linear(8, 8).cuda())
        assert not found.weight.is_cuda
        assert found.to("cuda").weight.is_cuda


def test_a_module_that_is_made_on_a_device() -> None:
    with simulated_gpu("h100"):
        with torch.device("cpu"):
            here = nn.Linear(8, 8)
        with torch.device("cuda"):
            there = nn.Linear(8, 8)
        assert not here.weight.is_cuda and there.weight.is_cuda
        here(torch.randn(2, 8, device="cpu"))
        with pytest.raises(RuntimeError, match="at least two devices"):
            here(torch.randn(2, 8, device="cuda"))


@pytest.mark.parametrize(
    "second",
    [
        lambda: torch.zeros(4, device="cuda:1"),
        lambda: nn.Linear(8, 8).to("cuda:3"),
        lambda: nn.Linear(8, 8).cuda(2),
    ],
)
def test_a_second_gpu_is_refused(second: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match="has one GPU, and this program names cuda:0 and cuda:"):
        with simulated_gpu("h100"):
            torch.zeros(4, device="cuda")
            nn.Linear(8, 8, device=torch.device("cuda", 0))
            second()
    with simulated_gpu("h100") as gpu:
        second()  # as one of several processes names its own
    assert gpu.fits


def test_a_training_on_the_host_is_told() -> None:
    with simulated_gpu("h100") as gpu:
        model = nn.Linear(8, 8).to("cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(2, 8, device="cpu")).sum().backward()
            optimizer.step()
    assert "updated weights that lie on the host" in gpu.remark


def test_an_optimizer_of_another_model_is_told() -> None:
    with simulated_gpu("h100") as gpu:
        model, other = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
        optimizer = torch.optim.AdamW(other.parameters())
        for _ in range(3):
            model(torch.randn(2, 8, device="cuda")).sum().backward()
            optimizer.step()
    assert "none of its parameters has a gradient" in gpu.remark


def of_bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def whole(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("call", "operator"),
    [
        (lambda x: nn.Linear(8, 8, device="cuda", dtype=torch.bfloat16)(x), "aten::addmm"),
        (lambda x: F.linear(of_bf16(4, 8), of_bf16(8, 8), x[0]), "aten::addmm"),
        (lambda x: x @ of_bf16(8, 8), "aten::mm"),
        (lambda x: x @ of_bf16(8), "aten::mv"),
        (lambda x: F.conv_transpose1d(x.mT[None], of_bf16(8, 8, 3)), "aten::convolution"),
        (lambda x: F.layer_norm(x, (8,), of_bf16(8), of_bf16(8)), "aten::native_layer_norm"),
        (lambda x: F.group_norm(x, 2, of_bf16(8), of_bf16(8)), "aten::native_group_norm"),
        (
            lambda x: F.scaled_dot_product_attention(x[None, None], of_bf16(1, 1, 4, 8), x[None]),
            "aten::scaled_dot_product_attention",
        ),
        (lambda x: F.cross_entropy(x, whole(4, dtype=torch.int32)), "aten::nll_loss_forward"),
        (lambda x: F.binary_cross_entropy(x, whole(4, 8)), "aten::binary_cross_entropy"),
        (lambda x: x.index_add(0, whole(4), of_bf16(4, 8)), "aten::index_add"),
        (lambda x: nn.Linear(8, 8, device="cuda")(whole(4, 8)), "aten::addmm"),
        (lambda x: whole(4, 8) @ whole(8, 4), "aten::mm"),
        (lambda x: torch.softmax(whole(4), 0), "aten::_softmax"),
        (lambda x: x.to(torch.float8_e4m3fn) @ x.mT.to(torch.float8_e4m3fn), "aten::mm"),
    ],
)
def test_dtypes_that_pytorch_refuses_on_a_gpu(
    call: Callable[[Tensor], Tensor], operator: str
) -> None:
    with (
        pytest.raises(RuntimeError, match="in simulated_gpu") as found,
        simulated_gpu("h100") as gpu,
    ):
        call(torch.randn(4, 8, device="cuda"))
    assert f"({operator}, in simulated_gpu)" in str(found.value)
    assert gpu.verdict == "cut off"


def test_fp8_needs_a_gpu_that_has_it() -> None:
    def product() -> Tensor:
        a = of_bf16(32, 32).to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        return torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one)

    with simulated_gpu("l40s"):
        product()
    with pytest.raises(RuntimeError, match="compute capability"), simulated_gpu("a100 80gb"):
        product()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: nn.LayerNorm(8, device="cuda")(x.bfloat16()),
        lambda x: nn.BatchNorm1d(8, device="cuda")(x.bfloat16()),
        lambda x: torch.cat([x, x.bfloat16()]) + x.bfloat16().repeat(2, 1),
        lambda x: F.cross_entropy(x, whole(4)) + F.mse_loss(x, whole(4, 8)),
        lambda x: F.cross_entropy(x, torch.rand(4, 8, device="cuda")),
        lambda x: F.embedding(whole(4, dtype=torch.int32), x),
    ],
)
def test_dtypes_that_pytorch_takes_together(call: Callable[[Tensor], Tensor]) -> None:
    with simulated_gpu("h100") as gpu:
        x = torch.randn(4, 8, device="cuda")
        call(x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            nn.Linear(8, 8, device="cuda")(x.half())
    assert gpu.fits
