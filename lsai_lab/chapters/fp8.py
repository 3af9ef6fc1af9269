"""What fp8 gains, and what it changes of the loss, wherever this report measured it."""

import pandas as pd

from lsai_lab.analysis.losses import first_pairs
from lsai_lab.analysis.summary import summarize


def fp8_gains(runs: pd.DataFrame) -> pd.DataFrame:
    """The 8 B model with the recipe `fused` beside bf16 with the same kernels, of `lab.recorded()`:
    `measured in`, `GPU, tokens a step`, the medians `bf16` and `fp8` (tokens/s), their ratio
    `gain`, and `run`, the pair of first runs (in bf16, in fp8)."""
    of_part = runs["study"] + " " + runs["part"] + " " + runs["machine"]
    one, two = "H100, 1 x 4,096", "H200, 2 x 4,096"
    last = "H200, 1 x 4,096"
    peers = (runs["study"] == "peers") & (runs["part"] == "ours") & runs["main"].eq(True)
    sets = [
        ("@sec-speed", one, of_part == "speed levers h100", "fused_optimizer", "fp8"),
        ("@sec-course", one, of_part == "course train h100", "flash_attn", "fp8"),
        ("@sec-fp8-loss", last, of_part == "speed advised h200-l", "rounded", "fp8_rounded"),
        ("@sec-speed", two, of_part == "speed levers h200", "attention", "fp8"),
        ("@sec-peers", two, peers, "ours_bf16", "ours_fp8"),
        ("this section", two, of_part == "fp8 speed h200-a", "bf16", "fused"),
    ]
    rows = []
    for where, setting, chosen, before, after in sets:
        found = summarize(runs[chosen], ["tokens_per_s"]).set_index("variant")
        speeds, first = found["tokens_per_s"], found["run"]
        both = (first[before], first[after])
        rows.append((where, setting, speeds[before], speeds[after], both))
    names = ["measured in", "GPU, tokens a step", "bf16", "fp8", "run"]
    table = pd.DataFrame(rows, columns=names)
    table.insert(4, "gain", table["fp8"] / table["bf16"])
    return table


EARLY = {
    "speed levers h100": ("@sec-speed", "fused_optimizer", "fp8"),
    "course train h100": ("@sec-course", "flash_attn", "fp8"),
    "peers ours h100": ("@sec-peers", "ours_bf16", "ours_fp8"),
    "speed overlap h200-h": ("@sec-failures", "attention", "fp8"),
    "speed advised h200-l": ("this section", "rounded", "fp8_rounded"),
}


def fp8_by_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Of `lab.recorded()`, wherever the 8 B model trained with one sequence a step: the validation
    loss with the recipe `fused` less that in bf16 of the same seed and session (nats). A row for
    each set of runs: `measured in`, `GPU`, `steps`, how the weights are `rounded`, a column for
    each seed, and `run`, the pair of the first seed; the last set is the advised setting."""
    of_part = runs["study"] + " " + runs["part"] + " " + runs["machine"]
    rows = []
    for name, (where, before, after) in EARLY.items():
        pair = runs[(of_part == name) & runs["variant"].isin([before, after])]
        losses = pair.pivot_table(index="repeat", columns="variant", values="validation_loss")
        first = pair.iloc[0]
        row = {"measured in": where, "GPU": first["gpu"], "steps": int(first["steps"])}
        row["rounded"] = (
            "stochastically" if first["optim.rounding"] == "stochastic" else "to nearest"
        )
        apart = losses[after] - losses[before]
        row |= {f"seed {repeat:.0f}": change for repeat, change in apart.items()}
        rows.append(row | {"run": first_pairs(pair, before)[after]})
    return pd.DataFrame(rows)
