"""What each technique needs of a GPU: `python tests/fits_table.py` writes the table, in half an
hour of one core; it is committed. `python tests/fits_table.py check` holds predictions between its
lengths against it.

The memory of a step depends on the tokens that a GPU computes, hardly on how they are cut into
sequences. So one sequence of 2K to 128K tokens is predicted, and the report's calculator draws
straight lines between these. Of 32 points between them, with three models and eight techniques, the
median was 1.1 % off `lsai predict`, 31 were within 5 %, and CPU offload of 3,072 tokens 12 % off.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from lsai_core.config.train import TrainConfig
from lsai_core.prediction.roofline import estimate
from lsai_core.profiling.gpus import GPUS
from lsai_lab.predictions.recorded import table_path
from lsai_lab.predictions.techniques import TECHNIQUES, compare

LENGTHS = [2**power for power in range(11, 18)]
SHARDED = [name for name, settings in TECHNIQUES if settings["parallel"].get("fsdp", 1) >= 8]
MODELS: dict[str, Sequence[str]] = {
    "llama3-8b": (),
    "llama3-70b": SHARDED,
    "llama2-7b": (),
    "llama3.2-1b": (),
}
BETWEEN = (
    ("llama3-8b", 6144, 1),
    ("llama3-8b", 4096, 5),
    ("llama3.2-1b", 24_576, 4),
    ("llama2-7b", 3072, 1),
)
CHECKED = (
    "nothing fused",
    "fused, 8-bit AdamW",
    "fused, fp8 matmuls",
    "fused, alternating checkpointing",
    "fused, full checkpointing",
    "fused, full checkpointing, CPU offload",
    "FSDP, 4 GPUs",
    "FSDP, 8 GPUs, full checkpointing",
)


def task_of(model: str, seq_len: int, batch_size: int) -> TrainConfig:
    settings = {"precision": "bf16", "compile": True, "seq_len": seq_len, "batch_size": batch_size}
    return TrainConfig.model_validate(
        {"model": {"preset": model}, "data": {"vocab_size": 257}, **settings}
    )


def check() -> pd.DataFrame:
    """Of each point between the table's lengths and each technique the table's `needs`, on a
    straight line, over the predicted."""
    table, rows = pd.read_csv(table_path()), []
    for model, seq_len, batch_size in BETWEEN:
        for row in compare(task_of(model, seq_len, batch_size), techniques=CHECKED):
            line = table[(table["model"] == model) & (table["technique"] == row.name)].sort_values(
                "tokens"
            )
            needs = np.interp(seq_len * batch_size, line["tokens"], line["needs"])
            rows.append((model, seq_len * batch_size, row.name, needs / row.prediction.needs - 1))
    return pd.DataFrame(rows, columns=["model", "tokens", "technique", "error"])


def fits(model: str, tokens: int, techniques: Sequence[str] = ()) -> pd.DataFrame:
    """One row per technique (all, or those named): its GPUs; in GiB of each GPU the least that
    keeps every step going (`least`), the least that keeps it fast (`needs`) and what the peak
    consists of; host memory; under its name the estimated seconds of a step on each GPU (of
    several: in one node, by NVLink).
    """
    rows = []
    for row in compare(task_of(model, tokens, 1), techniques=techniques):
        found, gpus = row.prediction, row.config.parallel.world_size
        times = {
            gpu.name: estimate(row.config, gpu)
            for gpu in GPUS
            if gpus == 1 or (gpus <= 8 and gpu.link_gb_per_s >= 300)
        }
        sizes = {
            "least": found.least(found),
            "needs": found.needs,
            "host": found.host,
        } | found.parts
        sizes["unused reserve"] = found.needs - found.peak
        rounded = {name: round(size, 2) for name, size in sizes.items()}
        rounded |= {name: round(time.step_s, 4) for name, time in times.items() if time}
        rows.append(
            {"model": model, "tokens": tokens, "technique": row.name, "gpus": gpus, **rounded}
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["check"]:
        print(errors := check(), errors["error"].abs().describe(), sep="\n")
        sys.exit()
    found: list[pd.DataFrame] = []
    for model, names in MODELS.items():
        for length in LENGTHS:
            found.append(fits(model, length, names))
            print(model, length, len(found[-1]), flush=True)
    pd.concat(found).to_csv(table_path(), index=False)
