"""Predictions of a study's training runs, written down before anything of them is measured.

`python -m lsai_lab.predictions.before STUDY GPU` predicts every run of the study on that GPU and
writes `reports/predictions/STUDY.GPU.jsonl`: a row for each process whose memory differs from the
others' (rank 0 first), with the settings, so that a row stays what it was when the study changes.
Rows that are there already stay as they were written.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lsai_core.base.files import read_jsonl, write_text
from lsai_core.config.affects import key_values
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.memory import predict_ranks, verdict
from lsai_core.profiling.gpus import Gpu, find_gpu
from lsai_lab.predictions.will_fit import expected_kernel, timed
from lsai_lab.project.files import repo_root
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import detect_profile, measured_pairs, resolve

KEY = ("part", "variant")


def runs_of(study: str, gpu: Gpu) -> Iterator[tuple[str, str, TrainConfig]]:
    """Part, variant and config of every training run of `study` as `gpu` would run it."""
    profile = detect_profile(repo_root(), gpu.driver_name)
    loaded = Session(profile).study(study)
    for part, variant in measured_pairs(loaded, [], [], []):
        config = resolve(loaded, variant, part, 0, {})
        if isinstance(config, TrainConfig):
            yield part, variant, config


def predicted(config: TrainConfig, gpu: Gpu) -> list[dict[str, Any]]:
    """A row (GiB; s; tokens/s of one GPU, as in every file so far) for each process of `config`
    that differs in memory."""
    kernel = expected_kernel(config, gpu, None)
    time = timed(config, gpu, kernel)
    if time["tokens/s"] is not None:
        time["tokens/s"] /= config.parallel.world_size
    return [
        {
            "rank": found.rank,
            "active_gib": round(found.peak, 4),
            "reserved_gib": round(found.reserved, 4),
            "verdict": verdict(found, gpu),
            **time,
            "attention": kernel,
            "parts_gib": {name: round(size, 4) for name, size in found.parts.items()},
        }
        for found in predict_ranks(config, kernel)
    ]


def path_of(study: str, gpu: Gpu) -> Path:
    """Where the predictions of a study are kept."""
    return repo_root() / "reports" / "predictions" / f"{study}.{gpu.name.lower()}.jsonl"


def main(study: str, gpu: Gpu) -> None:
    path = path_of(study, gpu)
    rows = read_jsonl(path) if path.exists() else []
    there = {tuple(row[name] for name in KEY) for row in rows}
    for part, variant, config in runs_of(study, gpu):
        if (part, variant) in there:
            continue
        said = {"study": study, "part": part, "variant": variant}
        settings = key_values(config)
        rows += [said | row | {"settings": settings} for row in predicted(config, gpu)]
        write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))
        print(f"{rows[-1]['active_gib']:8.2f} GiB  {part}.{variant}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], find_gpu(sys.argv[2]))
