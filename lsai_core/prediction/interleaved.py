"""How long a step of an interleaved pipeline takes: PyTorch's own order of computations and
messages, played through.

Its schedule posts every message by itself. Messages of one process group are a stream (of NCCL's),
in which each waits for those that were posted before it, and for all that the process had been
given to compute by then. So a receive whose sender is late holds up the messages behind it, and
with them other processes. Counted without messages (Narayanan et al. 2021, 2.2) two stages a
process halve the waiting; played through, they can make it longer.

A message takes no time of its own here: what processes send is part of their time.
"""

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from lsai_core.config.train import TrainConfig
from lsai_core.parallel.pipeline import stages_of
from lsai_core.prediction.process import one_rank

Action = tuple[int, str, int]  # stage; F, B or SEND_ or RECV_ with one of them; micro-batch
Message = tuple[str, int, int]  # F or B; sending stage; micro-batch
_WHAT = {"F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"}


def step_s(config: TrainConfig, busy_s: Sequence[float]) -> float:
    """Seconds of a step whose processes, by rank in the pipeline, compute for `busy_s`.

    A block takes a third of its time forward (2 products backward for each forward), or a quarter
    if it is computed a second time for its gradients. What a process does beside its blocks, it
    does at the end of the model that it has: the loss forward, the embedding backward.
    """
    stages, processes = stages_of(config), config.parallel.pp
    blocks = [sum(map(len, stages[rank::processes])) for rank in range(processes)]
    each_s = [busy / config.grad_accum for busy in busy_s]
    block_s = min(busy / own for busy, own in zip(each_s, blocks, strict=True))
    forward = 1 / (3 + config.computed_again / config.model.n_layers)
    more_s = {
        (len(stages) - 1, "F") if rank == processes - 1 else (rank, "B"): busy - own * block_s
        for rank, (busy, own) in enumerate(zip(each_s, blocks, strict=True))
    }

    def seconds(stage: int, what: str) -> float:
        share = forward if what == "F" else 1 - forward
        return len(stages[stage]) * block_s * share + more_s.get((stage, what), 0.0)

    return played(_orders(processes, config.grad_accum), len(stages), seconds)


def played(
    orders: Mapping[int, Sequence[Action]], stages: int, seconds: Callable[[int, str], float]
) -> float:
    """When the last process is through. `orders`: what each is given to do; `seconds(stage, what)`:
    of one micro-batch, forward (F) or backward (B)."""
    posted, ended = dict[Message, float](), dict[Message, float]()
    processes = [_Process(actions, stages, posted, ended) for actions in orders.values()]
    while any(process.go_on(seconds) for process in processes):  # the first that can
        pass
    assert not any(process.left for process in processes), "processes wait for one another"
    return max(process.computed_s for process in processes)


class _Process:
    """What one process has still to do. `posted`: when messages could begin that one end has
    posted; `ended`: when they had come, of all processes."""

    def __init__(
        self,
        actions: Sequence[Action],
        stages: int,
        posted: dict[Message, float],
        ended: dict[Message, float],
    ) -> None:
        self.left, self.computed_s = deque(actions), 0.0
        self._stages, self._posted, self._ended = stages, posted, ended
        self._before: Message | None = None  # the message that it posted last

    def go_on(self, seconds: Callable[[int, str], float]) -> bool:
        """Do what can be done; whether that was anything."""
        count = len(self.left)
        while self.left and self._do(*self.left[0], seconds):
            self.left.popleft()
        return len(self.left) < count

    def _do(self, stage: int, what: str, batch: int, seconds: Callable[[int, str], float]) -> bool:
        if what not in ("F", "B"):
            return self._post(message(stage, what, batch))
        if stage != (0 if what == "F" else self._stages - 1):  # where nothing comes from a stage
            if (came_s := self._ended.get(message(stage, f"RECV_{what}", batch))) is None:
                return False
            self.computed_s = max(self.computed_s, came_s)
        self.computed_s += seconds(stage, what)
        return True

    def _post(self, sent: Message) -> bool:
        begin_s = self.computed_s
        if self._before is not None:
            if self._before not in self._ended:
                return False
            begin_s = max(begin_s, self._ended[self._before])
        if sent in self._posted:
            self._ended[sent] = max(begin_s, self._posted[sent])
        self._posted[sent] = begin_s
        self._before = sent
        return True


def message(stage: int, what: str, batch: int) -> Message:
    """The message that `stage` sends or receives."""
    way = what[-1]
    before = stage - 1 if way == "F" else stage + 1
    return way, stage if what.startswith("SEND") else before, batch


@functools.cache
def _orders(processes: int, micro_batches: int) -> dict[int, list[Action]]:
    """What PyTorch gives each process to do in a step."""
    with one_rank():
        dist.init_process_group(rank=0, world_size=processes)
        x = torch.empty(1, device="meta")
        stages: list[Any] = [
            PipelineStage(
                nn.Identity(), index, 2 * processes, torch.device("cpu"), x, output_args=x
            )
            for index in (0, processes)
        ]
        schedule = ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=lambda x, y: x)
    return {
        rank: [
            (action.stage_index, str(action.computation_type.value), action.microbatch_index)
            for action in actions
            if action is not None
            and action.computation_type.value in _WHAT
            and action.microbatch_index is not None
        ]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }
