"""The update of a step beside the next forward pass, block by block, to the same bits.

An update moves bytes, and is limited by memory bandwidth; the products of a forward pass are
limited by tensor cores and power. What clips the gradients is known once the backward pass has
ended, so that the update of a block waits for nothing but its turn.

    step's end      what the forward pass begins with, the embedding and the first block, is
                    updated: nothing would run beside it
    next step       the first block begins, and with it all other updates, on a stream of their
                    own, in the order of the forward pass; each block waits for its own

All begin at once, not block n + 1 when block n begins: the stream then never waits for the host
or for a block, and the update of the output layer may last longer than the one block before it.
How much of the GPU an update takes is bounded otherwise, by its number of programs
(`optim.overlap`): a product of Hopper fills the registers of its multiprocessors, so nothing runs
beside it on the same one, and an update with a program for each tile would take all of them in
turn, while the products wait. The stream has priority: these few programs get the multiprocessors
that become free first, and the products have all others.

A gradient lives until the block that waited for its update begins. It is held here, and let go
after the stream of the forward pass was told to wait: memory that is used again is used later. So
no stream is recorded with the allocator, and when memory is free does not depend on the GPU's
time, which a prediction could not know.

On a CPU each update runs at its turn. Whatever reads or replaces weights or states by a state dict,
or steps, completes the update first; the training loop does before validation and checkpoints, so
that the time of an update belongs to a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Update(NamedTuple):
    """What updates a parameter when it is called, with all that it needs: no later change of a
    group's settings has a part in it."""

    parameter: Tensor
    gradient: Tensor
    run: Callable[[], None]


class Overlap:
    """The updates of a step that wait for their turns in the next forward pass."""

    def __init__(self, turns: list[list[Tensor]], device: torch.device) -> None:
        """`turns`: the parameters, in the order in which a forward pass needs them; those of the
        first are updated at once."""
        self._turns = {p: number for number, turn in enumerate(turns) for p in turn}
        self._waiting: list[list[Update]] = [[] for _ in turns]
        self._events: dict[int, torch.cuda.Event] = {}  # of turns whose updates have begun
        self._device, self._stream = device, None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)

    @property
    def gradients(self) -> list[Tensor]:
        """Those of the updates that wait."""
        return [update.gradient for waiting in self._waiting for update in waiting]

    @torch.no_grad()
    def take(self, updates: Iterable[Update]) -> None:
        """Run the updates of the first turn; the others wait, after those before are complete."""
        self.complete()
        for update in updates:
            self._waiting[self._turns[update.parameter]].append(update)
        self._run(0)
        self._waiting[0].clear()

    def turn(self, number: int) -> None:
        """To be called before what reads the weights of a turn: returns when it may."""
        if self._stream is not None and not self._events:
            self._begin(self._stream)
        if not self._waiting[number]:
            return
        if self._stream is None:
            self._run(number)
        else:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._events.pop(number))
        self._waiting[number].clear()

    def complete(self) -> None:
        """Return when weights and states may be read, all updated."""
        for number in range(len(self._waiting)):
            self.turn(number)

    def _begin(self, stream: torch.cuda.Stream) -> None:
        """Start all updates that wait."""
        if not any(self._waiting):
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for number, waiting in enumerate(self._waiting):
                if waiting:
                    self._run(number)
                    self._events[number] = stream.record_event()

    @torch.no_grad()
    def _run(self, number: int) -> None:
        with torch.autocast(self._device.type, enabled=False):
            for update in self._waiting[number]:
                update.run()
