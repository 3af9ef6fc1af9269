"""The methods of sequence-parallel attention, and the one object that training and studies use:
`ContextParallel`.

Every method is a mesh of `ulysses` x `ring` ranks, a layout and a schedule; USP (Fang and Zhao
2024, arXiv:2405.07719) is the general case: heads are exchanged among neighbours in rank, and what
is left of the sequence goes around the ring. torch's own context parallelism (`torch`) is here as
the peer to compare with.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lsai_core.attention.choice import tile_backend
from lsai_core.base.errors import Unavailable, UserError, hint
from lsai_core.context.exchange import GroupExchange
from lsai_core.context.heads import exchange_to_heads, exchange_to_sequence, key_heads
from lsai_core.context.layout import Layout, contiguous, zigzag
from lsai_core.context.operators import attend
from lsai_core.context.parts import Parts, register
from lsai_core.context.plan import Plan, Schedule, make_plan


@dataclass(frozen=True)
class Method:
    """How a method lays out the sequence (`layout(length, ring ranks, pieces)`) and what it runs.

    `ulysses(ranks)`: how many ranks exchange heads, for that many ranks in all. `balanced`: every
    rank computes as much.
    """

    name: str
    layout: Callable[[int, int, int], Layout]
    schedule: Schedule = "ring"
    ulysses: Callable[[int], int] = lambda ranks: 1
    balanced: bool = True
    peer: bool = False


def _half(ranks: int) -> int:
    """Of R ranks, the smallest divisor from sqrt(R) on: 2 of 4, 4 of 8, all of a prime number."""
    return min(u for u in range(1, ranks + 1) if ranks % u == 0 and u * u >= ranks)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("ring", contiguous, balanced=False),
        Method("zigzag", zigzag),
        Method("lightseq", contiguous, schedule="lightseq"),
        Method("ulysses", contiguous, ulysses=lambda ranks: ranks),
        Method("usp", zigzag, ulysses=_half),
        Method("torch", zigzag, peer=True),
    )
}


def get_method(name: str) -> Method:
    """The method called `name`; UserError if there is none."""
    if name not in METHODS:
        raise UserError(f"unknown context-parallel method {name!r}{hint(name, METHODS)}")
    return METHODS[name]


@dataclass(frozen=True)
class ContextSetting:
    """What all ranks of a group must agree on. `ulysses`: ranks that exchange heads, None for the
    method's own choice."""

    method: str
    seq_len: int
    window: int | None = None
    kernel: str = "auto"
    ulysses: int | None = None

    def layout(self, ranks: int) -> Layout:
        """The layout over `ranks` ranks; UserError if the lengths or the mesh do not fit."""
        pieces = self.pieces(ranks)
        return get_method(self.method).layout(self.seq_len, ranks // pieces, pieces)

    def pieces(self, ranks: int) -> int:
        """How many of `ranks` ranks exchange heads with each other."""
        pieces = get_method(self.method).ulysses(ranks) if self.ulysses is None else self.ulysses
        if pieces < 1 or ranks % pieces:
            raise UserError(
                f"{ranks} ranks cannot be divided into groups of {pieces} that exchange heads"
            )
        if self.ulysses is not None and self.method != "usp":
            raise UserError(
                f"ulysses={self.ulysses} is a choice of the method usp, not of {self.method}"
            )
        return pieces

    def plan(self, ranks: int) -> Plan:
        """Who computes what among the ranks of one ring."""
        if self.window is not None and self.window < 1:
            raise UserError(f"window must be at least 1, got {self.window}")
        return make_plan(self.layout(ranks), self.window, get_method(self.method).schedule)


class ContextParallel:
    """Exact causal attention over a sequence that the ranks of a group share.

    Making one is collective: all ranks of the group call, with equal settings, else all raise
    `UserError`. What cannot work is refused before anything is sent.
    """

    def __init__(
        self,
        method: str,
        seq_len: int,
        *,
        window: int | None = None,
        kernel: str = "auto",
        ulysses: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        setting = ContextSetting(
            method,
            seq_len,
            None if window is not None and window >= seq_len else window,
            kernel,
            ulysses,
        )
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.agree(setting, group)
        self.setting, self.method = setting, get_method(method)
        self.layout, self.plan = setting.layout(self.size), setting.plan(self.size)
        self._group = group
        if self.method.peer:
            if window is not None:
                raise UserError(
                    "torch's context parallelism has no sliding window; use another method"
                )
            self.require_peer()
            return
        pieces = setting.pieces(self.size)
        ring_rank, piece = divmod(self.rank, pieces)
        neighbours = [ring_rank * pieces + other for other in range(pieces)]
        ring = [other * pieces + piece for other in range(self.size // pieces)]
        self._exchanges = GroupExchange(group, ring), GroupExchange(group, neighbours)
        parts = Parts(self.plan, *self._exchanges, kernel, setting.window)
        self._pieces, self._key = pieces, register(parts)

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent to others so far; not counted for torch's
        (`peer.torch_sent_bytes` says what it sends)."""
        return 0 if self.method.peer else sum(exchange.sent_bytes for exchange in self._exchanges)

    @property
    def positions_S(self) -> Tensor:
        """int64: the absolute positions of this rank's slice, for rotary embeddings
        (`Transformer.hidden`)."""
        return self.layout.positions(self.rank)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's slice of a whole sequence along `dim`."""
        return self.layout.shard(x, self.rank, dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence from all ranks' slices (all ranks must call; not differentiable)."""
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        dist.all_gather(parts, x.detach().contiguous(), group=self._group)
        return self.layout.unshard(parts, dim)

    def check(self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> None:
        """UserError or Unavailable if this rank's slices cannot work; communicates nothing."""
        batch, length, n_heads, head_dim = q_BSHD.shape
        n_kv_heads = k_BSKD.shape[2]
        if length * self.size != self.layout.length:
            raise UserError(
                f"rank {self.rank} holds {length} positions; {self.layout.length} over {self.size} "
                f"ranks are "
                f"{self.layout.length // self.size} each"
            )
        if k_BSKD.shape != v_BSKD.shape or k_BSKD.shape != (batch, length, n_kv_heads, head_dim):
            shapes = f"q {tuple(q_BSHD.shape)}, k {tuple(k_BSKD.shape)}, v {tuple(v_BSKD.shape)}"
            raise UserError(f"attention: {shapes} do not fit")
        if n_heads % n_kv_heads:
            raise UserError(
                f"attention: {n_heads} query heads are not a multiple of {n_kv_heads} key-value "
                f"heads"
            )
        if self.method.peer:
            return
        key_heads(n_heads, n_kv_heads, self._pieces)
        if torch.compiler.is_compiling():
            # the compiler cannot follow the choice of a kernel; the operator makes it when it runs
            return
        self.require_kernel(q_BSHD, grouped=n_heads != n_kv_heads)

    def attention(self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> Tensor:
        """Causal attention with scale 1/sqrt(D): this rank's slice (B, S / ranks, H, D) in the
        dtype of q, differentiable.

        Inputs are this rank's slices (`shard`), batch and heads whole; query head h reads key-value
        head h // (H // K). All ranks must call, and all must run the backward pass or none.
        """
        self.check(q_BSHD, k_BSKD, v_BSKD)
        if self.method.peer:
            return self.peer_attention(q_BSHD, k_BSKD, v_BSKD)
        n_heads, n_kv_heads = q_BSHD.shape[2], k_BSKD.shape[2]
        if self._pieces > 1:
            q_BSHD = exchange_to_heads(q_BSHD, n_heads, n_heads, self._key)
            k_BSKD = exchange_to_heads(k_BSKD, n_kv_heads, n_heads, self._key)
            v_BSKD = exchange_to_heads(v_BSKD, n_kv_heads, n_heads, self._key)
        out_BSHD, _ = attend(q_BSHD, k_BSKD, v_BSKD, self._key)
        if self._pieces > 1:
            out_BSHD = exchange_to_sequence(out_BSHD, n_heads, n_heads, self._key)
        return out_BSHD

    # What follows asks the machine; a prediction, which has no ranks and no kernels, overrides it.

    def agree(self, setting: ContextSetting, group: dist.ProcessGroup | None) -> None:
        """UserError on every rank unless all have the same setting, or where the setting itself is
        wrong.

        It also is the group's first collective, which NCCL needs before ranks may talk in pairs.
        """
        size = dist.get_world_size(group)
        try:
            setting.plan(size)
            error = None
        except UserError as found:
            error = str(found)
        answers: list[Any] = [None] * size
        dist.all_gather_object(answers, (asdict(setting), error), group=group)
        for _, message in answers:
            if message is not None:
                raise UserError(message)
        for name, value in answers[0][0].items():
            values = [answer[name] for answer, _ in answers]
            if any(other != value for other in values):
                raise UserError(
                    f"the ranks of a context-parallel group disagree on {name}: {values}"
                )

    def require_peer(self) -> None:
        """Unavailable where torch's own context parallelism cannot run."""
        from lsai_core.context.peer import torch_missing  # imports torch's compiler, a second

        if (reason := torch_missing()) is not None:
            raise Unavailable(f"torch's context parallelism {reason}")

    def require_kernel(self, q_BSHD: Tensor, *, grouped: bool) -> None:
        """UserError or Unavailable where the setting's kernel cannot serve such queries."""
        tile_backend(
            self.setting.kernel,
            q_BSHD.device,
            q_BSHD.dtype,
            q_BSHD.shape[3],
            window=self.setting.window,
            grouped=grouped,
        )

    def peer_attention(self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> Tensor:
        """This rank's slice of the output by torch's own context parallelism."""
        from lsai_core.context.peer import torch_attention

        return torch_attention(q_BSHD, k_BSKD, v_BSKD, self._group)
