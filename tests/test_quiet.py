"""Where a run was executed and how quiet it was there: what its record says."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest
import torch

from lsai_lab.machine.environment import environment, gpu_neighbours
from lsai_lab.runs import disturbance
from lsai_lab.runs.disturbance import OTHERS, SPREAD, Quiet


def judged(
    monkeypatch: pytest.MonkeyPatch, busy_s: float, neighbours: int | None = None, **steps: float
) -> dict[str, Any]:
    """The verdict on a run of ten seconds, of four cores, in which others used the processor for
    `busy_s` seconds."""
    clocks, busy = iter([0.0, 10.0]), iter([0.0, busy_s])
    monkeypatch.setattr(disturbance.time, "perf_counter", lambda: next(clocks))
    monkeypatch.setattr(disturbance, "_busy_s", lambda: next(busy))
    monkeypatch.setattr(disturbance, "gpu_neighbours", lambda: neighbours)
    monkeypatch.setattr(disturbance.os, "cpu_count", lambda: 4)
    return Quiet().results(steps)


def test_a_run_is_marked_beyond_the_declared_bounds_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside = {"step_ms": 100.0, "step_ms_p25": 100.0, "step_ms_p75": 100.0 + 99 * SPREAD}
    found = judged(monkeypatch, 39 * OTHERS, **inside)
    assert "disturbed" not in found and found["step_spread"] == pytest.approx(0.99 * SPREAD)
    assert found["other_cores"] == pytest.approx(3.9 * OTHERS)
    assert (
        "steps spread"
        in judged(monkeypatch, 0, **{**inside, "step_ms_p75": 100 + 101 * SPREAD})["disturbed"]
    )
    assert "other processes used 0.8 of 4 cores" in judged(monkeypatch, 41 * OTHERS)["disturbed"]
    assert "2 other processes on the GPU" in judged(monkeypatch, 0, neighbours=2)["disturbed"]
    monkeypatch.setenv(disturbance.BESIDE, "1")
    assert "1 other runs shared the machine" in judged(monkeypatch, 0)["disturbed"]


class Nvml(types.ModuleType):
    """As much of NVML as is asked for, with two GPUs."""

    NVMLError = type("NVMLError", (Exception,), {})
    processes: dict[int, list[int]] = {0: [11], 1: [11, 12]}

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetMemoryInfo": lambda gpu: types.SimpleNamespace(total=80 << 30),
            "nvmlDeviceGetName": lambda gpu: "NVIDIA H100",
            "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                types.SimpleNamespace(pid=pid) for pid in self.processes[gpu]
            ],
        }
        return answers[name]


def test_the_visible_gpus_are_named_and_their_neighbours_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("pynvml"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    env = environment()
    assert (env["gpu"], env["gpu_count"], env["gpu_memory_gib"], env["driver"]) == (
        "NVIDIA H100",
        2,
        80.0,
        "580.1",
    )
    assert env["gpu_uuids"] == ["GPU-0", "GPU-1"] and gpu_neighbours() == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert environment()["gpu_uuids"] == ["GPU-1"] and gpu_neighbours() == 2
    monkeypatch.setattr(Nvml, "processes", {1: [os.getpid(), 12]})
    assert gpu_neighbours() == 1
