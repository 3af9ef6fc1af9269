"""Triton kernels, one file each: what they compute, and how many bytes that moves.

They exist for CUDA GPUs, where torch brings Triton with it. Callers ask `available(device)` first
and have a plain torch path beside each kernel, which is also what the tests compare them with.

A kernel whose caller is no custom operator is one itself, so that it has a fake implementation: the
shapes of its results. Callers ask `serves(tensor)`, which is also true of fake tensors that stand
for a GPU's (`FakeGpu`).
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


@functools.cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def available(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`."""
    return device.type == "cuda" and _triton()


class FakeGpu(FakeTensorMode):
    """Fake tensors on the CPU that stand for a GPU's: the fake implementations of the kernels serve
    them."""


def serves(tensor: Tensor) -> bool:
    """Whether Triton kernels, or their fake implementations, run on `tensor`."""
    return available(tensor.device) or isinstance(getattr(tensor, "fake_mode", None), FakeGpu)
