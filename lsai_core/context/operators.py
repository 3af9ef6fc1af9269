"""Attention of a ring as one differentiable operator: the plan's steps, forward and backward.

A custom operator is opaque to torch.compile, and gradient checkpointing can keep its results
(`lsai_core.model.recompute`): with the output and log-sum-exp of `attend` kept, recomputing a block
never repeats attention or its ring (the rematerialization-aware checkpointing of DistFlashAttn,
arXiv:2310.03294, section 3.3).
"""

from typing import Any

import torch
from torch import Tensor

from lsai_core.attention.choice import tile_backend
from lsai_core.attention.registry import TileKernel
from lsai_core.context.engine import planned_backward, planned_forward
from lsai_core.context.parts import PARTS, Parts


def _kernel(parts: Parts, q: Tensor, k: Tensor) -> TileKernel:
    grouped = q.shape[2] != k.shape[2]
    backend = tile_backend(
        parts.kernel,
        q.device,
        q.dtype,
        q.shape[3],
        window=parts.window,
        grouped=grouped,
        length=q.shape[1],
    )
    assert backend.tiles is not None
    return backend.tiles


@torch.library.custom_op("lsai::context_attend", mutates_args=())
def attend(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Output (B, S, H, D) and log-sum-exp (B, H, S) of this ring rank's queries against all keys of
    the ring."""
    parts = PARTS[key]
    kernel = _kernel(parts, q_BSHD, k_BSKD)
    return planned_forward(parts.plan, parts.ring, kernel, q_BSHD, k_BSKD, v_BSKD)


@torch.library.custom_op("lsai::context_attend_backward", mutates_args=())
def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key: int
) -> tuple[Tensor, Tensor, Tensor]:
    parts = PARTS[key]
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
