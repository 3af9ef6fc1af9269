"""Carrying out a plan: one rank's part of sequence-parallel attention, forward and backward, on
plain tensors.

Before a step is computed, what the next one needs is already on its way; results for other ranks
are sent while the next step computes. Partial outputs are merged in fp32 by their log-sum-exp:

    lse = log(exp(lse_a) + exp(lse_b));  out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)

The backward pass takes the same steps. A worker computes dq, dk and dv of its tiles from the output
and lse of the whole row; gradients of other ranks' queries and keys are sent to their owners in the
dtype of the inputs and summed there in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lsai_core.attention.registry import TileKernel
from lsai_core.context.exchange import Exchange, Message, Wait
from lsai_core.context.layout import Tile
from lsai_core.context.merge import merge
from lsai_core.context.plan import Plan, Task

Range = tuple[int, int]


def planned_forward(
    plan: Plan,
    exchange: Exchange,
    kernel: TileKernel,
    q_BSHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
) -> tuple[Tensor, Tensor]:
    """This rank's output (B, S, H, D), in the dtype of q, and log-sum-exp (B, H, S), fp32; S is a
    ring shard's length."""
    me, rows = exchange.rank, _Rows(q_BSHD)
    own = _Own([q_BSHD], [k_BSKD, v_BSKD])
    arriving = _Arriving(rows.merge)
    for step, current in _walk(plan, exchange, own):
        sends: list[Message] = []
        for task in step:
            if task.worker != me:
                continue
            (q,), (k, v) = current.inputs(task, own)
            results = rows if task.q_owner == me else _Rows(q)
            q_base = 0 if task.q_owner == me else task.q_range[0]
            for tile in task.tiles:
                qs, ks = _slices(task, tile)
                out, lse = kernel.forward(q[:, qs], k[:, ks], v[:, ks], tile.left, tile.right)
                results.merge((tile.q0 - q_base, tile.q1 - q_base), out, lse)
            if task.q_owner != me:
                sends += [(task.q_owner, x.contiguous()) for x in results.finished(q.dtype)]
        arriving.land()
        receives: list[Message] = []
        for task in step:
            if task.q_owner == me and task.worker != me:
                n = task.q_range[1] - task.q_range[0]
                out = q_BSHD.new_empty((q_BSHD.shape[0], n, *q_BSHD.shape[2:]))
                lse = torch.empty(
                    (q_BSHD.shape[0], q_BSHD.shape[2], n), dtype=rows.wide, device=q_BSHD.device
                )
                receives += [(task.worker, out), (task.worker, lse)]
                arriving.expect(task.q_range, out, lse)
        arriving.wait_for(exchange.start(sends, receives))
    arriving.land()
    return rows.finished(q_BSHD.dtype)


def _gradients(
    kernel: TileKernel, task: Task, for_queries: list[Tensor], keys: list[Tensor]
) -> tuple[_Sum, _Sum, _Sum]:
    """Of a task's tiles: sums of the gradients of its q, k and v."""
    (q, dout, out, lse_BSH), (k, v) = for_queries, keys
    dq_part, dk_part, dv_part = _Sum(q), _Sum(k), _Sum(v)
    for tile in task.tiles:
        qs, ks = _slices(task, tile)
        lse = lse_BSH[:, qs].transpose(1, 2).contiguous()
        dq, dk, dv = kernel.backward(
            dout[:, qs].contiguous(),
            q[:, qs],
            k[:, ks],
            v[:, ks],
            out[:, qs],
            lse,
            tile.left,
            tile.right,
        )
        dq_part.add((qs.start, qs.stop), dq)
        dk_part.add((ks.start, ks.stop), dk)
        dv_part.add((ks.start, ks.stop), dv)
    return dq_part, dk_part, dv_part


def planned_backward(
    plan: Plan,
    exchange: Exchange,
    kernel: TileKernel,
    dout_BSHD: Tensor,
    q_BSHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    out_BSHD: Tensor,
    lse_BHS: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtypes."""
    me = exchange.rank
    dq_sum, dk_sum, dv_sum = _Sum(q_BSHD), _Sum(k_BSKD), _Sum(v_BSKD)
    own = _Own([q_BSHD, dout_BSHD, out_BSHD, lse_BHS.transpose(1, 2)], [k_BSKD, v_BSKD])

    def add_keys(at: Range, dk: Tensor, dv: Tensor) -> None:
        dk_sum.add(at, dk)
        dv_sum.add(at, dv)

    arriving_dq, arriving_dkv = _Arriving(dq_sum.add), _Arriving(add_keys)
    for step, current in _walk(plan, exchange, own):
        sends: list[Message] = []
        for task in step:
            if task.worker != me:
                continue
            dq_part, dk_part, dv_part = _gradients(kernel, task, *current.inputs(task, own))
            if task.q_owner == me:
                dq_sum.add(task.q_range, dq_part.total())
            else:
                sends.append((task.q_owner, dq_part.finished()))
            if task.k_owner == me:
                add_keys(task.k_range, dk_part.total(), dv_part.total())
            else:
                sends += [(task.k_owner, dk_part.finished()), (task.k_owner, dv_part.finished())]
        arriving_dq.land()
        arriving_dkv.land()
        receives: list[Message] = []
        for task in step:
            if task.worker == me:
                continue
            if task.q_owner == me:
                dq = _empty(q_BSHD, task.q_range)
                receives.append((task.worker, dq))
                arriving_dq.expect(task.q_range, dq)
            if task.k_owner == me:
                dk, dv = _empty(k_BSKD, task.k_range), _empty(v_BSKD, task.k_range)
                receives += [(task.worker, dk), (task.worker, dv)]
                arriving_dkv.expect(task.k_range, dk, dv)
        wait = exchange.start(sends, receives)
        arriving_dq.wait_for(wait)
        arriving_dkv.wait_for(wait)
    arriving_dq.land()
    arriving_dkv.land()
    return dq_sum.finished(), dk_sum.finished(), dv_sum.finished()


def _slices(task: Task, tile: Tile) -> tuple[slice, slice]:
    (q_base, _), (k_base, _) = task.q_range, task.k_range
    return slice(tile.q0 - q_base, tile.q1 - q_base), slice(tile.k0 - k_base, tile.k1 - k_base)


def _empty(like_BSHD: Tensor, at: Range) -> Tensor:
    return like_BSHD.new_empty((like_BSHD.shape[0], at[1] - at[0], *like_BSHD.shape[2:]))


@dataclass
class _Own:
    """What this rank holds: tensors along its queries and along its keys; the sequence is dimension
    1."""

    queries: Sequence[Tensor]
    keys: Sequence[Tensor]


class _Fetched:
    """What a step needs from other ranks, by task; `wait` once before use."""

    def __init__(self) -> None:
        self.queries: dict[Task, list[Tensor]] = {}
        self.keys: dict[Task, list[Tensor]] = {}
        self.wait: Wait = lambda: None

    def inputs(self, task: Task, own: _Own) -> tuple[list[Tensor], list[Tensor]]:
        """The task's ranges of queries and keys, fetched or this rank's own."""
        queries = self.queries.get(task) or [x[:, slice(*task.q_range)] for x in own.queries]
        keys = self.keys.get(task) or [x[:, slice(*task.k_range)] for x in own.keys]
        return queries, keys


def _walk(plan: Plan, exchange: Exchange, own: _Own) -> Iterator[tuple[Sequence[Task], _Fetched]]:
    """Each step with what it needs; what the next one needs is on its way by then."""
    fetched = _fetch(plan.steps[0], exchange, own)
    for index, step in enumerate(plan.steps):
        current, upcoming = fetched, plan.steps[index + 1 : index + 2]
        current.wait()
        if upcoming:
            fetched = _fetch(upcoming[0], exchange, own)
        yield step, current


def _fetch(step: Sequence[Task], exchange: Exchange, own: _Own) -> _Fetched:
    """Post what moves before a step can be computed: queries and keys to workers that do not own
    them."""
    me, fetched = exchange.rank, _Fetched()
    sends: list[Message] = []
    receives: list[Message] = []
    for task in step:
        for owner, at, mine, kept in (
            (task.q_owner, task.q_range, own.queries, fetched.queries),
            (task.k_owner, task.k_range, own.keys, fetched.keys),
        ):
            if owner == task.worker:
                continue
            if owner == me:
                sends += [(task.worker, x[:, slice(*at)].contiguous()) for x in mine]
            if task.worker == me:
                kept[task] = [_empty(x, at) for x in mine]
                receives += [(owner, x) for x in kept[task]]
    fetched.wait = exchange.start(sends, receives)
    return fetched


class _Arriving:
    """Results that others computed for this rank: added by `add` once they have landed, a step
    after they were sent."""

    def __init__(self, add: Callable[..., None]) -> None:
        self._add, self._expected = add, list[tuple[Range, tuple[Tensor, ...]]]()
        self._wait: Wait | None = None

    def expect(self, at: Range, *tensors: Tensor) -> None:
        self._expected.append((at, tensors))

    def wait_for(self, wait: Wait) -> None:
        self._wait = wait

    def land(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
        for at, tensors in self._expected:
            self._add(at, *tensors)
        self._expected.clear()


class _Rows:
    """The output of some queries, merged from parts. A single part that covers all rows is kept as
    it is."""

    def __init__(self, q_BSHD: Tensor) -> None:
        self._shape, self._device = q_BSHD.shape, q_BSHD.device
        self.wide = torch.promote_types(q_BSHD.dtype, torch.float32)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def merge(self, at: Range, out_BSHD: Tensor, lse_BHS: Tensor) -> None:
        batch, length, heads, _ = self._shape
        if self._out is None and at == (0, length):
            self._out, self._lse = out_BSHD, lse_BHS
            return
        if self._out is None or self._lse is None:
            self._out = torch.zeros(self._shape, dtype=self.wide, device=self._device)
            self._lse = torch.full(
                (batch, heads, length), float("-inf"), dtype=self.wide, device=self._device
            )
        if self._out.dtype != self.wide:
            self._out = self._out.to(self.wide)
        merge(self._out[:, slice(*at)], self._lse[:, :, slice(*at)], out_BSHD, lse_BHS)

    def finished(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        assert self._out is not None and self._lse is not None
        return self._out.to(dtype).contiguous(), self._lse.contiguous()


class _Sum:
    """A sum in fp32 of parts of a tensor like `like`. A single part that covers all of it is kept
    as it is."""

    def __init__(self, like_BSHD: Tensor) -> None:
        self._like, self._owned = like_BSHD, False
        self._sum: Tensor | None = None

    def add(self, at: Range, part: Tensor) -> None:
        wide = torch.promote_types(self._like.dtype, torch.float32)
        if self._sum is None and at == (0, self._like.shape[1]):
            self._sum = part
            return
        if self._sum is None:
            self._sum, self._owned = torch.zeros_like(self._like, dtype=wide), True
        if not self._owned:
            self._sum, self._owned = self._sum.to(wide, copy=True), True
        self._sum[:, slice(*at)] += part

    def total(self) -> Tensor:
        assert self._sum is not None
        return self._sum

    def finished(self) -> Tensor:
        return (
            torch.zeros_like(self._like) if self._sum is None else self._sum.to(self._like.dtype)
        ).contiguous()
