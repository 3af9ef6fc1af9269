"""Runs in which several processes share each sequence: their groups, their slices, and what is
refused before anything starts.

Ranks are numbered with the sharing processes as neighbours (rank = reader x cp + place in the
sequence), so that they lie in one node. A reader is a group of `parallel.cp` processes with a batch
of its own; its members draw the same batch and keep a slice each. Weights are sharded over all
processes of a copy, `fsdp` x `cp`, as torchtitan does it: slices are equally long, so the mean of
the processes' gradients, which FSDP makes anyway, is the gradient of the mean loss over whole
sequences.

Where `parallel.tp` processes share each matrix as well, each place is such a group, with the heads
dealt out among its processes: those that have the same heads of one sequence share its slices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lsai_core.attention.choice import BACKENDS, tile_backend
from lsai_core.base.errors import UserError
from lsai_core.config.precision import compute_dtype
from lsai_core.context.heads import key_heads
from lsai_core.context.methods import ContextParallel, ContextSetting, get_method
from lsai_core.parallel.processes import TIMEOUT

if TYPE_CHECKING:
    from lsai_core.config.train import TrainConfig


def setting(config: TrainConfig) -> ContextSetting:
    """What the processes that share a sequence agree on."""
    return ContextSetting(
        config.parallel.cp_method, config.seq_len, config.attention.window, config.attention.backend
    )


def own_heads(config: TrainConfig) -> tuple[int, int]:
    """The query heads and the key-value heads that a process computes."""
    model, tp = config.model, config.parallel.tp
    return model.n_heads // tp, model.n_kv_heads // tp


def refusal(config: TrainConfig) -> str | None:
    """Why no machine could share this run's sequences as it asks, or None."""
    method, ranks = get_method(config.parallel.cp_method), config.parallel.cp
    if config.parallel.tp > 1 and method.peer:
        return "parallel.cp_method torch, a peer to compare with, does not go with parallel.tp > 1"
    if config.precision in ("fp32", "tf32") and method.peer:
        return "parallel.cp_method torch needs 16-bit inputs; use precision bf16 or bf16_autocast"
    if config.attention.window is not None and method.peer:
        return (
            "parallel.cp_method torch has no sliding window; use another method, or "
            "attention.window null"
        )
    able = [name for name, backend in BACKENDS.items() if backend.tiles]
    if config.attention.backend not in ("auto", *able):
        return (
            f"attention backend {config.attention.backend!r} returns no log-sum-exp, which "
            f"parallel.cp > 1 needs; use auto, " + ", ".join(able)
        )
    try:
        setting(config).layout(ranks)
        key_heads(*own_heads(config), setting(config).pieces(ranks))
    except UserError as error:
        return f"parallel.cp={ranks}, cp_method {method.name}: {error}"
    return None


def kernel(config: TrainConfig, device: torch.device) -> str:
    """The attention kernel that every process runs on its tiles; UserError or Unavailable if it
    cannot."""
    if get_method(config.parallel.cp_method).peer:
        return "sdpa_cudnn"
    model, ranks = config.model, config.parallel.cp
    pieces = setting(config).pieces(ranks)
    heads, kv_heads = own_heads(config)
    return tile_backend(
        config.attention.backend,
        device,
        compute_dtype(config.precision),
        model.head_dim,
        window=config.attention.window,
        grouped=heads // pieces != max(1, kv_heads // pieces),
        length=config.seq_len * pieces // ranks,
    ).name


def join(
    config: TrainConfig, device: torch.device, kind: type[ContextParallel] = ContextParallel
) -> ContextParallel:
    """Form the group that shares this process's sequences; all processes of the run must call."""
    parallel = config.parallel
    groups = [
        list(range(first, reader + parallel.members, parallel.tp))
        for reader in range(0, parallel.world_size, parallel.members)
        for first in range(reader, reader + parallel.tp)
    ]
    group, _ = dist.new_subgroups_by_enumeration(groups, timeout=TIMEOUT)
    if device.type == "cuda":
        # NCCL connects a group at its first collective, in which all must take part; in a ring's
        # first step not all may.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    asked = setting(config)
    return kind(asked.method, asked.seq_len, window=asked.window, kernel=asked.kernel, group=group)
