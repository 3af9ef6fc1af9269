"""Figures that other trainers published (`params/published.yaml`) beside predictions: `python
tests/published_predictions.py` writes the table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from lsai_core.config.strict import deep_merge
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.memory import GIB
from lsai_core.profiling.gpus import OUTSIDE_GIB, find_gpu
from lsai_core.training.combinations import checked
from lsai_lab.peers.settings import PLAIN
from lsai_lab.peers.trainer_memory import TrainerMemory, predict_as, trainer_memory_of
from lsai_lab.predictions.recorded import table_path
from lsai_lab.project.files import load_yaml, repo_root

NAMES = ["source", "row", "memory", "why"]


def rows(root: Path | None = None) -> list[dict[str, Any]]:
    """One entry per figure: source, what the source says of it, its config and what its
    trainer keeps in memory."""
    told, found = load_yaml((root or repo_root()) / "params" / "published.yaml"), []
    numbered = [
        (name, *pair)
        for name, group in told["figures"].items()
        for pair in enumerate(group["rows"], 1)
    ]
    for source, number, row in numbered:
        group, changed = told["figures"][source], row.get("trainer_memory", {})
        own = {
            key: value
            for key, value in row.items()
            if key not in ("gib", "trainer_memory", "model", "why")
        }
        shape = told["shapes"][row.get("model") or group["model"]]
        data = deep_merge(deep_merge(PLAIN | {"model": shape}, group["setting"]), own)
        config = checked(TrainConfig, data, f"params/published.yaml, {source}, row {number}")
        trainer_memory = (
            trainer_memory_of(group["as"], config).model_dump()
            | group.get("trainer_memory", {})
            | changed
        )
        said = {
            "source": source,
            "row": number,
            "config": config,
            "trainer_memory": TrainerMemory.model_validate(trainer_memory),
        }
        found.append(group | said | {"gib": row["gib"], "why": row.get("why")})
    return found


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """Of one of `rows`: the published GiB, what is predicted to have been measured, and its
    parts."""
    found = predict_as(row["config"], row["trainer_memory"])
    # A full GPU gives cached memory back.
    available = find_gpu(row["gpu"]).memory_gib - OUTSIDE_GIB if "gpu" in row else 1e6
    reserved = found.on_gpu_with(available, expandable=row.get("expandable", False)).reserved / GIB
    said = (
        found.peak
        if row["memory"] == "active"
        else reserved + (OUTSIDE_GIB if row.get("outside") else 0.0)
    )
    sizes = {
        "published": row["gib"],
        "predicted": said,
        "error": said / row["gib"] - 1,
        **found.parts,
    }
    sizes["unused"] = said - found.peak
    told = {
        "config": row["config"].model_dump_json(exclude_defaults=True),
        "masters": max(1, row["trainer_memory"].masters),
    }
    return (
        {name: row[name] for name in NAMES}
        | told
        | {name: round(size, 4) for name, size in sizes.items()}
    )


if __name__ == "__main__":
    table = []
    for entry in rows():
        table.append(predicted(entry))
        print(
            "{source} {row}: {published} GiB published, {predicted} predicted".format_map(
                table[-1]
            ),
            flush=True,
        )
    pd.DataFrame(table).to_csv(table_path(name="published"), index=False)
