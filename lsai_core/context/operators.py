"""The three differentiable operators that context-parallel attention is made of, registered with
torch.

    to_heads (q, k, v) -> attend (q, k, v) -> to_sequence (out)

As custom operators they are opaque to torch.compile, and gradient checkpointing can keep their
results (`lsai_core.model.recompute`): with the output and log-sum-exp of `attend` kept, recomputing
a block never repeats attention or its ring (the rematerialization-aware checkpointing of
DistFlashAttn, arXiv:2310.03294, section 3.3).

An operator takes no Python objects, so each set-up (`Parts`) has a key under which the operators
find it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lsai_core.context.engine import planned_backward, planned_forward
from lsai_core.context.exchange import Exchange
from lsai_core.context.heads import key_heads, query_heads, to_heads, to_sequence
from lsai_core.context.kernels import local_kernel
from lsai_core.context.plan import Plan


@dataclass(frozen=True, eq=False)
class Parts:
    """What the operators work with. `ulysses`: the ranks that exchange heads; `ring`: those that
    share the plan."""

    plan: Plan
    ring: Exchange
    ulysses: Exchange
    kernel: str
    window: int | None


_PARTS: list[Parts] = []


def register(parts: Parts) -> int:
    """The key under which the operators find `parts`, for the rest of the process."""
    _PARTS.append(parts)
    return len(_PARTS) - 1


def _kernel(parts: Parts, q: Tensor, k: Tensor) -> Any:
    grouped = q.shape[2] != k.shape[2]
    return local_kernel(
        parts.kernel,
        q.device,
        q.dtype,
        q.shape[3],
        window=parts.window,
        grouped=grouped,
        length=q.shape[1],
    )


@torch.library.custom_op("lsai::context_attend", mutates_args=())
def attend(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Output (B, S, H, D) and log-sum-exp (B, H, S) of this ring rank's queries against all keys of
    the ring."""
    parts = _PARTS[key]
    kernel = _kernel(parts, q_BSHD, k_BSKD)
    return planned_forward(parts.plan, parts.ring, kernel, q_BSHD, k_BSKD, v_BSKD)


@torch.library.custom_op("lsai::context_attend_backward", mutates_args=())
def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key: int
) -> tuple[Tensor, Tensor, Tensor]:
    parts = _PARTS[key]
    return planned_backward(parts.plan, parts.ring, _kernel(parts, q, k), dout, q, k, v, out, lse)


def _dense(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@attend.register_fake
def _(q: Tensor, _k: Tensor, _v: Tensor, _key: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return _dense(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)


@_attend_backward.register_fake
def _(
    _dout: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _lse: Tensor, _key: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _dense(q), _dense(k), _dense(v)


def _attend_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, ctx.key = inputs
    ctx.save_for_backward(*qkv, *output)


def _attend_gradients(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    # The log-sum-exp is not used outside, so its gradient is always zero.
    return *_attend_backward(dout, *ctx.saved_tensors, ctx.key), None


attend.register_autograd(_attend_gradients, setup_context=_attend_keep)


@torch.library.custom_op("lsai::context_to_heads", mutates_args=())
def exchange_to_heads(x_BSHD: Tensor, n_heads: int, n_query_heads: int, key: int) -> Tensor:
    """`heads.to_heads` for queries, or for keys and values where `n_heads` < `n_query_heads`."""
    exchange = _PARTS[key].ulysses
    return to_heads(x_BSHD, _ranges(n_heads, n_query_heads, exchange.size), exchange)


@torch.library.custom_op("lsai::context_to_sequence", mutates_args=())
def exchange_to_sequence(x_BTHD: Tensor, n_heads: int, n_query_heads: int, key: int) -> Tensor:
    """`heads.to_sequence`, likewise."""
    exchange = _PARTS[key].ulysses
    return to_sequence(x_BTHD, _ranges(n_heads, n_query_heads, exchange.size), n_heads, exchange)


def _ranges(n_heads: int, n_query_heads: int, size: int) -> list[tuple[int, int]]:
    return (
        key_heads(n_query_heads, n_heads, size)
        if n_heads < n_query_heads
        else query_heads(n_heads, size)
    )


@exchange_to_heads.register_fake
def _(x: Tensor, n_heads: int, n_query_heads: int, key: int) -> Tensor:
    exchange = _PARTS[key].ulysses
    first, last = _ranges(n_heads, n_query_heads, exchange.size)[exchange.rank]
    return x.new_empty((x.shape[0], x.shape[1] * exchange.size, last - first, x.shape[3]))


@exchange_to_sequence.register_fake
def _(x: Tensor, n_heads: int, _n_query_heads: int, key: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // _PARTS[key].ulysses.size, n_heads, x.shape[3]))


def _exchange_keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.n_heads, ctx.n_query_heads, ctx.key = inputs


def _to_heads_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return exchange_to_sequence(gradient, ctx.n_heads, ctx.n_query_heads, ctx.key), None, None, None


def _to_sequence_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return exchange_to_heads(gradient, ctx.n_heads, ctx.n_query_heads, ctx.key), None, None, None


exchange_to_heads.register_autograd(_to_heads_gradient, setup_context=_exchange_keep)
exchange_to_sequence.register_autograd(_to_sequence_gradient, setup_context=_exchange_keep)
