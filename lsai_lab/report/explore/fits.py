"""The calculator: which technique fits which GPU, how fast, and how many GPUs a model needs; for the
models of the committed table of predicted steps, and for a shape of the reader's own.

A model of another shape is scaled from the first of the table: weights, gradients and states by the
number of parameters, activations by the inputs that a block keeps, the loss by the vocabulary,
times by FLOPs. In JupyterLab such a model is predicted when it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsai_core.base.errors import UserError
from lsai_core.config.train import ModelConfig
from lsai_core.model.transformer import count_parameters
from lsai_core.prediction.memory import OUTSIDE_GIB, PARTS
from lsai_lab.predictions.steps import (
    CHECKPOINTS,
    MODELS,
    NVLINK_GB_PER_S,
    STATES,
    config_of,
    predicted_step,
    read_steps,
)
from lsai_lab.project.files import reading_root
from lsai_lab.report.explore.memory import gpus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Will it fit, and how fast will it be?"
MOMENTS = 9  # of a step, in which the scaled model's highest is looked for
_SHAPE = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size")


def data(root: Path | None = None) -> dict[str, Any]:
    """Of the laboratory in `root` the table's rows, the models' shapes and parameters, the GPUs, and the settings' values."""
    rows = read_steps(root or reading_root())
    reference = next(iter(MODELS))
    return {
        "rows": [_small(row, row["model"] == reference) for row in rows],
        "models": {name: _shape(name) for name in MODELS},
        "reference": reference,
        "gpus": gpus(),
        "parts": [*PARTS, "unused reserve"],
        "states": list(STATES),
        "checkpoints": list(CHECKPOINTS),
        "outside": OUTSIDE_GIB,
        "nvlink": NVLINK_GB_PER_S,
    }


def _shape(name: str) -> dict[str, int]:
    model = ModelConfig(preset=name)
    shape = {key: int(getattr(model, key)) for key in _SHAPE}
    return shape | {"parameters": count_parameters(model).total, "tied": int(model.tie_embeddings)}


def _small(row: Mapping[str, Any], moments: bool) -> dict[str, Any]:
    found = {name: value for name, value in row.items() if name != "timeline"}
    if not moments or "timeline" not in row:
        return found
    lines = row["timeline"]
    totals = [sum(sizes) for sizes in zip(*lines.values(), strict=True)]
    width = len(totals) // MOMENTS
    tops = [
        max(range(first, first + width), key=totals.__getitem__)
        for first in range(0, MOMENTS * width, width)
    ]
    kept = {name: [sizes[top] for top in tops] for name, sizes in lines.items() if any(sizes)}
    return found | {"moments": kept}


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """The predicted row of any setting, by the names of `config_of`; or `error`, one line that says
    why there is none."""
    names = ("model", "states", "products", "checkpoint", "gpus", "offload", "fused", "tokens")
    try:
        return predicted_step(config_of(**{name: question[name] for name in names}))
    except UserError as error:
        return {"error": str(error)}


def picture(data: dict[str, Any]) -> Figure:
    """What the first model needs over 8,192 tokens, by cause, for each way to checkpoint."""
    from matplotlib.figure import Figure as New

    from lsai_lab.report.style import PALETTE

    figure = New(figsize=(6.3, 2.4), layout="constrained")
    axes = figure.subplots()
    asked = {"model": data["reference"], "states": "bf16", "products": "bf16", "gpus": 1}
    asked |= {"offload": False, "fused": True, "tokens": 8192}
    rows = [row for row in data["rows"] if asked.items() <= row.items()]
    for place, row in enumerate(rows):
        end = 0.0
        for name, size in row["parts"].items():
            axes.barh(place, size, left=end, color=PALETTE[data["parts"].index(name) % 8])
            end += size
    axes.set_yticks(range(len(rows)), [f"{row['checkpoint']} checkpointing" for row in rows])
    axes.set(xlabel="GiB of one GPU at the peak")
    return figure
