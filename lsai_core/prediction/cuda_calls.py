"""Streams, events, CUDA graphs, meters and profilers, as programs on a simulated GPU find them.

No time passes there, so events and marks do nothing. A side stream has memory of its own, as the
allocator has pools for each (`tracker.py` asks `torch.cpu.current_stream`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import profiler
from torch.cuda import nvtx

from lsai_core.base.errors import UserError

_METERS = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")
SILENT = (
    *("synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all", "init"),
    *("set_per_process_memory_fraction", "ipc_collect", "_sleep", "reset_max_memory_allocated"),
    *("reset_max_memory_cached", "reset_accumulated_memory_stats", "set_rng_state"),
)


def _none(*_arguments: Any, **_options: Any) -> None: ...


class _OneDevice(contextlib.nullcontext[None]):
    """A context that changes nothing, whatever it is given: there is one GPU."""

    def __init__(self, *_arguments: Any) -> None:
        super().__init__()


class Event:
    """`torch.cuda.Event`, for which no time passes."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self.record = self.synchronize = self.wait = lambda *_: None
        self.query = lambda: True
        self.elapsed_time = lambda _end: 0.0


class Stream(torch.cpu.Stream):
    """`torch.cuda.Stream`: all that it was given is done."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_options: Any) -> None:
        super().__init__(priority)
        self.priority, self.device = priority, torch.device("cuda", 0)
        self.synchronize = lambda: None
        self.query = lambda: True

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        return event or Event()


def call_answers(main: Stream) -> dict[str, Callable[..., Any]]:
    """What functions and classes of `torch.cuda` become, by name. `main`: the stream of a program
    that opens none."""
    return {
        "Event": Event,
        "Stream": Stream,
        "StreamContext": torch.cpu.StreamContext,
        "stream": torch.cpu.stream,
        "set_stream": lambda stream: torch.cpu.stream(stream).__enter__(),
        "current_stream": lambda *_, **__: torch.cpu.current_stream(),
        "default_stream": lambda *_, **__: main,
        "CUDAGraph": _Graph,
        "graph": _Graph,
        "make_graphed_callables": _Graph,
        "device": _OneDevice,
        "device_of": _OneDevice,
        "cudart": lambda: SimpleNamespace(cudaProfilerStart=_none, cudaProfilerStop=_none),
        "initial_seed": lambda: 0,
        "get_allocator_backend": lambda: "native",
        **{name: lambda *_, **__: 0 for name in _METERS},
    }


def quiet_calls() -> list[tuple[Any, str, Any]]:
    """What else is changed (owner, name, value): what streams do with a tensor, records of the
    memory, marks for NVIDIA's profiler, and PyTorch's own, which looks at the host alone."""
    marks = {"rangePushA": lambda *_: 0, "rangePop": lambda: 0, "markA": lambda *_: None}
    marks |= {"rangeStartA": lambda *_: 0, "rangeEnd": lambda *_: None}
    return [
        (torch.Tensor, "record_stream", lambda _tensor, _stream: None),
        (torch.cuda.memory, "_record_memory_history", _none),
        (torch.cuda.memory, "_dump_snapshot", _none),
        (torch.cuda.memory, "get_allocator_backend", lambda: "native"),
        (torch.cuda.profiler, "start", _none),
        (torch.cuda.profiler, "stop", _none),
        (nvtx, "_nvtx", SimpleNamespace(**marks)),
        (profiler.profile, "__init__", _of_the_host(profiler.profile.__init__)),
        (profiler, "emit_nvtx", lambda *_, **__: contextlib.nullcontext()),
    ]


def statistics_of(memory: SimpleNamespace) -> dict[str, Any]:
    """`torch.cuda.memory_stats`, nested. What is not simulated is zero."""
    bytes_of = {"allocated_bytes": memory.live, "active_bytes": memory.live}
    bytes_of |= {"requested_bytes": memory.live, "reserved_bytes": memory.reserved}
    peaks = dict.fromkeys(bytes_of, memory.peak) | {"reserved_bytes": memory.reserved}
    counts = ("allocation", "active", "segment", "inactive_split", "inactive_split_bytes")
    nothing = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
    found: dict[str, Any] = {
        name: {pool: dict(nothing) for pool in ("all", "large_pool", "small_pool")}
        for name in (*bytes_of, *counts)
    }
    for name, current in bytes_of.items():
        found[name]["all"] |= {"current": current(), "peak": peaks[name]()}
    for name in ("oversize_allocations", "oversize_segments"):
        found[name] = dict(nothing)
    return found | {"num_ooms": 0, "num_alloc_retries": 0}


def _of_the_host(begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def begin_on_host(self: Any, *arguments: Any, **options: Any) -> None:
        if options.get("use_device") == "cuda":
            options["use_device"] = None
        begin(self, *arguments, **options | {"use_cuda": False})

    return begin_on_host


class _Graph:
    """`torch.cuda.CUDAGraph` and what makes one; a class, for annotations name it."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        raise UserError("simulated_gpu cannot follow CUDA graphs; predict without them")
