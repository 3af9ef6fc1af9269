"""The `context` kind's work: go through the points, keep every one at once, and outlive those that end a process.

The run's own process launches the others (`lsai_lab.launch`), and all of them come back to `run`. The first process decides what is
measured next and says so to the others; each point is a line of `metrics.jsonl`, written when it is measured. A refusal is the same on
every process and comes before anything is sent, so it is a line with its reason and the rest goes on. Any other error of one
process leaves its neighbours waiting for it: it ends with its reason, the others are ended, the point that was pending gets that
outcome, and new processes go on with what is left; so it is with a point that takes too long. A method
is not tried at longer lengths once its memory was out, and not at all once its processes ended for another reason.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lsai_core.errors import Preempted
from lsai_core.files import write_json
from lsai_lab.benches.context.config import ContextBenchConfig, Point
from lsai_lab.benches.context.rank import Rank
from lsai_lab.benches.context.rows import expected, row_of, summary
from lsai_lab.benches.points import Points, Row, describe, guarded
from lsai_lab.cluster.launch_srun import srun_command
from lsai_lab.launch.launch import WorkerFailed, launch, require_devices
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.records import is_out_of_memory

_PENDING = "pending.json"
_TOO_LONG = "no end within"


def run(config: ContextBenchConfig, context: Context) -> dict[str, Any]:
    """Measure; returns counts, the device and `<method>_<length>_tflops` (forward plus backward, per GPU) of every point.

    Raises Unavailable if this machine lacks the processes' GPUs, and what ended the processes if it happened before a point.
    """
    shown, pending = set[int](), context.folder / _PENDING

    def on_rows(rows: list[Row]) -> None:
        new = [row for row in rows if row["step"] not in shown]
        shown.update(row["step"] for row in new)
        for row in new:
            print(describe(row, row["method"], row["length"]), flush=True)
        context.on_rows(new)

    def watch(rows: list[Row]) -> None:
        on_rows(rows)
        with contextlib.suppress(FileNotFoundError):
            began = json.loads(pending.read_text(encoding="utf-8"))["began"]
            if time.time() - began > config.point_timeout_s:
                raise WorkerFailed(f"{_TOO_LONG} {config.point_timeout_s:g} s")

    if config.processes == 1 or context.world.size > 1:
        return _measured(config, context, on_rows if config.processes == 1 else context.on_rows)
    command = srun_command(config.processes)
    if command is None:
        require_devices(config.device, config.processes)
    pending.unlink(missing_ok=True)  # of an attempt that was itself ended
    while True:
        try:
            return launch(context.folder, context.data_root, config.processes, on_rows=watch, command=command)
        except (MemoryError, WorkerFailed) as error:
            if not pending.exists():
                raise
            _keep_failure(context.folder, error)


def _keep_failure(folder: Path, error: Exception) -> None:
    """The pending point gets the outcome that ended its processes, so that the next ones pass it by."""
    place: Row = json.loads((folder / _PENDING).read_text(encoding="utf-8"))
    reason = " ".join(str(error).split())[:400]
    outcome = "oom" if is_out_of_memory(error) else "timeout" if _TOO_LONG in reason else "failed"
    took_s = round(time.time() - place.pop("began"), 3)
    points = Points(folder / "metrics.jsonl", lambda rows: None)
    if not points.find(**place):  # else it was kept, and the end came right after
        points.add({**place, "outcome": outcome, "reason": reason, "took_s": took_s})
    (folder / _PENDING).unlink()


def _measured(config: ContextBenchConfig, context: Context, on_rows: Callable[[list[Row]], None]) -> dict[str, Any]:
    from lsai_core.training.step import resolve_device

    world, device = context.world, resolve_device(config.device)
    asked: list[int] = []  # the launcher has passed a stop signal on
    if config.processes > 1:
        signal.signal(signal.SIGUSR1, lambda number, _frame: asked.append(number))
    # The first process alone writes, and knows what was measured before.
    points = Points(context.folder / "metrics.jsonl", on_rows) if world.is_main else None
    rank = Rank(config, world, device)
    for point in config.points():
        decision = _decision(config, points, point, device) if points else None
        answers = world.gather((decision, bool(asked)))
        if any(stop for _, stop in answers):
            raise Preempted("stopped between two points; those measured are kept")
        todo, expected_ms = answers[0][0] or (False, None)
        if not todo:
            continue
        place = {**point._asdict(), "batch": config.batch}
        if points:
            write_json(context.folder / _PENDING, {**place, "began": time.time()})
        began = time.perf_counter()
        work = partial(rank.measure, point, expected_ms)
        everybody = world.gather(guarded(device, work, others_wait=world.size > 1))
        if points:
            took = {"took_s": round(time.perf_counter() - began, 3)}
            points.add({**place, **row_of(config, point, everybody, rank.typical), **took})
            (context.folder / _PENDING).unlink()
    return summary(config, device, points.rows) if points else {}


def _decision(
    config: ContextBenchConfig, points: Points, point: Point, device: torch.device
) -> tuple[bool, float | None]:
    """Whether to measure a point now, and the milliseconds that its step should take. Notes why not."""
    if points.find(**point._asdict()):
        return False, None
    total_gib = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None
    expected_ms, refusal = expected(config, points.rows, point, total_gib)
    if refusal:
        ended = {"batch": config.batch, "outcome": refusal[0], "reason": refusal[1], "took_s": 0.0}
        points.add(point._asdict() | ended)
    return refusal is None, expected_ms
