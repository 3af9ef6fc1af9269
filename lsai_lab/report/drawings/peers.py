"""Drawings of what the trainers do."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from lsai_lab.report.charts import WIDE

TRAINERS = ("torchtitan", "HF Trainer", "this package")
# Of each part of a step: who does it in each trainer, "library", "compiled" or "own", in words.
PARTS = {
    "attention": [
        ("library", "SDPA, cuDNN first"),
        ("library", "SDPA or\nFlashAttention-2"),
        ("library", "FlashAttention-4,\nelse cuDNN"),
    ],
    "norms, rotation,\nSwiGLU": [
        ("compiled", "torch.compile"),
        ("compiled", "torch.compile, or\nLiger's kernels"),
        ("own", "own kernels, inside\ntorch.compile"),
    ],
    "output layer,\nloss": [
        ("compiled", "all logits,\ntorch.compile"),
        ("compiled", "torch.compile;\nLiger in chunks"),
        ("own", "in chunks,\nlogits never whole"),
    ],
    "clipping,\nAdamW": [
        ("library", "clipping, then\ntorch's fused AdamW"),
        ("library", "clipping, then\ntorch's fused AdamW"),
        ("own", "one kernel clips\nand updates"),
    ],
    "fp8 matmuls": [
        ("compiled", "torchao,\ncurrent scales"),
        ("compiled", "torchao,\ncurrent scales"),
        ("own", "own layers, current\nor delayed scales"),
    ],
}
SHADES = {"library": "white", "compiled": "#d9eaf6", "own": "#fbe3d0"}


def trainers_parts() -> Figure:
    """Who does each part of a training step in each trainer."""
    fig, axes = plt.subplots(figsize=(WIDE, 2.3))
    middle: dict[str, Any] = {"ha": "center", "va": "center"}
    for x, name in enumerate(TRAINERS):
        axes.text(x + 0.5, -0.28, name, fontsize=9, fontweight="bold", **middle)
    for y, (part, cells) in enumerate(PARTS.items()):
        axes.text(-0.06, y + 0.5, part, ha="right", va="center", fontsize=8.5)
        for x, (kind, text) in enumerate(cells):
            style: dict[str, Any] = {
                "facecolor": SHADES[kind],
                "edgecolor": "#888888",
                "linewidth": 0.8,
            }
            axes.add_patch(plt.Rectangle((x + 0.02, y + 0.05), 0.96, 0.9, **style))
            axes.text(x + 0.5, y + 0.5, text, fontsize=8.5, linespacing=1.1, **middle)
    axes.set(xlim=(-0.7, 3), ylim=(len(PARTS), -0.5))
    axes.axis("off")
    return fig


DRAWINGS = [trainers_parts]
