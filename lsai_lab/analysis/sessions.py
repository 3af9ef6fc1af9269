"""How far speeds of equal work lie apart between sessions: the noise of a comparison whose sides
were not measured one after the other."""

import pandas as pd

SAME_WORK = [
    "gpu",
    "study",
    "part",
    "variant",
    "attention_kernel",
    "batch_size",
    "seq_len",
    "world_size",
    "env.torch",
]


def session_differences(runs: pd.DataFrame) -> pd.DataFrame:
    """Of each work that `runs` (rows of `lab.load`) hold under several labels of a machine, which
    are sessions or GPUs of one model: `SAME_WORK`; `sessions`, how many; `low` and `high`, the
    tokens/s of the slowest and the fastest (medians); `spread`, high over low less 1. The smallest
    spread first."""
    good = runs[runs["outcome"] == "ok"].reindex(columns=[*SAME_WORK, "machine", "tokens_per_s"])
    good = good.dropna(subset=[*SAME_WORK, "tokens_per_s"])
    medians = good.groupby([*SAME_WORK, "machine"], as_index=False)["tokens_per_s"].median()
    found = medians.groupby(SAME_WORK, as_index=False)["tokens_per_s"].agg(
        sessions="count", low="min", high="max"
    )
    found = found[found["sessions"] > 1].assign(spread=lambda rows: rows["high"] / rows["low"] - 1)
    return found.sort_values("spread", kind="stable").reset_index(drop=True)
