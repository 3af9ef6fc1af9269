"""One process of several that share a model: PyTorch's own code for it runs on fake tensors, in a
process group that exchanges nothing.

DistributedDataParallel's reducer, FSDP2, ZeroRedundancyOptimizer, DTensor and the schedules of
pipelines are real, so that their buffers are. What they need to hear from others is answered here:
a reduced bucket is there at once, and what processes ask one another (is every parameter used, does
each know its shapes) is true.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lsai_core.base.attributes import attributes_as
from lsai_core.base.errors import UserError
from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import Transformer
from lsai_core.parallel.build import connect
from lsai_core.prediction.purposes import named
from lsai_core.prediction.simulated_shards import shapes_unseen
from lsai_core.prediction.tracker import PurposeTracker

MOST_SHARDS = 4096  # FSDP2 cuts each parameter into all of them, of which one is kept


@contextlib.contextmanager
def one_of(config: TrainConfig, rank: int) -> Iterator[None]:
    """A process group as large as the run's whose communication does nothing, of which this process
    is `rank`."""
    if not config.parallel.distributed:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if (shards := config.parallel.shards) > MOST_SHARDS:
        raise UserError(
            f"a model in {shards:,} shards cannot be predicted, at most in {MOST_SHARDS:,}; "
            f"with parallel.replicate groups of processes hold a copy each"
        )
    if dist.is_initialized():
        raise UserError("a prediction for several processes cannot run inside of a distributed run")
    dist.init_process_group(
        "fake", rank=rank, world_size=config.parallel.world_size, store=FakeStore()
    )
    try:
        with attributes_as([shapes_unseen()]):
            yield
    finally:
        dist.destroy_process_group()
        _forget()


def _forget() -> None:
    """Clear what DTensor keeps of a mesh, which holds for one process and its groups alone."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    if hasattr(_redistribute, "_gen_transform_infos"):
        _redistribute._gen_transform_infos.cache_clear()


class SharingTracker(PurposeTracker):
    """`PurposeTracker` in a process to which the others say yes. `connecting`: what is born is
    communication's, and if it has a weight's kind of numbers, buckets for gradients."""

    connecting = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not args[0].is_floating_point():
            return 1
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.connecting and isinstance(result, torch.Tensor) and result.is_floating_point():
            self.mark(result, "gradients")
        return result


def connect_alone(
    model: Transformer, config: TrainConfig, mesh: DeviceMesh, tracker: SharingTracker
) -> None:
    """`connect` without the others; the buckets that it makes are the gradients' memory."""
    # Weights that travel in fp8 are predicted as if they went in their own dtype.
    parallel = config.parallel.model_copy(update={"fp8_gather": False})
    with tracker, tracker.purpose("messages"):
        tracker.connecting = True
        connect(model, config.model_copy(update={"parallel": parallel}), mesh)
        tracker.connecting = False
    wrapper = getattr(model.wrapper, "__self__", None)
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.register_comm_hook(None, _reduced)


def _reduced(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


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
