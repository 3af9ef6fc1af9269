"""One real training step on fake tensors: shapes, dtypes and lifetimes are true, arithmetic and
memory do not exist.

The model is shaped on the meta device, given fake parameters, converted, fused and shared by the
project's own code, and `train_step` runs over it; where there are several processes, as one of them
(`process.py`). The optimizer's states exist from the start, as in every step but the first.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from lsai_core.config.model import BlockCheckpoint
from lsai_core.config.precision import compute_dtype, residual_dtype, weight_dtype
from lsai_core.config.train import Fp8Config, TrainConfig
from lsai_core.context.exchange import IN_FLIGHT_BYTES
from lsai_core.context.heads import key_heads
from lsai_core.context.methods import get_method
from lsai_core.fp8.recipes import linear_names
from lsai_core.kernels import FakeGpu
from lsai_core.model.transformer import Block, Transformer, shaped
from lsai_core.optimizers.base import FactorOptimizer, parts_of
from lsai_core.optimizers.build import clip_and_update, kept_states, make_states
from lsai_core.parallel.adapt import adapt
from lsai_core.parallel.build import connect, share
from lsai_core.parallel.sequence import join, own_heads, setting
from lsai_core.parallel.tensor import share as share_matrices
from lsai_core.prediction.compiled import POLICIES, Policy, compiled
from lsai_core.prediction.fake_kernels import (
    FusedRMSNorm,
    PretendedGpus,
    PretendedRanks,
    attention_as,
    convert_as,
    expected_kernel,
    few_pieces,
    update_on_gpu,
    update_on_host,
)
from lsai_core.prediction.process import SharingTracker, messages_between_stages, one_of
from lsai_core.prediction.purposes import name_gradients_and_buffers, named
from lsai_core.prediction.timeline import timeline
from lsai_core.prediction.tracker import Moment, PurposeTracker
from lsai_core.training import step

CPU = torch.device("cpu")
Plan = Callable[..., Any]  # a compiled block: its tensors and its arguments


@dataclass(frozen=True)
class Simulated:
    """Bytes of one process: the peak of each phase, the largest of them, and how that one divides
    over purposes.

    `events`: all births and deaths (see `PurposeTracker`); `marks`: how many births came before
    buckets for gradients, the optimizer's states and the step's input ("activations") were made,
    and how many events before the phases. `work`: of
    one or two micro-batches (see `work.py`). `timeline`: by purpose the bytes at the highest moment
    of each slice of the step (see `timeline.py`).
    """

    phases: dict[str, int]
    peak: int
    parts: dict[str, int]
    events: list[int]
    marks: dict[str, int]
    work: dict[str, int]
    timeline: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trainer:
    """What a trainer does in a step; the defaults are this project's own.

    `reshape` replaces parts of a model on the meta device, before layers run in fp8, which
    `linear_names` names. `norm` stands outside of compiled blocks. `head` has the last hidden
    states, the output layer's weight and the targets, as `model.loss`. `policy` makes what
    selective checkpointing keeps (a new one for each use, for it may count). `optimizer` makes one
    for the model, `update` clips and updates. `keeps_gradients`: to the step's end.
    """

    reshape: Callable[[Transformer], None] = lambda model: None
    linear_names: Callable[[Transformer, Fp8Config], list[str]] = linear_names
    norm: type[nn.RMSNorm] = FusedRMSNorm
    loss: Callable[..., Tensor] | None = None
    head: Callable[..., Tensor] | None = None
    policy: Callable[[], Policy] | None = None
    optimizer: Callable[[Transformer], torch.optim.Optimizer] | None = None
    update: Callable[[torch.optim.Optimizer, float], Tensor] | None = None
    keeps_gradients: bool = True


def simulate(
    config: TrainConfig,
    kernel: str | None = None,
    *,
    on: Literal["gpu", "cpu"] = "gpu",
    rank: int = 0,
    trainer: Trainer = Trainer(),
    moments: list[tuple[str, dict[str, int]]] | None = None,
) -> Simulated:
    """One step of `config` on fake tensors. `kernel`: the attention kernel; what `auto` comes to if
    not given. `moments`: a list to which the phase and the bytes by purpose are added after each
    birth and death.

    `on="cpu"`: as the run behaves on a CPU, where PyTorch runs compiled code eagerly while memory
    is measured. Raises UserError for an attention backend that cannot run on fake tensors.
    """
    if config.parallel.pp == 1:  # from the second micro-batch on all are alike
        config = config.model_copy(update={"grad_accum": min(2, config.grad_accum)})
    if on == "cpu":
        config = config.model_copy(update={"compile": False})
    kernel = kernel or expected_kernel(config)
    simulation = _Simulation(config, kernel, on == "gpu", trainer)
    with one_of(config, rank), torch.random.fork_rng(devices=[]):
        watched, events, seen = simulation.one_step()
    if moments is not None:
        moments += [(moment.phase, dict(+moment.bytes_of)) for moment in seen]
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
        timeline=timeline(seen, messages),
    )


class _Simulation:
    """One step's model, optimizer and batch on fake tensors, and what watches them."""

    def __init__(self, config: TrainConfig, kernel: str, on_gpu: bool, trainer: Trainer) -> None:
        self._config, self._kernel, self._on_gpu = config, kernel, on_gpu
        self._trainer = trainer
        self._fakes = FakeGpu if on_gpu else FakeTensorMode
        self._tracker = SharingTracker(on_gpu)

    def one_step(self) -> tuple[PurposeTracker, list[int], list[Moment]]:
        """What watched the step, its events and its moments, both up to the end."""
        config, tracker = self._config, self._tracker
        tracker.levels = levels = list[Moment]()
        model, mesh = self._shaped()
        with self._fakes(allow_non_fake_inputs=True):
            model.to_empty(device=CPU)
            with tracker.purpose("weights"):
                tracker.add([model])
            tracker.marks["gradients made"] = tracker.births
            if mesh is not None:
                with tracker, tracker.purpose("gradients"):  # DDP's buckets
                    connect(model, self._narrow_as_wide(), mesh)
            optimizer = self._optimizer(model)
            tokens = torch.empty(
                config.batch_size * config.grad_accum, config.seq_len + 1, dtype=torch.int64
            )
            # The counts of steps lie on the host, as the project's own optimizer has them.
            states = kept_states(optimizer) if self._on_gpu else [optimizer]
            seeds = {"optimizer": states, "activations": [tokens]}
            for purpose, kept in seeds.items():
                tracker.marks[f"{purpose} made"] = tracker.births
                with tracker.purpose(purpose):
                    tracker.add(kept)
            if config.parallel.cpu_offload:
                for tensor in (*model.parameters(), *kept_states(optimizer)):
                    tracker.move_to_host(tensor)
            self._watch(model)
            with messages_between_stages(tracker):
                step.train_step(
                    model,
                    optimizer,
                    tokens[:, :-1],
                    tokens[:, 1:],
                    # The layers are converted, and no package's context is needed around them.
                    config.model_copy(update={"fp8": Fp8Config()}),
                    CPU,
                    _Meter(tracker, model),  # type: ignore[arg-type]
                    loss_of=self._loss(),
                    update=self._update(),
                )
            # before the model dies
            return tracker, tracker.events.copy(), levels.copy()

    def _narrow_as_wide(self) -> TrainConfig:
        """The config in which weights that travel in fp8 go in their own dtype."""
        parallel = self._config.parallel.model_copy(update={"fp8_gather": False})
        return self._config.model_copy(update={"parallel": parallel})

    def _optimizer(self, model: Transformer) -> torch.optim.Optimizer:
        """With the states that it has in every step but the first."""
        config = self._config
        if self._trainer.optimizer is not None:
            optimizer = self._trainer.optimizer(model)
        else:
            optimizer = step.prepare_optimizer(model, config)
        make_states(optimizer, update=False)
        for part in parts_of(optimizer):
            if isinstance(part, FactorOptimizer):
                part.pieces = few_pieces
        return optimizer

    def _update(self) -> Callable[..., Tensor]:
        if self._trainer.update is not None:
            return self._trainer.update
        if not self._on_gpu:
            return clip_and_update
        return update_on_host if self._config.parallel.cpu_offload else update_on_gpu

    def _watch(self, model: Transformer) -> None:
        """Say what tensors are for as they come to be."""
        tracker = self._tracker
        name_gradients_and_buffers(model, tracker, self._config.parallel.cpu_offload)
        model.loss = named(tracker, "loss", self._trainer.head or model.loss)
        if not self._trainer.keeps_gradients:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def _host_buffer(self, like: Tensor) -> Tensor:
        buffer = torch.empty_like(like)
        if self._on_gpu:
            self._tracker.move_to_host(buffer)
        return buffer

    def _loss(self) -> Callable[..., Tensor]:
        whole = named(self._tracker, "loss", step.loss_of_logits(self._config.loss))
        return self._trainer.loss or functools.partial(step.loss_fn, cross_entropy=whole)

    def _shaped(self) -> tuple[Transformer, DeviceMesh | None]:
        """The run's model on the meta device: fp8 layers, fused blocks, sharded; not yet
        compiled."""
        config = self._config
        model = shaped(config.model, config.attention, grad_checkpoint=config.checkpointed)
        self._adapt(model, weight_dtype(config.precision))
        for module in model.modules() if self._on_gpu else ():
            if isinstance(module, nn.RMSNorm):
                module.__class__ = self._trainer.norm
        if config.parallel.cp > 1:
            kind = PretendedGpus if self._on_gpu else PretendedRanks
            model.share_sequence(join(config, CPU, kind))
        mesh = share(model, config, CPU) if config.parallel.distributed else None
        if config.compile:
            self._compile(model, mesh)
        return model, mesh

    def _adapt(self, model: Transformer, dtype: torch.dtype) -> None:
        trainer, config = self._trainer, self._config.model_copy(update={"compile": False})
        trainer.reshape(model)
        model.to(dtype)
        adapt(model, config, convert_as(trainer.linear_names), self._host_buffer)
        for block in model.blocks:
            assert isinstance(block, Block)
            if self._on_gpu:
                block.attention.attend = attention_as(self._kernel)
            if trainer.policy is not None:
                block.selective_contexts = functools.partial(_contexts, trainer.policy)

    def _compile(self, model: Transformer, mesh: DeviceMesh | None) -> None:
        """Let every block run by the plan that the partitioner makes for one with its
        checkpointing."""
        policy = self._trainer.policy
        policies = POLICIES if policy is None else POLICIES | {"selective": policy()}
        plans: dict[BlockCheckpoint, Plan] = {}
        for block in model.blocks:
            if not isinstance(block, Block):  # of another process
                continue
            mode = block.grad_checkpoint
            if mode not in plans:
                plans[mode] = self._plan(model, mesh, mode, policies)

            def run(
                x_BSD: Tensor,
                cos: Tensor,
                sin: Tensor,
                block: nn.Module = block,
                plan: Plan = plans[mode],
            ) -> Any:
                return plan(_tensors(block), x_BSD, cos, sin)

            block.forward = run  # type: ignore[method-assign]

    def _plan(
        self,
        model: Transformer,
        mesh: DeviceMesh | None,
        mode: BlockCheckpoint,
        policies: dict[BlockCheckpoint, Policy],
    ) -> Plan:
        config, tp = self._config, self._config.parallel.tp
        plain = shaped(config.model.model_copy(update={"n_layers": 1}), config.attention)
        sharded = config.parallel.sharded
        # FSDP casts weights as it gathers them
        self._adapt(plain, (compute_dtype if sharded else weight_dtype)(config.precision))
        if model.context is not None:
            plain.share_sequence(model.context)
        if mesh is not None and tp > 1:
            share_matrices(plain, mesh["tp"])
        block, length = plain.blocks[0], config.seq_len // config.parallel.cp
        with self._fakes(allow_non_fake_inputs=True):
            block.to_empty(device=CPU)
            plan = compiled(block, mode, policies)
            x_BSD = torch.empty(
                config.batch_size,
                length // tp,
                config.model.d_model,
                dtype=residual_dtype(config),
                requires_grad=True,
            )
            table = torch.empty(length, 1, config.model.head_dim // 2)
            with step.autocast(config.precision, CPU) if not sharded else contextlib.nullcontext():
                # plans; nothing may watch it, for it runs no step
                plan(_tensors(block), x_BSD, table, table.clone())
        return plan


def _contexts(policy: Callable[[], Policy]) -> Any:
    return create_selective_checkpoint_contexts(policy())


class _Meter:
    """Stands where `PhaseMemory` does: counts within phases."""

    def __init__(self, tracker: PurposeTracker, model: Transformer) -> None:
        self._tracker, self._model = tracker, model

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == "optimizer":  # FSDP2 padded its slices, which are elsewhere now
            for parameter in self._model.parameters():
                self._tracker.mark(parameter, "weights")
        with self._tracker, self._tracker.purpose("activations"):
            self._tracker.enter(name)
            yield


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def held_back(config: TrainConfig) -> int:
    """Bytes of messages of one process that the allocator counts as active, for the host runs
    ahead: at most the limit and a round (`lsai_core.context.exchange`), or what a whole step sends
    and receives if that is less. No tensor shows them."""
    parallel, model, (heads, kv_heads) = config.parallel, config.model, own_heads(config)
    if parallel.cp == 1 or get_method(parallel.cp_method).peer:
        return 0
    pieces = setting(config).pieces(parallel.cp)
    ring = parallel.cp // pieces
    tokens = config.batch_size * config.seq_len // parallel.cp
    # of one head, sent and received
    head = 2 * tokens * model.head_dim * compute_dtype(config.precision).itemsize
    first, last = key_heads(heads, kv_heads, pieces)[0]
    # keys and values of the neighbours in the ring
    around = 2 * (last - first) * pieces * head if ring > 1 else 0
    # and as much of the output, on the way back
    queries = heads * head * (pieces - 1) // pieces
    keys = (last - first) * head * (pieces - 1)
    a_forward_pass = model.n_layers * (2 * queries + 2 * keys + (ring - 1) * around)
    # The backward pass sends the same and its gradients.
    return min(3 * a_forward_pass, IN_FLIGHT_BYTES + max(queries, keys, around))
