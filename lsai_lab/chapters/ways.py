"""Ways of sharing a model among GPUs at equal work: what each keeps by formula, what was predicted
before it ran (`lsai_lab.predictions.before`), and what was measured."""

from typing import Any

import pandas as pd

from lsai_core.base.files import read_jsonl
from lsai_core.config.parallel import ParallelConfig
from lsai_core.config.precision import weight_dtype
from lsai_core.config.train import TrainConfig
from lsai_lab.project.files import reading_root

# As the chapter names them; TP and CP are tensor and context parallelism.
NAMES = {
    "one": "one GPU",
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "fsdp": "FSDP",
    "hsdp": "HSDP",
    "tp": "TP",
    "tpfsdp": "TP and FSDP",
    "cp": "CP",
    "cpfsdp": "CP and FSDP",
    "cptp": "CP and TP",
    "pp": "pipeline",
    "ppi": "pipeline, interleaved",
    "ppfsdp": "pipeline and FSDP",
}
MEASURED = ["tokens_per_s", "exposed_communication_ms", "gpu_clock_mhz", "mem_peak_active_gib"]


def shares(parallel: ParallelConfig) -> dict[str, float]:
    """The share of a model's weights, gradients and optimizer states that a process holds between
    two steps, on average over the processes. Norms, which tensor parallelism keeps whole, count as
    shared."""
    states = 1 / parallel.state_parts
    kept = 1.0 if parallel.keeps_copies else states
    return {"weights": kept, "gradients": kept, "states": states}


def bytes_per_parameter(config: TrainConfig) -> float:
    """`shares` in bytes per parameter of the model, with AdamW's two moments in the weights'
    dtype."""
    share, size = shares(config.parallel), weight_dtype(config.precision).itemsize
    return size * (share["weights"] + share["gradients"] + 2 * share["states"])


def predicted_before() -> pd.DataFrame:
    """What was written down before the runs of study sharing: one row per `gpu`, `part` and
    `variant`, of the process that needs most. `kept`: bytes per parameter by formula; `active` and
    `reserved`: GiB at the peak; `speed_said`: tokens/s of all GPUs, where a time was predicted."""
    paths = sorted((reading_root() / "reports" / "predictions").glob("sharing.*.jsonl"))
    rows = list[dict[str, Any]]()
    for gpu, said in [(path.stem.split(".")[1], row) for path in paths for row in read_jsonl(path)]:
        config = TrainConfig.model_validate(said["settings"])
        speed = said["tokens/s"]
        rows.append(
            {
                "gpu": gpu.upper(),
                "part": said["part"],
                "variant": said["variant"],
                "kept": bytes_per_parameter(config),
                "active": said["active_gib"],
                "reserved": said["reserved_gib"],
                "speed_said": speed and speed * config.parallel.world_size,
            }
        )
    found = pd.DataFrame(rows).sort_values("reserved")
    return found.drop_duplicates(["gpu", "part", "variant"], keep="last").reset_index(drop=True)


def ways_measured(runs: pd.DataFrame) -> pd.DataFrame:
    """Of the good runs of study sharing (`runs`) the medians beside `predicted_before`, a row per
    `part`, `variant` and `machine`, most memory first: the `way` in words, `n` runs, `MEASURED`,
    the GiB `reserved`, those `said` before, and the relative errors of what was said
    (`active_error`, `reserved_error`)."""
    keys = ["part", "variant", "machine", "gpu"]
    groups = runs[runs["outcome"] == "ok"].groupby(keys)
    found = groups[[*MEASURED, "mem_peak_reserved_gib"]].median()
    found = found.assign(n=groups.size(), run=groups["run"].first()).reset_index()
    found["way"] = found["variant"].str.split("_").str[0].map(NAMES)
    found = found.merge(predicted_before(), on=["gpu", "part", "variant"])
    found["active_error"] = found["active"] / found["mem_peak_active_gib"] - 1
    found["reserved_error"] = found["reserved"] / found["mem_peak_reserved_gib"] - 1
    found = found.rename(columns={"reserved": "said", "mem_peak_reserved_gib": "reserved"})
    return found.sort_values(["part", "reserved"], ascending=False, ignore_index=True)
