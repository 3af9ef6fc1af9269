"""From shards of the sequence to shards of the heads and back: the all-to-all of Ulysses (Jacobs et
al. 2023, arXiv:2309.14509).

Each rank of a group of U holds all heads of 1/U of the positions, and afterwards 1/U of the heads
at all positions of the group, in rank order; attention then needs no other rank. Per rank q, k, v
and the output are sent once, whatever U: less than a ring sends as soon as there are a few ranks
and no grouping of heads.

Where there are fewer key-value heads than ranks, each goes to all ranks whose query heads read it,
and the gradients of the copies are summed.

The exchange is differentiable by itself: each way is the gradient of the other. As custom operators
the two are opaque to torch.compile.
"""

from typing import Any

import torch
from torch import Tensor

from lsai_core.base.errors import UserError
from lsai_core.context.exchange import Exchange, Message
from lsai_core.context.parts import PARTS

HeadRange = tuple[int, int]


def query_heads(n_heads: int, size: int) -> list[HeadRange]:
    """The query heads of each rank; UserError if they cannot be dealt evenly."""
    if n_heads % size:
        raise UserError(
            f"ulysses deals heads to ranks, and {n_heads} query heads cannot be dealt evenly to "
            f"{size}"
        )
    each = n_heads // size
    return [(rank * each, (rank + 1) * each) for rank in range(size)]


def key_heads(n_heads: int, n_kv_heads: int, size: int) -> list[HeadRange]:
    """The key-value heads that each rank's query heads read; UserError if ranks would share them
    unevenly."""
    if n_kv_heads % size and size % n_kv_heads:
        raise UserError(
            f"ulysses: {n_kv_heads} key-value heads over {size} ranks; one of the two must be a "
            f"multiple of the other"
        )
    group = n_heads // n_kv_heads
    return [(first // group, (last - 1) // group + 1) for first, last in query_heads(n_heads, size)]


def to_heads(x_BSHD: Tensor, heads: list[HeadRange], exchange: Exchange) -> Tensor:
    """(B, S, H, D), this rank's positions, all heads -> (B, U S, h, D), all ranks' positions, this
    rank's range of heads."""
    first, last = heads[exchange.rank]
    batch, length, _, head_dim = x_BSHD.shape
    parts_UBShD = x_BSHD.new_empty((exchange.size, batch, length, last - first, head_dim))
    sends: list[Message] = []
    receives: list[Message] = []
    for peer, (start, stop) in enumerate(heads):
        if peer == exchange.rank:
            parts_UBShD[peer] = x_BSHD[:, :, start:stop]
        else:
            sends.append((peer, x_BSHD[:, :, start:stop].contiguous()))
            receives.append((peer, parts_UBShD[peer]))
    exchange.start(sends, receives)()
    return parts_UBShD.transpose(0, 1).flatten(1, 2)  # a view for a single sequence


def to_sequence(x_BTHD: Tensor, heads: list[HeadRange], n_heads: int, exchange: Exchange) -> Tensor:
    """The way back, (B, U S, h, D) -> (B, S, H, D); where several ranks hold the same head the
    results are summed, in fp32."""
    parts = x_BTHD.chunk(exchange.size, dim=1)
    batch, length, _, head_dim = parts[0].shape
    wide = torch.promote_types(x_BTHD.dtype, torch.float32)
    copies = sum(stop - start for start, stop in heads) > n_heads
    whole_BSHD = x_BTHD.new_zeros(
        (batch, length, n_heads, head_dim), dtype=wide if copies else x_BTHD.dtype
    )
    sends: list[Message] = []
    received: list[Message] = []
    for peer, (start, stop) in enumerate(heads):
        if peer != exchange.rank:
            sends.append((peer, parts[peer].contiguous()))
            received.append((peer, x_BTHD.new_empty((batch, length, stop - start, head_dim))))
    wait = exchange.start(sends, received)
    for peer, part in [(exchange.rank, parts[exchange.rank]), *received]:
        if peer != exchange.rank:
            wait()
        start, stop = heads[peer]
        if copies:
            whole_BSHD[:, :, start:stop] += part
        else:
            whole_BSHD[:, :, start:stop] = part
    return whole_BSHD.to(x_BTHD.dtype)


@torch.library.custom_op("lsai::context_to_heads", mutates_args=())
def exchange_to_heads(x_BSHD: Tensor, n_heads: int, n_query_heads: int, key: int) -> Tensor:
    """`to_heads` for queries, or for keys and values where `n_heads` < `n_query_heads`."""
    exchange = PARTS[key].ulysses
    return to_heads(x_BSHD, _ranges(n_heads, n_query_heads, exchange.size), exchange)


@torch.library.custom_op("lsai::context_to_sequence", mutates_args=())
def exchange_to_sequence(x_BTHD: Tensor, n_heads: int, n_query_heads: int, key: int) -> Tensor:
    """`to_sequence`, the reverse of `exchange_to_heads`."""
    exchange = PARTS[key].ulysses
    return to_sequence(x_BTHD, _ranges(n_heads, n_query_heads, exchange.size), n_heads, exchange)


def _ranges(n_heads: int, n_query_heads: int, size: int) -> list[tuple[int, int]]:
    return (
        key_heads(n_query_heads, n_heads, size)
        if n_heads < n_query_heads
        else query_heads(n_heads, size)
    )


@exchange_to_heads.register_fake
def _(x: Tensor, n_heads: int, n_query_heads: int, key: int) -> Tensor:
    exchange = PARTS[key].ulysses
    first, last = _ranges(n_heads, n_query_heads, exchange.size)[exchange.rank]
    return x.new_empty((x.shape[0], x.shape[1] * exchange.size, last - first, x.shape[3]))


@exchange_to_sequence.register_fake
def _(x: Tensor, n_heads: int, _n_query_heads: int, key: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // PARTS[key].ulysses.size, n_heads, x.shape[3]))


def _exchange_keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.n_heads, ctx.n_query_heads, ctx.key = inputs


def _to_heads_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return exchange_to_sequence(gradient, ctx.n_heads, ctx.n_query_heads, ctx.key), None, None, None


def _to_sequence_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return exchange_to_heads(gradient, ctx.n_heads, ctx.n_query_heads, ctx.key), None, None, None


exchange_to_heads.register_autograd(_to_heads_gradient, setup_context=_exchange_keep)
exchange_to_sequence.register_autograd(_to_sequence_gradient, setup_context=_exchange_keep)
