"""Triton kernels, one file each: what they compute, and how many bytes that moves.

They exist for NVIDIA's GPUs of compute capability 8.0 and newer, where torch brings Triton with it.
Callers ask `available(device)` first and have a plain torch path beside each kernel, which is also
what the tests compare them with.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from lsai_core.devices import AMPERE, cuda_capability


@functools.cache
def _triton() -> bool:
    """Triton, and no GPU that it was not tried on (older ones lack bf16, AMD's are others). Without
    a GPU nothing speaks against it."""
    if torch.cuda.is_available() and cuda_capability() < AMPERE:
        return False
    return importlib.util.find_spec("triton") is not None


def available(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`."""
    return device.type == "cuda" and _triton()
