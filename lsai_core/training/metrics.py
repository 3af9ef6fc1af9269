"""The metrics file: one JSON line per step, written without making the GPU wait.

Losses and gradient norms stay on the device as tensors until `flush`, which reads a whole window of
steps with a single synchronization. Every `flush` ends with complete lines on disk, so a killed run
keeps what it had measured.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from lsai_core.base.files import read_jsonl, write_text
from lsai_core.parallel.world import World


class MetricsFile:
    """Appends rows to `metrics.jsonl`; `truncate` drops what a resumed run is about to do again.

    Of several processes each gets all rows, with values averaged over them and its own durations;
    rank 0 writes its own.
    """

    def __init__(
        self, path: Path, mfu_per_rate: float | None = None, world: World | None = None
    ) -> None:
        """`mfu_per_rate`: MFU of one token/s over all devices; None leaves MFU out."""
        self.path, self.mfu_per_rate, self.world = path, mfu_per_rate, world or World()
        self._pending: list[tuple[dict[str, Any], torch.Tensor]] = []

    def truncate(self, steps: int) -> list[dict[str, Any]]:
        """Keep the rows of the first `steps` steps and return them (0: start an empty file)."""
        kept = (
            [row for row in read_jsonl(self.path) if row["step"] < steps]
            if self.path.exists()
            else []
        )
        self.world.barrier()  # all have read before one writes
        if self.world.is_main:
            write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        return kept

    def add(self, row: dict[str, Any], loss_and_norm: torch.Tensor) -> None:
        """Queue one step. `loss_and_norm`: (2,) fp32 on any device."""
        self._pending.append((row, loss_and_norm))

    def flush(self, durations_ms: list[float], extra: dict[str, Any]) -> list[dict[str, Any]]:
        """Write the queued steps with their durations (one each); `extra` joins the last of them.
        Returns the rows."""
        if not self._pending:
            return []
        values = self.world.mean(torch.stack([tensor for _, tensor in self._pending])).tolist()
        rows = []
        for (row, _), (loss, norm), duration in zip(
            self._pending, values, durations_ms, strict=True
        ):
            rate = row["tokens_in_step"] * 1e3 / duration
            row |= {"loss": loss, "grad_norm": norm, "step_ms": duration, "tokens_per_s": rate}
            if self.mfu_per_rate is not None:
                row["mfu"] = rate * self.mfu_per_rate
            rows.append(row)
        rows[-1] |= extra
        if self.world.is_main:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(finite(row)) + "\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
        self._pending.clear()
        return rows


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a value that is not finite is written as null."""
    return {k: None if isinstance(v, float) and v - v != 0 else v for k, v in row.items()}
