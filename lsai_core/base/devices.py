"""What the GPU is, asked at one place: kernels are chosen by CUDA compute capability.

PyTorch for AMD's GPUs (ROCm) answers to the name of `torch.cuda` and numbers its GPUs otherwise: a
capability of 9.4 is no Hopper. Nothing of this package has been tried there, so what was written
for NVIDIA's GPUs refuses, and PyTorch's own operations run.
"""

from __future__ import annotations

import torch

NOT_NVIDIA = (
    "is for NVIDIA's GPUs, and this PyTorch is built for AMD's (ROCm), where it is untested"
)
AMPERE = (8, 0)


def on_rocm() -> bool:
    """Whether `torch.cuda` means AMD's GPUs here."""
    return torch.version.hip is not None


def cuda_capability(device: torch.device | str | None = None) -> tuple[int, int]:
    """Compute capability of the GPU `device`; (0, 0) without an NVIDIA GPU that torch can use.
    Initializes CUDA."""
    if on_rocm() or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)
