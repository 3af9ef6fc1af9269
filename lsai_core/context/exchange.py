"""Sending and receiving between the ranks of a context-parallel group, without waiting.

`start` posts a round of messages and returns a function that waits for them; whatever is computed
in between overlaps. Between two ranks messages arrive in the order in which they were posted, so
both ends must post the same rounds in the same order; a plan that all ranks share guarantees it. On
GPUs a round is one NCCL group on NCCL's own stream: waiting only orders streams, the host goes on.

It must not go on for ever: PyTorch's allocator gives a message's memory to nobody else before the
GPU has reached the point at which the host let go of it (`record_stream`, which messages between
two ranks cannot do without). A host that has queued whole layers ahead holds back their messages,
of Llama-2-7B at 128K tokens 70 GiB beside 34 in use. So the host waits for the GPU as long as more
than `IN_FLIGHT_BYTES` are on their way; at lengths at which the host is the slower one that never
happens.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Message = tuple[int, Tensor]  # (rank of the other end, a contiguous tensor)
Wait = Callable[[], None]

IN_FLIGHT_BYTES = 2**30


class InFlight:
    """The messages that the GPU has not come to yet, by the order in which they were waited for."""

    def __init__(self, limit_bytes: int = IN_FLIGHT_BYTES) -> None:
        self._limit, self.total_bytes = limit_bytes, 0
        self._rounds: deque[tuple[Any, int]] = deque()

    def waited(self, event: Any, size: int) -> None:
        """A round of `size` bytes is over for the host; for the GPU it is once `event` (a
        torch.cuda.Event) has happened."""
        self._rounds.append((event, size))
        self.total_bytes += size

    def make_room(self) -> None:
        """Let the host wait until no more than the limit is in flight."""
        while self.total_bytes > self._limit:
            event, size = self._rounds.popleft()
            event.synchronize()
            self.total_bytes -= size


# One for all groups of a process: they share its memory.
_in_flight = InFlight()


class Exchange(Protocol):
    """One rank's view of its group."""

    rank: int
    size: int

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Wait:
        """Post the messages; the tensors to receive into are filled once the returned function has
        returned.

        It may be called more than once."""
        ...


class GroupExchange:
    """Over a torch.distributed process group (None: the default one); `ranks` selects members of
    it, by group rank."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, list(ranks)
        self.rank, self.size = self._ranks.index(dist.get_rank(group)), len(self._ranks)
        self.sent_bytes = 0  # by this rank to others, so far

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Wait:
        """See `Exchange.start`. A peer that is gone raises torch's DistBackendError or
        RuntimeError, here or in the wait."""
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=self._ranks[peer])
            for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
        ]
        if not operations:
            return lambda: None
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        size, on_gpu = (
            sum(tensor.nbytes for _, tensor in [*sends, *receives]),
            operations[0].tensor.is_cuda,
        )
        if on_gpu:
            _in_flight.make_room()
        works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            if not operations:
                return
            for work in works:
                work.wait()
            works.clear()  # of gloo's, waiting twice would wait for another message
            operations.clear()  # which kept the tensors alive
            if on_gpu:
                _in_flight.waited(torch.cuda.current_stream().record_event(), size)

        return wait
