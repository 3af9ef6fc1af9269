"""The training loop: next-token prediction, by one process or by several that share a batch and a
sharded model.

Each step draws `grad_accum` micro-batches whose content depends only on (seed, step), runs forward
and backward, clips the gradient norm and takes one AdamW step. The host never waits for the GPU
inside a step. A few early steps run with the memory meter on; they and the warm-up do not count for
speed. Validation, checkpoints and logs come between timed steps.

Reader r of R takes micro-batches R * step + r: a process, or the group of processes that share
sequences, a slice each. FSDP averages the gradients inside the backward pass. What else they must
agree on goes through `World`, which for one process does nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lsai_core.base.errors import Diverged, Preempted, UserError
from lsai_core.config.precision import set_matmul_mode
from lsai_core.config.train import LOSSES, TrainConfig
from lsai_core.model.transformer import Transformer
from lsai_core.optimizers.base import held_here
from lsai_core.optimizers.build import way_of
from lsai_core.parallel.world import World
from lsai_core.profiling.steptime import StepTimer
from lsai_core.training import checkpoint
from lsai_core.training.batches import BatchStream, TokenSource, sequential_batches
from lsai_core.training.combinations import require_possible
from lsai_core.training.host_memory import keep_freed_memory
from lsai_core.training.instruments import Instruments, over_processes
from lsai_core.training.lost_updates import LostUpdates
from lsai_core.training.metrics import MetricsFile
from lsai_core.training.step import (
    attention_kernel,
    compute_context,
    learning_rate,
    loss_fn,
    own_part,
    prepare_model,
    prepare_optimizer,
    resolve_device,
    train_step,
)

GIB = 2**30
OnRows = Callable[[list[dict[str, Any]]], None]


@dataclass
class Trained:
    """What the loop leaves behind: the raw material of the results."""

    model: Transformer
    attention_kernel: str
    optimizer: dict[str, str]  # `way_of` it
    rows: list[dict[str, Any]] = field(default_factory=list)
    timed_ms: list[float] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    setup_s: float = 0.0
    first_step_s: float = 0.0
    train_s: float = 0.0
    validation_loss: float = math.nan
    resumed_at: int = 0


@torch.no_grad()
def validate(
    model: Transformer,
    config: TrainConfig,
    dataset: TokenSource,
    device: torch.device,
    world: World | None = None,
) -> float:
    """Mean cross-entropy (nats per token) over `eval.sequences` of the held-out split, every token
    weighted the same, whatever loss a laboratory trains with. Batches go round the readers; how
    large they are changes no more than rounding."""
    world = world or World()
    if config.loss not in LOSSES:
        config = config.model_copy(update={"loss": "full"})
    readers, reader = config.parallel.readers, world.rank // config.parallel.members
    total_and_count = torch.zeros(2, dtype=torch.float64)
    tokens = dataset.tokens("validation")
    batches = sequential_batches(tokens, config.batch_size, config.seq_len, config.eval.sequences)
    while round_ := list(itertools.islice(batches, readers)):
        # The model is sharded, so all processes must run it: one that is left without a batch runs
        # another's, for nothing.
        x_BS, y_BS = own_part(model, *round_[min(reader, len(round_) - 1)])
        with compute_context(config, device):
            loss = loss_fn(model, x_BS.to(device), y_BS.to(device), config, reduction="sum")
        if reader < len(round_):
            total_and_count += torch.tensor([float(loss), y_BS.numel()], dtype=torch.float64)
    total, count = world.sum(total_and_count).tolist()
    return total / count


def open_checkpoints(config: TrainConfig, folder: Path, world: World) -> checkpoint.Checkpoints:
    """The checkpoints of a run: sharded ones for a sharded model, or where another number of
    processes left such."""
    if not config.parallel.distributed and not any(folder.glob("sharded-*")):
        return checkpoint.WholeCheckpoints(folder, config.checkpoint.keep)
    from lsai_core.training.sharded_checkpoint import ShardedCheckpoints

    sequences = config.tokens_per_step // config.seq_len
    return ShardedCheckpoints(folder, config.checkpoint.keep, sequences, world, config.parallel.tp)


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGUSR1 while the block runs, so that the loop can end at a step
    boundary."""
    received: list[int] = []
    try:
        old = {
            s: signal.signal(s, lambda number, _: received.append(number))
            for s in (signal.SIGTERM, signal.SIGUSR1)
        }
    except ValueError:  # not the main thread: nothing can be caught here
        old = {}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def train(
    config: TrainConfig,
    dataset: TokenSource,
    folder: Path,
    on_rows: OnRows = lambda rows: None,
    mfu_per_rate: float | None = None,
    world: World | None = None,
) -> Trained:
    """Train `config` on `dataset`; metrics and checkpoints go to `folder`, finished rows also to
    `on_rows`.

    `mfu_per_rate`: MFU of one token/s over all devices, for the rows of the metrics file. `world`:
    the processes that train together; each calls with its own, and all get the same rows.

    Resumes from the newest checkpoint in `folder`. Raises Unavailable, UserError, Diverged,
    Preempted, or torch's out-of-memory error; whatever happens, `metrics.jsonl` holds the complete
    steps.
    """
    require_possible(config, "train")
    world = world or World()
    if config.parallel.world_size != world.size:
        raise UserError(
            f"parallel asks for {config.parallel.world_size} processes, but {world.size} are "
            f"running"
        )
    if config.parallel.distributed and not world.launched:
        raise UserError(
            "parallel.cpu_offload needs a process group, which `lsai train` and the studies start"
        )
    loop = _Loop(
        config,
        dataset,
        folder,
        MetricsFile(folder / "metrics.jsonl", mfu_per_rate, world),
        on_rows,
        world,
    )
    with _stop_requests() as asked, loop.instruments:
        for step in range(loop.result.resumed_at, config.steps):
            loop.step(step)
            loop.end_of_step(step + 1, world.agree_to_stop(bool(asked)), asked)
    loop.checkpoints.finish()
    # in every session of this run
    loop.result.timed_ms = [row["step_ms"] for row in loop.result.rows if row["steady"]]
    loop.result.measured = over_processes(world.gather(loop.instruments.results()))
    if not loop.result.timed_ms:
        loop.result.measured["speed_note"] = (
            f"none of {config.steps} steps was timed: steps {loop.instruments.uses()}; "
            f"give at least {loop.instruments.steps_needed} steps"
        )
    return loop.result


class _Loop:
    """What one run of the loop holds: model, optimizer, data, clock, instruments, records and
    checkpoints."""

    def __init__(
        self,
        config: TrainConfig,
        dataset: TokenSource,
        folder: Path,
        metrics: MetricsFile,
        on_rows: OnRows,
        world: World,
    ) -> None:
        started = time.perf_counter()
        self.config, self.dataset, self.metrics, self.on_rows, self.world = (
            config,
            dataset,
            metrics,
            on_rows,
            world,
        )
        self.device = resolve_device(config.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        set_matmul_mode(config.precision)
        self.checkpoints = open_checkpoints(config, folder, world)
        sequences = config.batch_size * config.grad_accum
        self.stream = BatchStream(dataset.tokens("train"), sequences, config.seq_len, config.seed)
        kernel = attention_kernel(config, self.device)
        self.model = prepare_model(config, self.device)
        self.optimizer = prepare_optimizer(self.model, config)
        self.result = result = Trained(self.model, kernel, way_of(self.optimizer))
        result.resumed_at, self.earlier_s = self.checkpoints.restore(self.model, self.optimizer)
        result.rows, result.train_s = metrics.truncate(result.resumed_at), self.earlier_s
        profile = config.profile.model_copy(
            update={} if world.is_main else {"trace": False, "snapshot": False}
        )
        held = held_here(self.optimizer)  # what is counted as memory of this process
        self.instruments = Instruments(
            profile, self.device, folder, (self.model, held), result.resumed_at
        )
        self.lost_updates = LostUpdates(self.model, self.optimizer, profile.lost_updates)
        # steps of this process whose durations are on disk
        self.timer, self.flushed = StepTimer(self.device), 0
        result.setup_s = time.perf_counter() - started
        self.began = time.perf_counter()
        self.timer.mark()

    def step(self, step: int) -> None:
        """One optimizer step, its duration and its row."""
        config, result = self.config, self.result
        meter = self.instruments.before(step)
        lr = learning_rate(step, config.steps, config.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = self.stream.batch(
            step * config.parallel.readers + self.world.rank // config.parallel.members
        )
        self.lost_updates.before(step)
        loss_and_norm = train_step(self.model, self.optimizer, *batch, config, self.device, meter)
        self.timer.mark()
        if self.instruments.after(step):
            self.timer.restart()
            self.timer.mark()
        row = {
            "step": step,
            "lr": lr,
            "tokens_in_step": config.tokens_per_step,
            **memory_now(self.device),
        }
        timed = step not in self.instruments.untimed and not self.lost_updates.due(step)
        row |= {"steady": timed, **self.lost_updates.after(step)}
        self.metrics.add(row, loss_and_norm)
        if step == result.resumed_at:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            result.first_step_s = time.perf_counter() - self.began

    def end_of_step(self, done: int, stop: bool, asked: list[int]) -> None:
        """Validate, write and save what is due after `done` steps; raises Preempted where all agree
        to `stop`."""
        config, result, last = self.config, self.result, done == self.config.steps
        save = config.checkpoint.every and done % config.checkpoint.every == 0 and not last
        check = last or (config.eval.every and done % config.eval.every == 0)
        if not (save or check or stop or done % config.log_every == 0):
            return
        extra: dict[str, Any] = {}
        if check or save or stop:
            self.timer.restart()  # what follows is no step
        if check:
            result.validation_loss = validate(
                self.model, config, self.dataset, self.device, self.world
            )
            extra["validation_loss"] = result.validation_loss
        result.train_s = self.earlier_s + time.perf_counter() - self.began
        self._write(extra)
        self.checkpoints.check()
        if save or (stop and not last):
            self.checkpoints.save(done, self.model, self.optimizer, result.train_s)
        if stop and not last:
            self.checkpoints.finish()
            # of several processes, the one that launched them knows the signal, and adds it; a
            # person stops a run by SIGTERM
            told = not self.world.launched and asked[0] != signal.SIGTERM
            asked_by = f" ({signal.Signals(asked[0]).name})" if told else ""
            raise Preempted(f"stopped after step {done} of {config.steps}{asked_by}")
        if check or save:
            self.timer.mark()

    def _write(self, extra: dict[str, Any]) -> None:
        durations = self.timer.durations_ms()[self.flushed :]
        self.flushed += len(durations)
        rows = self.metrics.flush(durations, extra)
        self.result.rows.extend(rows)
        self.on_rows(rows)
        if wrong := [row["step"] for row in rows if not math.isfinite(row["loss"])]:
            raise Diverged(f"the loss is not finite at step {wrong[0]}")


def memory_now(device: torch.device) -> dict[str, float]:
    """Peak allocated and reserved GPU memory since the last reset, GiB (empty on a CPU). Host-side
    counters: no wait."""
    if device.type != "cuda":
        return {}
    return {
        "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
    }
