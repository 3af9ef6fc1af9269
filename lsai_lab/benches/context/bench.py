"""The `context` kind's work: go through the points and keep every one at once.

The run's own process launches the others (`lsai_lab.launch`), and all of them come back to `run`. The first process decides what is
measured next and says so to the others. A refusal is the same on every process and comes before anything is sent, so it is a row with
its reason and the rest goes on. Any other error of one process leaves its neighbours waiting for it and ends the run; what was measured
is kept, and a run that is started again goes on where it was.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from lsai_core.errors import Preempted
from lsai_core.training.step import resolve_device
from lsai_lab.benches.attention.clock import figures, short
from lsai_lab.benches.attention.config import BACKWARD_FLOPS
from lsai_lab.benches.context.config import ALONE, ContextBenchConfig, Point
from lsai_lab.benches.context.rank import Rank
from lsai_lab.benches.points import Points, Refusal, Row, guarded, point_results, refusal
from lsai_lab.cluster.launch_srun import srun_command
from lsai_lab.launch.launch import launch, require_devices
from lsai_lab.runs.kinds import Context


def run(config: ContextBenchConfig, context: Context) -> dict[str, Any]:
    """Measure; returns counts, the device and `<method>_<length>_tflops` (forward plus backward, per GPU) of every point.

    Raises Unavailable if this machine lacks the processes' GPUs, and what ended the processes.
    """
    if config.processes == 1 or context.world.size > 1:
        return _measured(config, context)
    command = srun_command(config.processes)
    if command is None:
        require_devices(config.device, config.processes)
    return launch(context.folder, context.data_root, config.processes, on_rows=context.on_rows, command=command)


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
        refused, todo = None, bool(points and not points.find(**point._asdict()))
        if points and todo and (refused := refusal_of(config, points.rows, point)):
            points.add({**place, "outcome": refused[0], "reason": refused[1], "took_s": 0.0})
        answers = world.gather((todo and not refused, bool(asked)))
        if any(stop for _, stop in answers):
            raise Preempted("stopped between two points; those measured are kept")
        if not answers[0][0]:
            continue
        began = time.perf_counter()
        everybody = world.gather(guarded(device, partial(rank.measure, point), others_wait=world.size > 1))
        if points:
            took = {"took_s": round(time.perf_counter() - began, 3)}
            points.add({**place, **row_of(config, point, everybody, rank.typical), **took})
    if not points:
        return {}
    results = point_results(points.rows, device, lambda row: f"{row['method']}_{row['length']}")
    seconds = round(sum(row["took_s"] for row in points.rows), 3)
    return {"world_size": config.processes, "measuring_s": seconds, **results}


def row_of(config: ContextBenchConfig, point: Point, answers: Sequence[Row], typical: int) -> Row:
    """The row of a point from each process's answer; how a refusal ended it. `typical`: the percentile of the repeats that counts."""
    first: Row = {"outcome": "ok", "reason": None} | answers[0]
    if first["outcome"] != "ok" or point.measure == "error":
        return first
    row = {name: first[name] for name in ("outcome", "reason", "kernel", "plan_imbalance")}
    if point.measure == "trace":
        return row | _traced(answers)
    alone = point.method in ALONE
    return row | _timed(config.shape(point.length).forward_flops / (1 if alone else config.processes), answers, typical)


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

    Bandwidth is what all processes sent over the time in which their communication kernels ran: a kernel that waits counts, so
    the links are at least as fast."""
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
    if sum(row["took_s"] for row in rows) > config.budget_s:
        return "skipped", f"the {config.budget_s:g} s of this run were over"
    mine = [row for row in rows if row["method"] == point.method]
    found = refusal(mine, config.shape(point.length), config.max_call_s)
    return None if point.measure == "error" and found and found[0] == "skipped" else found
