"""What a token costs: energy by the GPUs' mean power over the timed steps, money by the hour."""

import pandas as pd


def with_cost(rows: pd.DataFrame, dollars_per_hour: float) -> pd.DataFrame:
    """`rows` (with `gpu_power_w`, W of one GPU, and `tokens_per_s_per_gpu`) and what the tokens
    cost: `mj_per_token` (millijoules: power over speed), `kwh_per_billion` and
    `dollars_per_billion` (of tokens; one GPU costs `dollars_per_hour`). The host's power and idle
    time are not in it. Missing where no power was recorded."""
    speed = rows["tokens_per_s_per_gpu"].astype(float)
    joules = rows["gpu_power_w"].astype(float) / speed
    return rows.assign(
        mj_per_token=1e3 * joules,
        kwh_per_billion=joules * 1e9 / 3.6e6,
        dollars_per_billion=1e9 / speed / 3600 * dollars_per_hour,
    )
