"""The calculator: which technique fits which GPU, how fast, and how many GPUs a model needs; for
the models of the committed table of predicted steps, and for a shape of the reader's own.

A model of another shape is scaled from the first of the table: weights, gradients and states by the
number of parameters, activations by the inputs that a block keeps, the loss by the vocabulary,
times by FLOPs. In JupyterLab such a model is predicted when it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lsai_core.attention.measured import nearest, select_rankings, shipped
from lsai_core.attention.registry import Case
from lsai_core.base.errors import UserError
from lsai_core.config.model import ModelConfig
from lsai_core.model.transformer import count_parameters
from lsai_core.prediction.memory import PARTS
from lsai_core.prediction.roofline import NODE
from lsai_core.profiling.gpus import find_gpu
from lsai_lab.predictions.steps import (
    AXES,
    LENGTHS,
    MODELS,
    STATES,
    config_of,
    predicted_step,
    read_steps,
)
from lsai_lab.project.files import one_line, reading_root
from lsai_lab.report.explore.memory import gpus, tokens_slider

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Will it fit, and how fast will it be?"
COUNTS = (1, 2, 4, 8, 16, 32, 64)  # GPUs
OWN_SHAPES_WITHIN = 0.06  # of what is predicted for a model of another shape, as far as was tried
MOMENTS = 9  # of a step, in which the scaled model's highest is looked for
OWN = "a model of your own"
_SHAPE = {
    "n_layers": "layers",
    "d_model": "width",
    "n_heads": "heads",
    "n_kv_heads": "key-value heads",
    "d_ff": "feed-forward width",
    "vocab_size": "vocabulary",
}


def data(root: Path | None = None) -> dict[str, Any]:
    """Of the laboratory in `root` every way to train a model of the table, the models' shapes and
    parameters, the GPUs, and the controls."""
    families: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in _timed(read_steps(root or reading_root())):
        families.setdefault(tuple(row[name] for name in AXES[:-1]), []).append(row)
    ways = [
        _way(sorted(rows, key=lambda row: row["tokens"]))
        for rows in families.values()
        if len(rows) == len(LENGTHS)
    ]
    kernel = _kernel()
    return {
        "title": "Will it fit, and how fast?",
        "about": f"Speeds are those with the attention kernel {kernel}.",
        "fields": _fields(),
        "shape": _SHAPE,
        "lengths": list(LENGTHS),
        "ways": [*ways, *_between_counts(ways)],
        "models": {name: _shape(name) for name in MODELS},
        "reference": next(iter(MODELS)),
        "gpus": gpus(),
        "counts": list(COUNTS),
        "node": NODE,
        "parts": [*PARTS, "unused reserve"],
    }


def _fields() -> dict[str, Any]:
    """The controls; what few change is folded."""
    reference = _shape(next(iter(MODELS)))
    shape = {
        name: {"label": label, "entry": True, "value": reference[name]}
        for name, label in _SHAPE.items()
    }
    orders = {"fewest": "the fewest GPUs", "cheapest": "the least GPU time"}
    states = [[name, name.replace("bf16", "bf16, rounded stochastically")] for name in STATES]
    more: dict[str, dict[str, Any]] = {
        "batch": {"label": "sequences on a GPU", "range": [1, 32, 1], "value": 1},
        "states": {"label": "weights and states", "choices": states, "value": "bf16"},
        "train": {"label": "tokens to train (billions)", "entry": True, "value": 1},
        "order": {
            "label": "best is",
            "choices": [*orders.items(), ("shortest", "the shortest time")],
        },
    }
    return {
        "model": {"label": "model", "choices": [*MODELS, OWN]},
        **shape,
        "gpu": {"label": "GPU", "choices": list(gpus()), "value": "H100"},
        "gpus": {"label": "GPUs at most", "choices": list(COUNTS)},
        "tokens": tokens_slider(LENGTHS),
        "products": {"label": "matmuls", "choices": ["bf16", "fp8"]},
        **{name: field | {"more": True} for name, field in more.items()},
    }


def _kernel() -> str:
    """The attention kernel whose times the predictions of the table take: the fastest one that was
    measured at a shape like theirs, as it is the same on every GPU of the table."""
    measured = select_rankings(shipped(), find_gpu("H100").driver_name, "9.0")
    model = ModelConfig.model_validate({"preset": next(iter(MODELS))})
    shape = Case("cuda", torch.bfloat16, model.head_dim, None, grouped=True, length=LENGTHS[0])
    found = nearest(shape, [ranking for ranking in measured if ranking.training])
    assert found, "the package ships measured kernels"
    return next(iter(found.training))


def _timed(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """`rows` with no time beyond the GPUs of a node, where no network was measured; within it no
    GPU is faster than one alone with the same settings."""

    def settings(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in AXES if name != "gpus")

    alone = {settings(row): row["seconds"] for row in rows if row["gpus"] == 1}
    for row in rows:
        least = alone.get(settings(row), {})
        seconds = {gpu: max(time, least.get(gpu, 0)) for gpu, time in row["seconds"].items()}
        yield row | {"seconds": seconds if row["gpus"] <= NODE else {}}


def _shape(name: str) -> dict[str, int]:
    model = ModelConfig.model_validate({"preset": name})
    shape = {key: int(getattr(model, key)) for key in _SHAPE}
    return shape | {"parameters": count_parameters(model).total, "tied": int(model.tie_embeddings)}


def _way(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One setting: of each GPU the seconds of a step (`_time`) `among` how many, and as
    `rows`, by tokens, what it needs; of the first model, which others are scaled from, with every
    part at some moments of the step."""
    first = rows[0]
    found = {name: first[name] for name in AXES[:-1]} | {"among": first["gpus"]}
    checkpoint = "no" if first["checkpoint"] == "none" else first["checkpoint"]
    extra = ", CPU offload" * first["offload"] + ", compiled, nothing fused" * (not first["fused"])
    found["name"] = f"{checkpoint} checkpointing{extra}"
    keys = ("tokens", "needs", "least", "host", "parts")
    found["rows"] = [{key: row[key] for key in keys} for row in rows]
    names = [gpu for gpu in first["seconds"] if all(gpu in row["seconds"] for row in rows)]
    found["time"] = {
        gpu: _time([row["tokens"] for row in rows], [row["seconds"][gpu] for row in rows])
        for gpu in names
    }
    if "timeline" in first and first["model"] == next(iter(MODELS)):
        for row, kept in zip(rows, found["rows"], strict=True):
            kept["moments"] = _moments(row["timeline"])
    return found


def _time(tokens: list[int], seconds: list[float]) -> list[float]:
    """The least time of a step, in which the host decides, and three terms: fixed, for each token,
    and for each token times the length of its sequence, which is attention's."""
    bend, slope, fixed = np.polyfit(tokens[-3:], seconds[-3:], 2)
    return [float(f"{value:.5g}") for value in (seconds[0], fixed, slope, bend)]


def _moments(lines: dict[str, list[float]]) -> dict[str, list[float]]:
    """Every part at the highest moment of each of `MOMENTS` equal parts of the step."""
    totals = [sum(sizes) for sizes in zip(*lines.values(), strict=True)]
    width = len(totals) // MOMENTS
    tops = [
        max(range(first, first + width), key=totals.__getitem__)
        for first in range(0, MOMENTS * width, width)
    ]
    return {name: [sizes[top] for top in tops] for name, sizes in lines.items() if any(sizes)}


def _between_counts(ways: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Ways for counts of GPUs that were not predicted: what a GPU keeps of a shared model goes by
    1 / count; its time is that of the predicted count, `among`, in one node."""
    shared = [way for way in ways if way["gpus"] > 1]
    for few in shared:
        same = [name for name in AXES[:-1] if name != "gpus"]
        alike = [way for way in shared if all(way[name] == few[name] for name in same)]
        many = max(alike, key=lambda way: int(way["gpus"]))
        if few is many:
            continue
        known = {way["gpus"] for way in alike}
        for count in COUNTS:
            if count == 1 or count in known:
                continue
            share = (1 / few["gpus"] - 1 / count) / (1 / few["gpus"] - 1 / many["gpus"])
            time = few["time"] if count <= NODE else {}
            among = {"gpus": count, "time": time, "among": few["among"]}
            yield mixed(few, many, share) | among


def mixed(one: Any, two: Any, share: float) -> Any:
    """Between `one` and `two`, by `share`: numbers, and lists and dictionaries of numbers; what is
    neither is as in `one`, and what is equal stays."""
    if one == two:
        return one
    if isinstance(one, dict):
        names = dict.fromkeys([*one, *two])
        return {name: mixed(one.get(name, 0), two.get(name, 0), share) for name in names}
    if isinstance(one, list) or isinstance(two, list):
        count = len(one or two)
        return [
            mixed(a, b, share) for a, b in zip(one or [0] * count, two or [0] * count, strict=True)
        ]
    if isinstance(one, bool | str):
        return one
    return float(f"{one + share * (two - one):.5g}")


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """The predicted row of any setting, by the names of `config_of`; or `error`, one line that says
    why there is none."""
    names = ("model", "states", "products", "checkpoint", "gpus", "offload", "fused", "tokens")
    try:
        return predicted_step(config_of(**{name: question[name] for name in names}))
    except (UserError, ValueError) as error:
        return {"error": one_line(str(error), 200)}


def picture(data: dict[str, Any]) -> Figure:
    """What the first model needs over 8,192 tokens, by cause, for each way to checkpoint."""
    from matplotlib.figure import Figure as New

    from lsai_lab.report.colors import COLORS

    figure = New(figsize=(6.3, 2.4), layout="constrained")
    axes = figure.subplots()
    asked = {"model": data["reference"], "states": "bf16", "products": "bf16", "gpus": 1}
    asked |= {"offload": False, "fused": True}
    ways = [way for way in data["ways"] if asked.items() <= way.items()]
    for place, way in enumerate(ways):
        end = 0.0
        for name, size in way["rows"][1]["parts"].items():
            axes.barh(place, size, left=end, color=COLORS[name])
            end += size
    axes.set_yticks(range(len(ways)), [f"{way['checkpoint']} checkpointing" for way in ways])
    axes.set(xlabel="GiB of one GPU at the peak")
    return figure
