"""The explorable of PyTorch's fp8 types: where a format has numbers, and what a value becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "A number in fp8: what a scale is for"


def data() -> dict[str, Any]:
    """All numbers of each fp8 format from 0 up."""
    import torch

    codes = torch.arange(128, dtype=torch.uint8)
    types = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
    formats = {name: codes.view(dtype).float() for name, dtype in types.items()}
    return {
        "title": "A number in fp8.",
        "about": "A scale moves a tensor to where the format has numbers.",
        "fields": {
            "format": {"label": "format", "choices": list(formats)},
            "value": {
                "label": "value",
                "range": [-14.02, 9.98, 0.05],
                "value": -9.97,
                "show": "two",
            },
            "largest": {
                "label": "largest value of the tensor",
                "range": [-6.04, 9.96, 0.05],
                "value": 1.26,
                "show": "two",
            },
            "scaled": {"label": "scale the tensor", "value": True},
        },
        "formats": {name: all_[all_.isfinite()].tolist() for name, all_ in formats.items()},
    }


def picture(data: dict[str, Any]) -> Figure:
    """The number lines of both formats."""
    from matplotlib.figure import Figure as New

    from lsai_lab.report.colors import PALETTE

    figure = New(figsize=(6.3, 1.6), layout="constrained")
    axes = figure.subplots()
    for place, numbers in enumerate(data["formats"].values()):
        axes.vlines(numbers[1:], place - 0.3, place + 0.3, color=PALETTE[0], linewidth=0.7)
    axes.set_yticks(range(len(data["formats"])), list(data["formats"]))
    axes.set(xscale="log", xlabel="numbers above zero that the format has")
    return figure
