"""Who holds what: the memory of every way of sharing a model, by formula and as it was predicted
before a run (`lsai_lab.predictions.before`)."""

import json

import pandas as pd

from lsai_core.config.precision import weight_dtype
from lsai_core.config.train import ParallelConfig, TrainConfig
from lsai_core.model.transformer import count_parameters
from lsai_lab.project.files import reading_root

HELD = ("weights", "gradients", "states")


def shares(parallel: ParallelConfig) -> dict[str, float]:
    """The share of a model's weights, gradients and optimizer states that a process holds between
    two steps, on average over the processes. Norms, which tensor parallelism keeps whole, count as
    shared."""
    if parallel.keeps_copies:
        states = 1 / parallel.replicate if parallel.kind == "zero1" else 1.0
        return {"weights": 1.0, "gradients": 1.0, "states": states}
    return dict.fromkeys(HELD, 1 / (parallel.shards * parallel.tp * parallel.pp))


def bytes_per_parameter(config: TrainConfig) -> dict[str, float]:
    """`shares` in bytes per parameter of the model, with AdamW's two moments in the weights'
    dtype."""
    size = weight_dtype(config.precision).itemsize
    of_one = {"weights": size, "gradients": size, "states": 2 * size}
    return {name: of_one[name] * share for name, share in shares(config.parallel).items()}


def ways_predicted(study: str = "sharing", gpu: str = "h100") -> pd.DataFrame:
    """One row per run of `study` and process that differs in memory: `part`, `variant`, `rank`, the
    GiB that are predicted (`active_gib`, `reserved_gib`, `activations_gib`), bytes per parameter of
    `weights` and `states` by formula and as simulated (`*_simulated`), and bytes of activations per
    token of the process's micro-batch."""
    path = reading_root() / "reports" / "predictions" / f"{study}.{gpu}.jsonl"
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        config = TrainConfig.model_validate(said["settings"])
        parameters = count_parameters(config.model).total
        parts, formula = said["parts_gib"], bytes_per_parameter(config)
        tokens = config.batch_size * config.seq_len / config.parallel.cp
        row = {name: said[name] for name in ("part", "variant", "rank")}
        row |= {name: said[name] for name in ("active_gib", "reserved_gib", "verdict")}
        row |= {"activations_gib": parts["activations"], **formula}
        row["weights_simulated"] = parts["weights"] * 2**30 / parameters
        row["states_simulated"] = parts["optimizer"] * 2**30 / parameters
        row["activation_bytes_per_token"] = parts["activations"] * 2**30 / tokens
        rows.append(row)
    return pd.DataFrame(rows)
