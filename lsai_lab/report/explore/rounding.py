"""The explorable on rounding: bf16 weights, with the bits of `lsai_core.optimizers.rounding`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "A weight in bf16: what rounding keeps"
STEPS = 400


def data() -> dict[str, Any]:
    """The controls, and the random bits of eight weights in each of `STEPS` steps."""
    import torch

    from lsai_core.optimizers.rounding import Noise, random_bits

    host = torch.device("cpu")
    bits = [random_bits(Noise(0, step, 0), 8, host).tolist() for step in range(1, STEPS + 1)]
    return {
        "title": "A weight in bf16.",
        "about": "Every step adds the same update. Does it arrive?",
        "fields": {
            "weight": {"label": "weight", "choices": [0.02, 0.05, 0.1, 0.5, 1, 2], "value": 0.05},
            "update": {
                "label": "update of a step",
                "range": [-16, -4, 0.025],
                "value": -14.025,
                "show": "two",
            },
            "steps": {"label": "steps", "range": [20, STEPS, 20], "value": 100},
        },
        "bits": bits,
    }


def picture(data: dict[str, Any]) -> Figure:
    """100 steps of 0.00006 from a weight of 0.05, to nearest and stochastically."""
    import torch
    from matplotlib.figure import Figure as New

    from lsai_core.optimizers.rounding import Noise, rounded
    from lsai_lab.report.colors import COLORS

    start, update, steps = 0.05, 6e-5, 100
    lines = {"to nearest": [start], "stochastically": [start]}
    for step in range(1, steps + 1):
        for name, line in lines.items():
            noise = Noise(0, step, 0) if name == "stochastically" else None
            line.append(rounded(torch.tensor([line[-1] + update]), noise).item())
    figure = New(figsize=(6.3, 2.4), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, steps], [start, start + steps * update], "--", color="#444444", label="exact")
    for (name, line), meaning in zip(lines.items(), ("bad", "good"), strict=True):
        axes.plot(line, label=name, color=COLORS[meaning])
    axes.set(xlabel="step", ylabel="weight")
    axes.legend()
    return figure
