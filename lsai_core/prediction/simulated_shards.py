"""FSDP2 (`fully_shard`) on a simulated GPU: PyTorch's own code, as one of several processes.

FSDP2 holds its buffers, and what another stream still reads, by references in Python. So its own
code runs over fake tensors, and its collectives are those of torch's `fake` backend, which exchange
nothing. While `attributes` are set, a device mesh of GPUs is one of where tensors are, the ranks in
it have values, and sharded tensors infer the shapes of results unseen, for they do so on whole
tensors. FSDP2's streams are those of `torch.cpu`, which nothing else uses.

The first FSDP (`FullyShardedDataParallel`) and tensor parallelism are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from lsai_core.base.errors import UserError

# Methods of a device mesh that compute with ranks.
_MESH_METHODS = ("__getitem__", "_flatten", "_unflatten", "_get_all_submeshes")


def attributes() -> list[tuple[Any, str, Any]]:
    """(owner, name, value) of attributes of torch that are others inside of a simulation."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor.parallel.style import ParallelStyle

    methods = [(name, getattr(DeviceMesh, name, None)) for name in _MESH_METHODS]
    return [
        (DeviceMesh, "__init__", _begin_mesh(_unseen(DeviceMesh.__init__))),
        *((DeviceMesh, name, _unseen(method)) for name, method in methods if method),
        shapes_unseen(),
        (FullyShardedDataParallel, "__init__", refusing("FullyShardedDataParallel")),
        *(
            (style, "_apply", refusing(f"tensor parallelism ({style.__name__})"))
            for style in ParallelStyle.__subclasses__()
        ),
    ]


def shapes_unseen() -> tuple[Any, str, Any]:
    """(owner, name, value) with which DTensor infers the shape of a whole result unseen: on tensors
    that a real process never has."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    return ShardingPropagator, name, _unseen(getattr(ShardingPropagator, name))


def refusing(said: str) -> Callable[..., None]:
    """A function that refuses to be called, as `said`."""

    def begin(*_arguments: Any, **_options: Any) -> None:
        raise UserError(
            f"simulated_gpu cannot follow {said}; predict one process without it, or this "
            f"package's own models with --gpus"
        )

    return begin


def _unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, whose tensors are neither fake nor counted."""

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return method(*arguments, **options)

    return call


def _begin_mesh(method: Callable[..., Any]) -> Callable[..., None]:
    """`DeviceMesh.__init__`, on the device where tensors are."""

    @functools.wraps(method)
    def begin(self: Any, *arguments: Any, **options: Any) -> None:
        arguments, options = _where_tensors_are(arguments, options)
        method(self, *arguments, **options)

    return begin


def _where_tensors_are(
    arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a mesh, with "cpu" for the device, and ranks that have values."""
    if arguments:
        arguments = ("cpu", *arguments[1:])
    else:
        options = options | {"device_type": "cpu"}
    if any(isinstance(value, FakeTensor) for value in (*arguments, options.get("mesh"))):
        raise UserError(
            "simulated_gpu cannot follow a DeviceMesh whose ranks are a tensor; give them as a list"
        )
    if isinstance(ranks := options.get("_rank_map"), FakeTensor):  # of `init_device_mesh`: all
        with _disable_current_modes():
            options = options | {"_rank_map": torch.arange(ranks.numel(), dtype=ranks.dtype)}
    return arguments, options
