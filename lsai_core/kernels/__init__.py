"""Triton kernels, one file each: what they compute, and how many bytes that moves.

They exist for NVIDIA's GPUs of compute capability 8.0 and newer, where torch brings Triton with it.
Callers ask `available(device)` first and have a plain torch path beside each kernel, which is also
what the tests compare them with. PyTorch for AMD's GPUs (ROCm) answers to the name of `torch.cuda`
and numbers its GPUs otherwise: a capability of 9.4 is no Hopper. Nothing of this package has been
tried there, so what was written for NVIDIA's GPUs refuses, and PyTorch's own operations run.

A kernel whose caller is no custom operator is one itself, so that it has a fake implementation: the
shapes of its results. Callers ask `serves(tensor)`, which is also true of fake tensors that stand
for a GPU's (`FakeGpu`).
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import CustomOpDef, custom_op, infer_schema

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


def fake_operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Makes a function on fake tensors an operator that exists for these only."""

    def operator(fake: Callable[..., Any]) -> CustomOpDef:
        def real(*_: Any) -> None:
            raise NotImplementedError(f"{name} exists for fake tensors only")

        schema = infer_schema(fake, mutates_args=())
        made = custom_op(name, real, mutates_args=(), schema=schema)
        made.register_fake(fake)
        return made

    return operator


def serves(tensor: Tensor) -> bool:
    """Whether Triton kernels, or their fake implementations, run on `tensor`."""
    return available(tensor.device) or isinstance(getattr(tensor, "fake_mode", None), FakeGpu)
