"""What a simulated GPU is told in: the words of a watched loop."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lsai_core import simulated_gpu
from lsai_core.base.errors import UserError
from lsai_core.prediction.gpu_context import SimulatedGpu
from lsai_core.profiling.memory import CAUSES
from lsai_core.profiling.watch import StepWatch

GIB = 2**30


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.GELU(), nn.Linear(512, 256))
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.randn(1024, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_memory_is_told_by_cause_in_the_words_of_a_watched_loop() -> None:
    model, optimizer = built()
    with StepWatch(model, optimizer) as seen:
        trained(model, optimizer)
    watched = seen.causes_gib
    with simulated_gpu("h100") as gpu:
        trained(*built())
    of_predictions = {"kernel scratch", "libraries"}
    assert {*gpu.memory} - of_predictions <= {*CAUSES}
    assert sum(gpu.memory.values()) == pytest.approx(gpu.peak_allocated_gib)
    for cause, apart in {"weights": 0.02, "optimizer": 0.02, "activations": 0.2}.items():
        assert gpu.memory[cause] == pytest.approx(watched[cause], rel=apart), cause
    made = sum(size for name, size in gpu.operators.items() if name.startswith("forward: "))
    assert made == pytest.approx(gpu.memory["activations"]) and "forward: gelu" in gpu.operators
    assert {cause for moment in gpu.moments for cause in moment.bytes_of} - of_predictions <= {
        *CAUSES
    }


def test_a_model_that_is_built_is_weights_from_the_beginning() -> None:
    with simulated_gpu("h100") as gpu:
        trained(*built())
    first = next(place for place, each in enumerate(gpu.moments) if each.phase == "backward")
    whole = gpu.moments[first].bytes_of["weights"]
    sizes = [each.bytes_of.get("weights", 0) for each in gpu.moments]
    assert sizes == sorted(sizes) and sizes[-1] == whole > 0
    built_of = [each.bytes_of for each in gpu.moments[: sizes.index(whole) + 1]]
    assert built_of and all({*each} == {"weights"} for each in built_of), "no activations yet"
    highest = max(sum(each.bytes_of.values()) for each in gpu.moments) / GIB
    assert highest == pytest.approx(max(gpu.phases.values()), rel=0.05)


def test_the_verdict_on_another_gpu_is_of_its_own_memory() -> None:
    with simulated_gpu("h100") as gpu:
        torch.empty(int(40 * GIB), dtype=torch.uint8, device="cuda")
    assert gpu.verdict == "fits" and gpu.verdict_on("H200") == "fits"
    assert gpu.verdict_on("24GiB") == "too large", "its own GPU's memory is no part of it"
    with pytest.raises(UserError, match="unknown GPU"):
        gpu.verdict_on("h10")


def test_a_watch_within_a_simulation_is_one_too_many() -> None:
    with simulated_gpu("h100"), pytest.raises(UserError, match="leave watch out"):
        StepWatch(*built())


@pytest.mark.parametrize("way", ["slices", "loader", "stack"])
def test_data_from_before_lies_on_the_host_until_it_is_sent(way: str) -> None:
    """8 GiB of data, of which a step sends a quarter of a MiB to a GPU of 8 GiB."""
    data = torch.empty(2**21, 1024)
    batches = {
        "slices": lambda: (data[64 * i : 64 * (i + 1)].view(64, 1024) for i in range(3)),
        "loader": lambda: (x for (x,) in islice(DataLoader(TensorDataset(data), 64), 3)),
        "stack": lambda: (torch.stack([data[k + i] for k in range(64)]) for i in range(3)),
    }
    with simulated_gpu("8GiB") as gpu:
        model = nn.Linear(1024, 10).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches[way]():
            model(batch.cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert gpu.fits and gpu.memory["activations"] == pytest.approx(64 * 1024 * 4 / GIB, rel=1.1)


def test_a_watched_update_is_the_optimizers_in_both_traced_steps() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(10)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with StepWatch(model, optimizer) as seen:
        for _ in range(6):
            model(torch.randn(1, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    roots = [each for each in seen.kernels if each["name"] == "aten::sqrt"]
    assert [(each["class"], each["calls"]) for each in roots] == [("optimizer", 20)]
    assert seen.phase_ms["optimizer"] > 2 * seen.phase_ms["forward"]


def test_a_data_set_without_a_device_is_told() -> None:
    """It counts on the GPU; a program that sends its batches there means the host."""

    def run(device: str | None) -> SimulatedGpu:
        with simulated_gpu("h100") as gpu:
            net = nn.Linear(2048, 2048, device="cuda")
            optimizer = torch.optim.AdamW(net.parameters())
            data = torch.randn(2**18, 2048, device=device)
            for _ in range(2):
                net(data[:64].cuda()).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return gpu

    said = "2.00 GiB were made without a device before the first forward pass and count on"
    unsaid = run(None)
    assert said in unsaid.remark and unsaid.peak_allocated_gib > 2
    assert run("cuda").remark == "" and run("cpu").remark == ""
    assert run("cpu").peak_allocated_gib < 0.2


def test_a_gpu_is_a_name_or_its_memory() -> None:
    assert simulated_gpu(8).gpu.memory_gib == 8
    for gpu in (["h100"], True, None):
        with pytest.raises(UserError, match=r"gpu is a name, such as .h100., or its memory in GiB"):
            simulated_gpu(gpu)  # type: ignore[arg-type]
