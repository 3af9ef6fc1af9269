"""From a request to a kernel: the list of backends, how `auto` chooses among them, and `attention`
itself.

`auto` takes the fastest correct backend of the nearest shape that was measured on this kind of GPU
(`measured.py`). Where nothing was measured, fused kernels come before plain operations; with a
window, kernels that skip the tiles outside of it before those that mask them away; then the order
is that of `Backend.speed`, which each kernel's file states.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lsai_core.attention.measured import Ranking, nearest, rankings_for
from lsai_core.attention.registry import Backend, Case
from lsai_core.base.errors import Unavailable, UserError, hint
from lsai_core.base.plugins import declared, file_adds, names, own, place_of

_TAKEN = ("q_BSHD", "k_BSKD", "v_BSKD", "window", "causal")
PACKAGE = "lsai_core.attention.backends.*"

BACKENDS: dict[str, Backend] = {
    name: declared(PACKAGE, name, "BACKEND", "attention") for name in names(PACKAGE)
}
# These and those of the laboratory that were asked for by name.
_KERNELS = dict(BACKENDS)


def get_backend(name: str) -> Backend:
    """The backend called `name`, of this package or of the laboratory (`techniques/attention`);
    `UserError` if there is none (`auto` is not a backend: see `resolve`)."""
    if name in BACKENDS:
        return BACKENDS[name]
    known = ("auto", *BACKENDS, *own("attention"))
    if name not in known[1:]:
        raise UserError(
            f"unknown attention backend {name!r}{hint(name, known)}; {file_adds('attention')}"
        )
    found: Backend = declared(PACKAGE, name, "BACKEND", "attention", Backend)
    _KERNELS[name] = _looked_at(found)
    return _KERNELS[name]


@functools.cache
def _looked_at(backend: Backend) -> Backend:
    """The laboratory's backend, whose output is looked at: UserError unless it is one of q's shape
    and dtype, and where it does not take the five arguments."""
    try:
        inspect.signature(backend.function).bind(*_TAKEN)
    except TypeError:
        raise UserError(
            f"{place_of(backend.function)}: attention backend {backend.name} must take "
            f"({', '.join(_TAKEN)}), not {inspect.signature(backend.function)}"
        ) from None

    def function(
        q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, window: int | None, causal: bool
    ) -> Tensor:
        out = backend.function(q_BSHD, k_BSKD, v_BSKD, window, causal)
        if not isinstance(out, Tensor):
            given = f"{out!r:.80}"
        elif out.shape != q_BSHD.shape or out.dtype != q_BSHD.dtype:
            given = f"{tuple(out.shape)} in {out.dtype}"
        else:
            return out
        wanted = f"{tuple(q_BSHD.shape)} in {q_BSHD.dtype}"
        raise UserError(
            f"attention backend {backend.name} must return a tensor like q, {wanted}, not {given}"
        )

    return replace(backend, function=function)


def available_backends(device: torch.device | str, training: bool = True) -> dict[str, str | None]:
    """Every backend with None if it can run on `device` here, or the reason why it cannot.

    `training=False` asks for the forward pass alone.
    """
    device = torch.device(device)
    return {name: backend.missing(device, training) for name, backend in BACKENDS.items()}


def choose(
    case: Case, available: Mapping[str, str | None], measured: Sequence[Ranking] = ()
) -> str:
    """The fastest backend that is available and supports `case`: a pure function, the meaning of
    `auto`.

    `available` is what `available_backends` returns, `measured` what was measured on this kind of
    device (`measured.rankings_for`). Raises `Unavailable` if nothing fits.
    """
    found = nearest(case, measured)
    ranked = () if found is None else found.training if case.training else found.inference
    for name in (*ranked, *sorted(BACKENDS, key=lambda name: _unmeasured(BACKENDS[name], case))):
        if available[name] is None and BACKENDS[name].unsupported(case) is None:
            return name
    raise Unavailable(f"no attention backend here serves {case}")


def _unmeasured(backend: Backend, case: Case) -> tuple[bool, bool, int]:
    return not backend.fused, case.window is not None and backend.masked, -backend.speed


def resolve(
    backend: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    seq_len: int,
    window: int | None = None,
    *,
    causal: bool = True,
    grouped: bool = False,
) -> str:
    """The name of the kernel that `attention(..., backend=backend)` runs for such inputs, which
    learn.

    Raises `Unavailable` if this machine lacks the kernel, `UserError` if the combination can never
    work; callers that want the error before the first step (or the name for a record) ask here.
    """
    restricting = None if window is not None and window >= seq_len else window
    length = nearest_power_of_two(seq_len) if backend == "auto" else None
    mask = (restricting, causal)
    return _resolved(
        backend,
        torch.device(device),
        dtype,
        head_dim,
        *mask,
        grouped,
        length,
        seq_len == 1,
        training=True,
    )


# One request resolves the same way for the whole process: cached, because it stands in every layer
# of every step.
@functools.cache
def _resolved(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    window: int | None,
    causal: bool,
    grouped: bool,
    length: int | None,
    single_token: bool,
    training: bool,
) -> str:
    case = Case(
        device.type, dtype, head_dim, window, single_token, causal, grouped, length, training
    )
    if backend == "auto":
        available = available_backends(device, training)
        return choose(case, available, rankings_for(device, available))
    chosen = get_backend(backend)
    if (reason := chosen.missing(device, training)) is not None:
        raise Unavailable(f"attention backend {backend} {reason}")
    if (reason := chosen.unsupported(case)) is not None:
        raise UserError(f"attention backend {backend} {reason}; use another backend, or auto")
    return backend


def _resolved_constant(*request: Any) -> str:
    # A constant for torch.compile, so that imports and version checks never enter a graph.
    return _resolved(*request)


# All that `torch.compiler.assume_constant_result` does, but it imports the compiler, which takes a
# second in every process.
_resolved_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def nearest_power_of_two(seq_len: int) -> int:
    """By ratio: the lengths by which measured shapes are told apart."""
    # Comparisons only: of a symbolic length torch.compile then knows the range, and recompiles when
    # it is left.
    length = 1
    while 3 * length < 2 * seq_len:
        length *= 2
    return length


def attention(
    q_BSHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    *,
    backend: str = "auto",
    window: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Softmax attention with scale 1/sqrt(D): returns (B, S, H, D) in the dtype of q.

    q_BSHD: (batch, sequence, heads, head dimension); k_BSKD and v_BSKD: the same with K key-value
    heads, H % K == 0 (query head h reads key-value head h // (H // K)). Position i attends to j <=
    i; with `window=W` to i - W < j <= i (W >= S is no window); with `causal=False` to all
    positions, and there is no window. Raises `UserError` for shapes or combinations that cannot
    work, `Unavailable` if the machine lacks the backend.
    """
    batch, seq_len, n_heads, head_dim = q_BSHD.shape
    n_kv_heads = k_BSKD.shape[2]
    if k_BSKD.shape != v_BSKD.shape or k_BSKD.shape != (batch, seq_len, n_kv_heads, head_dim):
        q, k, v = (tuple(tensor.shape) for tensor in (q_BSHD, k_BSKD, v_BSKD))
        raise UserError(f"attention: q {q}, k {k}, v {v} do not fit")
    if n_heads % n_kv_heads:
        raise UserError(
            f"attention: {n_heads} query heads are not a multiple of {n_kv_heads} key-value heads"
        )
    if window is not None and window < 1:
        raise UserError(f"attention: window must be at least 1, got {window}")
    if window is not None and not causal:
        raise UserError(
            f"attention: window={window} looks back from each position and needs causal=True"
        )
    if window is not None and window >= seq_len:
        window = None
    training = torch.is_grad_enabled() and (
        q_BSHD.requires_grad or k_BSKD.requires_grad or v_BSKD.requires_grad
    )
    # Branches, because torch.compile keeps the comparisons themselves symbolic.
    single_token = grouped = False
    if seq_len == 1:
        single_token = True
    if n_heads != n_kv_heads:
        grouped = True
    length = nearest_power_of_two(seq_len) if backend == "auto" else None
    name = _resolved_constant(
        backend,
        q_BSHD.device,
        q_BSHD.dtype,
        head_dim,
        window,
        causal,
        grouped,
        length,
        single_token,
        training,
    )
    return _KERNELS[name].function(q_BSHD, k_BSKD, v_BSKD, window, causal)


# Asked in every layer of every step, hence cached.
@functools.cache
def tile_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    window: int | None = None,
    grouped: bool = False,
    length: int = 8192,
) -> Backend:
    """The backend called `name`, or for `auto` the fastest, that has a kernel for tiles; UserError
    or Unavailable if it cannot serve such inputs.

    `length`: queries of a tile, for `auto`.
    """
    case = Case(device.type, dtype, head_dim, window, False, True, grouped, length)
    if name == "auto":
        own = {
            other: reason if BACKENDS[other].tiles else "returns no log-sum-exp"
            for other, reason in available_backends(device).items()
        }
        name = choose(case, own, rankings_for(device, own))
    backend = get_backend(name)
    if backend.tiles is None:
        able = ", ".join(other for other, each in BACKENDS.items() if each.tiles)
        raise UserError(
            f"attention backend {name} returns no log-sum-exp; for context parallelism: {able}"
        )
    if (reason := backend.missing(device)) is not None:
        raise Unavailable(f"attention backend {name} {reason}")
    if (reason := backend.unsupported(case)) is not None:
        raise UserError(f"attention backend {name} {reason}; use another backend, or auto")
    return backend
