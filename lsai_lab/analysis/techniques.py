"""The memory study: settings that differ in one property only, and what fills the memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from lsai_core.config.train import TrainConfig
from lsai_core.prediction.simulate import simulate
from lsai_lab.analysis.summary import work_of

GIB = 2**30


def memory_terms(row: Mapping[str, Any]) -> pd.Series:
    """GiB in fp32 of what fills the memory of a training step, by the formula: weights, gradients
    and states; one copy of the attention scores; one copy of the layers' inputs; the logits and two
    tensors like them. `row`: a row of `lab.load`."""
    tokens = row["batch_size"] * row["seq_len"]
    numbers = {
        "weights, gradients, states": 4 * row["parameters"],
        "scores": row["model.n_layers"] * row["model.n_heads"] * tokens * row["seq_len"],
        "inputs": row["model.n_layers"] * row["model.d_model"] * tokens,
        "logits": 3 * tokens * row["model.vocab_size"],
    }
    return 4 * pd.Series(numbers).astype(float) / GIB


def single_changes(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Pairs of settings that differ in one property of their work: `change` (a column of
    `work_of`), `from`, `to` (variants), and the ratios `speed` (tokens/s) and `peak`.

    `rows`: one a variant, of `lab.summarize`; of those that do the same work only the first counts.
    """
    work = work_of(runs)
    ranked = rows[~rows["variant"].map(work.apply(tuple, axis=1)).duplicated()]
    found = []
    for place, (_, before) in enumerate(ranked.iterrows()):
        for _, after in ranked.iloc[place + 1 :].iterrows():
            differs = work.loc[before["variant"]] != work.loc[after["variant"]]
            if differs.sum() == 1:
                speed = after["tokens_per_s"] / before["tokens_per_s"]
                peak = after["mem_peak_allocated_gib"] / before["mem_peak_allocated_gib"]
                pair = (differs.idxmax(), before["variant"], after["variant"], speed, peak)
                found.append(pair)
    return pd.DataFrame(found, columns=["change", "from", "to", "speed", "peak"])


def step_memory(config: TrainConfig, kernel: str) -> pd.DataFrame:
    """The memory of a training step that is simulated for a GPU, with the attention `kernel`:
    `time` (the forward pass from 0 to 1, the backward pass to 2.2, the optimizer to 2.9) and `gib`,
    the largest within each hundredth."""
    step = simulate(config, kernel, on="gpu")
    events = np.array(step.events)  # a tensor is born: its bytes; the nth one dies: -n
    change = events // 512 * 512  # as the allocator rounds
    dead = events < 0
    change[dead] = -change[~dead][-events[dead] - 1]
    # Tensors that die together die in any order: here the youngest first.
    together = np.cumsum(np.r_[0, dead[1:] != dead[:-1]])
    change = change[np.lexsort((np.where(dead, events, 0), together))]
    start = step.marks["forward"]
    begins = [start, step.marks["backward"], step.marks["optimizer"], len(events) - 1]
    time = np.interp(range(start, len(events)), begins, [0, 1, 2.2, 2.9])
    gib = pd.Series(change.cumsum()[start:] / GIB)
    level = gib.groupby((time * 100).astype(int)).max().reindex(range(291)).ffill()
    return pd.DataFrame({"time": level.index / 100, "gib": level.array})
