"""What fp8 gains, wherever this report measured it."""

import pandas as pd

from lsai_lab.analysis.summary import summarize


def fp8_gains(runs: pd.DataFrame) -> pd.DataFrame:
    """The 8 B model with the recipe `fused` beside bf16 with the same kernels, of `lab.recorded()`:
    `measured in`, `GPU, tokens a step`, the medians `bf16` and `fp8` (tokens/s), their ratio
    `gain`, and the first run of each, `bf16_run` and `run`."""
    of_part = runs["study"] + " " + runs["part"] + " " + runs["machine"]
    one, two = "H100, 1 x 4,096", "H200, 2 x 4,096"
    peers = (runs["study"] == "peers") & (runs["part"] == "ours") & runs["main"].eq(True)
    sets = [
        ("@sec-speed", one, of_part == "speed levers h100", "attention", "fp8"),
        ("@sec-course", one, of_part == "course train h100", "flash_attn", "fp8"),
        ("@sec-speed", two, of_part == "speed levers h200", "attention", "fp8"),
        ("@sec-peers", two, peers, "ours_bf16", "ours_fp8"),
        ("this chapter", two, of_part == "fp8 speed h200-a", "bf16", "fused"),
    ]
    rows = []
    for where, setting, chosen, before, after in sets:
        found = summarize(runs[chosen], ["tokens_per_s"]).set_index("variant")
        speeds, first = found["tokens_per_s"], found["run"]
        rows.append((where, setting, speeds[before], speeds[after], first[before], first[after]))
    names = ["measured in", "GPU, tokens a step", "bf16", "fp8", "bf16_run", "run"]
    table = pd.DataFrame(rows, columns=names)
    table.insert(4, "gain", table["fp8"] / table["bf16"])
    return table
