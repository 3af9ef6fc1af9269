"""Which settings of a training run cannot go together, and what to change: checked before anything
starts.

A config means the same on every machine, so what a kernel or a recipe demands is refused
everywhere, not only where it would run. Whoever plans, begins or predicts a run asks here. Rooms
that need torch are imported where a setting asks for them: planning a usual run takes no seconds.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel

from lsai_core.base.errors import UserError, hint
from lsai_core.base.plugins import declared, file_adds, names, own
from lsai_core.config.model import MOST_TOKENS
from lsai_core.config.parallel import ParallelConfig
from lsai_core.config.strict import validated
from lsai_core.config.train import LOSSES, TENSOR_CLASSES, OptimConfig, TrainConfig

T = TypeVar("T", bound=BaseModel)


@runtime_checkable
class Optimizer(Protocol):
    """What is asked here of an `lsai_core.optimizers.base.Optimizer`, which imports torch."""

    refusal: Callable[[OptimConfig], str | None]


def checked(cls: type[T], data: dict[str, Any], where: str) -> T:
    """`cls` from plain data, with every training run in it possible; UserError names `where`."""
    config = validated(cls, data, where)
    for train in training_configs(config):
        require_possible(train, where)
    return config


def require_possible(config: TrainConfig, where: str) -> None:
    """UserError that begins with `where` if settings of `config` cannot go together."""
    if (reason := refusal(config)) is not None:
        raise UserError(f"{where}: {reason}")


def training_configs(config: BaseModel) -> Iterator[TrainConfig]:
    """Every training run that `config` is or holds."""
    if isinstance(config, TrainConfig):
        yield config
        return
    for name in type(config).model_fields:
        if isinstance(inner := getattr(config, name), BaseModel):
            yield from training_configs(inner)


def refusal(config: TrainConfig) -> str | None:
    """Why `config` is impossible, and what would be possible; None if it is not."""
    if config.batch_size * config.seq_len > MOST_TOKENS:
        tokens = f"{config.batch_size} x {config.seq_len} tokens"
        return (
            f"batch_size x seq_len = {tokens}, and no process can hold more than {MOST_TOKENS}; "
            "use a smaller batch"
        )
    window = config.attention.window
    reason = _refusal_of_attention(config) or _refusal_of_optimizer(config.optim)
    if (reason := reason or _refusal_of_loss(config.loss)) is not None:
        return reason
    if window is not None and window > config.seq_len:
        return (
            f"attention.window={window} is longer than seq_len={config.seq_len}; use window: "
            f"null for full attention"
        )
    if config.fp8.recipe != "none" and not config.precision.startswith("bf16"):
        return (
            f"fp8.recipe={config.fp8.recipe!r} converts bf16 matmuls but precision is "
            f"{config.precision!r}; "
            "use precision bf16 or bf16_autocast, or fp8.recipe none"
        )
    if config.fp8.recipe != "none":
        from lsai_core.fp8.shapes import refusal as refusal_of_fp8

        if (reason := refusal_of_fp8(config)) is not None:
            return reason
    if set(config.optim.rounded) != set(TENSOR_CLASSES) and (
        config.precision != "bf16" or config.parallel.distributed
    ):
        return (
            f"optim.rounded says which bf16 weights of one process are rounded; it needs precision "
            f"bf16 (here {config.precision}) and no parallel.*"
        )
    adamw = config.optim.name == "adamw" and config.optim.states == "full"
    if config.profile.lost_updates and (config.parallel.distributed or not adamw):
        return "profile.lost_updates counts in one process, with optim.name adamw and states full"
    if (reason := _refusal_of_activations(config)) is not None:
        return reason
    if (reason := _refusal_of_sharing(config)) is not None:
        return reason
    if config.data.vocab_size > config.model.vocab_size:
        return (
            f"data.vocab_size={config.data.vocab_size} does not fit "
            f"model.vocab_size={config.model.vocab_size}"
        )
    return None


def _refusal_of_sharing(config: TrainConfig) -> str | None:
    if config.parallel.kind != ParallelConfig().kind:
        from lsai_core.parallel.way import way_of

        if (reason := way_of(config.parallel).refusal(config)) is not None:
            return reason
    if config.parallel.pp > 1:
        from lsai_core.parallel.possible import refusal_of_stages

        if (reason := refusal_of_stages(config)) is not None:
            return reason
    if config.parallel.tp > 1:
        from lsai_core.parallel.possible import refusal_of_matrices

        if (reason := refusal_of_matrices(config)) is not None:
            return reason
    if config.parallel.async_tp and not (config.parallel.tp > 1 and config.compile):
        return "parallel.async_tp needs parallel.tp > 1 and compile true"
    if config.parallel.cp > 1:
        from lsai_core.parallel.sequence import refusal as refusal_of_slices

        if (reason := refusal_of_slices(config)) is not None:
            return reason
    if config.optim.states == "8bit" and config.parallel.cpu_offload:
        return (
            "optim.states 8bit saves GPU memory, and cpu_offload keeps no states there; "
            "use one of them"
        )
    if config.parallel.fp8_gather and (config.fp8.recipe != "fused" or config.parallel.shards == 1):
        return "parallel.fp8_gather needs fp8.recipe fused and parallel.fsdp > 1 (or cp > 1)"
    return None


def _refusal_of_blocks(config: TrainConfig) -> str | None:
    first, layers = config.checkpoint_blocks, config.model.n_layers
    mode, others = config.grad_checkpoint, config.checkpoint_others
    if first is None:
        if others == "none":
            return None
        return (
            f"checkpoint_others={others} is for the blocks that checkpoint_blocks leaves; say how "
            "many blocks do grad_checkpoint"
        )
    if first >= layers or mode == others:
        return (
            f"checkpoint_blocks={first} of {layers} layers must leave blocks that do otherwise "
            f"(grad_checkpoint {mode}, checkpoint_others {others}); use null for all"
        )
    if config.saved_inputs == "host":
        return "saved_inputs: host moves the inputs of all blocks; leave out checkpoint_blocks"
    return None


def _refusal_of_activations(config: TrainConfig) -> str | None:
    if (reason := _refusal_of_blocks(config)) is not None:
        return reason
    if config.saved_inputs == "host" and config.grad_checkpoint == "none":
        return (
            "saved_inputs: host moves what gradient checkpointing keeps; use grad_checkpoint "
            "full or attention"
        )
    if config.inputs_on_gpu and config.saved_inputs == "gpu":
        return (
            "inputs_on_gpu says what saved_inputs: host leaves on the GPU; with saved_inputs "
            "gpu all are"
        )
    if config.inputs_on_gpu >= config.model.n_layers:
        return (
            f"inputs_on_gpu={config.inputs_on_gpu} leaves nothing for the host: the model has "
            f"{config.model.n_layers} layers"
        )
    if config.loss_chunk is not None and config.loss != "fused":
        return "loss_chunk needs loss: fused"
    if config.mlp_chunk is not None and config.blocks != "fused":
        return "mlp_chunk needs blocks: fused"
    if (
        config.mlp_chunk is not None
        and config.fp8.recipe != "none"
        and {"gate_up", "down"} & set(config.fp8.layers)
    ):
        return "mlp_chunk computes gate_up and down without fp8; leave them out of fp8.layers"
    return None


def _refusal_of_attention(config: TrainConfig) -> str | None:
    name = config.attention.backend
    if name == "auto":
        return None
    from lsai_core.attention.choice import BACKENDS, get_backend

    try:
        backend = get_backend(name)
    except UserError as error:
        return str(error)
    if config.attention.window is not None and not backend.windowed:
        able = ", ".join(other for other, each in BACKENDS.items() if each.windowed)
        return f"attention backend {name!r} has no sliding window; use auto, {able}"
    if config.precision in ("fp32", "tf32") and backend.half_only:
        others = ", ".join(other for other, each in BACKENDS.items() if not each.half_only)
        return (
            f"attention backend {name!r} needs 16-bit inputs but precision is "
            f"{config.precision!r}; use precision bf16_autocast or bf16, or backend auto, {others}"
        )
    return None


def _refusal_of_optimizer(optim: OptimConfig) -> str | None:
    package = "lsai_core.optimizers.kinds.*"
    if optim.name not in (known := (*names(package), *own("optimizers"))):
        return (
            f"unknown optimizer {optim.name!r}{hint(optim.name, known)}; {file_adds('optimizers')}"
        )
    asked = {"name", "kernel", "states", "rounding", "rounded"}
    usual = OptimConfig().model_dump(include=asked)
    if optim.model_dump(include=asked) == usual:
        return None
    declaration: Optimizer = declared(package, optim.name, "OPTIMIZER", "optimizers", Optimizer)
    return declaration.refusal(optim)


def _refusal_of_loss(name: str) -> str | None:
    if name in LOSSES:
        return None
    if name not in (known := (*LOSSES, *own("losses"))):
        return f"unknown loss {name!r}{hint(name, known)}; {file_adds('losses')}"
    declared("", name, "LOSS", "losses", Callable)
    return None
