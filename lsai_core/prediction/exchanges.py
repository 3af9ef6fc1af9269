"""What the processes of a run send each other in one optimizer step, by its way of sharing the
model (`lsai_core.parallel`): how many messages of which size, and whether computation hides them.

    copies (ddp, zero1)     one sum of the gradients, hidden; zero1 then sends the new weights
    fsdp, zero2             weights before their block, in both passes (zero2: once a step), and a
                            sum of the gradients in fp32; hidden. Copies of the model add theirs
    tensor parallelism      activations of every block, four times a pass, which nothing hides
    pipelines               hidden states and their gradients between two stages, not hidden.
                            Sharded ones gather weights once a step, and sum gradients once, at its
                            end, where nothing hides it
    context parallelism     as fsdp; keys and values of each block are left out

FSDP2's messages are those of its units, to the byte: each parameter is cut along its first
dimension and padded to equal slices. Where tensor parallelism shares the matrices first, a process
is counted an equal part of every unit, and where a pipeline shares the blocks, of their number.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

from lsai_core.config.model import ModelConfig
from lsai_core.config.precision import compute_dtype, weight_dtype
from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import count_parameters, shaped

_MATRICES = 4  # of a block: what DDP sums at once, since each is larger than a bucket
_SUMMED_BYTES = 4  # FSDP sums gradients in fp32


@dataclass(frozen=True)
class Exchange:
    """`calls` of `operation` (as the study `messages` names it) among `processes`; `size`: bytes of
    one message, the larger of what a process has before and after it."""

    operation: str
    processes: int
    calls: float
    size: float
    hidden: bool = True

    @property
    def sent(self) -> float:
        """Bytes that each process must send in all calls."""
        passed_on = (self.processes - 1) / self.processes
        share = {"all_reduce": 2 * passed_on, "send_receive": 1.0}.get(self.operation, passed_on)
        return self.calls * self.size * share


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP2 gathers together (`lsai_core.parallel.kinds.fsdp`). `elements`: of all
    equal slices together, padding included. `count`: so many units are alike. `passes`: the passes
    of a micro-batch that gather it, one where it stays whole in between."""

    elements: int
    count: int
    passes: int


@cache
def units(model: ModelConfig, shards: int, reshard_after_forward: bool = True) -> tuple[Unit, ...]:
    """The units of `model` in slices for `shards` processes."""
    one = shaped(model.model_copy(update={"n_layers": 1}))
    both = 2 if reshard_after_forward else 1

    def unit(parameters: Iterable[torch.Tensor], count: int, passes: int) -> Unit:
        cut = (math.ceil(p.shape[0] / shards) * shards * p[0].numel() for p in parameters)
        return Unit(sum(cut), count, passes)

    found = [
        unit(one.blocks.parameters(), model.n_layers - 1, both),
        unit(one.blocks.parameters(), 1, 1),
        unit([*one.norm.parameters(), one.output_weight], 1, 1),
    ]
    if one.output is not None:
        found.append(unit(one.embedding.parameters(), 1, 1))
    return tuple(found)


def _gathered(config: TrainConfig) -> Iterator[tuple[Unit, int, int]]:
    """FSDP2's units, how often each is gathered in a step, and how often its gradients are
    summed."""
    parallel, piped = config.parallel, config.parallel.pp > 1
    for unit in units(config.model, parallel.shards, parallel.reshard_after_forward):
        once = parallel.kind == "zero2" or piped
        gathered = 1 if once else unit.passes * config.grad_accum
        yield unit, gathered, 1 if piped else config.grad_accum


def copied_bytes(config: TrainConfig) -> float:
    """Bytes that are read and written in a step around messages. FSDP2: weights out of what it
    gathered, gradients into what it sums in fp32. DDP: the divided gradients into their buckets."""
    if config.parallel.keeps_copies:
        return 2.0 * weight_dtype(config.precision).itemsize * count_parameters(config.model).total
    if not config.parallel.sharded:
        return 0.0
    computed = compute_dtype(config.precision).itemsize
    kept = computed if config.parallel.pp == 1 else _SUMMED_BYTES  # of a gradient until then
    moved = sum(
        unit.elements * unit.count * (2 * computed * times + (kept + _SUMMED_BYTES) * sums)
        for unit, times, sums in _gathered(config)
    )
    return moved / (config.parallel.tp * config.parallel.pp)


def exchanges(config: TrainConfig) -> Iterator[Exchange]:
    """All messages of a step of `config`."""
    parallel = config.parallel
    if parallel.keeps_copies:
        total = count_parameters(config.model).total
        calls = _MATRICES * (config.model.n_layers + 1)
        gradient = total * weight_dtype(config.precision).itemsize / calls
        yield Exchange("all_reduce", parallel.replicate, calls, gradient)
        if parallel.kind == "zero1":
            yield Exchange("all_gather", parallel.replicate, calls, gradient, hidden=False)
    elif parallel.sharded:
        yield from _of_shards(config)
    if parallel.tp > 1:
        yield from _of_matrices(config)
    if parallel.pp > 1:
        of_one = 2 * config.grad_accum * (parallel.stages - 1) / parallel.pp  # on average
        yield Exchange("send_receive", parallel.pp, of_one, _hidden_bytes(config), hidden=False)


def _of_shards(config: TrainConfig) -> Iterator[Exchange]:
    parallel, computed = config.parallel, compute_dtype(config.precision).itemsize
    for unit, times, sums in _gathered(config):
        elements, count = unit.elements / parallel.tp, unit.count / parallel.pp
        summed, hidden = _SUMMED_BYTES * elements, parallel.pp == 1
        if parallel.shards > 1:
            yield Exchange("all_gather", parallel.shards, times * count, computed * elements)
            yield Exchange("reduce_scatter", parallel.shards, sums * count, summed, hidden)
        if parallel.replicate > 1:
            own = summed / parallel.shards
            yield Exchange("all_reduce", parallel.replicate, sums * count, own, hidden)


def _of_matrices(config: TrainConfig) -> Iterator[Exchange]:
    parallel, size = config.parallel, _hidden_bytes(config)
    # Both once a half of a block and pass; a block's last sum is not made a second time.
    layers, again = config.model.n_layers, config.computed_again
    often = {"all_gather": 4 * layers + 2 * again, "reduce_scatter": 4 * layers + again}
    for operation, times in often.items():
        count = times * config.grad_accum
        yield Exchange(operation, parallel.tp, count, size, hidden=False)


def _hidden_bytes(config: TrainConfig) -> float:
    """Of the hidden states of a micro-batch."""
    tokens = config.batch_size * config.seq_len // config.parallel.cp
    return tokens * config.model.d_model * compute_dtype(config.precision).itemsize
