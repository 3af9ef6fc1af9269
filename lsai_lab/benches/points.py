"""What every bench of points does alike: keep each at once, outlive those that fail, tell what the
next one will take."""

import gc
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lsai_core.base.errors import Unavailable, UserError
from lsai_core.base.files import read_jsonl, write_text
from lsai_lab.benches.attention.config import Shape
from lsai_lab.runs.records import outcome_of

Row = dict[str, Any]
Refusal = tuple[str, str]  # outcome and reason of a point that is not to be started


class Points:
    """The rows of a run, in memory and in a file that holds each as soon as it is added."""

    def __init__(self, path: Path, on_rows: Callable[[list[Row]], None]) -> None:
        self.path, self.on_rows = path, on_rows
        self.rows: list[Row] = read_jsonl(path) if path.exists() else []
        # without a torn last line
        write_text(path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, row: Row) -> Row:
        """Keep `row` under the next number."""
        self.rows.append(row := {"step": len(self.rows), **row})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.on_rows([row])
        return row

    def find(self, **values: Any) -> list[Row]:
        """The rows that have these values."""
        return [
            row for row in self.rows if all(row.get(key) == value for key, value in values.items())
        ]


def point_results(
    rows: Sequence[Row], device: torch.device, place: Callable[[Row], str]
) -> dict[str, Any]:
    """The device, how many points were timed and how many of them well, and `<place>_tflops` of
    these: forward plus backward, where both were timed."""
    timed = [row for row in rows if row["measure"] == "time"]
    good = [row for row in timed if row["outcome"] == "ok"]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    rates = {
        f"{place(row)}_tflops": row.get("training_tflops", row["forward_tflops"]) for row in good
    }
    return {"device_name": name, "points": len(timed), "points_ok": len(good), **rates}


def guarded(device: torch.device, work: Callable[[], Row], others_wait: bool = False) -> Row:
    """What `work` returns, or the outcome and reason of the error that ended it. With
    `others_wait`, that is other processes for this one, only refusals, which come before anything
    is sent."""
    try:
        return work()
    except Exception as error:
        outcome, reason = outcome_of(error)
        refused = isinstance(error, UserError | Unavailable)
        if others_wait and not refused:
            raise
    gc.collect()  # tracebacks hold tensors
    if device.type == "cuda" and outcome == "oom":
        torch.cuda.empty_cache()
    return {
        "outcome": "unsupported" if refused and outcome == "failed" else outcome,
        "reason": reason,
    }


def refusal(rows: Sequence[Row], shape: Shape, max_call_s: float) -> Refusal | None:
    """Why not to try a call at `shape`, if there is a reason: memory has ended earlier, or it would
    last too long, by its FLOPs over those of the longest of the shorter `rows`. `rows`: those of
    the same backend or method."""
    shorter = [row for row in rows if row["length"] <= shape.length]
    if full := next((row for row in shorter if row["outcome"] == "oom"), None):
        return "oom", f"out of memory already at length {full['length']}"
    timed = [row for row in shorter if row["outcome"] == "ok" and row["measure"] == "time"]
    if not timed:
        return None
    last = max(timed, key=lambda row: row["length"])
    before = replace(shape, batch=last["batch"], length=last["length"])
    ms = (
        last["training_ms" if "training_ms" in last else "forward_ms"]
        * shape.forward_flops
        / before.forward_flops
    )
    slow = f"about {ms / 1e3:.1f} s a call expected, the limit is {max_call_s:g} s"
    return ("skipped", slow) if ms > 1e3 * max_call_s else None
