"""One optimizer step, and what it needs: the model on its device, the optimizer, the learning rate,
the loss.

A step runs forward and backward over `grad_accum` micro-batches, clips the gradient norm and lets
AdamW update (`optimizer.py`). What is measured around it and how often it is called is the loop's
business (`loop.py`); searches call the same step.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lsai_core.attention.choice import resolve
from lsai_core.base import compiler
from lsai_core.base.errors import Unavailable, UserError
from lsai_core.base.plugins import declared
from lsai_core.config.precision import autocast, compute_dtype, weight_dtype
from lsai_core.config.train import LOSSES, OptimConfig, TrainConfig
from lsai_core.fp8 import recipes
from lsai_core.model.loss import Reduction
from lsai_core.model.saved_inputs import require_host_memory
from lsai_core.model.transformer import Transformer, build_model
from lsai_core.optimizers.build import build_optimizer, clip_and_update
from lsai_core.parallel.adapt import adapt
from lsai_core.parallel.way import way_of
from lsai_core.profiling.memory import PhaseMemory
from lsai_core.profiling.steptime import PhaseClock


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises Unavailable for `cuda` on a machine without."""
    if name == "cuda" and not torch.cuda.is_available():
        raise Unavailable("needs a CUDA GPU and torch sees none here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def attention_kernel(config: TrainConfig, device: torch.device) -> str:
    """The attention kernel that this run uses on `device` (what `auto` comes to). Raises
    Unavailable if the machine lacks it."""
    if config.parallel.cp > 1:
        from lsai_core.parallel.sequence import kernel

        return kernel(config, device)
    model, attention = config.model, config.attention
    return resolve(
        attention.backend,
        device,
        compute_dtype(config.precision),
        model.head_dim,
        config.seq_len,
        attention.window,
        grouped=model.n_heads != model.n_kv_heads,
    )


def require(config: TrainConfig, device: torch.device) -> str:
    """The attention kernel of a run, once all that it needs of this machine is found: kernel, fp8
    recipe, compiler, what shares matrices. Raises Unavailable for what is missing; asked before
    anything is built."""
    recipes.require(config.fp8.recipe, device)
    compiler.require(config.compile, device)
    if config.parallel.tp > 1 and config.compile and config.computed_again:
        from lsai_core.parallel.tensor import require_recomputation

        require_recomputation()
    if config.parallel.async_tp:
        from lsai_core.parallel.async_tensor import require_symmetric_memory

        require_symmetric_memory(config, device)
    return attention_kernel(config, device)


def prepare_model(config: TrainConfig, device: torch.device) -> Transformer:
    """The model of a run, initialized from its seed, on its device, in its weight dtype, compiled
    and sharded if asked. Raises as `require`, and MemoryError where the host cannot hold what is to
    be kept there."""
    require(config, device)
    torch.manual_seed(config.seed)
    if config.parallel.distributed:
        from lsai_core.parallel.build import build_sharded

        model = build_sharded(config, device)
    else:
        if config.saved_inputs == "host":
            require_host_memory(config)
        model = build_model(
            config.model,
            config.attention,
            grad_checkpoint=config.checkpointed,
            device=device,
            dtype=weight_dtype(config.precision),
            seed=config.seed,
        )
        adapt(model, config)
    if config.init_from is not None:
        from lsai_core.model.hf import fill_from, find_checkpoint

        fill_from(model, find_checkpoint(config.init_from))
    return model


def prepare_optimizer(model: Transformer, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a run for the model of `prepare_model`. Raises as `build_optimizer`."""
    build = functools.partial(build_optimizer, optim=config.optim, seed=config.seed)
    if not config.parallel.distributed:
        return build(model)
    optimizer = way_of(config.parallel).optimizer(build, model)
    optimizer.pipeline_group = model.pipeline_group  # type: ignore[attr-defined]
    return optimizer


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """Linear warm-up over `warmup_steps`, then a cosine from lr to lr * min_lr_ratio at the last
    step."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    progress = (step - optim.warmup_steps) / max(1, steps - 1 - optim.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * cosine)


def own_part(model: Transformer, *tokens_NS: torch.Tensor) -> list[torch.Tensor]:
    """Of whole sequences (N, S) what this process computes: all, or its slice where several share
    them."""
    return [x_NS if model.context is None else model.context.shard(x_NS) for x_NS in tokens_NS]


def loss_of_logits(name: str) -> Callable[..., torch.Tensor]:
    """What a whole tensor of logits goes through, for the `loss` of a config: cross-entropy, or the
    laboratory's own `LOSS(logits_NV, targets_N)`, in training only, whose mean it is."""
    if name in LOSSES:
        return F.cross_entropy
    own: Callable[..., Any] = declared("", name, "LOSS", "losses", Callable)

    def mean(logits_NV: torch.Tensor, targets_N: torch.Tensor, reduction: str) -> torch.Tensor:
        loss = own(logits_NV, targets_N)
        given = "" if isinstance(loss, torch.Tensor) else f"{loss!r:.80}"
        if not given and loss.numel() != 1:
            given = f"a tensor of shape {tuple(loss.shape)}"
        if not given and logits_NV.requires_grad and not loss.requires_grad:
            given = "a tensor without a gradient"
        if given:
            raise UserError(
                f"loss {name}: its LOSS must return the mean over tokens as a tensor of one number "
                f"that the logits' gradient is computed from, not {given}"
            )
        return loss

    return mean


def loss_fn(
    model: Transformer,
    x_BS: torch.Tensor,
    y_BS: torch.Tensor,
    config: TrainConfig,
    reduction: Reduction = "mean",
    cross_entropy: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Cross-entropy in nats per token (or their sum), an fp32 scalar, by the way that `config.loss`
    names; `cross_entropy` is that of whole logits, by default `loss_of_logits`."""
    called = model.wrapper or model
    if config.loss == "fused":
        return called(x_BS, y_BS, reduction)
    cross_entropy = cross_entropy or loss_of_logits(config.loss)
    logits_BSV = called(x_BS)
    return cross_entropy(logits_BSV.float().flatten(0, 1), y_BS.flatten(), reduction=reduction)


def compute_context(
    config: TrainConfig, device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """The context of forward and loss: precision, and the fp8 recipe of Transformer Engine.

    A sharded model casts its weights as it gathers them and needs no autocast.
    """
    stack = contextlib.ExitStack()
    if not config.parallel.sharded:
        stack.enter_context(autocast(config.precision, device))
    stack.enter_context(recipes.context(config.fp8))
    return stack


def train_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    x_NS: torch.Tensor,
    y_NS: torch.Tensor,
    config: TrainConfig,
    device: torch.device,
    meter: PhaseMemory | PhaseClock | None = None,
    *,
    loss_of: Callable[..., torch.Tensor] = loss_fn,
    update: Callable[[torch.optim.Optimizer, float], torch.Tensor] = clip_and_update,
) -> torch.Tensor:
    """One optimizer step over N = batch_size * grad_accum sequences of token ids (int64, host
    memory).

    Sequences are whole, also where several processes share them. Returns (2,) fp32 on the device:
    mean loss of this process's part of the step (nats per token) and gradient norm before clipping.
    A prediction hands over its own `loss_of` and `update`.
    """
    phase = meter.phase if meter else lambda _: contextlib.nullcontext()
    x_NS, y_NS = own_part(model, x_NS, y_NS)
    if device.type == "cuda":
        x_NS, y_NS = (t.pin_memory().to(device, non_blocking=True) for t in (x_NS, y_NS))
    recipes.begin_step(model)
    if model.pipeline is not None:
        with phase("forward"), compute_context(config, device):  # and backward, by turns
            total = model.pipeline(x_NS, y_NS)
    else:
        total = _forward_and_backward(model, x_NS, y_NS, config, device, phase, loss_of)
    recipes.end_step(model)
    with phase("optimizer"):
        norm = update(optimizer, config.optim.grad_clip)
        optimizer.zero_grad(set_to_none=True)
    return torch.stack([total.float(), norm.float().to(device)])


def _forward_and_backward(
    model: Transformer,
    x_NS: torch.Tensor,
    y_NS: torch.Tensor,
    config: TrainConfig,
    device: torch.device,
    phase: Callable[..., contextlib.AbstractContextManager[Any]],
    loss_of: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """The passes of a step, one micro-batch after the other; returns the mean loss."""
    total = torch.zeros((), device=device)
    for number, (x_BS, y_BS) in enumerate(
        zip(x_NS.split(config.batch_size), y_NS.split(config.batch_size), strict=True), 1
    ):
        with model.micro_batch(number == config.grad_accum):
            with phase("forward"), compute_context(config, device):
                loss = loss_of(model, x_BS, y_BS, config) / config.grad_accum
            with phase("backward"):
                loss.backward()
        total += loss.detach()
    return total
