"""Streams, events, marks, profilers and CUDA graphs on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.profiler import ProfilerActivity, profile

from lsai_core import simulated_gpu
from lsai_core.base.errors import UserError

MIB = 2**20


def batch() -> Tensor:
    return torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")


def test_a_side_stream_has_memory_of_its_own() -> None:
    """PyTorch's allocator keeps a freed block for the stream that asked for it."""
    reserved = {}
    for aside in (False, True):
        with simulated_gpu("h100") as gpu:
            stream = torch.cuda.Stream() if aside else torch.cuda.current_stream()
            first = batch()
            del first
            with torch.cuda.stream(stream):
                second = batch()
            torch.cuda.current_stream().wait_stream(stream)
            second.record_stream(torch.cuda.current_stream())
        reserved[aside] = gpu.peak_reserved_gib * 1024
    assert reserved == {False: 20.0, True: 40.0}


def test_a_stream_can_be_asked_waited_for_and_set() -> None:
    with simulated_gpu("h100"):
        stream, event = torch.cuda.Stream(priority=-1), torch.cuda.Event(enable_timing=True)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() is stream
            stream.record_event(event)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.cuda.default_stream().wait_event(event)
        stream.synchronize()
        assert stream.query() and event.query()
        torch.cuda.set_stream(stream)
        assert torch.cuda.current_stream() is stream
    with simulated_gpu("h100"):
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def marked(step: Callable[[], Any]) -> None:
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.mark("begin")
    with torch.cuda.nvtx.range("inner"), torch.autograd.profiler.emit_nvtx():
        step()
    torch.cuda.nvtx.range_pop()


def profiled(step: Callable[[], Any]) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
    assert seen.key_averages()


@pytest.mark.parametrize("around", [marked, profiled])
def test_a_program_may_watch_itself(
    around: Callable[[Callable[[], Any]], None], capfd: pytest.CaptureFixture[str]
) -> None:
    def step() -> None:
        model = nn.Linear(1024, 1024, device="cuda")
        model(torch.randn(64, 1024, device="cuda")).sum().backward()

    with simulated_gpu("h100") as plain:
        step()
    with simulated_gpu("h100") as watched:
        around(step)
    assert watched.peak_reserved_gib == plain.peak_reserved_gib
    assert "Failed" not in capfd.readouterr().err


def test_what_programs_ask_of_a_gpu_beside_their_steps(tmp_path: Path) -> None:
    with simulated_gpu("h100") as gpu, torch.cuda.device(0):
        torch.cuda.set_per_process_memory_fraction(0.9)
        torch.cuda.memory._record_memory_history()
        batch()
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot"))
        torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda.profiler.stop()
        assert torch.cuda.utilization() == 0
        assert torch.cuda.get_allocator_backend() == "native"
    assert gpu.fits and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.cuda.CUDAGraph(),
        lambda: torch.cuda.graph(None),
        lambda: torch.cuda.make_graphed_callables(nn.Linear(4, 4), (torch.zeros(4),)),
    ],
)
def test_graphs_are_refused(use: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match="cannot follow CUDA graphs"), simulated_gpu("h100"):
        use()


def test_gradients_of_each_example_by_torch_func() -> None:
    """`vmap` puts tensors of its own in the place of a module's weights."""
    with simulated_gpu("h100") as gpu:
        model = nn.Linear(256, 256, device="cuda")
        inputs_BD = torch.randn(64, 256, device="cuda")

        def loss(weights: dict[str, Tensor], input_D: Tensor) -> Tensor:
            return functional_call(model, weights, (input_D,)).sum()

        found = vmap(grad(loss), (None, 0))(dict(model.named_parameters()), inputs_BD)
    assert found["weight"].shape == (64, 256, 256)
    assert gpu.peak_allocated_gib * 1024 > 64 * 0.25
