"""What is known of one step of a run: its memory moment by moment, simulated and as the allocator
recorded it, and the kernels of its trace.

Nothing that is read here runs: a trace is JSON, and of a snapshot's pickle only plain values are
taken.
"""

import gzip
import json
import pickle
import re
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

from lsai_core.base.disk_cache import cached_on_disk
from lsai_core.base.errors import Unavailable, UserError
from lsai_core.prediction.simulate import simulate
from lsai_core.profiling.trace import KernelEvent, kernel_class
from lsai_core.training.own_techniques import own_techniques
from lsai_lab.predictions.recorded import config_of
from lsai_lab.report.timelines import Curve, Moments, lanes, memory_picture, thinned
from lsai_lab.runs.records import Run

TRACE, SNAPSHOT = "trace.json.gz", "memory-snapshot.pickle"
_GIB = 2**30
_MOST_BYTES = 2**30  # of a file that is read
_PHASES = ("forward", "backward", "optimizer")
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CURVE = 600  # points of a recorded curve


def pictures(run: Run) -> list[str]:
    """The memory of a step by cause, with what was measured beside it, and its kernels, each as
    SVG; what cannot be had is left out."""
    found = []
    try:
        moments = simulated(run)
    except (UserError, Unavailable, RuntimeError, LookupError, TypeError, ValueError):
        moments = []
    if moments:
        names = {phase: f"mem_{phase}_peak_gib" for phase in _PHASES}
        results = run.summary.results
        measured = {p: results[name] for p, name in names.items() if name in results}
        found.append(
            memory_picture(
                moments,
                title="Memory of a step by cause, simulated; dashed: measured",
                measured=measured,
                recorded=recorded(run),
            )
        )
    if events := traced(run.folder):
        found.append(lanes(events, "Kernels of a traced step, by class"))
    return found


def simulated(run: Run) -> Moments:
    """The phase and bytes by cause in a simulated step of a training run, some hundred moments,
    kept on disk. UserError if it trained nothing or cannot be predicted."""
    if run.summary.kind != "train":
        raise UserError(f"{run.summary.id} is no training run, so it has no step to show")
    config, kernel = config_of(run), run.summary.results.get("attention_kernel")
    on: Literal["gpu", "cpu"] = "gpu" if run.env.get("gpu") else "cpu"

    def answer() -> dict[str, Any]:
        moments: list[tuple[str, dict[str, int]]] = []
        simulate(config, kernel, on=on, moments=moments)
        return {"moments": thinned(moments)}

    question = json.dumps([config.model_dump_json(), kernel, on, own_techniques(config)])
    found: Moments = cached_on_disk(__name__, question, answer)["moments"]
    return found


def recorded(run: Run) -> Curve:
    """GiB over ms as the allocator recorded them, one step's time around the highest moment; empty
    without a snapshot. UserError if the file is damaged."""
    path = run.folder / SNAPSHOT
    if not _is_plain(path):
        return []
    try:
        with path.open("rb") as file:
            snapshot = _Plain(file).load()
        events = [
            event
            for event in max(snapshot["device_traces"], key=len)
            if event["action"] in ("alloc", "free_completed")
        ]
        blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
        held = sum(int(b["size"]) for b in blocks if b["state"] == "active_allocated")
        signed = [int(e["size"]) * (1 if e["action"] == "alloc" else -1) for e in events]
        times = [float(event["time_us"]) / 1e3 for event in events]
    except (OSError, pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}") from None
    live, curve = held - sum(signed), []
    for ms, size in zip(times, signed, strict=True):
        live += size
        curve.append((ms, live / _GIB))
    return _around_the_peak(curve, run.summary.results.get("step_ms"))


def _around_the_peak(curve: list[tuple[float, float]], step_ms: float | None) -> Curve:
    if not curve:
        return []
    at = max(curve, key=lambda point: point[1])[0]
    half = 0.6 * step_ms if step_ms else float("inf")
    near = [point for point in curve if abs(point[0] - at) <= half]
    size = max(1, -(-len(near) // _CURVE))
    return [max(near[i : i + size], key=lambda p: p[1]) for i in range(0, len(near), size)]


class _Plain(pickle.Unpickler):
    """Takes dicts, lists, numbers and texts; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def traced(folder: Path) -> list[KernelEvent]:
    """The kernels, or without a GPU the operators, of one whole step of the run's trace; empty
    without a trace. UserError if the file is damaged."""
    path = folder / TRACE
    if not _is_plain(path):
        return []
    try:
        with gzip.open(path) as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError("it is too large")
        events = [e for e in json.loads(text)["traceEvents"] if e.get("ph") == "X" and "dur" in e]
        return _kernels(events)
    except (OSError, EOFError, zlib.error, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _kernels(events: list[dict[str, Any]]) -> list[KernelEvent]:
    # From the first on: beside the microseconds since 1970 floats have no place for fractions.
    origin = min(float(event["ts"]) for event in events)
    events = [{**event, "ts": float(event["ts"]) - origin} for event in events]
    steps = sorted(
        (float(e["ts"]), _end(e))
        for e in events
        if str(e["name"]).startswith("ProfilerStep#") and e.get("cat") == "user_annotation"
    )
    on_gpu = any(e.get("cat") in _GPU for e in events)
    begin, end = steps[len(steps) // 2] if steps else (float("-inf"), float("inf"))
    wanted = [e for e in events if begin <= float(e["ts"]) < end]
    if on_gpu:
        return [
            _event(e, kernel_class(str(e["name"])), float(e["dur"]), True)
            for e in wanted
            if e.get("cat") in _GPU
        ]
    updates = [
        (float(e["ts"]), _end(e)) for e in wanted if re.match(r"Optimizer\.step", str(e["name"]))
    ]
    found = []
    for event, own_us in _own_times([e for e in wanted if e.get("cat") == "cpu_op"]):
        at = float(event["ts"])
        updating = any(first <= at < last for first, last in updates)
        label = "optimizer" if updating else kernel_class(str(event["name"]))
        found.append(_event(event, label, own_us, False))
    return found


def _own_times(operators: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Each operator with its own microseconds, without those of operators that ran in it."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for operator in operators:
        threads[operator.get("tid")].append(operator)
    found: list[tuple[dict[str, Any], float]] = []
    for within in threads.values():
        within.sort(key=lambda e: (float(e["ts"]), -float(e["dur"])))
        own = [float(e["dur"]) for e in within]
        around: list[int] = []  # the operators that are open, by their places
        for at, operator in enumerate(within):
            while around and float(operator["ts"]) >= _end(within[around[-1]]):
                around.pop()
            if around:
                own[around[-1]] -= float(operator["dur"])
            around.append(at)
        found += zip(within, (max(0.0, us) for us in own), strict=True)
    return found


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _event(event: dict[str, Any], label: str, own_us: float, on_gpu: bool) -> KernelEvent:
    begin, end = float(event["ts"]) / 1e3, _end(event) / 1e3
    return KernelEvent(str(event["name"]), label, own_us / 1e3, begin, end, on_gpu)


def _is_plain(path: Path) -> bool:
    """Whether there is such a file, no link, of a size that can be read."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size <= _MOST_BYTES
