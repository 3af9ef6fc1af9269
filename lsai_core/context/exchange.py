"""Sending and receiving between the ranks of a context-parallel group, without waiting.

`start` posts a round of messages and returns a function that waits for them; whatever is computed in between overlaps. Between two
ranks messages arrive in the order in which they were posted, so both ends must post the same rounds in the same order; a plan
that all ranks share guarantees it. On GPUs a round is one NCCL group on NCCL's own stream: waiting only orders streams,
the host goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

Message = tuple[int, Tensor]  # (rank of the other end, a contiguous tensor)
Wait = Callable[[], None]


class Exchange(Protocol):
    """One rank's view of its group."""

    rank: int
    size: int

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Wait:
        """Post the messages; the tensors to receive into are filled once the returned function has returned.

        It may be called more than once."""
        ...


class GroupExchange:
    """Over a torch.distributed process group (None: the default one); `ranks` selects members of it, by group rank."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, list(ranks)
        self.rank, self.size = self._ranks.index(dist.get_rank(group)), len(self._ranks)
        self.sent_bytes = 0  # by this rank to others, so far

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Wait:
        """See `Exchange.start`. A peer that is gone raises torch's DistBackendError or RuntimeError, here or in the wait."""
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=self._ranks[peer])
            for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
        ]
        if not operations:
            return _nothing
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            for work in works:
                work.wait()
            works.clear()  # of gloo's, waiting twice would wait for another message
            operations.clear()  # which kept the tensors alive

        return wait


def _nothing() -> None:
    pass
