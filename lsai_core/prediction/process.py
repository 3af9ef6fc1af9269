"""One process of several that share a model: PyTorch's own code for it runs on fake tensors, in a
process group that exchanges nothing (torch's `fake` backend).

FSDP2, ZeroRedundancyOptimizer, DTensor and the schedules of pipelines are real, so that their
buffers are; DistributedDataParallel holds what its reducer would (`buckets.py`). While `one_rank`
is open, a device mesh of GPUs is one of where tensors are, the ranks in it have values, and sharded
tensors infer the shapes of results unseen, for they do so on whole tensors. FSDP2's streams are
those of `torch.cpu`, which nothing else uses.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import init_process_group
from torch.nn.parallel import DataParallel
from torch.utils._python_dispatch import _disable_current_modes

from lsai_core.base.attributes import attributes_as
from lsai_core.base.errors import UserError
from lsai_core.config.train import TrainConfig
from lsai_core.prediction import buckets
from lsai_core.prediction.purposes import named
from lsai_core.prediction.tracker import PurposeTracker

MOST_SHARDS = 4096  # FSDP2 cuts each parameter into all of them, of which one is kept
_OPENING = (dist, dist.distributed_c10d, device_mesh)  # which open the first process group
# Methods of a device mesh that compute with ranks.
_MESH_METHODS = ("__getitem__", "_flatten", "_unflatten", "_get_all_submeshes")


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A context in which every process group exchanges nothing. One that is opened inside, of the
    size that its opener or `WORLD_SIZE` says, is closed at the end."""
    before = dist.is_available() and dist.is_initialized()
    changed: list[tuple[Any, str, Any]] = [
        *((owner, "init_process_group", _open) for owner in _OPENING),
        (dist, "barrier", lambda *_, **__: None),
        *buckets.attributes(),
        *_of_meshes(),
    ]
    try:
        with attributes_as(changed):
            yield
    finally:
        if dist.is_available() and dist.is_initialized() and not before:
            dist.destroy_process_group()
            _forget()


@contextlib.contextmanager
def one_of(config: TrainConfig, rank: int) -> Iterator[None]:
    """`one_rank`, with a group as large as the run's, of which this process is `rank`."""
    if not config.parallel.distributed:
        yield
        return
    if (shards := config.parallel.shards) > MOST_SHARDS:
        raise UserError(
            f"a model in {shards:,} shards cannot be predicted, at most in {MOST_SHARDS:,}; "
            f"with parallel.replicate groups of processes hold a copy each"
        )
    if dist.is_initialized():
        raise UserError("a prediction for several processes cannot run inside of a distributed run")
    with one_rank():
        _open(world_size=config.parallel.world_size, rank=rank)
        yield


def _open(
    backend: Any = None,
    init_method: Any = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    *_others: Any,
    **_options: Any,
) -> None:
    """`init_process_group`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
    rank = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
    init_process_group("fake", rank=rank, world_size=max(size, rank + 1), store=FakeStore())


def _forget() -> None:
    """Clear what DTensor keeps of a mesh, which holds for one process and its groups alone."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    if hasattr(_redistribute, "_gen_transform_infos"):
        _redistribute._gen_transform_infos.cache_clear()


def refusals() -> list[tuple[Any, str, Any]]:
    """(owner, name, value) of what anybody's program may not do, for nothing here follows it."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor.parallel.style import ParallelStyle

    styles = ParallelStyle.__subclasses__()
    return [
        (DataParallel, "__init__", _refusing("DataParallel")),
        (FullyShardedDataParallel, "__init__", _refusing("FullyShardedDataParallel")),
        *(
            (style, "_apply", _refusing(f"tensor parallelism ({style.__name__})"))
            for style in styles
        ),
    ]


def _refusing(said: str) -> Callable[..., None]:
    def begin(*_arguments: Any, **_options: Any) -> None:
        raise UserError(
            f"simulated_gpu cannot follow {said}; predict one process without it, or this "
            f"package's own models with --gpus"
        )

    return begin


def _of_meshes() -> list[tuple[Any, str, Any]]:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    shapes = "_propagate_tensor_meta_non_cached"  # on tensors that a real process never has
    methods = [(name, getattr(DeviceMesh, name, None)) for name in _MESH_METHODS]
    return [
        (DeviceMesh, "__init__", _begin_mesh(_unseen(DeviceMesh.__init__))),
        *((DeviceMesh, name, _unseen(method)) for name, method in methods if method),
        (ShardingPropagator, shapes, _unseen(getattr(ShardingPropagator, shapes))),
    ]


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


class SharingTracker(PurposeTracker):
    """`PurposeTracker` in a process to whose questions the others say yes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not args[0].is_floating_point():
            return 1
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Sent(list[Any]):
    """Work of a process group, which holds what it sends and receives until nobody waits for it."""

    tensors: list[torch.Tensor]


def _holding(send: Any) -> Any:
    def call(operations: list[dist.P2POp], *others: Any, **options: Any) -> _Sent:
        work = _Sent(send(operations, *others, **options))
        work.tensors = [operation.tensor for operation in operations]
        return work

    return call


@contextlib.contextmanager
def messages_between_stages(tracker: PurposeTracker) -> Iterator[None]:
    """While it is open, what a pipeline receives in is named so, and what is on its way lives."""
    from torch.distributed.pipelining import schedules, stage

    buffer, send = "_make_tensor_from_meta", "_batch_p2p"
    changed = [
        (stage, buffer, named(tracker, "messages", getattr(stage, buffer))),
        (schedules, send, _holding(getattr(schedules, send))),
    ]
    with attributes_as(changed):
        yield
