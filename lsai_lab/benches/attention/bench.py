"""The `attention` kind's work: go through the sweeps, measure, and keep every point at once.

A run that is killed and started again goes on where it was. A point that cannot be measured is a row, too, with its outcome (`oom`,
`unsupported`, `failed`, `skipped`) and the reason. A backend whose next length would take too long, judged by its last, or whose memory
has ended is not tried at longer ones. What the machine lacks altogether is said once (`measure: backend`).
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from lsai_core.attention import Case, available_backends, get_backend
from lsai_core.training.step import resolve_device
from lsai_lab.benches.attention.clock import Call, Clock, measure, random_inputs
from lsai_lab.benches.attention.config import AttentionBenchConfig, Shape
from lsai_lab.benches.attention.errors import example, relative_errors, values
from lsai_lab.benches.points import Points, Row, describe, guarded, outlook
from lsai_lab.runs.kinds import Context


def run(config: AttentionBenchConfig, context: Context) -> dict[str, Any]:
    """Measure; returns counts, the device, and `<mask>_<length>_<backend>_tflops` of every point."""
    device = resolve_device(config.device)
    points = Points(context.folder / "metrics.jsonl", context.on_rows)
    bench = _Bench(config, device, points)
    for sweep in config.sweeps:
        for length in sweep.lengths:
            shape = config.shape(sweep, length)
            for name in sweep.backends or config.backends:
                if row := bench.point(sweep.measure, shape, name):
                    print(describe(row, shape.mask, shape.window or "", shape.length, name), flush=True)
    return _results(config, device, points.rows)


class _Bench:
    def __init__(self, config: AttentionBenchConfig, device: torch.device, points: Points) -> None:
        self.config, self.device, self.points = config, device, points
        self.began, self.clock = time.perf_counter(), Clock(device, config.torch_dtype)
        self.inference = available_backends(device, training=False)
        self.training = available_backends(device)
        for name in dict.fromkeys([*config.backends, *(b for s in config.sweeps for b in s.backends or [])]):
            if not points.find(measure="backend", backend=name):
                reason = self.inference[name] or self.training[name]
                outcome = "unavailable" if self.inference[name] else "forward only" if reason else "ok"
                points.add({"measure": "backend", "backend": name, "outcome": outcome, "reason": reason})

    def point(self, measure: str, shape: Shape, name: str) -> Row | None:
        """The row of a point; none if this machine lacks the backend or the point is measured already."""
        place = {"measure": measure, "mask": shape.mask, "window": shape.window, "length": shape.length}
        if self.inference[name] is not None or self.points.find(**place, backend=name):
            return None
        expected_ms, refusal = None, None
        if measure == "time":
            rows = self.points.find(measure="time", mask=shape.mask, window=shape.window, backend=name)
            expected_ms, refusal = outlook(rows, shape, self.config.max_call_s)
        case = Case(self.device.type, self.config.torch_dtype, shape.head_dim, shape.window, causal=shape.causal)
        outcome, reason = refusal or ("ok", None)
        if not refusal and (unsupported := get_backend(name).unsupported(case)):
            outcome, reason = "unsupported", unsupported
        elif not refusal and time.perf_counter() - self.began > self.config.budget_s:
            outcome, reason = "skipped", f"the {self.config.budget_s:g} s of this run were over"
        row = {**place, "batch": shape.batch, "backend": name, "outcome": outcome, "reason": reason}
        if outcome == "ok":
            work = partial(self._measure, expected_ms=expected_ms) if measure == "time" else self._errors
            row |= guarded(self.device, partial(work, shape, name))
        row = self.points.add(row)
        if self.clock.on_gpu:  # after an illegal memory access nothing runs here any more: end, the points are kept
            torch.cuda.synchronize()
        return row

    def _measure(self, shape: Shape, name: str, expected_ms: float | None) -> Row:
        example.cache_clear()  # its memory is for what is timed
        inputs = random_inputs(shape, self.config.torch_dtype, self.device, self.config.seed + len(self.points.rows))
        call = Call(name, shape, inputs, self.training[name] is None)
        return measure(call, self.clock, point_ms=self.config.point_ms, expected_ms=expected_ms)

    def _errors(self, shape: Shape, name: str) -> Row:
        inputs, exact, bounds = example(shape, self.config.torch_dtype, self.device, self.config.seed)
        began = time.perf_counter()
        found = relative_errors(values(Call(name, shape, inputs, self.training[name] is None)), exact)
        return {**bounds, "first_call_s": round(time.perf_counter() - began, 3), **found}


def _results(config: AttentionBenchConfig, device: torch.device, rows: list[Row]) -> dict[str, Any]:
    timed = [row for row in rows if row["measure"] == "time"]
    good = [row for row in timed if row["outcome"] == "ok"]
    name, capability = "cpu", None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    results = {"device_name": name, "compute_capability": capability, "points": len(timed), "points_ok": len(good)}
    for row in good:
        place = f"{row['mask']}{row['window'] or ''}_{row['length']}_{row['backend']}"
        results[f"{place}_tflops"] = row.get("training_tflops", row["forward_tflops"])
    return results
