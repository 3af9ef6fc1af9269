"""The training loop: one model, one device, next-token prediction.

Each step draws `grad_accum` micro-batches whose content depends only on (seed, step), runs forward and backward, clips the
gradient norm and takes one AdamW step. The host never waits for the GPU inside a step: losses stay on the device and are
read once per `log_every` steps, step times come from events. A few early steps run with the memory meter on; they and the
warm-up steps are left out of the speed figures. Validation, checkpoints and log flushes happen between timed steps.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lsai_core.attention import resolve
from lsai_core.config import OptimConfig, TrainConfig
from lsai_core.data import BatchStream, Dataset, sequential_batches
from lsai_core.errors import Unavailable, UserError
from lsai_core.model import Transformer, build_model
from lsai_core.profiling.memory import PhaseMemory
from lsai_core.profiling.steptime import StepTimer
from lsai_core.train import checkpoint
from lsai_core.train.instruments import Instruments
from lsai_core.train.metrics import MetricsFile
from lsai_core.train.precision import autocast, compute_dtype, set_matmul_mode, weight_dtype

GIB = 2**30


class Preempted(Exception):
    """The run was asked to stop (SIGTERM or SIGUSR1) and has saved a checkpoint."""


class Diverged(Exception):
    """The loss is not a finite number any more."""


@dataclass
class Trained:
    """What the loop leaves behind: the raw material of the results."""

    model: Transformer
    attention_kernel: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    timed_ms: list[float] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    setup_s: float = 0.0
    first_step_s: float = 0.0
    train_s: float = 0.0
    validation_loss: float = math.nan
    resumed_at: int = 0


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises Unavailable for `cuda` on a machine without."""
    if name == "cuda" and not torch.cuda.is_available():
        raise Unavailable("needs a CUDA GPU and torch sees none here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def attention_kernel(config: TrainConfig, device: torch.device) -> str:
    """The attention kernel that this run uses on `device` (what `auto` comes to).

    Raises Unavailable if the machine lacks it, before anything is built.
    """
    dtype = compute_dtype(config.precision)
    return resolve(
        config.attention.backend, device, dtype, config.model.head_dim, config.seq_len, config.attention.window
    )


def prepare_model(config: TrainConfig, device: torch.device) -> Transformer:
    """The model of a run, initialized from its seed, on its device, in its weight dtype, compiled if asked."""
    torch.manual_seed(config.seed)
    model = build_model(
        config.model,
        config.attention,
        grad_checkpoint=config.grad_checkpoint,
        device=device,
        dtype=weight_dtype(config.precision),
        seed=config.seed,
    )
    if config.compile:
        for block in model.blocks:
            block.compile()
    return model


def build_optimizer(model: torch.nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW; weight decay applies to matrices, not to norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """Linear warm-up over `warmup_steps`, then a cosine from lr to lr * min_lr_ratio at the last step."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    progress = (step - optim.warmup_steps) / max(1, steps - 1 - optim.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * cosine)


def loss_fn(model: Transformer, x_BS: torch.Tensor, y_BS: torch.Tensor, *, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy in nats per token, in fp32."""
    logits_BSV = model(x_BS)
    return F.cross_entropy(logits_BSV.float().flatten(0, 1), y_BS.flatten(), reduction=reduction)


@torch.no_grad()
def validate(model: Transformer, config: TrainConfig, dataset: Dataset, device: torch.device) -> float:
    """Mean loss (nats per token) over the held-out split, every token weighted the same."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    tokens = dataset.tokens("validation")
    for x_BS, y_BS in sequential_batches(tokens, config.batch_size, config.seq_len, config.eval.batches):
        with autocast(config.precision, device):
            loss = loss_fn(model, x_BS.to(device), y_BS.to(device), reduction="sum")
        total += loss.double().cpu()
        count += y_BS.numel()
    return float(total) / count


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGUSR1 while the block runs, so that the loop can end at a step boundary."""
    received: list[int] = []
    try:
        old = {s: signal.signal(s, lambda number, _: received.append(number)) for s in (signal.SIGTERM, signal.SIGUSR1)}
    except ValueError:  # not the main thread: nothing can be caught here
        old = {}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def train(
    config: TrainConfig,
    dataset: Dataset,
    folder: Path,
    on_rows: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    mfu_per_rate: float | None = None,
) -> Trained:
    """Train `config` on `dataset`; metrics and checkpoints go to `folder`, finished rows also to `on_rows`.

    `mfu_per_rate`: MFU of one token/s on this device, for the rows of the metrics file.

    Resumes from the newest checkpoint in `folder`. Raises Unavailable, UserError, Diverged, Preempted, or torch's
    out-of-memory error; whatever happens, `metrics.jsonl` holds the complete steps.
    """
    started = time.perf_counter()
    device = resolve_device(config.device)
    set_matmul_mode(config.precision)
    kernel = attention_kernel(config, device)
    stream = BatchStream(dataset.tokens("train"), config.batch_size * config.grad_accum, config.seq_len, config.seed)
    model = prepare_model(config, device)
    optimizer = build_optimizer(model, config.optim)
    metrics, result = MetricsFile(folder / "metrics.jsonl", mfu_per_rate), Trained(model, kernel)

    if saved := checkpoint.checkpoints(folder):
        state = checkpoint.load(saved[-1])
        try:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(
                f"{saved[-1]} does not fit this run's model: {' '.join(str(error).split())[:200]}"
            ) from None
        checkpoint.restore_random_states(state["random"])
        result.resumed_at, result.train_s = state["step"], state["train_s"]
    result.rows = metrics.truncate(result.resumed_at)

    timer = StepTimer(device)
    instruments = Instruments(config.profile, device, folder, (model, optimizer), result.resumed_at)
    flushed = 0  # steps of this process whose durations are on disk
    result.setup_s = time.perf_counter() - started
    loop_started = time.perf_counter()
    earlier_s = result.train_s

    def flush(extra: dict[str, Any]) -> None:
        nonlocal flushed
        durations = timer.durations_ms()[flushed:]
        flushed += len(durations)
        rows = metrics.flush(durations, extra)
        result.rows.extend(rows)
        on_rows(rows)
        if rows and not all(math.isfinite(row["loss"]) for row in rows):
            raise Diverged(
                f"the loss is not finite at step {next(r['step'] for r in rows if not math.isfinite(r['loss']))}"
            )

    timer.mark()
    with _stop_requests() as stop, instruments:
        for step in range(result.resumed_at, config.steps):
            meter = instruments.before(step)
            lr = learning_rate(step, config.steps, config.optim)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss_and_norm = train_step(model, optimizer, *stream.batch(step), config, device, meter)
            timer.mark()
            instruments.after(step)
            row = {"step": step, "lr": lr, "tokens_in_step": config.tokens_per_step, **memory_now(device)}
            metrics.add(row, loss_and_norm)
            if step == result.resumed_at:
                _synchronize(device)
                result.first_step_s = time.perf_counter() - loop_started

            done = step + 1
            last = done == config.steps
            save_now = config.checkpoint.every and done % config.checkpoint.every == 0 and not last
            check_now = last or (config.eval.every and done % config.eval.every == 0)
            if not (last or save_now or check_now or stop or done % config.log_every == 0):
                continue
            extra: dict[str, Any] = {}
            if check_now or save_now or stop:
                timer.restart()  # what follows is no step
            if check_now:
                result.validation_loss = validate(model, config, dataset, device)
                extra["validation_loss"] = result.validation_loss
            result.train_s = earlier_s + time.perf_counter() - loop_started
            flush(extra)
            if save_now or (stop and not last):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "train_s": result.train_s}
                checkpoint.save(folder, done, state, config.checkpoint.keep)
            if stop and not last:
                raise Preempted(f"stopped by {signal.Signals(stop[0]).name} after step {done} of {config.steps}")
            if check_now or save_now:
                timer.mark()

    result.timed_ms = [row["step_ms"] for row in result.rows if row["step"] not in instruments.untimed]
    result.measured = instruments.results()
    return result


def train_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    x_NS: torch.Tensor,
    y_NS: torch.Tensor,
    config: TrainConfig,
    device: torch.device,
    meter: PhaseMemory | None = None,
) -> torch.Tensor:
    """One optimizer step over N = batch_size * grad_accum sequences of token ids (int64, host memory).

    Returns (2,) fp32 on the device: mean loss of the step (nats per token) and gradient norm before clipping.
    """
    phase = meter.phase if meter else lambda _: contextlib.nullcontext()
    if device.type == "cuda":
        x_NS, y_NS = (t.pin_memory().to(device, non_blocking=True) for t in (x_NS, y_NS))
    total = torch.zeros((), device=device)
    for x_BS, y_BS in zip(x_NS.split(config.batch_size), y_NS.split(config.batch_size), strict=True):
        with phase("forward"), autocast(config.precision, device):
            loss = loss_fn(model, x_BS, y_BS) / config.grad_accum
        with phase("backward"):
            loss.backward()
        total += loss.detach()
    with phase("optimizer"):
        limit = config.optim.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return torch.stack([total.float(), norm.float()])


def memory_now(device: torch.device) -> dict[str, float]:
    """Peak allocated and reserved GPU memory since the last reset, GiB (empty on a CPU). Host-side counters: no wait."""
    if device.type != "cuda":
        return {}
    return {
        "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
