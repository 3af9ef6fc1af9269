"""What the processes of a run send each other in one optimizer step, by its way of sharing the
model (`lsai_core.parallel`): how many messages of which size, and whether computation hides them.

    copies (ddp, zero1)     one sum of the gradients, hidden; zero1 then sends the new weights
    fsdp, zero2             weights before their block, in both passes (zero2: once a step), and a
                            sum of the gradients in fp32; hidden. Copies of the model add theirs
    tensor parallelism      activations of every block, four times a pass, which nothing hides
    pipelines               hidden states and their gradients between two stages, not hidden
    context parallelism     as fsdp; keys and values of each block are left out
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lsai_core.config.precision import compute_dtype, weight_dtype
from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import count_parameters

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


def _gathers(config: TrainConfig) -> int:
    """How often FSDP2 gathers each weight in a step."""
    return 1 if config.parallel.kind == "zero2" else 2 * config.grad_accum


def copied_bytes(config: TrainConfig) -> float:
    """Bytes that FSDP2 reads and writes in a step around its messages: weights out of what it
    gathered, gradients into what it sums in fp32."""
    if not config.parallel.sharded:
        return 0.0
    total = count_parameters(config.model).total / config.parallel.tp
    computed = compute_dtype(config.precision).itemsize
    gradients = (computed + _SUMMED_BYTES) * config.grad_accum
    return total * (2 * computed * _gathers(config) + gradients)


def exchanges(config: TrainConfig) -> Iterator[Exchange]:
    """All messages of a step of `config`."""
    parallel, blocks = config.parallel, config.model.n_layers + 1
    total = count_parameters(config.model).total / parallel.tp
    computed = compute_dtype(config.precision).itemsize
    if parallel.keeps_copies:
        calls, size = _MATRICES * blocks, total * weight_dtype(config.precision).itemsize
        yield Exchange("all_reduce", parallel.replicate, calls, size / calls)
        if parallel.kind == "zero1":
            yield Exchange("all_gather", parallel.replicate, calls, size / calls, hidden=False)
    elif parallel.shards > 1:
        sums = blocks * config.grad_accum
        weights, gradients = computed * total / blocks, _SUMMED_BYTES * total / blocks
        yield Exchange("all_gather", parallel.shards, _gathers(config) * blocks, weights)
        yield Exchange("reduce_scatter", parallel.shards, sums, gradients)
        if parallel.replicate > 1:
            own = gradients / parallel.shards
            yield Exchange("all_reduce", parallel.replicate, sums, own)
    if parallel.tp > 1:
        tokens = config.batch_size * config.seq_len // parallel.cp
        size = tokens * config.model.d_model * computed
        # Both once a half of a block and pass; a block's last sum is not made a second time.
        again = config.grad_checkpoint == "full"
        often = {"all_gather": 4 + 2 * again, "reduce_scatter": 4 + again}
        for operation, times in often.items():
            count = times * config.model.n_layers * config.grad_accum
            yield Exchange(operation, parallel.tp, count, size, hidden=False)
    if parallel.pp > 1:
        hidden_states = config.batch_size * config.seq_len * config.model.d_model * computed
        calls = 2 * config.grad_accum * (parallel.stages - 1) / parallel.pp  # of one, on average
        yield Exchange("send_receive", parallel.pp, calls, hidden_states, hidden=False)
