"""The `attention` kind's work: go through the sweeps, measure, and keep every point at once.

A run that is killed and started again goes on where it was. A point that cannot be measured is a
row, too, with its outcome (`oom`, `unsupported`, `failed`, `skipped`) and the reason. A backend
whose next length would take too long, judged by its last, or whose memory has ended is not tried at
longer ones. What the machine lacks altogether is said once (`measure: backend`).
"""

import time
from functools import partial
from typing import Any

import torch

from lsai_core.attention import Case, available_backends, get_backend
from lsai_core.kernels import cuda_capability, on_rocm
from lsai_core.training.step import resolve_device
from lsai_lab.benches.attention.clock import Call, Clock, measure, random_inputs
from lsai_lab.benches.attention.config import AttentionBenchConfig, Shape
from lsai_lab.benches.attention.errors import example, relative_errors, values
from lsai_lab.benches.points import Points, Refusal, Row, guarded, point_results, refusal
from lsai_lab.runs.kinds import Context


def run(config: AttentionBenchConfig, context: Context) -> dict[str, Any]:
    """Measure; returns counts, the device, and `<mask>_<length>_<backend>_tflops` of every
    point."""
    device = resolve_device(config.device)
    points = Points(context.folder / "metrics.jsonl", context.on_rows)
    bench = _Bench(config, device, points)
    for sweep in config.sweeps:
        for length in sweep.lengths:
            shape = config.shape(sweep, length)
            for name in sweep.backends or config.backends:
                bench.point(sweep.measure, shape, name)
    capability = cuda_capability(device) if device.type == "cuda" and not on_rocm() else None
    results = {"compute_capability": ".".join(map(str, capability)) if capability else None}
    return results | point_results(points.rows, device, _place)


def _place(row: Row) -> str:
    return f"{row['mask']}{row['window'] or ''}_{row['length']}_{row['backend']}"


class _Bench:
    def __init__(self, config: AttentionBenchConfig, device: torch.device, points: Points) -> None:
        self.config, self.device, self.points = config, device, points
        self.began, self.clock = time.perf_counter(), Clock(device, config.torch_dtype)
        self.inference = available_backends(device, training=False)
        self.training = available_backends(device)
        for name in dict.fromkeys(
            [*config.backends, *(b for s in config.sweeps for b in s.backends or [])]
        ):
            if not points.find(measure="backend", backend=name):
                reason = self.inference[name] or self.training[name]
                outcome = (
                    "unavailable" if self.inference[name] else "forward only" if reason else "ok"
                )
                points.add(
                    {"measure": "backend", "backend": name, "outcome": outcome, "reason": reason}
                )

    def point(self, measure: str, shape: Shape, name: str) -> None:
        """Measure a point, unless this machine lacks the backend or it is measured already."""
        place = {
            "measure": measure,
            "mask": shape.mask,
            "window": shape.window,
            "length": shape.length,
        }
        if self.inference[name] is not None or self.points.find(**place, backend=name):
            return
        refused = self._refusal(measure, shape, name)
        outcome, reason = refused or ("ok", None)
        row = {**place, "batch": shape.batch, "backend": name, "outcome": outcome, "reason": reason}
        if not refused:
            work = self._measure if measure == "time" else self._errors
            row |= guarded(self.device, partial(work, shape, name))
        self.points.add(row)
        # after an illegal memory access nothing runs here any more: end, the points are kept
        if self.clock.on_gpu:
            torch.cuda.synchronize()

    def _refusal(self, measure: str, shape: Shape, name: str) -> Refusal | None:
        if measure == "time":
            rows = self.points.find(
                measure="time", mask=shape.mask, window=shape.window, backend=name
            )
            if known := refusal(rows, shape, self.config.max_call_s):
                return known
        case = Case(
            self.device.type,
            self.config.torch_dtype,
            shape.head_dim,
            shape.window,
            causal=shape.causal,
        )
        if unsupported := get_backend(name).unsupported(case):
            return "unsupported", unsupported
        over = time.perf_counter() - self.began > self.config.budget_s
        return (
            ("skipped", f"the {self.config.budget_s:g} s of this run were over") if over else None
        )

    def _measure(self, shape: Shape, name: str) -> Row:
        example.cache_clear()  # its memory is for what is timed
        inputs = random_inputs(
            shape, self.config.torch_dtype, self.device, self.config.seed + len(self.points.rows)
        )
        call = Call(name, shape, inputs, self.training[name] is None)
        return measure(call, self.clock, point_ms=self.config.point_ms)

    def _errors(self, shape: Shape, name: str) -> Row:
        inputs, exact, bounds = example(
            shape, self.config.torch_dtype, self.device, self.config.seed
        )
        began = time.perf_counter()
        found = relative_errors(
            values(Call(name, shape, inputs, self.training[name] is None)), exact
        )
        return {**bounds, "first_call_s": round(time.perf_counter() - began, 3), **found}
