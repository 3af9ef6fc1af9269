"""GPUs that a prediction can be held against: memory as torch reports it, bandwidths from the data
sheets.

The driver's name leads to peaks (`flops.py`) and measured rates. `link` is what a GPU sends to its
neighbours in a node per second and direction: NVLink, or PCIe 4.0 x16 and 5.0 x16 for GeForce
cards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lsai_core.base.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """`memory_gib`: of the whole device; `memory_gb_per_s`, `link_gb_per_s`: data sheet; `fp8`: in
    tensor cores."""

    name: str
    driver_name: str
    memory_gib: float
    memory_gb_per_s: float
    link_gb_per_s: float
    fp8: bool


GPUS: tuple[Gpu, ...] = (
    Gpu("RTX 4090", "NVIDIA GeForce RTX 4090", 23.5, 1008, 32, True),
    Gpu("RTX 5090", "NVIDIA GeForce RTX 5090", 31.4, 1792, 64, True),
    Gpu("A100-40", "A100-SXM4-40GB", 39.4, 1555, 300, False),
    Gpu("A100-80", "A100-SXM4-80GB", 79.1, 2039, 300, False),
    Gpu("H100", "NVIDIA H100 80GB HBM3", 79.1, 3350, 450, True),
    Gpu("GH200-96", "NVIDIA GH200 120GB", 94.5, 4000, 450, True),
    Gpu("H200", "NVIDIA H200", 139.8, 4800, 450, True),
    Gpu("GH200-144", "NVIDIA GH200 144G HBM3e", 140.0, 4900, 450, True),
)


def find_gpu(name: str) -> Gpu:
    """The GPU of the table that `name` means (`h200`, `rtx4090`, or the driver's name); UserError
    lists the table.

    A size (`24`, `24GB`) means any GPU with so much memory (GiB); its speed is not known, and fp8
    is left out.
    """
    wanted = _plain(name)
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:g|gb|gib)?", name.strip().lower())
    if size and 0 < float(size[1]) < 1e6:
        return Gpu(f"GPU with {float(size[1]):g} GiB", "", float(size[1]), 0, 0, False)
    for gpu in GPUS:
        if wanted in (_plain(gpu.name), _plain(gpu.driver_name)):
            return gpu
    raise UserError(
        f"unknown GPU {name!r}; known: {', '.join(gpu.name for gpu in GPUS)}, or its memory: 24GB"
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
