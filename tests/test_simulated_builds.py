"""A simulated GPU is the same whatever PyTorch was built for: the CPU alone, or CUDA (as pip's is
on Linux) where there is no driver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lsai_core import simulated_gpu

BUILDS = ("this one", "CUDA, no driver")


@pytest.fixture(params=BUILDS, autouse=True)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch's compiled code says of its accelerator."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    if request.param == "CUDA, no driver":
        cuda = torch.device("cuda")
        monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: cuda)
        for name in ("getDeviceIndex", "setDeviceIndex", "getStream", "synchronizeDevice"):
            monkeypatch.setattr(torch._C, f"_accelerator_{name}", refuse)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_program_that_asks_for_the_accelerator() -> None:
    """As PyTorch's tutorials do: what it finds is the simulated GPU."""
    with simulated_gpu("h100"):
        found = torch.accelerator.current_accelerator()
        device = found.type if found and torch.accelerator.is_available() else "cpu"
        assert torch.accelerator.device_count() == 1
        torch.accelerator.set_device_index(torch.accelerator.current_device_index())
        model = nn.Linear(1024, 1024).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        data = TensorDataset(torch.randn(16, 1024, device="cpu"))
        for (x,) in DataLoader(data, batch_size=8, pin_memory=True):
            model(x.to(device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize()
        peak = torch.accelerator.max_memory_allocated()
        assert peak == torch.cuda.max_memory_allocated()
    weights = 4 * 1024 * 1025
    assert 4 * weights < peak < 6 * weights  # they, gradients, two moments, what a step makes


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_compiled_program() -> None:
    with simulated_gpu("h100") as gpu:
        model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)).cuda()
        model = torch.compile(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            model(torch.randn(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert gpu.peak_allocated_gib > 4 * 4 * 2 * 1024 * 1025 / 2**30
