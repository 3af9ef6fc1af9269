"""The explorable on rounding: all of it is arithmetic, which its module does itself, bit by bit as
`lsai_core.optimizers.rounding` and PyTorch's fp8 types do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "A weight in bf16, a number in fp8: what rounding keeps"


def data() -> dict[str, Any]:
    """The weights to choose from."""
    return {"weights": [0.02, 0.1, 0.5, 1, 1.5, 2]}


def picture(data: dict[str, Any]) -> Figure:
    """100 steps of 1/1024 from a weight of 1, to nearest and stochastically."""
    import torch
    from matplotlib.figure import Figure as New

    from lsai_core.optimizers.rounding import Noise, rounded

    start, update, steps = 1.0, 2.0**-10, 100
    lines = {"to nearest": [start], "stochastically": [start]}
    for step in range(1, steps + 1):
        for name, line in lines.items():
            noise = Noise(0, step, 0) if name == "stochastically" else None
            line.append(rounded(torch.tensor([line[-1] - update]), noise).item())
    figure = New(figsize=(6.3, 2.4), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, steps], [start, start - steps * update], "--", color="#444444", label="exact")
    for name, line in lines.items():
        axes.plot(line, label=name)
    axes.set(xlabel="step", ylabel="weight")
    axes.legend()
    return figure
