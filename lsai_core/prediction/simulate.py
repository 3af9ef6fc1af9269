"""One real training step on fake tensors: shapes, dtypes and lifetimes are true, arithmetic and
memory do not exist.

The model is shaped on the meta device, given fake parameters, converted, fused and sharded by the
project's own code, and `train_step` runs over it. FSDP2 itself runs, as rank 0 of a process group
that only pretends to communicate. The optimizer's states exist from the start, as in every step but
the first.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lsai_core.base.errors import UserError
from lsai_core.config.precision import compute_dtype, residual_dtype, weight_dtype
from lsai_core.config.train import TrainConfig
from lsai_core.context.exchange import IN_FLIGHT_BYTES
from lsai_core.context.heads import key_heads
from lsai_core.context.methods import get_method
from lsai_core.model.recompute import BlockCheckpoint, of_block
from lsai_core.model.transformer import Transformer
from lsai_core.optimizers.build import build_optimizer, make_states
from lsai_core.parallel.adapt import adapt
from lsai_core.parallel.sequence import setting
from lsai_core.prediction.compiled import compiled
from lsai_core.prediction.purposes import named_purposes
from lsai_core.prediction.stand_ins import FusedRMSNorm, behaviour, expected_kernel
from lsai_core.prediction.tracker import PurposeTracker
from lsai_core.training import step

CPU = torch.device("cpu")
Plan = Callable[..., Any]  # a compiled block: its tensors and its arguments


@dataclass(frozen=True)
class Simulated:
    """Bytes of one process: the peak of each phase, the largest of them, and how that one divides
    over purposes.

    `events`: all births and deaths (see `PurposeTracker`); `marks`: how many came before the
    weights, the optimizer's states, the step's input ("activations"), and its phases. `work`: of
    one or two micro-batches (see `work.py`).
    """

    phases: dict[str, int]
    peak: int
    parts: dict[str, int]
    events: list[int]
    marks: dict[str, int]
    work: dict[str, int]


def simulate(
    config: TrainConfig, kernel: str | None = None, *, on: Literal["gpu", "cpu"] = "gpu"
) -> Simulated:
    """One step of `config` on fake tensors. `kernel`: the attention kernel; what `auto` comes to if
    not given.

    `on="cpu"`: as the run behaves on a CPU, where PyTorch runs compiled code eagerly while memory
    is measured.
    """
    # From the second micro-batch on all are alike.
    config = config.model_copy(update={"grad_accum": min(2, config.grad_accum)})
    if on == "cpu":
        config = config.model_copy(update={"compile": False})
    kernel = kernel or expected_kernel(config)
    with (
        _world(config),
        behaviour(kernel, on, config.parallel.cpu_offload),
        torch.random.fork_rng(devices=[]),
    ):
        watched, events = _one_step(config, on)
    messages, highest = held_back(config) if on == "gpu" else 0, watched.highest
    for phase, bytes_of in highest.items():
        if phase != "optimizer":
            bytes_of["messages"] += messages
    largest = max(highest.values(), key=Counter.total)
    return Simulated(
        phases={phase: bytes_of.total() for phase, bytes_of in highest.items()},
        peak=largest.total(),
        parts={purpose: size for purpose, size in largest.items() if size},
        events=events,
        marks=watched.marks,
        work=dict(watched.work),
    )


@contextlib.contextmanager
def _world(config: TrainConfig) -> Iterator[None]:
    """A process group as large as the run's whose communication does nothing, of which this process
    is rank 0."""
    if not config.parallel.sharded:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("a prediction for several processes cannot run inside of a distributed run")
    dist.init_process_group(
        "fake", rank=0, world_size=config.parallel.world_size, store=FakeStore()
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _one_step(config: TrainConfig, on: str) -> tuple[PurposeTracker, list[int]]:
    """What watched the step, and its events up to the end."""
    tracker = PurposeTracker(on_gpu=on == "gpu")
    model = _shaped(config, on)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=CPU)
        optimizer = build_optimizer(model, config.optim)
        make_states(optimizer, update=False)
        states = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and (on == "cpu" or value.ndim)  # a count is on the host
        ]
        tokens = torch.empty(
            config.batch_size * config.grad_accum, config.seq_len + 1, dtype=torch.int64
        )
        seeds = {"weights": [model], "optimizer": states, "activations": [tokens]}
        for purpose, tensors in seeds.items():
            tracker.marks[f"{purpose} made"] = len(tracker.events)
            with tracker.purpose(purpose):
                tracker.add(tensors)
        if config.parallel.cpu_offload:
            for tensor in (*model.parameters(), *states):
                tracker.move_to_host(tensor)
        meter = _Meter(tracker)

        def host_buffer(like: Tensor) -> Tensor:
            buffer = torch.empty_like(like)
            if on == "gpu":
                tracker.move_to_host(buffer)
            return buffer

        buffers = mock.patch("lsai_core.model.saved_inputs.host_buffer", host_buffer)
        with named_purposes(model, tracker, config.parallel.cpu_offload), buffers:
            step.train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], config, CPU, meter)  # type: ignore[arg-type]
            events = tracker.events.copy()  # before the model dies
    return tracker, events


class _Meter:
    """Stands where `PhaseMemory` does: counts within phases."""

    def __init__(self, tracker: PurposeTracker) -> None:
        self._tracker = tracker

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._tracker, self._tracker.purpose("activations"):
            self._tracker.enter(name)
            yield


def _shaped(config: TrainConfig, on: str) -> Transformer:
    """The run's model on the meta device: fp8 layers, fused blocks, sharded; not yet compiled."""
    with torch.device("meta"):
        model = Transformer(config.model, config.attention, grad_checkpoint=config.grad_checkpoint)
    model.to(weight_dtype(config.precision))
    adapt(model, config.model_copy(update={"compile": False}))
    for module in model.modules() if on == "gpu" else ():
        if isinstance(module, nn.RMSNorm):
            module.__class__ = FusedRMSNorm
    if config.parallel.cp > 1:
        from lsai_core.parallel.sequence import join

        model.share_sequence(join(config, CPU))
    if config.compile:
        _compile(model, config)
    if config.parallel.sharded:
        from lsai_core.parallel.fsdp import shard

        shard(model, config.parallel, config.precision, CPU)
    return model


def _compile(model: Transformer, config: TrainConfig) -> None:
    """Let every block run by the plan that the partitioner makes for one with its checkpointing."""
    plans: dict[BlockCheckpoint, Plan] = {}
    for index, block in enumerate(model.blocks):
        mode = of_block(config.grad_checkpoint, index)
        if mode not in plans:
            plans[mode] = _plan(model, config, mode)

        def run(
            x_BSD: Tensor,
            cos: Tensor,
            sin: Tensor,
            block: nn.Module = block,
            plan: Plan = plans[mode],
        ) -> Any:
            return plan(_tensors(block), x_BSD, cos, sin)

        block.forward = run


def _plan(model: Transformer, config: TrainConfig, mode: BlockCheckpoint) -> Plan:
    with torch.device("meta"):
        plain = Transformer(config.model.model_copy(update={"n_layers": 1}), config.attention)
    sharded = config.parallel.sharded
    # FSDP casts weights as it gathers them
    plain.to((compute_dtype if sharded else weight_dtype)(config.precision))
    adapt(plain, config.model_copy(update={"compile": False}))
    if model.context is not None:
        plain.share_sequence(model.context)
    block, length = plain.blocks[0], config.seq_len // config.parallel.cp
    with FakeTensorMode(allow_non_fake_inputs=True):
        block.to_empty(device=CPU)
        plan = compiled(block, mode)
        x_BSD = torch.empty(
            config.batch_size,
            length,
            config.model.d_model,
            dtype=residual_dtype(config),
            requires_grad=True,
        )
        table = torch.empty(length, 1, config.model.head_dim // 2)
        with step.autocast(config.precision, CPU) if not sharded else contextlib.nullcontext():
            # plans; nothing may watch it, for it runs no step
            plan(_tensors(block), x_BSD, table, table.clone())
    return plan


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def held_back(config: TrainConfig) -> int:
    """Bytes of messages of one process that the allocator counts as active, for the host runs
    ahead: at most the limit and a round (`lsai_core.context.exchange`), or what a whole step sends
    and receives if that is less. No tensor shows them."""
    parallel, model = config.parallel, config.model
    if parallel.cp == 1 or get_method(parallel.cp_method).peer:
        return 0
    pieces = setting(config).pieces(parallel.cp)
    ring = parallel.cp // pieces
    tokens = config.batch_size * config.seq_len // parallel.cp
    # of one head, sent and received
    head = 2 * tokens * model.head_dim * compute_dtype(config.precision).itemsize
    first, last = key_heads(model.n_heads, model.n_kv_heads, pieces)[0]
    # keys and values of the neighbours in the ring
    around = 2 * (last - first) * pieces * head if ring > 1 else 0
    # and as much of the output, on the way back
    queries = model.n_heads * head * (pieces - 1) // pieces
    keys = (last - first) * head * (pieces - 1)
    a_forward_pass = model.n_layers * (2 * queries + 2 * keys + (ring - 1) * around)
    # The backward pass sends the same and its gradients.
    return min(3 * a_forward_pass, IN_FLIGHT_BYTES + max(queries, keys, around))
