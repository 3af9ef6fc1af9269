"""Triton kernels, one file each: what they compute, and how many bytes that moves.

They exist for CUDA GPUs, where torch brings Triton with it. Callers ask `available(device)` first
and have a plain torch path beside each kernel, which is also what the tests compare them with.
"""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def available(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`."""
    return device.type == "cuda" and _triton()
