"""Will it fit? Models, lengths and batches under every technique, predicted for every GPU: `python tests/fits_table.py` writes the table.

The report shows it with filters, so that a reader without this package can look the answer up. It takes some minutes of one core and is
committed; `lsai predict` answers for anything else.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from lsai_core.config import TrainConfig
from lsai_core.profiling.predict import GPUS, estimate, find_gpu, verdict
from lsai_lab.predicted import table_path
from lsai_lab.techniques import compare

TASKS = [
    ("course", 4096, 2),
    *itertools.product(("llama3.2-1b", "llama2-7b", "llama3-8b"), (2048, 8192, 32_768), (1, 4)),
]


def fits(model: str, seq_len: int, batch_size: int, techniques: Sequence[str] = ()) -> pd.DataFrame:
    """One row per technique (all, or those named): GPUs, predicted GiB of each, what the peak consists of, the estimated
    tokens per second of an H200, and the verdict for each GPU of the table.
    """
    settings = {"precision": "bf16", "compile": True, "seq_len": seq_len, "batch_size": batch_size}
    task = TrainConfig.model_validate({"model": {"preset": model}, "data": {"vocab_size": 257}, **settings})
    h200, rows = find_gpu("H200"), []
    for row in compare(task, techniques=techniques):
        needs_fp8, predicted = row.config.fp8.recipe != "none", row.prediction
        sizes = {"peak_gib": predicted.peak, "reserved_gib": predicted.reserved, "host_gib": predicted.host}
        time = estimate(row.config, h200)
        sizes |= {"tokens_per_s": time.tokens_per_s if time else float("nan")} | predicted.parts
        said = {gpu.name: "no fp8" if needs_fp8 and not gpu.fp8 else verdict(predicted, gpu) for gpu in GPUS}
        rows.append({"model": model, "seq_len": seq_len, "batch_size": batch_size, "technique": row.name,
                     "gpus": row.config.parallel.world_size, **{k: round(v, 2) for k, v in sizes.items()}, **said})  # fmt: skip
    return pd.DataFrame(rows)


if __name__ == "__main__":
    found: list[pd.DataFrame] = []
    for asked in TASKS:
        found.append(fits(*asked))
        print(*asked, len(found[-1]), flush=True)
    pd.concat(found).to_csv(table_path(), index=False)
