"""Predicted training steps of public models under every combination of a few settings: what the
report's memory explorable and its calculator show.

`python -m lsai_lab.predictions.steps` predicts those that the committed table lacks, in some
seconds each, and writes it again. Steps of one sequence are predicted, because the memory of a step
depends on the tokens that a GPU computes and hardly on how they are cut into sequences.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lsai_core.base.files import write_text
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.memory import predict
from lsai_core.prediction.roofline import estimate
from lsai_core.profiling.gpus import GPUS
from lsai_core.training.combinations import refusal
from lsai_lab.predictions.recorded import table_path

LENGTHS = (2048, 8192, 32768, 131072)  # between them memory is near a straight line
# Settings and what each value of them is, as `TrainConfig` has them.
STATES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "bf16_autocast"},
    "bf16": {"precision": "bf16"},
    "8-bit": {"precision": "bf16", "optim": {"states": "8bit"}},
}
CHECKPOINTS = ("none", "selective", "full")
MODELS = {"llama3-8b": (1, 4, 64), "llama3.2-1b": (1, 4, 64), "llama3-70b": (8, 64)}
DRAWN = ("llama3-8b", "llama3.2-1b")  # whose timelines are kept, too
AXES = ("model", "states", "products", "checkpoint", "gpus", "offload", "fused", "tokens")
NVLINK_GB_PER_S = 300  # GPUs with less are estimated alone only


def config_of(
    model: str | dict[str, Any],
    states: str = "bf16",
    products: str = "bf16",
    checkpoint: str = "none",
    gpus: int = 1,
    offload: bool = False,
    fused: bool = True,
    tokens: int = 8192,
) -> TrainConfig:
    """The training run that one row of the table predicts: one sequence of `tokens` on each GPU,
    compiled. `model`: a preset's name, or the fields of a shape. `gpus` share the model by FSDP."""
    kernels = "fused" if fused else "plain"
    settings: dict[str, Any] = {
        "model": {"preset": model} if isinstance(model, str) else model,
        "data": {"vocab_size": 257},
        "seq_len": tokens,
        "batch_size": 1,
        "compile": True,
        "loss": "fused" if fused else "full",
        "blocks": kernels,
        "grad_checkpoint": checkpoint,
        "fp8": {"recipe": "fused" if products == "fp8" else "none"},
        "parallel": {"fsdp": gpus, "cpu_offload": offload},
    }
    return TrainConfig.model_validate(settings | STATES[states])


def combinations() -> Iterator[dict[str, Any]]:
    """Every row of the table by its axes, but for its length. Of the largest model, whose
    predictions take longest, only those that its size asks for."""
    for model, counts in MODELS.items():
        for states, checkpoint, gpus in itertools.product(STATES, CHECKPOINTS, counts):
            row: dict[str, Any] = {"model": model, "states": states, "products": "bf16"}
            row |= {"checkpoint": checkpoint, "gpus": gpus, "offload": False, "fused": True}
            if 1 not in counts:
                if checkpoint == "full":
                    yield row
                continue
            yield row
            if states == "bf16" and checkpoint != "selective":
                yield row | {"products": "fp8"}
            if gpus == 1 and checkpoint == "full":
                yield row | {"offload": True}
            if gpus == 1 and checkpoint == "none":
                yield row | {"fused": False}


def predicted_step(config: TrainConfig, drawn: bool = False) -> dict[str, Any]:
    """Memory (GiB of a GPU) and time of a step: `needs` and `least` as in `Prediction`, `host`,
    `parts` of the peak, `seconds` by the name of the GPU, and, if `drawn`, the `timeline`."""
    found, gpus = predict(config), config.parallel.world_size
    times = {
        gpu.name: estimate(config, gpu)
        for gpu in GPUS
        if gpus == 1 or gpu.link_gb_per_s >= NVLINK_GB_PER_S
    }
    row: dict[str, Any] = {
        "needs": round(found.needs, 2),
        "least": round(found.least(found), 2),
        "host": round(found.host, 1),
        "parts": {name: round(size, 2) for name, size in found.parts.items() if size >= 0.005},
        "seconds": {name: round(time.step_s, 4) for name, time in times.items() if time},
    }
    if drawn:
        row["timeline"] = {
            name: [round(size, 2) for size in sizes] for name, sizes in found.timeline.items()
        }
    return row


def read_steps(root: Path | None = None) -> list[dict[str, Any]]:
    """The committed table, one dictionary a row; empty if there is none."""
    path = _path(root)
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _path(root: Path | None = None) -> Path:
    return table_path(root, "steps").with_suffix(".jsonl")


def write_steps() -> None:
    """Predict what the table lacks, printing each row's axes and writing it."""
    known = {tuple(row[name] for name in AXES): row for row in read_steps()}
    for combination, tokens in itertools.product(combinations(), LENGTHS):
        axes = {**combination, "tokens": tokens}
        place = tuple(axes[name] for name in AXES)
        config = config_of(**axes)
        if place in known or refusal(config):
            continue
        drawn = axes["model"] in DRAWN and axes["products"] == "bf16" and not axes["offload"]
        known[place] = axes | predicted_step(config, drawn)
        print(*place, flush=True)
        _write(known)


def _write(known: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    lines = [json.dumps(row, separators=(",", ":")) for row in known.values()]
    write_text(_path(), "\n".join(lines) + "\n")


if __name__ == "__main__":
    write_steps()
