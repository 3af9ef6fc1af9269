"""Where a step's time goes: a torch profiler trace, the time per kind of kernel, and a CUDA memory snapshot.

Totals say that a variant is faster; a trace says why. `trace` records a few steps and writes a Chrome trace (open it
in https://ui.perfetto.dev); `kernel_breakdown` adds the same events up by what they do. On a GPU it sums kernels; on
a CPU, where an operator is the kernel, operators' own time. `memory_snapshot` records every allocation with its stack
(open the file at https://pytorch.org/memory_viz).
"""

from __future__ import annotations

import contextlib
import gzip
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from lsai_core.errors import Unavailable
from lsai_core.files import atomic_writer

# First match wins, so the special comes before the general: an optimizer's multi-tensor kernel is also elementwise, the
# loss's log-softmax is also a softmax. Names are kernels (GPU) or operators (CPU), compared without case.
_CLASSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("nccl", "gloo:", "c10d", "record_param_comms", "all_?reduce", "all_?gather", "reduce_?scatter")),
    ("memcpy", ("memcpy", "memset", "^aten::copy_$", "^aten::_to_copy$")),
    ("optimizer", ("multi_tensor", "_foreach_", "adam")),
    ("loss", ("log_?softmax", "nll_loss", "cross_entropy")),
    ("attention", ("attention", "flash", "fmha", "sdpa", "softmax")),
    ("matmul", ("gemm", "gemv", "matmul", "cutlass", "nvjet", "xmma", "splitk", "scaled_mm", "mkldnn_linear")),
    ("matmul", ("^aten::(_?mm|addmm|bmm|baddbmm|mv|addmv|dot|linear)$",)),
    (
        "norm/pointwise",
        ("norm", "gammabeta", "elementwise", "vectorized", "reduce_kernel", "triton_(poi|red|per)", "rope", "silu"),
    ),
    ("norm/pointwise", ("swiglu", "embedding", "index", "fill", "catarray", "sigmoid", "gelu", "relu", "dropout")),
    ("norm/pointwise", ("^aten::(add|sub|mul|div|neg|pow|rsqrt|sqrt|exp|sum|mean|cat|where|zero|tril|triu|clamp)_?$",)),
)
_PATTERNS = tuple((name, re.compile("|".join(parts), re.IGNORECASE)) for name, parts in _CLASSES)
# The profiler's and the CUDA runtime's own events on the host: calls and waits, not work.
_RUNTIME = re.compile(r"cuda[A-Z]|cu[A-Z]|Resource$|Activity Buffer|ProfilerStep")
KERNEL_CLASSES = (*dict.fromkeys(name for name, _ in _CLASSES), "other")


@contextlib.contextmanager
def trace(path: Path, steps: int = 3) -> Iterator[profile]:
    """Profile `steps` steps after one warm-up step; write the gzipped Chrome trace to `path` (`.json.gz`), atomically.

    Call `.step()` on the yielded profiler after each training step; what runs after the last profiled step is not
    recorded. Nothing is written if the block raises.
    """
    # A process that trains on the CPU has not touched CUDA; profiling it all the same fills the trace with waits.
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])]
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
                f"no step was profiled: call .step() on the profiler more than once ({path} not written)"
            )
        with atomic_writer(path) as file, raw.open("rb") as source, gzip.GzipFile(fileobj=file, mode="wb") as packed:
            shutil.copyfileobj(source, packed)


def kernel_breakdown(prof: profile) -> dict[str, float]:
    """Milliseconds per class of `KERNEL_CLASSES` over all profiled steps: GPU kernels if any ran, else CPU operators.

    An operator that runs inside `Optimizer.step` counts as optimizer, whatever it is; on a GPU the kernels' names tell
    (gradient clipping uses the same multi-tensor kernels and counts there too). Eager attention is matmul and softmax.
    """
    totals = dict.fromkeys(KERNEL_CLASSES, 0.0)
    events = [event for event in prof.events() or [] if not event.is_user_annotation and not _RUNTIME.match(event.name)]
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    for event in kernels:
        totals[kernel_class(event.name)] += event.self_device_time_total / 1e3
    if kernels:
        return totals
    for event in events:
        label = "optimizer" if _in_optimizer(event) else kernel_class(event.name)
        totals[label] += event.self_cpu_time_total / 1e3
    return totals


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
    """Record every CUDA allocation of the block with its stack; write the snapshot to `path` (`.pickle`), atomically.

    The snapshot is written also when the block raises (an out-of-memory is when it is wanted most). Raises Unavailable
    without a GPU. `max_entries` bounds the host memory; the oldest events are dropped first.
    """
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
