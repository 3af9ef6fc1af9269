"""The explorable on rounding: bf16 weights with the random bits of `lsai_core.optimizers.rounding`,
and the numbers of PyTorch's fp8 types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "A weight in bf16, a number in fp8: what rounding keeps"
STEPS = 400


def data() -> dict[str, Any]:
    """The weights to choose from; the random bits of eight weights in each of `STEPS` steps; all
    numbers of each fp8 format from 0 up."""
    import torch

    from lsai_core.optimizers.rounding import Noise, random_bits

    host = torch.device("cpu")
    bits = [random_bits(Noise(0, step, 0), 8, host).tolist() for step in range(1, STEPS + 1)]
    codes = torch.arange(128, dtype=torch.uint8)
    formats = {name: codes.view(dtype).float() for name, dtype in _formats().items()}
    return {
        "weights": [0.02, 0.1, 0.5, 1, 1.5, 2],
        "bits": bits,
        "formats": {name: all_[all_.isfinite()].tolist() for name, all_ in formats.items()},
    }


def _formats() -> dict[str, Any]:
    import torch

    return {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


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
