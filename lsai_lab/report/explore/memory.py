"""The explorable of a training step's memory: by cause, over the step, for settings that the
committed table of predicted steps has. In JupyterLab any setting is predicted when it is asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lsai_core.base.errors import UserError
from lsai_core.prediction.memory import OUTSIDE_GIB, PARTS, usable_gib
from lsai_core.prediction.roofline import Speed
from lsai_core.prediction.timeline import SLICES
from lsai_core.profiling.gpus import GPUS
from lsai_lab.predictions.steps import (
    CHECKPOINTS,
    DRAWN,
    STATES,
    config_of,
    predicted_step,
    read_steps,
)
from lsai_lab.project.files import one_line, reading_root

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "The memory of a training step"


def data() -> dict[str, Any]:
    """The table's rows with a timeline, the GPUs, and the settings' values. A timeline is in
    tenths of a GiB; a cause that does not change is one number."""
    rows = [row for row in read_steps(reading_root()) if "timeline" in row]
    lengths = sorted({row["tokens"] for row in rows})
    return {
        "title": f"{TITLE}.",
        "about": "Change it until it fits.",
        "fields": {
            "model": {"label": "model", "choices": list(DRAWN)},
            "gpu": {"label": "GPU", "choices": list(gpus()), "value": "H100"},
            "tokens": tokens_slider(lengths),
            "batch": {"label": "sequences on a GPU", "range": [1, 16, 1], "value": 1},
            "states": {"label": "weights and states", "choices": list(STATES), "value": "bf16"},
            "checkpoint": {"label": "checkpointing", "choices": list(CHECKPOINTS)},
            "gpus": {"label": "GPUs that share it (FSDP)", "choices": [1, 2, 4, 8, 16, 32, 64]},
            "fused": {"label": "fused kernels", "value": True},
        },
        "rows": [_small(row) for row in rows],
        "gpus": gpus(),
        "parts": list(PARTS),
        "slices": SLICES,
        "lengths": lengths,
    }


def tokens_slider(lengths: Sequence[int]) -> dict[str, Any]:
    """A slider from the first to the last of `lengths`, by the power of two."""
    ends = [math.log2(lengths[0]), math.log2(lengths[-1])] if lengths else [0, 0]
    label = "tokens in a sequence"
    return {"label": label, "range": [*ends, 0.25], "value": 13, "show": "tokens"}


def gpus() -> dict[str, dict[str, float]]:
    """Of each GPU its memory, what a run may need and surely fit, and what it may at most (GiB);
    whether it has fp8, and whether its speed was measured."""
    return {
        gpu.name: {
            "memory": gpu.memory_gib,
            "usable": round(usable_gib(gpu), 3),
            "most": round(gpu.memory_gib - OUTSIDE_GIB, 3),
            "fp8": gpu.fp8,
            "timed": Speed(gpu).like == gpu,
        }
        for gpu in GPUS
    }


def _small(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the page needs of a row."""
    found: dict[str, Any] = {}
    for name, sizes in row["timeline"].items():
        tenths = [round(10 * size) for size in sizes]
        if any(tenths):
            found[name] = tenths if len(set(tenths)) > 1 else tenths[0]
    names = ("model", "states", "checkpoint", "gpus", "fused", "tokens", "needs", "least", "parts")
    return {name: row[name] for name in names} | {"timeline": found}


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """A row for any setting: `model` (a preset), `states`, `checkpoint`, `gpus`, `fused`,
    `tokens`; or `error`, a line that says why there is none."""
    names = ("model", "states", "checkpoint", "gpus", "fused", "tokens")
    asked = {name: question[name] for name in names}
    try:
        return _small(asked | predicted_step(config_of(**asked), drawn=True))
    except (UserError, ValueError) as error:
        return {"error": one_line(str(error), 200)}


def picture(data: dict[str, Any]) -> Figure:
    """The first model's step over 8,192 tokens with fused kernels and bf16 states."""
    import numpy as np
    from matplotlib.figure import Figure as New

    from lsai_lab.report.colors import COLORS

    asked = {"model": DRAWN[0], "states": "bf16", "checkpoint": "none", "gpus": 1}
    asked |= {"fused": True, "tokens": 8192}
    row = next(row for row in data["rows"] if asked.items() <= row.items())
    slices = sum(data["slices"].values())
    known = [name for name in data["parts"] if name in row["timeline"]]
    sizes = [np.broadcast_to(row["timeline"][name], slices) / 10 for name in known]
    figure = New(figsize=(6.3, 2.4), layout="constrained")
    axes = figure.subplots()
    colors = [COLORS[name] for name in known]
    axes.stackplot(range(slices), sizes, labels=known, colors=colors)
    axes.set(xticks=[], xlabel="time in a step", ylabel="memory (GiB)")
    figure.legend(loc="outside right upper")
    return figure
