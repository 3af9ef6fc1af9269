"""What a way of sharing a model among processes declares. The ways are the files of `kinds/`, by
the names that `parallel.kind` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lsai_core.base.plugins import declared

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from lsai_core.config.parallel import ParallelConfig
    from lsai_core.config.train import TrainConfig
    from lsai_core.model.transformer import Transformer

PACKAGE = "lsai_core.parallel.kinds.*"

Share = Callable[["Transformer", "TrainConfig", "DeviceMesh"], None]
Wrap = Callable[["Transformer", "TrainConfig"], None]


class Build(Protocol):
    """Builds an optimizer over all parameters of a model, or over those named."""

    def __call__(
        self, model: Transformer, *, parameters: dict[str, torch.nn.Parameter] | None = None
    ) -> torch.optim.Optimizer: ...


def _nothing(*args: Any) -> None:
    return None


def _as_it_is(build: Build, model: Transformer) -> torch.optim.Optimizer:
    return build(model)


@dataclass(frozen=True)
class Way:
    """One way of sharing a model, as its file below `kinds/` declares it.

    `share(model, config, mesh)` sees the model on the meta device, before it has memory, and
    `wrap(model, config)` the same model with memory; both change it in place, on every process.
    `mesh`: all processes of the run (`mesh_of`). `optimizer(build,
    model)`: the optimizer of this process, given what builds one over all parameters.
    `refusal(config)`: why settings do not go with this way, or None.
    """

    share: Share = _nothing
    wrap: Wrap = _nothing
    optimizer: Callable[[Build, Transformer], torch.optim.Optimizer] = _as_it_is
    refusal: Callable[[TrainConfig], str | None] = lambda config: None


def way_of(parallel: ParallelConfig) -> Way:
    """The way that `parallel.kind` names."""
    found: Way = declared(PACKAGE, parallel.kind, "WAY", "parallel")
    return found


def only_copies(config: TrainConfig) -> str | None:
    """Why a way that keeps whole weights in every process cannot serve `config`, or None."""
    parallel, usual = config.parallel, type(config.parallel)()
    with_it = {"kind", "replicate", "cp_method"}
    others: list[Any] = [
        name
        for name in type(parallel).model_fields
        if name not in with_it and getattr(parallel, name) != getattr(usual, name)
    ]
    if others:
        return (
            f"parallel.kind {parallel.kind} keeps whole weights in every process, and "
            f"parallel.{others[0]} does not go with it; parallel.replicate says how many processes"
        )
    if parallel.world_size == 1:
        return f"parallel.kind {parallel.kind} needs parallel.replicate > 1"
    return None
