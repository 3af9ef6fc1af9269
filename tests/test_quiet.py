"""Where a run was executed and how quiet it was there: what its record says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKOUT

from lsai_lab.machine import environment as environment_module
from lsai_lab.machine.cuda_devices import CudaDevice, cuda_devices
from lsai_lab.machine.environment import environment, gpu_neighbours
from lsai_lab.runs import disturbance
from lsai_lab.runs.disturbance import OTHERS, SPREAD, Quiet
from lsai_lab.runs.study import detect_profile


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


DISPLAY, FAST, SLICE = (
    f"{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}" for digit in "abc"
)


class Desktop(types.ModuleType):
    """NVML of a machine with a small card for the display on the first bus and a fast one on the
    second, which may be cut into slices."""

    NVMLError = type("NVMLError", (Exception,), {})
    cards = [f"GPU-{DISPLAY}", f"GPU-{FAST}"]
    names = {DISPLAY: "NVIDIA GeForce GTX 1650", FAST: "NVIDIA H100 80GB HBM3"}
    names[SLICE] = f"{names[FAST]} MIG 1g.10gb"
    sizes = {DISPLAY: 4, FAST: 80, SLICE: 10}
    cut: set[str] = set()

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:
        return self.cards[number]

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name not in [*self.cards, f"MIG-{SLICE}"]:
            raise self.NVMLError(name)
        return name

    def nvmlDeviceGetMigMode(self, gpu: str) -> list[int]:
        if gpu.startswith("MIG-") or gpu == f"GPU-{DISPLAY}":
            raise self.NVMLError("not supported")
        return [int(gpu in self.cut)] * 2

    def nvmlDeviceGetName(self, gpu: str) -> str:
        return self.names[gpu[4:]]

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(total=self.sizes[gpu[4:]] << 30)

    def nvmlDeviceGetUUID(self, gpu: str) -> str:
        return gpu

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: str) -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(pid=1)] if gpu == f"GPU-{DISPLAY}" else []


@pytest.fixture
def desktop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Gives the environment on such a machine: variables, what CUDA counts in its order, cards."""

    def made(
        *cuda: str, cards: str = DISPLAY + FAST, cut: str = "", visible: str = ""
    ) -> dict[str, Any]:
        nvml = Desktop("pynvml")
        nvml.cards = [card for card in Desktop.cards if card[4:] in cards]
        nvml.cut = {f"GPU-{cut}"}
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cuda))
        devices = tuple(CudaDevice(name, nvml.names[name], nvml.sizes[name] << 30) for name in cuda)
        monkeypatch.setattr(environment_module, "cuda_devices", lambda: devices)
        return environment() | {"neighbours": gpu_neighbours()}

    return made


def test_the_record_is_of_the_gpu_that_runs_whatever_nvml_counts_first(
    desktop: Callable[..., dict[str, Any]],
) -> None:
    both = desktop(FAST, DISPLAY)  # CUDA's own order: the fastest first
    assert (both["gpu"], both["machine"], both["gpu_memory_gib"]) == (
        Desktop.names[FAST],
        "h100",
        80,
    )
    assert both["gpu_uuids"] == [f"GPU-{FAST}", f"GPU-{DISPLAY}"] and both["neighbours"] == 1
    along_the_bus = desktop(DISPLAY, FAST)
    assert along_the_bus["gpu"] == Desktop.names[DISPLAY] and along_the_bus["machine"] == "gtx1650"
    for visible in ("0", f"GPU-{FAST}", f"GPU-{FAST[:8]}"):
        chosen = desktop(FAST, visible=visible)
        assert (chosen["gpu_uuids"], chosen["neighbours"]) == ([f"GPU-{FAST}"], 0), visible
    assert desktop(DISPLAY, visible="1")["gpu_uuids"] == [f"GPU-{DISPLAY}"]


def test_the_only_gpu_and_whole_names_need_no_question(
    desktop: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    desktop(FAST)
    monkeypatch.setattr(environment_module, "cuda_devices", lambda: pytest.fail("CUDA was asked"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{FAST}")
    assert environment()["gpu_uuids"] == [f"GPU-{FAST}"]
    monkeypatch.setattr(sys.modules["pynvml"], "cards", [f"GPU-{FAST}"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment()["gpu_uuids"] == [f"GPU-{FAST}"]


@pytest.mark.parametrize("visible", ["", "0", f"GPU-{FAST}", f"MIG-{SLICE}", f"MIG-GPU-{FAST}/7/0"])
def test_of_a_gpu_that_is_cut_up_the_slice_is_named(
    desktop: Callable[..., dict[str, Any]], visible: str
) -> None:
    for cards in (FAST, DISPLAY + FAST):
        env = desktop(SLICE, cards=cards, cut=FAST, visible=visible)
        assert env["gpu_uuids"] == [f"MIG-{SLICE}"] and env["gpu_memory_gib"] == 10
        assert env["gpu"] == "NVIDIA H100 80GB HBM3 MIG 1g.10gb" and env["machine"] == "h100mig"
        # Its sizes are not those of the whole GPU.
        assert detect_profile(CHECKOUT, env["gpu"]) == "gpu"
        assert detect_profile(CHECKOUT, Desktop.names[FAST]) == "h100"


def test_where_nvml_refuses_cuda_is_believed_and_left_alone(
    desktop: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: pytest.fail("CUDA is used")
    )
    monkeypatch.setattr(Desktop, "nvmlInit", lambda self: 1 / 0)
    env = desktop(FAST, DISPLAY)
    assert (env["gpu"], env["gpu_uuids"], env["gpu_memory_gib"]) == (
        Desktop.names[FAST],
        [FAST, DISPLAY],
        80,
    )


DRIVER = """
#include <stdlib.h>
#include <string.h>
static int fast(int number) {
  const char *order = getenv("CUDA_DEVICE_ORDER");
  return (order && !strcmp(order, "PCI_BUS_ID")) ? number : 1 - number;
}
int cuInit(unsigned flags) { return getenv("NO_DRIVER") ? 100 : 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
  strncpy(name, fast(device) ? "fast" : "slow", size);
  return 0;
}
int cuDeviceGetUuid_v2(char *uuid, int device) {
  memset(uuid, fast(device) ? 0xbb : 0xaa, 16);
  return 0;
}
int cuDeviceTotalMem_v2(size_t *size, int device) {
  *size = (size_t)(fast(device) ? 80 : 4) << 30;
  return 0;
}
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_the_driver_is_asked_by_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "driver.c").write_text(DRIVER)
    made = [
        "cc",
        "-shared",
        "-fPIC",
        "-o",
        str(tmp_path / "libcuda.so.1"),
        str(tmp_path / "driver.c"),
    ]
    subprocess.run(made, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # the answer is kept by what it depends on
    fast, slow = CudaDevice(FAST, "fast", 80 << 30), CudaDevice(DISPLAY, "slow", 4 << 30)
    assert cuda_devices() == (fast, slow)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert cuda_devices() == (slow, fast)
    monkeypatch.setenv("NO_DRIVER", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert cuda_devices() == ()


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
