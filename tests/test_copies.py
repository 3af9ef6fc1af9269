"""Collectives by copies, in real processes: exactly what gloo's give, whole or in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lsai_core.errors import Unavailable
from lsai_core.parallel import window
from lsai_core.parallel.copies import CopiedAllGather, CopiedReduceScatter, Windows
from lsai_core.parallel.processes import connect
from lsai_core.runs.tries import attempt, server

CPU = torch.device("cpu")


def differences(rank: int, case: tuple[int, int, torch.dtype]) -> dict[str, float]:
    """Both collectives three times over, so that windows are filled again; the largest difference from gloo's."""
    count, window_bytes, dtype = case
    connect(CPU)
    group = dist.group.WORLD
    assert group is not None
    size = group.size()
    windows = Windows(window_bytes, size * window_bytes)
    gather, reduce = CopiedAllGather(windows), CopiedReduceScatter(windows)
    worst = {"gathered": 0.0, "summed": 0.0, "mean": 0.0}
    for turn in range(3):
        generator = torch.Generator().manual_seed(100 * turn + rank)
        mine = torch.randint(-8, 8, (count,), generator=generator).to(dtype)  # sums of these are exact in bf16
        wanted, found = (
            torch.empty(size * count, dtype=dtype),
            gather.allocate((size * count,), dtype=dtype, device=CPU),
        )
        dist.all_gather([*wanted.view(size, count)], mine)
        found.narrow(0, rank * count, count).copy_(mine)
        gather(found, found.narrow(0, rank * count, count), group)
        worst["gathered"] = max(worst["gathered"], float((found.float() - wanted.float()).abs().max()))
        everywhere = torch.randint(-8, 8, (size * count,), generator=generator).to(dtype)
        total = everywhere.float().clone()
        dist.all_reduce(total)
        wanted, found = total.view(size, count)[rank], torch.empty(count, dtype=dtype)
        reduce(found, everywhere, group, dist.ReduceOp.SUM)
        worst["summed"] = max(worst["summed"], float((found.float() - wanted).abs().max()))
        reduce(found, everywhere, group, dist.ReduceOp.AVG)
        worst["mean"] = max(worst["mean"], float((found.float() - wanted / size).abs().max()))
    return worst


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize(
    ("count", "window_bytes", "dtype"),
    [(1000, 1 << 16, torch.float32), (1000, 256, torch.float32), (77, 100, torch.bfloat16), (5, 40, torch.float32)],
    ids=str,
)
def test_they_are_what_gloo_gives(processes: int, count: int, window_bytes: int, dtype: torch.dtype) -> None:
    workers = server(["lsai_core.parallel.copies"], on_gpu=False)
    case = (count, window_bytes, dtype)
    found = attempt(workers, differences, case, processes=processes, timeout_s=100)
    assert found["outcome"] == "ok", found["note"]
    assert found["measured"] == {
        "gathered": 0.0,
        "summed": 0.0,
        "mean": pytest.approx(0.0, abs=1e-5 if dtype == torch.float32 else 0.05),
    }


def host_of_its_own(rank: int, _: Any) -> dict[str, float]:
    connect(CPU)
    window.socket.gethostname = lambda: f"host{rank}"  # type: ignore[attr-defined, assignment]
    group = dist.group.WORLD
    assert group is not None
    window.open_window(16, group, CPU)
    return {}


def test_processes_of_several_hosts_are_told() -> None:
    found = attempt(
        server(["lsai_core.parallel.copies"], on_gpu=False), host_of_its_own, None, processes=2, timeout_s=100
    )
    assert found["outcome"] == "failed" and Unavailable.__name__ in found["note"]
    assert "copies need processes of one host, and these are on 2" in found["note"]
