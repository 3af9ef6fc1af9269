"""What `lsai probe` measures of the machine at hand, by the benches of the studies.

    ceilings        products in fp32, tf32 and fp8, copies, host to GPU and back (`machine.py`)
    products        of a model's layers, forward and backward, in bf16 and fp8 (`gemm.py`)
    attention-...   every kernel by length, for one shape of heads (`attention/bench.py`)
    step-...        whole steps of a tiny model, bound by the host: what it takes to start kernels
    power           of the GPU in large products, and its limit
    messages        between all GPUs of the machine, by size, alone and beside products
                    (`collectives.py`)

Parts come in the order of their use for predictions, so that those which no longer fit into the
time are the least useful. What a part found is a file at once: a probe that was interrupted goes on
with the part that it was in, and within it from the last point.
"""

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lsai_core.base import compiler
from lsai_core.base.files import read_jsonl, write_json
from lsai_core.config.strict import validated
from lsai_core.config.train import TrainConfig
from lsai_core.fp8.recipes import missing
from lsai_core.kernels import cuda_capability, on_rocm
from lsai_core.profiling.steptime import PowerMeter
from lsai_core.training.step import attention_kernel, prepare_model, prepare_optimizer, train_step
from lsai_lab.benches import gemm
from lsai_lab.benches.attention import bench as attention
from lsai_lab.benches.attention.config import AttentionBenchConfig
from lsai_lab.benches.collectives import CollectivesConfig
from lsai_lab.benches.machine import measure_ceilings
from lsai_lab.benches.points import Points, guarded
from lsai_lab.launch.launch import launch
from lsai_lab.machine.environment import KERNELS, environment, visible_gpus
from lsai_lab.runs.execute import write_plan
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.records import RunId
from lsai_lab.runs.study import PlannedRun

Found = dict[str, Any]
USUAL_S = {"cuda": 480.0, "cpu": 90.0}  # the limit of a probe, where none is given
_POINT_S = 0.3  # of a product, long enough for a GPU's clocks to settle
_ROUNDS = 12  # of a few steps
_MIB = 2**20

# Heads of attention: query heads, key-value heads, their dimension; the most usual first.
_HEADS = {
    "cuda": [(32, 8, 128), (32, 32, 64), (32, 8, 64), (32, 32, 128)],
    "cpu": [(4, 4, 64), (4, 2, 128)],
}
_ATTENTION: dict[str, Found] = {
    "cuda": {
        "dtype": "bfloat16",
        "tokens": 16_384,
        "point_ms": 20.0,
        "max_call_s": 0.6,
        "backends": ["fa4", "fa3", "fa2", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient"],
        "sweeps": [
            {"measure": "error", "mask": "causal", "lengths": [2048]},
            {"mask": "causal", "lengths": [512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536]},
        ],
    },
    "cpu": {
        "dtype": "float32",
        "tokens": 512,
        "point_ms": 20.0,
        "max_call_s": 0.4,
        "backends": ["sdpa_flash", "sdpa_math", "eager"],
        "sweeps": [
            {"measure": "error", "mask": "causal", "lengths": [256]},
            {"mask": "causal", "lengths": [128, 256, 512, 1024]},
        ],
    },
}
# Sliding windows, of kernels that skip what lies outside.
_WINDOWS: Found = {
    "backends": ["fa4", "fa3", "fa2"],
    "sweeps": [
        {"measure": "error", "mask": 1024, "lengths": [4096]},
        {"mask": 1024, "lengths": [4096, 16_384]},
        {"mask": 4096, "lengths": [8192, 32_768]},
    ],
}
_TINY = dict(n_layers=4, d_model=128, n_heads=2, n_kv_heads=2, d_ff=256, vocab_size=512)
# Steps of small models by the cost that they tell (`lsai_core.prediction.roofline`).
STEPS: dict[str, dict[str, Found]] = {
    "cuda": {
        "call": {"model": _TINY, "precision": "bf16", "seq_len": 128, "batch_size": 1},
        "kernel": {
            "model": _TINY,
            "precision": "bf16",
            "seq_len": 128,
            "batch_size": 1,
            "compile": True,
        },
    },
    "cpu": {
        "call": {"model": _TINY, "seq_len": 32, "batch_size": 1},
        "eager": {"model": {"preset": "lab-tiny"}, "seq_len": 256, "batch_size": 2},
    },
}


@dataclass(frozen=True)
class Part:
    """A part of the probe: `seconds` that it usually takes, `least` of them without which it is not
    begun. `measure` is given a limit of seconds and a folder for its points."""

    name: str
    about: str
    seconds: float
    least: float
    measure: Callable[[float, Path], Found]


def parts(device: torch.device, count: int) -> list[Part]:
    """The parts for `count` devices like `device`, the most useful first."""
    first, *others = [_attention_part(device, heads) for heads in _HEADS[device.type]]
    steps = [_step_part(device, name) for name in STEPS[device.type]]
    found = [Part("ceilings", "products and copies", 12, 0, partial(_ceilings, device))]
    if device.type == "cpu":
        return [*found, first, *steps, *others]
    found.append(Part("products", "products of layers", 25, 5, partial(_products, device)))
    found += [first, *steps, Part("power", "power", 3, 3, partial(_power, device))]
    if count > 1:
        about = f"messages between {count} GPUs"
        found.append(Part("messages", about, 60, 40, partial(_messages, device, count)))
    windows = partial(_attention, device, _HEADS["cuda"][0], _ATTENTION["cuda"] | _WINDOWS)
    return [*found, *others, Part("windows", "attention in windows", 20, 10, windows)]


def _attention_part(device: torch.device, heads: tuple[int, int, int]) -> Part:
    queries, keys, width = heads
    about = f"attention, {queries} heads of {width}, {keys} key-value heads"
    work = partial(_attention, device, heads, _ATTENTION[device.type])
    times = (25, 5) if device.type == "cuda" else (12, 1)
    return Part(f"attention-{queries}-{keys}-{width}", about, *times, work)


def _step_part(device: torch.device, name: str) -> Part:
    """The part of a step of `STEPS`; most of a compiled one's time is compiling."""
    compiled = STEPS[device.type][name].get("compile", False)
    about = f"steps of a small model, {'compiled' if compiled else 'eager'} ({name})"
    times = (50, 20) if compiled else (8, 2)
    return Part(f"step-{name}", about, *times, partial(_step, device, name))


def device_facts(device: torch.device) -> Found:
    """Which machine it is, as `Device` of a passport has it."""
    env, gpu = environment(), device.type == "cuda"
    memory_gib, capability = env["memory_gib"], None
    if gpu:
        memory_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
        capability = None if on_rocm() else ".".join(map(str, cuda_capability(device)))
    return {
        "kind": "gpu" if gpu else "cpu",
        "name": torch.cuda.get_device_name(device) if gpu else env["cpu"],
        "count": env["gpu_count"] if gpu else 1,
        "memory_gib": round(memory_gib, 1),
        "capability": capability,
        "uuids": env["gpu_uuids"] if gpu else [],
        "driver": env["driver"] if gpu else None,
        "torch": env["torch"],
        "cuda": env["cuda"] if gpu else None,
        "packages": {name: env["packages"][name] for name in KERNELS if name in env["packages"]},
        "host_cpu": env["cpu"],
        "host_cores": env["cpu_cores"],
        "host_threads": env["threads"],
        "host_memory_gib": round(env["memory_gib"], 1),
    }


def run_parts(
    every: list[Part],
    device: torch.device,
    folder: Path,
    seconds: float,
    on_part: Callable[[Part, float], None],
) -> Iterator[tuple[Part, Found | None]]:
    """Each part with what it found: None if there was no time for it, `outcome` and `reason` if it
    failed. What is in `folder` already is not measured again.

    `on_part` is told each part before it begins, and about how many seconds are left.
    """
    until = time.perf_counter() + seconds
    for number, part in enumerate(every):
        path = folder / f"{part.name}.json"
        with contextlib.suppress(OSError, ValueError):
            yield part, json.loads(path.read_text(encoding="utf-8"))
            continue
        left = until - time.perf_counter()
        if left < part.least:
            yield part, None
            continue
        on_part(part, min(left, sum(later.seconds for later in every[number:])))
        (folder / part.name).mkdir(parents=True, exist_ok=True)
        found = guarded(
            device, partial(part.measure, min(left, 2 * part.seconds), folder / part.name)
        )
        if found.get("outcome", "ok") == "ok":
            write_json(path, found)
        yield part, found
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _ceilings(device: torch.device, seconds: float, folder: Path) -> Found:
    return dict(measure_ceilings(device, budget_s=min(8.0, max(0.2, seconds / 2))))


def _products(device: torch.device, seconds: float, folder: Path) -> Found:
    """Rows as those of a `gemm` run, without the casts of fp8."""
    until = time.perf_counter() + seconds
    config = validated(gemm.GemmConfig, {"model": {"preset": "course"}}, "the probe's products")
    ways = ("bf16",) if missing("tensorwise", device) else ("bf16", "fp8")
    kept = Points(folder / "metrics.jsonl", lambda rows: None)
    for point in gemm.points(config, ways):
        if time.perf_counter() < until and not kept.find(**point.__dict__):
            found = guarded(device, partial(gemm.measure, point, device, _POINT_S))
            kept.add({**point.__dict__, **found})
    return {"rows": kept.rows}


def _attention(
    device: torch.device, heads: tuple[int, int, int], settings: Found, seconds: float, folder: Path
) -> Found:
    """Config, results and rows of an `attention` run."""
    names = dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
    own = {"device": device.type, "budget_s": seconds}
    config = validated(AttentionBenchConfig, {**settings, **names, **own}, "the probe's attention")
    results = attention.run(config, Context(folder, folder, folder))
    return {
        "config": config.model_dump(mode="json"),
        "results": results,
        "rows": read_jsonl(folder / "metrics.jsonl"),
    }


def _step(device: torch.device, name: str, seconds: float, folder: Path) -> Found:
    """Seconds and attention kernel of the step of `STEPS` that tells the cost `name`."""
    config = step_config(STEPS[device.type][name])
    compiler.require(config.compile, device)
    kernel = attention_kernel(config, device)
    return {"step_s": _step_s(config, device, seconds / 2), "attention": kernel}


def step_config(settings: Found) -> TrainConfig:
    """A step of `STEPS` as a run."""
    vocabulary = {"vocab_size": settings["model"].get("vocab_size", 10_000)}
    return validated(TrainConfig, {"data": vocabulary} | settings, "the probe's step")


def _step_s(config: TrainConfig, device: torch.device, seconds: float) -> float:
    """Seconds of a step of `config`: of rounds of steps without a pause, the fastest on a CPU,
    where other work only ever slows one, else the median. Rounds begin for about `seconds`."""
    model = prepare_model(config, device)
    optimizer = prepare_optimizer(model, config)
    tokens = torch.randint(config.model.vocab_size, (config.batch_size, config.seq_len + 1))
    taken, until = list[float](), time.perf_counter() + seconds
    steps = 10 if device.type == "cuda" else 2
    while len(taken) < 4 or (len(taken) < _ROUNDS and time.perf_counter() < until):
        begun = time.perf_counter()
        for _ in range(steps):
            train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], config, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - begun) / steps)
    settled = taken[2:]  # the first ones compile
    return min(settled) if device.type == "cpu" else statistics.median(settled)


def _power(device: torch.device, seconds: float, folder: Path) -> Found:
    """Watts of the GPU, its limit and its clock, as far as it tells."""
    found: Found = {}
    with visible_gpus(torch.cuda.device_count()) as (nvml, gpus):
        for gpu in gpus[:1]:
            found["limit_w"] = nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3
    meter = PowerMeter(device)
    time.sleep(0.2)
    meter.on = True
    gemm.measure(gemm.Point("square", "forward", "bf16", 8192, 8192, 8192), device, 2.0)
    meter.on = None
    told = meter.summary()
    names = {"products_w": "gpu_power_w", "products_mhz": "gpu_clock_mhz"}
    return found | {ours: told[name] for ours, name in names.items() if name in told}


def _messages(device: torch.device, count: int, seconds: float, folder: Path) -> Found:
    """Rows of a `collectives` run of one process for each device."""
    settings = {
        "processes": count,
        "bytes": [size * _MIB for size in (256, 64, 16, 4, 1, 1024)],
        "point_ms": 100.0,
        "device": device.type,
        "budget_s": max(1.0, seconds - 25),  # the start of the processes takes the rest
    }
    config = validated(CollectivesConfig, settings, "the probe's messages")
    run = RunId(study="probe", variant="messages", key="0")
    plan = PlannedRun(run, "collectives", config, "messages", seconds, folder, {})
    write_plan(plan, "lsai probe")
    launch(folder, folder, count)
    return {"rows": read_jsonl(folder / "metrics.jsonl")}
