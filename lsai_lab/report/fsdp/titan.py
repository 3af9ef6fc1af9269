"""The section on torchtitan: the larger model with our trainer and with torchtitan, at the same work on the same GPUs."""

from __future__ import annotations

import pandas as pd

from lsai_lab.report.fsdp.results import Sharding
from lsai_lab.report.show import run_link, show_table, show_text

# Runs that agree in these do the same work: processes, what is recomputed, what stays gathered, fp8 or not. torchtitan's fp8
# weights travel in fp8.
_SAME = ("processes", "recomputed", "resharded", "fp8", "fp8_gather")
# torchtitan's `selective` repeats every second matrix product, which is more than ours does and about as much as `alternating`.
_LIKE = {"alternating": "selective"}


def compared(sharding: Sharding) -> pd.DataFrame:
    """One row per setting that both trainers have a record of, ours in columns `*_ours`; `ratio` is ours over torchtitan."""
    ours, titan = (sharding.rows("fsdp", part) for part in ("large", "titan"))
    if ours.empty or titan.empty or not sharding.on_gpu:
        return pd.DataFrame()
    ours, titan = (rows.assign(recomputed=rows["grad_checkpoint"].replace(_LIKE)) for rows in (ours, titan))
    pairs = ours.merge(titan, on=list(_SAME), suffixes=("_ours", "_titan")).sort_values(["fp8", "processes"])
    pairs["ratio"] = pairs["tokens_per_s_ours"] / pairs["tokens_per_s_titan"]
    pairs["memory_ratio"] = pairs["mem_peak_allocated_gib_ours"] / pairs["mem_peak_allocated_gib_titan"]
    return pairs


def show_titan(sharding: Sharding) -> None:
    """The table and the sentences of one machine; nothing where torchtitan has not run."""
    pairs = compared(sharding)
    if pairs.empty or pairs["tokens_per_s_titan"].isna().all():
        return
    config = sharding.run(pairs.iloc[0]["key_ours"], "fsdp").config
    columns = {
        "GPUs": pairs["processes"],
        "products": pairs["fp8"].map({True: "fp8", False: "bf16"}),
        "checkpointing": pairs["grad_checkpoint_ours"].where(
            pairs["grad_checkpoint_ours"] == pairs["grad_checkpoint_titan"],
            pairs["grad_checkpoint_ours"] + " / " + pairs["grad_checkpoint_titan"],
        ),
        "ours": pairs["tokens_per_s_per_gpu_ours"],
        "MFU (%)": pairs["mfu_ours"] * 100,
        "torchtitan": pairs["tokens_per_s_per_gpu_titan"],
        "ours / torchtitan": pairs["ratio"],
        "peak (GiB)": pairs["mem_peak_allocated_gib_ours"],
        "its peak (GiB)": pairs["mem_peak_allocated_gib_titan"],
        "ended": pairs["outcome_ours"].where(
            pairs["outcome_ours"] == pairs["outcome_titan"], pairs["outcome_ours"] + " / " + pairs["outcome_titan"]
        ),
        "key": pairs["key_ours"],
        "key_titan": pairs["key_titan"],
    }
    table = pd.DataFrame(columns)
    if (table["ended"] == "ok").all():
        table = table.drop(columns="ended")
    speed, memory = "{:,.0f}", ".1f"
    show_table(
        table,
        f"tbl-titan-{sharding.slug}",
        f"The larger model by our trainer and by torchtitan on {sharding.machine}: {config['model']['preset']}, {config['batch_size']} sequences of "
        f"{config['seq_len']:,} tokens on each GPU, fp32 shards, sums of gradients in fp32, blocks compiled. Speeds in "
        "tokens/s per GPU; peaks are the largest of all GPUs. MFU and *peak* are ours, *its peak* is torchtitan's.",
        formats={
            "ours": speed, "MFU (%)": memory, "torchtitan": speed, "ours / torchtitan": ".2f",
            "peak (GiB)": memory, "its peak (GiB)": memory,
        },
        links={"ours": "key", "torchtitan": "key_titan"},
    )  # fmt: skip
    show_text("\n".join(f"- {line}" for line in sentences(sharding)))


def sentences(sharding: Sharding) -> list[str]:
    """How the two compare on the most GPUs, in bf16 and in fp8, where both have run."""
    pairs = compared(sharding)
    pairs = pairs.dropna(subset=["ratio"]) if len(pairs) else pairs
    text = []
    for fp8, words in ((False, "bf16"), (True, "fp8")):
        rows = pairs[(pairs["fp8"] == fp8) & (pairs["grad_checkpoint_ours"] == "none")] if len(pairs) else pairs
        if rows.empty:
            continue
        row = rows.loc[rows["processes"].idxmax()]
        text.append(
            f"*Beside torchtitan ({words}, {row['processes']} GPUs):* {run_link('ours', row['key_ours'])} trains {row['ratio']:.2f} times as many tokens/s as "
            f"{run_link('torchtitan', row['key_titan'])} in {row['memory_ratio']:.0%} of its memory."
        )
    return text
