"""Measurements against figures worked out by hand or read from an independent counter."""

from __future__ import annotations

import gzip
import json
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lsai_core.base.errors import Unavailable, UserError
from lsai_core.base.limits import cpu_cores, memory_gib
from lsai_core.config.model import ModelConfig
from lsai_core.profiling.flops import Peak, flops_per_token, mfu, peak_for, theoretical_peak
from lsai_core.profiling.memory import PhaseMemory, rss_peak_gib
from lsai_core.profiling.steptime import PhaseClock, PowerMeter, StepTimer
from lsai_core.profiling.trace import (
    KERNEL_CLASSES,
    KernelEvent,
    busy_ms,
    exposed_ms,
    kernel_breakdown,
    kernel_class,
    kernel_events,
    memory_snapshot,
    result_name,
    top_kernels,
    trace,
)
from lsai_lab.benches.machine import measure_ceilings, speed_summary
from lsai_lab.machine import environment as environment_module
from lsai_lab.machine.environment import environment, fingerprint, machine_label

GIB = 2**30
MIB = 2**20
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def model_config(**keys: object) -> ModelConfig:
    return ModelConfig.model_validate(keys)


# FLOPs, peaks, MFU


def test_llama3_8b_flops_by_hand() -> None:
    # 8,030,261,248 published parameters, less the 128,256 x 4,096 embedding table = 7,504,924,672.
    # 6 x 7,504,924,672 = 45,029,548,032;  12 x 32 x 4,096 x 8,192 = 12,884,901,888.
    flops = flops_per_token(model_config(preset="llama3-8b"), seq_len=8192)
    assert flops.counted_parameters == 7_504_924_672
    assert flops.convention == 57_914_449_920
    assert flops.causal_discounted == 51_471_998_976


def test_tied_embeddings_still_pay_for_the_output_projection() -> None:
    # Llama-3.2-1B has 1,235,814,400 parameters with the shared table counted once; all of them are
    # computed with.
    assert (
        flops_per_token(model_config(preset="llama3.2-1b"), 2048).counted_parameters
        == 1_235_814_400
    )


def test_window_counts_the_scores_that_are_left() -> None:
    model = model_config(preset="lab")
    full = flops_per_token(model, 4096, window=4096)
    assert full == flops_per_token(model, 4096)
    narrow = flops_per_token(model, 4096, window=512)
    scores = sum(min(position + 1, 512) for position in range(4096)) / 4096  # mean keys
    dense = 6 * narrow.counted_parameters
    assert narrow.convention == pytest.approx(dense + 12 * 6 * 512 * scores, rel=1e-3)
    assert narrow.convention == narrow.causal_discounted
    long = model_config(preset="llama3.2-1b")
    for length, times in ((16_384, 1.82), (65_536, 4.36)):  # so much more is full attention
        whole, some = flops_per_token(long, length), flops_per_token(long, length, window=512)
        assert whole.convention / some.convention == pytest.approx(times, abs=0.005)
    with pytest.raises(UserError, match="window"):
        flops_per_token(model, 4096, window=0)


def test_six_n_is_what_the_matrix_products_of_a_real_step_cost() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    d, ff, vocab, tokens = (
        32,
        64,
        48,
        10,
    )  # the matrices of one layer and the output projection
    shapes = [(d, d), (d, 16), (d, 16), (d, d), (d, ff), (d, ff), (ff, d), (d, vocab)]
    weights = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        for weight in weights:
            (torch.randn(tokens, weight.shape[0], requires_grad=True) @ weight).sum().backward()
    model = model_config(n_layers=1, d_model=d, n_heads=4, n_kv_heads=2, d_ff=ff, vocab_size=vocab)
    norms = 3 * d
    assert counter.get_total_flops() / tokens == 6 * (
        flops_per_token(model, 1).counted_parameters - norms
    )


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA GeForce RTX 5090", 209.5),
    ],
)
def test_known_gpus_use_the_dense_bf16_peak_for_every_precision(name: str, tflops: float) -> None:
    measured = {"matmul_bf16_tflops": 1.0, "matmul_fp32_tflops": 1.0}
    for precision in ("fp32", "tf32", "bf16", "bf16_autocast", "fp8"):
        peak = peak_for(name, precision, measured)
        assert peak is not None and peak.tflops == tflops and not peak.measured
    assert "fp8 run is stated against bf16" in peak.source


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H20",
        "NVIDIA X9",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
    ],
)
def test_unknown_gpus_never_get_a_guessed_peak(name: str) -> None:
    assert peak_for(name, "bf16") is None
    assert peak_for(name, "bf16", {"matmul_fp32_tflops": 5.0}) is None
    peak = peak_for(name, "bf16", {"matmul_bf16_tflops": 123.0})
    assert peak == Peak(123.0, "own measured bf16 matmul ceiling", measured=True)


def test_cpu_is_rated_against_its_measured_fp32_ceiling() -> None:
    ceilings = {"matmul_fp32_tflops": 0.2, "matmul_bf16_tflops": 0.4}
    for precision in ("fp32", "bf16_autocast"):
        peak = peak_for("cpu", precision, ceilings)
        assert peak is not None and peak.tflops == 0.2 and peak.measured
    assert peak_for("cpu", "fp32") is None
    with pytest.raises(UserError, match="int4"):
        peak_for("cpu", "int4")


def test_theoretical_peaks_and_mfu() -> None:
    fp8 = theoretical_peak("NVIDIA H200", "fp8")
    assert fp8 is not None and fp8.tflops == 1979.0
    assert theoretical_peak("NVIDIA A100-SXM4-80GB", "fp8") is None
    peak = peak_for("NVIDIA H200", "bf16")
    assert peak is not None
    # 463.3 of 989.5 TFLOP/s
    assert mfu(8_000, 57_914_449_920, peak) == pytest.approx(0.46823, abs=1e-5)


# Ceilings


def test_ceilings_on_cpu_agree_with_a_plain_timing() -> None:
    found = measure_ceilings("cpu", budget_s=1.5)
    assert found["ceilings_device"] == "cpu"
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        _ = a @ b
        seconds.append(time.perf_counter() - start)
    plain = 2 * 512**3 / min(seconds) / 1e12
    # Other work may run beside this test, so only the unit and the counting of FLOPs are checked.
    assert plain / 20 < float(found["matmul_fp32_512_tflops"]) < plain * 20
    best = max(
        float(value)
        for key, value in found.items()
        if key.startswith("matmul_fp32_") and key.endswith("_tflops")
    )
    assert (
        found["matmul_fp32_tflops"]
        == best
        == found[f"matmul_fp32_{found['matmul_fp32_size']}_tflops"]
    )
    for name in ("matmul_fp32_tflops", "matmul_bf16_tflops", "copy_gb_per_s"):
        # On a CPU the fastest repeat counts, so the quartiles lie below it.
        assert 0 < float(found[f"{name}_p25"]) <= float(found[f"{name}_p75"]) <= float(found[name])
    json.dumps(found, allow_nan=False)


def test_a_tiny_budget_leaves_out_the_large_sizes() -> None:
    found = measure_ceilings("cpu", budget_s=0.01)
    assert "matmul_fp32_512_tflops" in found and "matmul_fp32_2048_tflops" not in found


# Step times


def test_step_timer_times_the_steps_and_leaves_out_what_restart_covers() -> None:
    timer = StepTimer("cpu")
    timer.restart()
    timer.mark()
    for _ in range(3):
        time.sleep(0.02)
        timer.mark()
    timer.restart()
    time.sleep(0.3)
    timer.mark()
    time.sleep(0.02)
    timer.mark()
    durations = timer.durations_ms()
    assert len(durations) == 4
    assert all(20 <= duration < 200 for duration in durations)


def test_the_phase_clock_adds_up_micro_batches_and_takes_the_median_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))  # a second a reading
    clock = PhaseClock()
    assert clock.summary() == {}
    for micro_batches in (1, 2, 4):
        for name in ["forward", "backward"] * micro_batches + ["optimizer"]:
            with clock.phase(name):
                pass
    assert clock.summary() == {
        "host_forward_ms": 2000.0,
        "host_backward_ms": 2000.0,
        "host_optimizer_ms": 1000.0,
    }


def test_the_power_meter_reads_only_where_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, nvml = {"now": 300}, types.ModuleType("pynvml")
    vars(nvml).update(
        nvmlInit=lambda: None,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetHandleByUUID=lambda name: {"GPU-second": 1}[name],  # whatever NVML's order
        nvmlDeviceGetClockInfo=lambda gpu, kind: clock["now"] * gpu * kind,
        nvmlDeviceGetPowerUsage=lambda gpu: 700_000 * gpu,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    second = types.SimpleNamespace(uuid="second")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: second)
    meter = PowerMeter(torch.device("cuda"))
    time.sleep(0.35)  # time for three readings
    assert meter.summary() == {}
    clock["now"], meter.on, deadline = 1500, True, time.monotonic() + 10
    while not meter.summary() and time.monotonic() < deadline:
        time.sleep(0.01)
    meter.on = None
    assert meter.summary() == {"gpu_clock_mhz": 1500, "gpu_power_w": 700}
    assert PowerMeter(torch.device("cpu")).summary() == {}


def test_speed_summary_by_hand() -> None:
    found = speed_summary([900.0, 100.0, 10.0, 20.0, 30.0, 40.0, 50.0], tokens_per_step=600, skip=2)
    assert found == pytest.approx(
        {
            "step_ms": 30,
            "step_ms_p25": 20,
            "step_ms_p75": 40,
            "step_ms_min": 10,
            "step_ms_max": 50,
            "tokens_per_s": 20_000,
            "tokens_per_s_p25": 15_000,
            "tokens_per_s_p75": 30_000,
            "steps_timed": 5,
            "warmup_steps": 2,
            "warmup_s": 1.0,
        }
    )
    assert speed_summary([5.0], 600, skip=5) == {
        "steps_timed": 0,
        "warmup_steps": 1,
        "warmup_s": 0.005,
    }


# Memory


def one_step(
    meter: PhaseMemory, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> None:
    with meter.phase("forward"):
        loss = model(x).sum()
    with meter.phase("backward"):
        loss.backward()
    with meter.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


def test_tracked_memory_of_a_linear_chain_by_hand() -> None:
    layers, d, rows = 4, 256, 1024
    model = nn.Sequential(*(nn.Linear(d, d, bias=False) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    x = torch.randn(rows, d)
    warm = model(x).sum()
    warm.backward()
    optimizer.step()
    optimizer.zero_grad()
    del warm
    meter = PhaseMemory("cpu", seeds=[model, optimizer, x])
    one_step(meter, model, optimizer, x)
    found = meter.summary()
    weights = layers * d * d * 4  # 1 MiB; Adam's two moments are twice that
    # 1 MiB: each layer's output, of which the last is needed by sum() alone
    activation = rows * d * 4
    fixed = 3 * weights + layers * 4 + activation  # weights, moments, step counters, x
    # Forward: every layer's output at once when the last is summed (plus the scalar loss).
    assert float(found["mem_forward_peak_gib"]) * GIB == pytest.approx(
        fixed + layers * activation, rel=1e-4
    )
    # Optimizer (in place): the fixed part and all gradients; no activations.
    assert float(found["mem_optimizer_peak_gib"]) * GIB == pytest.approx(fixed + weights, rel=1e-4)
    # Backward: the gradient of the last output is an expanded scalar. The peak is in the third
    # layer: outputs 1 and 2 are still saved, the gradients of its output and of its input exist,
    # and so do two weight gradients.
    peak = fixed + 2 * activation + 2 * activation + 2 * (weights // layers)
    assert float(found["mem_backward_peak_gib"]) * GIB == pytest.approx(peak, abs=64)
    assert found["mem_peak_allocated_gib"] == max(
        found["mem_forward_peak_gib"],
        found["mem_backward_peak_gib"],
        found["mem_optimizer_peak_gib"],
    )
    assert found["memory_kind"] == "live tensor bytes (tracked)"
    assert found["mem_steps_measured"] == 1


def peaks_mib(meter: PhaseMemory) -> dict[str, float]:
    return {
        key: float(value) * 1024
        for key, value in meter.summary().items()
        if key.startswith("mem_") and "gib" in key
    }


def test_views_count_once_and_freed_tensors_not_at_all() -> None:
    meter = PhaseMemory("cpu")
    with meter.phase("forward"):
        x = torch.ones(MIB // 4)  # 1 MiB
        views = [x[1:], x.view(-1, 2), x.detach(), x.reshape(2, -1).t()]
        del x, views
        for _ in range(5):
            y = torch.ones(MIB // 4) + 0  # two at a time
            del y
    assert peaks_mib(meter)["mem_forward_peak_gib"] == pytest.approx(2, abs=1e-6)
    with meter.phase("backward"):
        torch.ones(MIB // 8)
    assert peaks_mib(meter)["mem_backward_peak_gib"] == pytest.approx(0.5, abs=1e-6)


def test_seeds_count_from_the_start_and_what_dies_between_phases_is_subtracted() -> None:
    kept, dropped = torch.ones(MIB // 4), torch.ones(MIB // 2)
    module = nn.Linear(512, 512, bias=False)  # 1 MiB, and as much gradient
    module.weight.grad = torch.zeros(512, 512)
    meter = PhaseMemory("cpu", seeds=[kept, module])
    with meter.phase("forward"):
        dropped.view(-1)  # seen by its first use
    assert peaks_mib(meter)["mem_forward_peak_gib"] == pytest.approx(5, abs=1e-6)
    del dropped
    module.zero_grad()
    with meter.phase("backward"):
        pass
    assert peaks_mib(meter)["mem_backward_peak_gib"] == pytest.approx(2, abs=1e-6)


def test_a_storage_resized_in_place_counts_at_its_new_size() -> None:
    meter = PhaseMemory("cpu")
    x = torch.ones(MIB)  # 4 MiB
    with meter.phase("forward"):
        x.view(-1)
        x.untyped_storage().resize_(MIB)
        torch.ones(MIB // 2)  # 2 MiB beside the 1 MiB that is left
    assert peaks_mib(meter)["mem_forward_peak_gib"] == pytest.approx(4)
    with meter.phase("backward"):
        x.untyped_storage().resize_(3 * MIB)
    assert peaks_mib(meter)["mem_backward_peak_gib"] == pytest.approx(3)


def test_a_compiled_model_is_labelled_since_it_runs_eagerly_while_tracked() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    assert (
        PhaseMemory("cpu", seeds=[model]).summary()["memory_kind"] == "live tensor bytes (tracked)"
    )
    model[0].compile(backend="eager")
    assert "compiled code ran eagerly" in str(
        PhaseMemory("cpu", seeds=[model]).summary()["memory_kind"]
    )
    wrapped = torch.compile(nn.Linear(8, 8), backend="eager")
    assert "compiled code ran eagerly" in str(
        PhaseMemory("cpu", seeds=[wrapped]).summary()["memory_kind"]
    )


def test_mean_and_max_over_steps_and_accumulation_within_one() -> None:
    meter = PhaseMemory("cpu")
    for sizes in ((1, 3), (2, 1)):
        for mib in sizes:
            with meter.phase("forward"):
                torch.ones(mib * MIB // 4)
        with meter.phase("optimizer"):
            pass
    found = peaks_mib(meter)
    assert found["mem_forward_peak_gib"] == pytest.approx(3)
    assert found["mem_forward_peak_gib_mean"] == pytest.approx(2.5)
    assert meter.summary()["mem_steps_measured"] == 2


class Blocks(nn.Module):
    """Blocks with wide insides: checkpointing keeps only the narrow block inputs."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 2048), nn.SiLU(), nn.Linear(2048, 32)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def test_checkpointing_and_autocast_show_in_the_tracked_peak() -> None:
    x = torch.randn(512, 32)
    inside = 512 * 2048 * 4 / MIB  # 4 MiB: one of the two wide activations that a block saves

    def measure(recompute: bool, autocast: bool) -> dict[str, float]:
        model = Blocks(recompute)
        optimizer = torch.optim.SGD(model.parameters())
        meter = PhaseMemory("cpu", seeds=[model, optimizer, x])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            one_step(meter, model, optimizer, x)
        return peaks_mib(meter)

    plain, recomputed = measure(False, False), measure(True, False)
    assert plain["mem_forward_peak_gib"] - recomputed["mem_forward_peak_gib"] == pytest.approx(
        5 * 2 * inside, rel=0.1
    )
    # one block is recomputed there
    assert recomputed["mem_backward_peak_gib"] > recomputed["mem_forward_peak_gib"]
    assert recomputed["mem_backward_peak_gib"] < plain["mem_backward_peak_gib"] / 2
    # bf16 activations: half of the 6 x 2 wide ones.
    halved = measure(False, True)
    assert plain["mem_forward_peak_gib"] - halved["mem_forward_peak_gib"] == pytest.approx(
        6 * inside, rel=0.1
    )


def test_an_error_in_a_phase_passes_through_and_leaves_no_mode_behind() -> None:
    meter = PhaseMemory("cpu")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        with meter.phase("forward"):
            torch.ones(2, 3) @ torch.ones(2, 3)
    assert torch._C._len_torch_dispatch_stack() == 0
    with pytest.raises(ValueError, match="sideways"):
        with meter.phase("sideways"):  # type: ignore[arg-type]
            pass


def test_rss_peak_covers_what_the_process_holds_and_outlives_it() -> None:
    import psutil

    block = bytearray(b"x" * (64 * MIB))
    held = psutil.Process().memory_info().rss / GIB
    del block
    assert held * 0.98 <= rss_peak_gib() < psutil.virtual_memory().total / GIB


# Environment and limits


def test_environment_is_complete_json_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    import platform

    monkeypatch.delenv("LSAI_MACHINE", raising=False)
    environment()
    start = time.perf_counter()
    env = environment()
    assert time.perf_counter() - start < 0.5
    assert env["host"] == platform.node() and json.dumps(env, allow_nan=False)
    for key in (
        "machine",
        "os",
        "kernel",
        "python",
        "torch",
        "cuda",
        "cudnn",
        "driver",
        "nccl",
        "gpu",
        "gpu_count",
        "gpu_memory_gib",
        "cpu",
        "cpu_cores",
        "threads",
        "memory_gib",
        "packages",
    ):
        assert key in env
    assert env["torch"] == torch.__version__
    assert env["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert env["torch"] in fingerprint(env) and env["cpu"] in fingerprint(env)
    assert fingerprint(env) != fingerprint(env | {"torch": "9.9"})
    assert fingerprint(env) != fingerprint(env | {"gpu": "NVIDIA X9", "gpu_count": 1})
    assert fingerprint(env) != fingerprint(env | {"omp_num_threads": "7"})
    for package in ("flash-attn", "torchao", "transformer-engine", "triton"):
        assert fingerprint(env) != fingerprint(
            env | {"packages": {**env["packages"], package: "99"}}
        ), package
    assert fingerprint(env) == fingerprint(
        env | {"host": "other", "packages": {**env["packages"], "papermill": "99"}}
    )
    monkeypatch.setenv("LSAI_MACHINE", "my-box")
    assert environment()["machine"] == "my-box"
    monkeypatch.setenv("LSAI_MACHINE", "../up")
    with pytest.raises(UserError, match="LSAI_MACHINE"):
        environment()


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla T4", "t4"),
        (None, "cpu-8core"),
    ],
)
def test_machine_labels(name: str | None, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LSAI_MACHINE", raising=False)
    assert machine_label(name, 8) == label


def test_a_gpu_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LSAI_MACHINE", raising=False)
    facts = {
        "gpu": "NVIDIA H200",
        "gpu_count": 4,
        "gpu_memory_gib": 140.4,
        "driver": "580.1",
        "gpu_uuids": ["GPU-1"],
    }
    monkeypatch.setattr(environment_module, "gpu_facts", lambda: facts)
    env = environment()
    assert env["machine"] == "h200" and env.items() >= facts.items()
    assert "NVIDIA H200 x4" in fingerprint(env)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_limits_of_cgroup_v2_hold_for_an_ancestor_too(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job_7/step_0")
    write(tmp_path / "sys/fs/cgroup/job_7/step_0/cpu.max", "max 100000")
    write(tmp_path / "sys/fs/cgroup/job_7/cpu.max", "50000 100000")
    write(tmp_path / "sys/fs/cgroup/job_7/step_0/memory.max", "max")
    write(tmp_path / "sys/fs/cgroup/job_7/memory.max", str(2**29))
    assert cpu_cores(tmp_path) == 1
    assert memory_gib(tmp_path) == 0.5


def test_limits_of_cgroup_v1_and_of_a_container(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab")
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**28))
    write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "100000")
    write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert cpu_cores(tmp_path) == 1
    assert memory_gib(tmp_path) == 0.25


def test_memory_that_the_machine_does_not_know_of_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LSAI_MEMORY_GIB", "512")
    assert memory_gib(tmp_path) == 512
    write(tmp_path / "proc/self/cgroup", "0::/job_7")
    write(tmp_path / "sys/fs/cgroup/job_7/memory.max", str(2**29))
    assert memory_gib(tmp_path) == 0.5, "a limit that is enforced stays one"
    for wrong in ("much", "0", "nan", "-1"):
        monkeypatch.setenv("LSAI_MEMORY_GIB", wrong)
        with pytest.raises(
            UserError, match=f"LSAI_MEMORY_GIB='{wrong}' must be this machine's memory in GiB"
        ):
            memory_gib(tmp_path)


def test_without_cgroups_the_machine_itself_is_the_limit(tmp_path: Path) -> None:
    import os

    import psutil

    assert cpu_cores(tmp_path) == len(os.sched_getaffinity(0))
    assert memory_gib(tmp_path) == psutil.virtual_memory().total / GIB


# Trace


def train_traced(path: Path, device: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.SiLU(), nn.Linear(256, 64)).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(512, 256, device=device), torch.randint(64, (512,), device=device)
    with trace(path, steps=2) as prof:
        for _ in range(4):
            q = model(x).view(1, 8, 512, 8)
            h = nn.functional.scaled_dot_product_attention(q, q, q).reshape(512, 64)
            nn.functional.cross_entropy(h, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    return kernel_breakdown(kernel_events(prof))


def test_trace_and_kernel_breakdown_on_cpu(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    totals = train_traced(path, "cpu")
    assert set(totals) == set(KERNEL_CLASSES)
    for name in ("matmul", "attention", "norm/pointwise", "optimizer", "loss"):
        assert totals[name] > 0, name
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    steps = {
        event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep")
    }
    assert len(steps) == 2
    busy = (
        sum(
            event["dur"]
            for event in events
            if str(event.get("name", "")).startswith("ProfilerStep")
        )
        / 1e3
    )
    assert sum(totals.values()) <= busy * 1.2
    assert [item.name for item in tmp_path.iterdir()] == ["trace.json.gz"]


def test_no_trace_file_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        with trace(tmp_path / "t.json.gz", steps=1) as prof:
            prof.step()
            _ = 1 / 0
    with pytest.raises(RuntimeError, match="no step was profiled"):
        with trace(tmp_path / "t.json.gz", steps=1):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "matmul"),
        ("aten::addmm", "matmul"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>", "loss"),
        ("void at::native::vectorized_elementwise_kernel<4, silu>", "norm/pointwise"),
        ("triton_poi_fused_add_mul_0", "norm/pointwise"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "memcpy"),
        ("something_else", "other"),
        ("adamw_update", "optimizer"),
        ("sum_of_squares", "optimizer"),
        ("cross_entropy_rows", "loss"),
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_coopA_TNN", "matmul"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x128", "matmul"),
        ("triton_tem_fused_mm_3", "matmul"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1",
            "attention",
        ),
        (
            "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16",
            "attention",
        ),
        (
            "kernel_cutlass_kernel_flash_attncuteflash_bwd_preprocessFlashAttentionBackwardPreprocess_object",
            "attention",
        ),
        (
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel"
            "<Flash_bwd_kernel_traits>",
            "attention",
        ),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_poi_fused_clone_scaled_dot_product_cudnn_attention_transpose_4", "norm/pointwise"),
        ("triton_red_fused_mean_mul_pow_rsqrt_1", "norm/pointwise"),
        (
            "triton_poi_fused__to_copy_add_cat_mul_split_split_with_sizes_sub_view_1",
            "norm/pointwise",
        ),
        ("at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel", "fsdp copies"),
        ("void at::native::detail::chunk_cat_cuda_kernel<float>", "fsdp copies"),
        ("triton_per_fused_abs_amax_clamp_2", "fp8 cast"),
        ("cast_tiles", "fp8 cast"),
        ("swiglu_backward_cast_tiles", "norm/pointwise"),
        ("rms_norm_backward", "norm/pointwise"),
        ("lsai::fp8_product", "matmul"),
        ("_cast_to_fp8_kernel", "fp8 cast"),
        ("triton_poi_fused__to_copy_float8_3", "fp8 cast"),
        ("void at::native::vectorized_elementwise_kernel<4, float8_copy_kernel_cuda>", "fp8 cast"),
        (
            "void transformer_engine::cast_transpose_fused_kernel<__nv_bfloat16, __nv_fp8_e4m3>",
            "fp8 cast",
        ),
    ],
)
def test_kernel_classes(name: str, expected: str) -> None:
    assert kernel_class(name) == expected


def event(name: str, start_ms: float, end_ms: float, on_gpu: bool = True) -> KernelEvent:
    return KernelEvent(name, kernel_class(name), end_ms - start_ms, start_ms, end_ms, on_gpu)


def test_overlapping_kernels_are_busy_once_and_add_up_by_name() -> None:
    events = [
        event("nvjet_a", 0, 4),
        event("ncclKernel", 2, 7),
        event("nvjet_a", 10, 11),
        event("sum_of_squares", 3, 4),
    ]
    assert busy_ms(events) == 8
    assert busy_ms([event("aten::mm", 0, 1, on_gpu=False)]) is None and busy_ms([]) is None
    assert exposed_ms(events, "communication") == 3 and exposed_ms(events, "attention") is None
    waits = [
        event("ncclKernel", 0, 4),
        event("ncclKernel", 3, 6),
        event("nvjet_a", 5, 8),
        event("ncclKernel", 9, 10),
    ]
    assert exposed_ms(waits, "communication") == 6 and exposed_ms(waits[:2], "communication") == 6
    assert exposed_ms([event("gloo:all_gather", 0, 1, on_gpu=False)], "communication") is None
    assert top_kernels(events, 2) == [
        {"name": "nvjet_a", "class": "matmul", "ms": 5, "calls": 2},
        {"name": "ncclKernel", "class": "communication", "ms": 5, "calls": 1},
    ]
    totals = kernel_breakdown(events)
    assert (totals["matmul"], totals["communication"], totals["optimizer"], totals["other"]) == (
        5,
        5,
        1,
        0,
    )
    assert [result_name(label) for label in ("matmul", "norm/pointwise", "fp8 cast")] == [
        "kernel_matmul_ms",
        "kernel_norm_pointwise_ms",
        "kernel_fp8_cast_ms",
    ]


def test_memory_snapshot_without_gpu_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="GPU"):
        with memory_snapshot(tmp_path / "s.pickle"):
            pass
    assert list(tmp_path.iterdir()) == []


# On a GPU


@gpu
@needs_gpu
def test_gpu_phase_memory_equals_the_allocator() -> None:
    d, rows = 2048, 8192
    model = nn.Sequential(*(nn.Linear(d, d, bias=False) for _ in range(4))).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(rows, d, device="cuda")
    meter = PhaseMemory("cuda", seeds=[model, optimizer])
    one_step(PhaseMemory("cuda"), model, optimizer, x)
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    loss = model(x).sum()
    forward = torch.cuda.max_memory_allocated()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del loss
    overall = torch.cuda.max_memory_allocated()
    assert torch.cuda.memory_allocated() <= base + 512
    one_step(meter, model, optimizer, x)
    found = meter.summary()
    assert float(found["mem_forward_peak_gib"]) * GIB == pytest.approx(forward, abs=4096)
    assert float(found["mem_peak_allocated_gib"]) * GIB == pytest.approx(overall, abs=4096)
    assert forward >= base + 4 * rows * d * 4
    assert float(found["mem_peak_reserved_gib"]) >= float(found["mem_peak_active_gib"])
    assert float(found["mem_peak_active_gib"]) >= float(found["mem_peak_allocated_gib"])


@gpu
@needs_gpu
def test_gpu_step_timer_agrees_with_the_clock_and_stays_bounded() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    timer = StepTimer("cuda")
    _ = a @ a
    torch.cuda.synchronize()
    start = time.perf_counter()
    timer.mark()
    for _ in range(20):
        for _ in range(10):
            _ = a @ a
        timer.mark()
    enqueued = time.perf_counter() - start
    durations = timer.durations_ms()
    wall = (time.perf_counter() - start) * 1e3
    assert len(durations) == 20
    assert sum(durations) == pytest.approx(wall, rel=0.1)
    assert enqueued * 1e3 < wall / 2  # marking did not wait for the GPU
    timer.restart()
    time.sleep(0.2)
    timer.mark()
    _ = a @ a
    timer.mark()
    assert len(timer.durations_ms()) == 21 and timer.durations_ms()[-1] < 150
    assert len(timer._events) <= 2


@gpu
@needs_gpu
def test_gpu_ceilings_are_plausible() -> None:
    found = measure_ceilings("cuda", budget_s=4)
    name = torch.cuda.get_device_name()
    assert found["ceilings_device"] == name
    for dtype in ("bf16", "tf32", "fp32", "fp8"):
        peak = theoretical_peak(name, dtype)
        if peak is not None:
            assert (
                0.3 * peak.tflops < float(found[f"matmul_{dtype}_tflops"]) < 1.05 * peak.tflops
            ), dtype
    assert float(found["copy_gb_per_s"]) > float(found["h2d_gb_per_s"]) > 1
    assert float(found["d2h_gb_per_s"]) > 1


@gpu
@needs_gpu
def test_gpu_trace_breakdown_and_snapshot(tmp_path: Path) -> None:
    totals = train_traced(tmp_path / "trace.json.gz", "cuda")
    for name in ("matmul", "attention", "norm/pointwise", "optimizer", "loss"):
        assert totals[name] > 0, (name, totals)
    with memory_snapshot(tmp_path / "s.pickle"):
        torch.ones(1000, device="cuda")
    assert (tmp_path / "s.pickle").stat().st_size > 100


@gpu
@needs_gpu
def test_gpu_environment_reads_nvml_and_leaves_cuda_alone() -> None:
    import subprocess
    import sys

    program = (
        "import json, time, torch; from lsai_lab.machine.environment import environment;"
        "start = time.perf_counter();"
        "env = environment(); print(json.dumps([env, torch.cuda.is_initialized(), "
        "time.perf_counter() - start]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    env, initialized, seconds = json.loads(output)
    print(env, seconds)
    assert (
        env["gpu"] == torch.cuda.get_device_name() and env["gpu_count"] == torch.cuda.device_count()
    )
    assert env["driver"]
    assert not initialized
    assert seconds < 1
