"""The `context` kind's work: go through the points, keep every one at once, and outlive those that
end a process.

The run's own process launches the others (`lsai_lab.launch`), and all of them come back to `run`.
The first process decides what is measured next and says so to the others. A refusal is the same on
every process and comes before anything is sent, so it is a row with its reason and the rest goes
on. Any other error of one process leaves its neighbours waiting for it: the others are ended, the
pending point gets that outcome, and new processes go on with what is left; so it is with a point
that takes too long. A method is not tried at longer lengths once its memory was out, and not at all
once its processes ended for another reason.
"""

import contextlib
import json
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lsai_core.base.errors import Preempted
from lsai_core.base.files import write_json
from lsai_core.training.step import resolve_device
from lsai_lab.benches.attention.clock import figures, short
from lsai_lab.benches.attention.config import BACKWARD_FLOPS
from lsai_lab.benches.context.config import ALONE, ContextBenchConfig, Point
from lsai_lab.benches.context.rank import Rank
from lsai_lab.benches.points import Points, Refusal, Row, guarded, point_results, refusal
from lsai_lab.launch.launch import WorkerFailed, launch, require_devices
from lsai_lab.launch.srun import srun_command
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.records import is_out_of_memory

_PENDING = "pending.json"
_TOO_LONG = "no end within"


def run(config: ContextBenchConfig, context: Context) -> dict[str, Any]:
    """Measure; returns counts, the device and `<method>_<length>_tflops` (forward plus backward,
    per GPU) of every point.

    Raises Unavailable if this machine lacks the processes' GPUs, and what ended the processes if it
    happened before a point.
    """
    pending = context.folder / _PENDING

    def watch(rows: list[Row]) -> None:
        context.on_rows(rows)
        with contextlib.suppress(FileNotFoundError):
            began = json.loads(pending.read_text(encoding="utf-8"))["began"]
            if time.time() - began > config.point_timeout_s:
                raise WorkerFailed(f"{_TOO_LONG} {config.point_timeout_s:g} s")

    if config.processes == 1 or context.world.size > 1:
        return _measured(config, context)
    command = srun_command(config.processes)
    if command is None:
        require_devices(config.device, config.processes)
    pending.unlink(missing_ok=True)  # of an attempt that was itself ended
    while True:
        try:
            return launch(
                context.folder, context.data_root, config.processes, on_rows=watch, command=command
            )
        except (MemoryError, WorkerFailed) as error:
            if not pending.exists():
                raise
            _keep_failure(context.folder, error)


def _keep_failure(folder: Path, error: Exception) -> None:
    """The pending point gets the outcome that ended its processes, so that the next ones pass it
    by."""
    place: Row = json.loads((folder / _PENDING).read_text(encoding="utf-8"))
    reason = " ".join(str(error).split())[:400]
    outcome = "oom" if is_out_of_memory(error) else "timeout" if _TOO_LONG in reason else "failed"
    took_s = round(time.time() - place.pop("began"), 3)
    points = Points(folder / "metrics.jsonl", lambda rows: None)
    if not points.find(**place):  # else it was kept, and the end came right after
        points.add({**place, "outcome": outcome, "reason": reason, "took_s": took_s})
    (folder / _PENDING).unlink()


def _measured(config: ContextBenchConfig, context: Context) -> dict[str, Any]:
    world, device = context.world, resolve_device(config.device)
    asked: list[int] = []  # the launcher has passed a stop signal on
    if config.processes > 1:
        signal.signal(signal.SIGUSR1, lambda number, _frame: asked.append(number))
    # The first process alone writes, and knows what was measured before.
    points = Points(context.folder / "metrics.jsonl", context.on_rows) if world.is_main else None
    rank = Rank(config, world, device)
    for point in config.points():
        place = {**point._asdict(), "batch": config.batch}
        todo = False
        if points and not points.find(**point._asdict()):
            refused = refusal_of(config, points.rows, point)
            todo = refused is None
            if refused:
                points.add({**place, "outcome": refused[0], "reason": refused[1], "took_s": 0.0})
        answers = world.gather((todo, bool(asked)))
        if any(stop for _, stop in answers):
            raise Preempted("stopped between two points; those measured are kept")
        if not answers[0][0]:
            continue
        if points:
            write_json(context.folder / _PENDING, {**place, "began": time.time()})
        began = time.perf_counter()
        everybody = world.gather(
            guarded(device, partial(rank.measure, point), others_wait=world.size > 1)
        )
        if points:
            took = {"took_s": round(time.perf_counter() - began, 3)}
            points.add({**place, **row_of(config, point, everybody, rank.typical), **took})
            (context.folder / _PENDING).unlink()
    if not points:
        return {}
    results = point_results(points.rows, device, lambda row: f"{row['method']}_{row['length']}")
    seconds = round(sum(row["took_s"] for row in points.rows), 3)
    return {"world_size": config.processes, "measuring_s": seconds, **results}


def row_of(config: ContextBenchConfig, point: Point, answers: Sequence[Row], typical: int) -> Row:
    """The row of a point from each process's answer; how a refusal ended it. `typical`: the
    percentile of the repeats that counts."""
    first: Row = {"outcome": "ok", "reason": None} | answers[0]
    if first["outcome"] != "ok" or point.measure == "error":
        return first
    row = {name: first[name] for name in ("outcome", "reason", "kernel", "plan_imbalance")}
    if point.measure == "trace":
        return row | _traced(answers)
    alone = point.method in ALONE
    return row | _timed(
        config.shape(point.length).forward_flops / (1 if alone else config.processes),
        answers,
        typical,
    )


def _timed(flops: float, answers: Sequence[Row], typical: int) -> Row:
    """Milliseconds are the slowest process's of each repeat; `rank_*`: each process's own."""
    first_call_s = round(max(answer["first_call_s"] for answer in answers), 3)
    row: Row = {"repeats": len(answers[0]["training_ms"]), "first_call_s": first_call_s}
    for name, work in (("forward", flops), ("training", (1 + BACKWARD_FLOPS) * flops)):
        each = np.array([answer[f"{name}_ms"] for answer in answers])
        row |= figures(name, each.max(axis=0), work, typical)
        row[f"rank_{name}_ms"] = [short(value) for value in np.percentile(each, typical, axis=1)]
        row[f"sent_{name}_mib"] = round(max(answer[f"sent_{name}_mib"] for answer in answers), 3)
    row["rank_sent_training_mib"] = [round(answer["sent_training_mib"], 3) for answer in answers]
    memory = [answer["memory_gib"] for answer in answers]
    known = None not in memory
    row["memory_gib"] = round(max(memory), 4) if known else None
    row["rank_memory_gib"] = [round(gib, 4) for gib in memory] if known else None
    return row


def _traced(answers: Sequence[Row]) -> Row:
    """The traced step: each process's times, their balance, and on GPUs what communication cost.

    Bandwidth is what all processes sent over the time in which their communication kernels ran: a
    kernel that waits counts, so the links are at least as fast."""
    row: Row = {"step_ms": short(max(answer["step_ms"] for answer in answers))}
    for name in ("compute_ms", "communication_ms", "exposed_ms", "sent_training_mib"):
        values = [answer[name] for answer in answers]
        row[f"rank_{name}"] = None if None in values else [short(value) for value in values]
    compute, communication = row["rank_compute_ms"], row["rank_communication_ms"]
    row["busy_balance"] = short(max(compute) / min(compute)) if min(compute) else None
    row["exposed_share"] = row["sent_gb_per_s"] = None
    if communication is not None:
        row["exposed_share"] = short(max(row["rank_exposed_ms"]) / row["step_ms"])
        sent, ms = sum(row["rank_sent_training_mib"]), sum(communication)
        row["sent_gb_per_s"] = short(sent * 2**20 / ms / 1e6) if ms else None
    return row


def refusal_of(config: ContextBenchConfig, rows: Sequence[Row], point: Point) -> Refusal | None:
    """Why not to try a point, if there is a reason."""
    measure, method, length = point
    if sum(row["took_s"] for row in rows) > config.budget_s:
        return "skipped", f"the {config.budget_s:g} s of this run were over"
    mine = [row for row in rows if row["method"] == method]
    if ended := next((row for row in mine if row["outcome"] in ("failed", "timeout")), None):
        return "skipped", f"its processes ended at length {ended['length']}"
    if missing := next((row for row in mine if row["outcome"] == "unavailable"), None):
        return "unavailable", missing["reason"]
    found = refusal(mine, config.shape(length), config.max_call_s)
    return None if measure == "error" and found and found[0] == "skipped" else found
