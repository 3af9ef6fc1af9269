"""The settings among which a plan chooses, and how each is called.

A *kind* of step is everything but its micro-batch: numerics, loss, and what becomes of activations.
Each axis below goes from what changes the run least, or costs least time, to what saves most
memory. What a user sets is no choice any more: it is laid over every kind, and kinds that become
the same are one.

Compiled blocks and fused kernels save memory and time at once, so every kind has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lsai_core.base.errors import UserError
from lsai_core.config.precision import weight_dtype
from lsai_core.config.strict import deep_merge
from lsai_core.config.train import DataConfig, TrainConfig
from lsai_core.model.loss import CHUNK_BYTES
from lsai_core.optimizers.build import trained_bytes
from lsai_core.training.combinations import refusal
from lsai_lab.predictions.asked import UNREAD_VOCABULARY

Numerics = Literal["fp32", "harmless", "fp8"]
Settings = Mapping[str, Any]

ALWAYS: Settings = {"compile": True, "blocks": "fused"}
_FULL, _8BIT = {"states": "full", "rounding": "nearest"}, {"states": "8bit", "rounding": "nearest"}
_CHANCE = {"rounding": "stochastic"}
# From the nearest to fp32 on, and by what a user allows. The products are in bf16.
STATES: tuple[tuple[Numerics, Settings], ...] = (
    ("fp32", {"precision": "bf16_autocast", "optim": _FULL}),
    ("harmless", {"precision": "bf16_autocast", "optim": _8BIT}),
    ("harmless", {"precision": "bf16", "optim": _FULL | _CHANCE}),
    ("harmless", {"precision": "bf16", "optim": _8BIT | _CHANCE}),
)
PRODUCTS: tuple[tuple[Numerics, Settings], ...] = (
    ("fp32", {"fp8": {"recipe": "none"}}),
    ("fp8", {"fp8": {"recipe": "fused"}}),
)
ALLOWED: dict[Numerics, tuple[Numerics, ...]] = {
    "fp32": ("fp32",),
    "harmless": ("fp32", "harmless"),
    "fp8": ("fp32", "harmless", "fp8"),
}
_ALIKE = {"checkpoint_blocks": None, "checkpoint_others": "none"}
_ON_GPU = _ALIKE | {"saved_inputs": "gpu", "inputs_on_gpu": 0, "mlp_chunk": None}
_HERE = _ON_GPU | {"parallel": {"cpu_offload": False}}
# From the least to the most that is computed again.
CHECKPOINTS: tuple[Settings, ...] = tuple(
    _HERE | {"grad_checkpoint": mode}
    for mode in ("none", "selective", "alternating", "attention", "full")
)
_AWAY = {"grad_checkpoint": "full", "saved_inputs": "host", "inputs_on_gpu": 0}
_CHUNK = 8192  # tokens that an MLP takes at a time
_LEAST_CHUNK = 1024  # tokens that the loss takes at a time: fewer do not fill a GPU
# Asked only where nothing of the above fits: what the times of these leave out (copies that do not
# hide, updates on the host) can be most of a step.
_OFFLOADED = {"parallel": {"cpu_offload": True}}
OFFLOADS: tuple[Settings, ...] = (
    _HERE | _AWAY | {"mlp_chunk": None},
    _HERE | _AWAY | {"mlp_chunk": _CHUNK},
    _HERE | {"grad_checkpoint": "full"} | _OFFLOADED,
    _HERE | _AWAY | {"mlp_chunk": None} | _OFFLOADED,
    _HERE | _AWAY | {"mlp_chunk": _CHUNK} | _OFFLOADED,
)


@dataclass(frozen=True)
class Chain:
    """Kinds that differ in their activations alone, from the fastest to the smallest.

    `rank`: 0 is the nearest to fp32. `kinds`: complete configurations but for their micro-batch.
    """

    rank: int
    kinds: tuple[TrainConfig, ...]

    @property
    def loss(self) -> str:
        """The loss of all its kinds."""
        return self.kinds[0].loss

    @property
    def kept_gib(self) -> float:
        """Weights, gradients and states on each GPU, which no kind of the chain goes below."""
        return min(map(kept_gib, self.kinds))


def kept_gib(config: TrainConfig) -> float:
    """Weights, gradients and states of one GPU, GiB; 0 where the host keeps them."""
    if config.parallel.cpu_offload:
        return 0.0
    kept_bytes = trained_bytes(config.model, config.optim, weight_dtype(config.precision))
    return kept_bytes / config.parallel.shards / 2**30


def chains(
    asked: TrainConfig,
    fixed: Settings,
    allowed: Numerics,
    activations: tuple[Settings, ...] = CHECKPOINTS,
    fp8: bool = True,
    chunk: int | None = None,
) -> list[Chain]:
    """Every chain of `activations` that is possible for the run `asked`, with `fixed` laid over it.

    `allowed`: how far numerics may go. `fp8`: whether the GPU has fp8 matmuls. `chunk`: of the
    fused loss.
    """
    found: dict[tuple[str, ...], Chain] = {}
    kinds_of_numerics = [
        deep_merge(dict(states), dict(products))
        for (so_far, products), (near, states) in itertools.product(PRODUCTS, STATES)
        if near in ALLOWED[allowed] and so_far in ALLOWED[allowed] and (fp8 or so_far != "fp8")
    ]
    # a loss of the laboratory's own stays
    both = ({"loss": "fused", "loss_chunk": chunk}, {"loss": "full", "loss_chunk": None})
    losses: tuple[Settings, ...] = both if asked.loss in ("fused", "full") else ({},)
    for rank, numerics in enumerate(kinds_of_numerics):
        for loss in losses:
            kinds: dict[str, TrainConfig] = {}
            for activation in activations:
                config = _kind(asked, fixed, numerics, loss, activation)
                if config is not None:
                    kinds.setdefault(config.model_dump_json(), config)
            if kinds:
                found.setdefault(tuple(kinds), Chain(rank, tuple(kinds.values())))
    return list(found.values())


def _kind(asked: TrainConfig, fixed: Settings, *settings: Settings) -> TrainConfig | None:
    """`asked` with `settings`, and `fixed` over them; None where they cannot go together."""
    data = asked.model_dump()
    for each in (ALWAYS, *settings, fixed):
        data = deep_merge(data, dict(each))
    config = TrainConfig.model_validate(data)
    in_vain = config.mlp_chunk is not None and config.mlp_chunk >= config.seq_len
    return None if in_vain or refusal(config) else config


def loss_chunk(asked: TrainConfig, usable_gib: float) -> int | None:
    """Tokens of a chunk of the fused loss, where the usual chunk is large beside the memory: it
    lies in one piece, for which there may be no gap. None: the usual one.

    Chunks of fewer tokens than three times the width save nothing: the weight's gradient is summed
    in fp32, beside one chunk's own.
    """
    if asked.parallel.tp > 1:
        return None
    a_word_bytes = 2 * asked.model.vocab_size  # of one token's logits
    tokens = max(_LEAST_CHUNK, 3 * asked.model.d_model, usable_gib * 2**30 / 16 / a_word_bytes)
    chunk = int(tokens) // 256 * 256
    return chunk if chunk * a_word_bytes < CHUNK_BYTES else None


def in_some_blocks(kind: TrainConfig, blocks: int, lighter: TrainConfig) -> TrainConfig:
    """`kind` in so many blocks; in the others the checkpointing of `lighter`."""
    return kind.model_copy(
        update={"checkpoint_blocks": blocks, "checkpoint_others": lighter.grad_checkpoint}
    )


def with_batch(config: TrainConfig, batch: int, sequences: int) -> TrainConfig:
    """`config` in micro-batches of `batch` sequences, of `sequences` a step."""
    return config.model_copy(update={"batch_size": batch, "grad_accum": sequences // batch})


def batches(asked: TrainConfig, tokens: int, fixed: Settings) -> tuple[list[int], int]:
    """The micro-batches in question, sequences of one GPU, and how many sequences a GPU's step has.

    `tokens` of one optimizer step over all GPUs. UserError where they cannot be divided so.
    """
    if "grad_accum" in fixed:
        raise UserError("--set grad_accum: it follows from --tokens; set batch_size, or neither")
    readers = asked.parallel.readers
    together = asked.seq_len * readers
    gpus = f" on each of {readers} GPUs" if readers > 1 else ""
    if tokens % together:
        near = [count * together for count in (tokens // together, tokens // together + 1) if count]
        raise UserError(
            f"--tokens {tokens:,} cannot be cut into sequences of {asked.seq_len:,}{gpus}; take "
            f"{' or '.join(f'{count:,}' for count in near)}"
        )
    sequences = tokens // together
    if "batch_size" in fixed:
        if sequences % fixed["batch_size"]:
            raise UserError(
                f"batch_size={fixed['batch_size']} does not divide the {sequences:,} sequences of "
                f"a step{gpus}"
            )
        return [fixed["batch_size"]], sequences
    every = [batch for batch in range(1, sequences + 1) if sequences % batch == 0]
    possible = [b for b in every if refusal(with_batch(asked, b, sequences)) is None]
    return possible, sequences


def with_usual_vocabulary(config: TrainConfig) -> TrainConfig:
    """A run that can be trained, where the question said nothing of its text."""
    if config.data != DataConfig(vocab_size=UNREAD_VOCABULARY):
        return config
    usual = min(DataConfig().vocab_size, config.model.vocab_size)
    return config.model_copy(update={"data": DataConfig(vocab_size=usual)})


CHECKPOINT_WORDS = {
    "none": "keep all activations",
    "selective": "checkpoint all but matmuls and attention",
    "alternating": "checkpoint cheap operations and every second MLP",
    "attention": "checkpoint all but attention",
    "full": "checkpoint every block",
}
_IN_SOME = CHECKPOINT_WORDS | {"full": "checkpoint all"}


def checkpoint_words(config: TrainConfig) -> str:
    """What becomes of activations."""
    words = [CHECKPOINT_WORDS[config.grad_checkpoint]]
    if config.checkpoint_blocks is not None:
        some, others = _IN_SOME[config.grad_checkpoint], _IN_SOME[config.checkpoint_others]
        blocks = f"{config.checkpoint_blocks} of {config.model.n_layers} blocks"
        words = [f"{some} in {blocks}, {others} in the others"]
    words += ["block inputs in host memory"] * (config.saved_inputs == "host")
    if config.mlp_chunk is not None:
        words.append(f"MLPs in chunks of {config.mlp_chunk:,} tokens")
    return ", ".join(words)


def states_words(config: TrainConfig) -> str:
    """The numerics of weights, states and products."""
    weights = "bf16" if config.precision == "bf16" else "fp32"
    by_chance = " rounded stochastically" * (config.optim.rounding == "stochastic")
    if config.optim.states == "8bit":
        words = f"{weights} weights{by_chance}, 8-bit states"
    else:
        words = f"{weights} weights and states{by_chance}"
    if config.fp8.recipe != "none":
        words += ", fp8 matmuls"
    elif config.precision in ("fp32", "tf32"):
        words += f", {config.precision} matmuls"
    return words + ", on the host" * config.parallel.cpu_offload


def loss_words(config: TrainConfig) -> str:
    """How the loss is computed."""
    if config.loss_chunk is not None:
        return f"loss in chunks of {config.loss_chunk:,} tokens"
    return {"fused": "loss in chunks", "full": "all logits at once"}.get(config.loss, config.loss)


def kind_words(config: TrainConfig) -> str:
    """Everything but the micro-batch; the loss is told where it is not the usual one."""
    words = [checkpoint_words(config), states_words(config)]
    return ", ".join(words + [loss_words(config)] * (config.loss != "fused"))


def batch_words(config: TrainConfig) -> str:
    """The micro-batch, and how many make a step."""
    gpus = f", FSDP over {config.parallel.shards} GPUs" if config.parallel.shards > 1 else ""
    several = f" ({config.grad_accum:,} a step)" if config.grad_accum > 1 else ""
    return f"micro-batch {config.batch_size:,}{several}{gpus}"
