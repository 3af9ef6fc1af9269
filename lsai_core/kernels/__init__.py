"""Triton kernels, one file each: what they compute, and how many bytes that moves.

They exist for NVIDIA's GPUs of compute capability 8.0 and newer, where torch brings Triton with it.
Callers ask `available(device)` first and have a plain torch path beside each kernel, which is also
what the tests compare them with.

A kernel whose caller is no custom operator is one itself, so that it has a fake implementation: the
shapes of its results. Callers ask `serves(tensor)`, which is also true of fake tensors that stand
for a GPU's (`FakeGpu`).
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lsai_core.base.devices import AMPERE, cuda_capability


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


class FakeGpu(FakeTensorMode):
    """Fake tensors on the CPU that stand for a GPU's: the fake implementations of the kernels serve
    them. A copied module's tensors stay in the same mode."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def serves(tensor: Tensor) -> bool:
    """Whether Triton kernels, or their fake implementations, run on `tensor`."""
    return available(tensor.device) or isinstance(getattr(tensor, "fake_mode", None), FakeGpu)
