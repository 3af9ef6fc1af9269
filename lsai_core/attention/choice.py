"""From a request to a kernel: the list of backends, the order in which `auto` tries them, and `attention` itself.

The order follows what is known to be fast where: on Hopper, causal, bf16, FlashAttention-4 is ahead of cuDNN, and
cuDNN of FlashAttention-2; in fp32 only the memory-efficient kernel is fused; torch's CPU flash kernel is the fused
one on CPUs. With a window, kernels that skip the tiles outside of it come before kernels that compute them and mask
them away.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lsai_core.attention.eager import EAGER
from lsai_core.attention.flash import FA2, FA3, FA4
from lsai_core.attention.flex import FLEX
from lsai_core.attention.registry import HALF, Backend, Case
from lsai_core.attention.sdpa import SDPA_CUDNN, SDPA_EFFICIENT, SDPA_FLASH, SDPA_MATH
from lsai_core.errors import Unavailable, UserError

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (EAGER, SDPA_MATH, SDPA_EFFICIENT, SDPA_FLASH, SDPA_CUDNN, FLEX, FA2, FA3, FA4)
}

ELSEWHERE: tuple[str, ...] = ("sdpa_flash", "sdpa_math", "eager")
CUDA_HALF = ("fa4", "sdpa_cudnn", "fa3", "fa2", "sdpa_flash", "flex", "sdpa_efficient", "sdpa_math", "eager")
CUDA_FULL = ("sdpa_efficient", "flex", "sdpa_math", "eager")
CUDA_FULL_WINDOW = ("flex", "sdpa_efficient", "sdpa_math", "eager")


def get_backend(name: str) -> Backend:
    """The backend called `name`; `UserError` if there is none (`auto` is not a backend: see `resolve`)."""
    if name not in BACKENDS:
        raise UserError(f"unknown attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]


def available_backends(device: torch.device | str, training: bool = True) -> dict[str, str | None]:
    """Every backend with None if it can run on `device` here, or the reason why it cannot.

    `training=False` asks for the forward pass alone.
    """
    device = torch.device(device)
    return {name: backend.missing(device, training) for name, backend in BACKENDS.items()}


def choose(case: Case, available: Mapping[str, str | None]) -> str:
    """The fastest backend that is available and supports `case`: a pure function, the meaning of `auto`.

    `available` is what `available_backends` returns. Raises `Unavailable` if nothing fits.
    """
    if case.device_type != "cuda":
        order = ELSEWHERE
    elif case.dtype in HALF:
        order = CUDA_HALF
    else:
        order = CUDA_FULL if case.window is None else CUDA_FULL_WINDOW
    for name in order:
        if available[name] is None and BACKENDS[name].unsupported(case) is None:
            return name
    raise Unavailable(f"no attention backend here serves {case}")


def resolve(
    backend: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    seq_len: int,
    window: int | None = None,
    training: bool = True,
) -> str:
    """The name of the kernel that `attention(..., backend=backend)` runs for such inputs.

    Raises `Unavailable` if this machine lacks the kernel, `UserError` if the combination can never work; callers that
    want the error before the first step (or the name for a record) ask here.
    """
    restricting = None if window is not None and window >= seq_len else window
    return _resolved(backend, torch.device(device), dtype, head_dim, restricting, seq_len == 1, training)


# One request resolves the same way for the whole process: cached, because it stands in every layer of every step.
@functools.cache
def _resolved(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    window: int | None,
    single_token: bool,
    training: bool,
) -> str:
    case = Case(device.type, dtype, head_dim, window, single_token)
    if backend == "auto":
        return choose(case, available_backends(device, training))
    chosen = get_backend(backend)
    if (reason := chosen.missing(device, training)) is not None:
        raise Unavailable(f"attention backend {backend} {reason}")
    if (reason := chosen.unsupported(case)) is not None:
        raise UserError(f"attention backend {backend} {reason}; use another backend, or auto")
    return backend


@torch.compiler.assume_constant_result
def _resolved_constant(*request: Any) -> str:
    # A constant for torch.compile, so that imports and version checks never enter a graph.
    return _resolved(*request)


def attention(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, *, backend: str = "auto", window: int | None = None
) -> Tensor:
    """Causal softmax attention with scale 1/sqrt(D): returns (B, S, H, D) in the dtype of q.

    q_BSHD: (batch, sequence, heads, head dimension); k_BSKD and v_BSKD: the same with K key-value heads, H % K == 0
    (query head h reads key-value head h // (H // K)). `window=W`: position i attends to i - W < j <= i; None or W >=
    S is full causal attention. Raises `UserError` for shapes or combinations that cannot work, `Unavailable` if the
    machine lacks the backend.
    """
    batch, seq_len, n_heads, head_dim = q_BSHD.shape
    if k_BSKD.shape != v_BSKD.shape or k_BSKD.shape != (batch, seq_len, k_BSKD.shape[2], head_dim):
        raise UserError(
            f"attention: q {tuple(q_BSHD.shape)}, k {tuple(k_BSKD.shape)}, v {tuple(v_BSKD.shape)} do not fit"
        )
    if n_heads % k_BSKD.shape[2]:
        raise UserError(f"attention: {n_heads} query heads are not a multiple of {k_BSKD.shape[2]} key-value heads")
    if window is not None and window < 1:
        raise UserError(f"attention: window must be at least 1, got {window}")
    if window is not None and window >= seq_len:
        window = None
    training = torch.is_grad_enabled() and (q_BSHD.requires_grad or k_BSKD.requires_grad or v_BSKD.requires_grad)
    single_token = False
    if seq_len == 1:  # a branch, because torch.compile keeps the comparison itself symbolic
        single_token = True
    name = _resolved_constant(backend, q_BSHD.device, q_BSHD.dtype, head_dim, window, single_token, training)
    return BACKENDS[name].function(q_BSHD, k_BSKD, v_BSKD, window)
