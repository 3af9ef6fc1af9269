"""What each technique needs of a GPU: `python tests/fits_table.py` writes the table, in half an hour of one core; it is committed.

The memory of a step depends on the tokens that a GPU computes, hardly on how they are cut into sequences. So one sequence of 2K to 128K
tokens is predicted, and the report's calculator draws straight lines between these. Of 32 points between them, with three models and
eight techniques, the median was 1.1 % off `lsai predict`, 31 were within 5 %, and CPU offload of 3,072 tokens 12 % off.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from lsai_core.config import TrainConfig
from lsai_core.profiling.predict import estimate, find_gpu
from lsai_lab.predicted import table_path
from lsai_lab.techniques import TECHNIQUES, compare

LENGTHS = [2**power for power in range(11, 18)]
SHARDED = [name for name, settings in TECHNIQUES if settings["parallel"].get("fsdp", 1) >= 8]
MODELS: dict[str, Sequence[str]] = {"llama3-8b": (), "llama3-70b": SHARDED, "llama2-7b": (), "llama3.2-1b": ()}


def fits(model: str, tokens: int, techniques: Sequence[str] = ()) -> pd.DataFrame:
    """One row per technique (all, or those named): its GPUs; in GiB of each GPU the least that keeps every step going (`least`), the least
    that keeps it fast (`needs`) and what the peak consists of; host memory; the estimated seconds of a step on one H200.
    """
    settings = {"precision": "bf16", "compile": True, "seq_len": tokens, "batch_size": 1}
    task = TrainConfig.model_validate({"model": {"preset": model}, "data": {"vocab_size": 257}, **settings})
    h200, rows = find_gpu("H200"), []
    for row in compare(task, techniques=techniques):
        found, gpus = row.prediction, row.config.parallel.world_size
        time = estimate(row.config, h200) if gpus == 1 else None
        sizes = {"least": found.least(found), "needs": found.needs, "host": found.host} | found.parts
        sizes["unused reserve"] = found.needs - found.peak
        rounded = {name: round(size, 2) for name, size in sizes.items()} | {"step_s": time and round(time.step_s, 4)}
        rows.append({"model": model, "tokens": tokens, "technique": row.name, "gpus": gpus, **rounded})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    found: list[pd.DataFrame] = []
    for model, names in MODELS.items():
        for length in LENGTHS:
            found.append(fits(model, length, names))
            print(model, length, len(found[-1]), flush=True)
    pd.concat(found).to_csv(table_path(), index=False)
