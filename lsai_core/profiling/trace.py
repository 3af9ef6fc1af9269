"""Where a step's time goes: a torch profiler trace, the time per kind of kernel, and a CUDA memory
snapshot.

`trace` records a few steps and writes a Chrome trace (open it in https://ui.perfetto.dev);
`kernel_events` reads the same events, `kernel_breakdown` adds them up by what they do,
`top_kernels` by name, `busy_ms` says how long the GPU had any work, and `exposed_ms` how long
nothing but communication, say, went on. On a CPU an event is an operator with its own time.
`memory_snapshot` records every allocation with its stack (open the file at
https://pytorch.org/memory_viz).
"""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from lsai_core.base.errors import Unavailable
from lsai_core.base.files import atomic_writer

# The profiler writes on stderr that it begins and ends, unless it is told before its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

# First match wins, so the special comes before the general: the loss's log-softmax is also a
# softmax. A kernel that torch.compile fused is named after all operators in it: one with
# "attention" in it stands beside that kernel. Names are kernels (GPU) or operators (CPU), compared
# without case.
_CLASSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "communication",
        (
            "nccl",
            "gloo:",
            "c10d",
            "record_param_comms",
            "all_?reduce",
            "all_?gather",
            "reduce_?scatter",
        ),
    ),
    ("memcpy", ("memcpy", "memset", "^aten::copy_$", "^aten::_to_copy$")),
    # into and out of messages; what torch.compile fused is none, whatever operators it names
    ("fsdp copies", ("^(?!triton_).*(chunk_cat|split_with_sizes)", "multi_tensor.*::Copy<")),
    ("optimizer", ("multi_tensor", "_foreach_", "adam", "sum_of_squares")),
    ("loss", ("log_?softmax", "nll_loss", "cross_entropy")),
    ("fp8 cast", ("^triton_(poi|red|per)_.*(float8|fp8|amax)",)),
    ("norm/pointwise", ("^triton_(poi|red|per)_",)),
    ("attention", ("attention", "flash", "fmha", "sdpa", "softmax")),
    (
        "matmul",
        (
            "gemm",
            "gemv",
            "matmul",
            "cutlass",
            "nvjet",
            "xmma",
            "splitk",
            "scaled_mm",
            "mkldnn_linear",
        ),
    ),
    (
        "matmul",
        (
            "^aten::(_?mm|addmm|bmm|baddbmm|mv|addmv|dot|linear)$",
            "^triton_(tem_fused_.*)?mm",
            "fp8_product",
        ),
    ),
    ("norm/pointwise", ("swiglu",)),  # also the one that casts what it produces
    (
        "fp8 cast",
        (
            "^cast_tiles",
            "fp8",
            "float8",
            "e4m3",
            "e5m2",
            "abs_?max",
            "amax",
            "cast_transpose",
            "quantize",
        ),
    ),
    (
        "norm/pointwise",
        ("norm", "gammabeta", "elementwise", "vectorized", "reduce_kernel", "rope", "silu"),
    ),
    (
        "norm/pointwise",
        ("embedding", "index", "fill", "catarray", "sigmoid", "gelu", "relu", "dropout"),
    ),
    (
        "norm/pointwise",
        (
            "^aten::(add|sub|mul|div|neg|pow|rsqrt|sqrt|exp|sum|mean|cat|where|zero|tril|triu|clamp)_?$",
        ),
    ),
)
_PATTERNS = tuple((name, re.compile("|".join(parts), re.IGNORECASE)) for name, parts in _CLASSES)
# The profiler's and the CUDA runtime's own events on the host.
_RUNTIME = re.compile(r"cuda[A-Z]|cu[A-Z]|Resource$|Activity Buffer|ProfilerStep")
KERNEL_CLASSES = (*dict.fromkeys(name for name, _ in _CLASSES), "other")


@contextlib.contextmanager
def trace(path: Path, steps: int = 3) -> Iterator[profile]:
    """Profile `steps` steps after one warm-up step; write the gzipped Chrome trace to `path`,
    unless the block raises.

    Call `.step()` on the yielded profiler after each training step; what runs after the last one is
    not recorded.
    """
    # A process that trains on the CPU has not touched CUDA; profiling it all the same fills the
    # trace with waits.
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []),
    ]
    plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        with profile(
            activities=activities,
            schedule=plan,
            on_trace_ready=lambda prof: prof.export_chrome_trace(str(raw)),
            acc_events=True,
        ) as prof:
            yield prof
        if not raw.exists():
            raise RuntimeError(
                f"no step was profiled, {path} not written: call the profiler's .step() more than "
                f"once"
            )
        with (
            atomic_writer(path) as file,
            raw.open("rb") as source,
            gzip.GzipFile(fileobj=file, mode="wb", compresslevel=4) as packed,
        ):
            shutil.copyfileobj(source, packed)


@dataclass(frozen=True)
class KernelEvent:
    """One kernel (GPU) or operator (CPU) as it ran: its own time, and when, in milliseconds."""

    name: str
    label: str  # one of KERNEL_CLASSES
    ms: float
    start_ms: float
    end_ms: float
    on_gpu: bool


def kernel_events(prof: profile) -> list[KernelEvent]:
    """Every event of the profiled steps: GPU kernels if any ran, else CPU operators.

    An operator that runs inside `Optimizer.step` counts as optimizer, whatever it is; on a GPU the
    kernels' names tell (gradient clipping uses the same multi-tensor kernels and counts there too).
    Eager attention is matmul and softmax.
    """
    events = [
        event
        for event in prof.events() or []
        if not event.is_user_annotation and not _RUNTIME.match(event.name)
    ]
    if on_gpu := [event for event in events if event.device_type == DeviceType.CUDA]:
        return [_event(e, kernel_class(e.name), e.self_device_time_total, True) for e in on_gpu]
    labels = ("optimizer" if _in_optimizer(event) else kernel_class(event.name) for event in events)
    return [
        _event(e, label, e.self_cpu_time_total, False)
        for e, label in zip(events, labels, strict=True)
    ]


def _event(event: Any, label: str, own_us: float, on_gpu: bool) -> KernelEvent:
    span = event.time_range
    return KernelEvent(event.name, label, own_us / 1e3, span.start / 1e3, span.end / 1e3, on_gpu)


def kernel_breakdown(events: Sequence[KernelEvent]) -> dict[str, float]:
    """Milliseconds per class of `KERNEL_CLASSES` over all profiled steps."""
    return {
        label: sum(event.ms for event in events if event.label == label) for label in KERNEL_CLASSES
    }


def top_kernels(
    events: Sequence[KernelEvent], count: int | None = None, per: int = 1
) -> list[dict[str, Any]]:
    """The `count` names with the most time (all, if not given), longest first: name, class, and of
    `per` profiled steps the mean ms and calls of one."""
    calls = defaultdict[tuple[str, str], list[float]](list)
    for event in events:
        calls[event.name, event.label].append(event.ms)
    longest = sorted(calls.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        {"name": n, "class": kind, "ms": sum(ms) / per, "calls": len(ms) / per}
        for (n, kind), ms in longest
    ]


def busy_ms(events: Sequence[KernelEvent]) -> float | None:
    """Milliseconds in which at least one GPU kernel or copy ran. None without a GPU."""
    if not any(event.on_gpu for event in events):
        return None
    total, until = 0.0, -math.inf
    for event in sorted(events, key=lambda event: event.start_ms):
        total += max(0.0, event.end_ms - max(event.start_ms, until))
        until = max(until, event.end_ms)
    return total


def exposed_ms(events: Sequence[KernelEvent], label: str) -> float | None:
    """Milliseconds in which kernels of class `label` ran and no others, waiting for a slower
    process included. None without such a kernel on a GPU."""
    busy, others = busy_ms(events), busy_ms([event for event in events if event.label != label])
    if busy is None or not any(event.label == label for event in events):
        return None
    return busy - (others or 0.0)


def result_name(label: str) -> str:
    """The name under which a run's results hold a kernel class: `norm/pointwise` is in
    `kernel_norm_pointwise_ms`."""
    return f"kernel_{re.sub(r'[^a-z0-9]', '_', label)}_ms"


def kernel_class(name: str) -> str:
    """The class of one kernel or operator name."""
    return next((label for label, pattern in _PATTERNS if pattern.search(name)), "other")


def _in_optimizer(event: Any) -> bool:
    while event is not None:
        if event.name.startswith("Optimizer.step"):
            return True
        event = event.cpu_parent
    return False


@contextlib.contextmanager
def memory_snapshot(path: Path, max_entries: int = 200_000) -> Iterator[None]:
    """Record the block's last `max_entries` CUDA allocations with their stacks; write the snapshot
    to `path` (`.pickle`), also when the block raises. Raises Unavailable without a GPU."""
    if not torch.cuda.is_available():
        raise Unavailable("a CUDA memory snapshot needs a CUDA GPU")
    torch.cuda.memory._record_memory_history(max_entries=max_entries)
    try:
        yield
    finally:
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "snapshot.pickle"
            torch.cuda.memory._dump_snapshot(str(raw))
            torch.cuda.memory._record_memory_history(enabled=None)
            with atomic_writer(path) as file, raw.open("rb") as source:
                shutil.copyfileobj(source, file)
