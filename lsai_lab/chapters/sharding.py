"""What sharding changes: the loss of runs that round alike, and the largest model that trains."""

from collections.abc import Sequence

import pandas as pd

from lsai_lab.analysis.losses import paired
from lsai_lab.analysis.scale import bytes_per_weight
from lsai_lab.report.load import steps

PEERS = ("ours", "torchtitan")
# Setting, host, our variant, torchtitan's, and the claim about their ratio.
COMPARED = [
    ("4 GPUs, bf16", "h200", "llama_4", "titan_4", "four_gpus_titan"),
    ("4 GPUs, fp8", "h200", "llama_4_fp8", "titan_4_fp8", "four_gpus_fp8_titan"),
    (
        "4 GPUs, bf16, checkpointing",
        "h200-f",
        "llama_4_alternating",
        "titan_4_selective",
        "four_gpus_checkpointing",
    ),
    (
        "2 GPUs, bf16, checkpointing",
        "h200-e",
        "llama_2_alternating",
        "titan_2_selective",
        "two_gpus_titan",
    ),
]
WAYS = {
    "eager_1": "eager, 1 GPU",
    "eager_2": "eager, 2 GPUs",
    "auto_1": "fused, 1 GPU",
    "auto_2": "fused, 2 GPUs",
}


def loss_distance(runs: pd.DataFrame, one: tuple[str, int], other: tuple[str, int]) -> pd.Series:
    """The distance of the training losses of two runs, each given as (variant, repeat), by step."""
    curves = [steps(_run(runs, *name)).set_index("step")["loss"] for name in (one, other)]
    return (curves[0] - curves[1]).abs()


def changes_by_pair(runs: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """One row per (variant, reference): `seeds`, the largest distance of the training loss in the
    `first_steps` (ten) of any seed, and of the final `train_loss` and `validation_loss` the mean
    change over the seeds with half its 95 % interval (`<metric>_half`; missing for one seed)."""
    rows = []
    for variant, reference in pairs:
        seeds = sorted(runs.loc[runs["variant"] == variant, "repeat"])
        first = [
            loss_distance(runs, (variant, seed), (reference, seed)).iloc[:10].max()
            for seed in seeds
        ]
        row = {"variant": variant, "reference": reference, "seeds": len(seeds)}
        pair = tuple(_run(runs, name, seeds[0])["run"] for name in (reference, variant))
        row |= {"first_steps": max(first), "run": pair}
        both = runs[runs["variant"].isin([variant, reference])]
        for metric in ("train_loss", "validation_loss"):
            change = paired(both[metric], both, reference).loc[variant]
            row |= {metric: change["mean"], f"{metric}_half": change["half"]}
        rows.append(row)
    return pd.DataFrame(rows)


def changes_in_words(changes: pd.DataFrame, metric: str) -> pd.Series:
    """Of rows of `changes_by_pair` the change of `metric` in thousandths of a nat, `−3 ± 20`, with
    half its interval where there is one."""
    means = 1e3 * changes[metric]
    text = means.map(lambda mean: f"{mean:.0f}" if abs(mean) >= 1 else f"{mean:.1g}")
    halves = (1e3 * changes[f"{metric}_half"]).map(" ± {:.0f}".format, na_action="ignore")
    return text.str.replace("-", "−") + halves.fillna("")


def largest_models(searches: pd.DataFrame) -> pd.DataFrame:
    """Of each setting (`label`) and number of GPUs the search that found the largest model.

    `searches`: rows of `lab.load("largest")` that ended. Adds `GPUs`, `billion` parameters,
    `loads` (weights alone, no training), `offloaded` (states in the host's memory), and `bound`:
    memory over bytes per parameter, in billions. The host's memory counts for CPU offload.
    """
    found = searches.copy()
    found["GPUs"] = found["train.parallel.fsdp"].astype(int)
    found["billion"] = found["parameters"].astype(float) / 1e9
    found["loads"] = found["measure"] == "load"
    found["offloaded"] = found["train.parallel.cpu_offload"].eq(True)
    found = found.sort_values("billion").drop_duplicates(["label", "GPUs"], keep="last")
    found["bound"] = [_bound(row) for _, row in found.iterrows()]
    return found


def sharded_peers(runs: pd.DataFrame) -> pd.DataFrame:
    """Llama-3-8B with this package beside torchtitan on the same GPUs: medians of the good runs of
    study fsdp (`runs`), and the `claim` about their ratio."""
    groups = runs.groupby(["machine", "variant"])
    speed = groups["tokens_per_s_per_gpu"].median()
    memory = groups["mem_peak_reserved_gib"].median()
    rows = []
    for setting, host, ours, titan, claim in COMPARED:
        pair = tuple(groups["run"].first()[host, name] for name in (titan, ours))
        row = {"setting": setting, "claim": claim, "run": pair}
        for name, variant in (("ours", ours), ("torchtitan", titan)):
            row[f"{name} (tokens/s)"] = speed[host, variant]
            row[f"{name}, reserved (GiB)"] = memory[host, variant]
        rows.append(row)
    names = [f"{name}{what}" for what in (" (tokens/s)", ", reserved (GiB)") for name in PEERS]
    return pd.DataFrame(rows)[["setting", *names, "claim", "run"]]


def scaling_grid(runs: pd.DataFrame) -> pd.DataFrame:
    """The course's grid of study fsdp, its failed runs too: `grown` ("all", or "layers" alone),
    `factor`, and `way`, attention and GPUs in words."""
    grid = runs[(runs["part"] == "grid") & (runs["machine"] == "h200")]
    names = grid["variant"].str.extract(r"^(?P<grown>all|layers)_(?P<factor>\d+)_(?P<way>\w+)$")
    factors = names["factor"].astype(int)
    return grid.join(names.assign(factor=factors, way=names["way"].map(WAYS)))


def _bound(row: pd.Series) -> float:
    weight, states = bytes_per_weight(row["train.precision"], row["train.optim.states"])
    of_gpus = row["GPUs"] * row["search_limit_gib"]
    memory = row["env.memory_gib"] if row["offloaded"] else of_gpus
    return float(memory * 2**30 / 1e9 / (weight + states * (not row["loads"])))


def _run(runs: pd.DataFrame, variant: str, repeat: int) -> pd.Series:
    return runs[(runs["variant"] == variant) & (runs["repeat"] == repeat)].iloc[0]
