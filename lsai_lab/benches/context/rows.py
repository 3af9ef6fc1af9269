"""From the processes' answers to one row, what earlier rows say of a point that is to come, and a run's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lsai_lab.benches.attention.clock import figures, short
from lsai_lab.benches.attention.config import BACKWARD_FLOPS
from lsai_lab.benches.context.config import ALONE, ContextBenchConfig, Point
from lsai_lab.benches.points import Refusal, Row, outlook


def row_of(config: ContextBenchConfig, point: Point, answers: Sequence[Row], typical: int) -> Row:
    """The row of a point from each process's answer; how a refusal ended it. `typical`: the percentile of the repeats that counts."""
    first: Row = {"outcome": "ok", "reason": None} | answers[0]
    if first["outcome"] != "ok" or point.measure == "error":
        return first
    row = {name: first[name] for name in ("outcome", "reason", "kernel", "plan_imbalance")}
    if point.measure == "trace":
        return row | _traced(answers)
    return row | _timed(config.work(point.method, point.length), answers, typical)


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


def expected(
    config: ContextBenchConfig, rows: Sequence[Row], point: Point, total_gib: float | None
) -> tuple[float | None, Refusal | None]:
    """Expected milliseconds of a step, from the method's longest shorter one; and why not to try, if there is a reason."""
    measure, method, length = point
    if sum(row["took_s"] for row in rows) > config.budget_s:
        return None, ("skipped", f"the {config.budget_s:g} s of this run were over")
    mine = [row for row in rows if row["method"] == method]
    if ended := next((row for row in mine if row["outcome"] in ("failed", "timeout")), None):
        return None, ("skipped", f"its processes ended at length {ended['length']}")
    if missing := next((row for row in mine if row["outcome"] == "unavailable"), None):
        return None, ("unavailable", missing["reason"])
    expected_ms, refusal = outlook(mine, length, lambda row: (length / row["length"]) ** 2, config.max_call_s)
    if measure == "error":
        return None, refusal if refusal and refusal[0] == "oom" else None
    if total_gib is not None and not refusal:
        # Inputs, output and gradients of one process: what no method can do without.
        positions = config.batch * length / (1 if method in ALONE else config.processes)
        values = positions * config.head_dim * 4 * (config.heads + config.kv_heads)
        seen = [
            row["memory_gib"] * length / row["length"]
            for row in mine
            if row.get("memory_gib") and row["length"] <= length
        ]
        needed = max([values * config.torch_dtype.itemsize / 2**30, *seen[-1:]])
        if needed > config.memory_share * total_gib:
            return None, ("skipped", f"about {needed:.0f} GiB expected, the GPU has {total_gib:.0f} GiB")
    return expected_ms, refusal


def summary(config: ContextBenchConfig, device: torch.device, rows: Sequence[Row]) -> dict[str, Any]:
    """The flat results of a run from its rows."""
    timed = [row for row in rows if row["measure"] == "time"]
    good = [row for row in timed if row["outcome"] == "ok"]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    results: dict[str, Any] = {"device_name": name, "world_size": config.processes, "points": len(timed)}
    results |= {"points_ok": len(good), "measuring_s": round(sum(row["took_s"] for row in rows), 3)}
    return results | {f"{row['method']}_{row['length']}_tflops": row["training_tflops"] for row in good}
