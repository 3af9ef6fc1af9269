"""One of several processes on a simulated GPU: process groups that exchange nothing, and
DistributedDataParallel's buckets.

While `one_rank` is open, every process group is torch's `fake` one, of the size that the program or
`WORLD_SIZE` says, and `DistributedDataParallel` holds what its reducer would
(torch/csrc/distributed/c10d/reducer.cpp): first one bucket of all gradients, from the second
forward pass on those that are rebuilt in the order of the backward pass. NCCL's own buffers lie
outside of PyTorch's allocator. What shares parameters among processes is in `simulated_shards.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.distributed_c10d import init_process_group
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lsai_core.base.attributes import attributes_as
from lsai_core.base.errors import UserError
from lsai_core.prediction import simulated_shards
from lsai_core.prediction.simulated_shards import refusing

MIB = 2**20
FIRST_BUCKET, BUCKET, BROADCAST = MIB, 25 * MIB, 250 * MIB
_OPENING = (dist, dist.distributed_c10d, device_mesh)  # which open the first process group
IN_FLIGHT = 2  # flat copies of parameters that are broadcast at a time


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A context; see above. A group that the program opens inside is closed at the end."""
    before = dist.is_available() and dist.is_initialized()
    changed: list[tuple[Any, str, Any]] = [
        (DistributedDataParallel, "__init__", _begin),
        (DistributedDataParallel, "forward", _forward),
        (DistributedDataParallel, "no_sync", lambda _self: contextlib.nullcontext()),
        (DataParallel, "__init__", refusing("DataParallel")),
        *((owner, "init_process_group", _init_process_group) for owner in _OPENING),
        (dist, "barrier", lambda *_, **__: None),
        *simulated_shards.attributes(),
    ]
    try:
        with attributes_as(changed):
            yield
    finally:
        if dist.is_available() and dist.is_initialized() and not before:
            dist.destroy_process_group()


def _init_process_group(
    backend: Any = None,
    init_method: Any = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    *_others: Any,
    **_options: Any,
) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
    rank = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
    init_process_group("fake", rank=rank, world_size=max(size, rank + 1), store=FakeStore())


def _begin(
    self: Any,
    module: nn.Module,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
    broadcast_buffers: bool = True,
    init_sync: bool = True,
    process_group: Any = None,
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool = False,
    check_reduction: bool = False,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
    *_others: Any,
    **options: Any,
) -> None:
    """`DistributedDataParallel.__init__`."""
    if not dist.is_initialized():
        raise UserError("DistributedDataParallel needs torch.distributed.init_process_group first")
    if strange := [name for name, value in options.items() if value]:
        raise UserError(f"simulated_gpu cannot follow DistributedDataParallel({strange[0]}=...)")
    nn.Module.__init__(self)
    self.module = module
    self.device_ids = device_ids
    learned = [p for p in module.parameters() if p.requires_grad]
    if init_sync:
        _broadcast([*module.parameters(), *module.buffers()])
    cap = BUCKET if bucket_cap_mb is None else int(bucket_cap_mb * MIB)
    one = sys.maxsize if static_graph or not find_unused_parameters else None
    self.simulated = _Buckets(learned, cap, gradient_as_bucket_view)
    self.simulated.rebuilt = one is None  # the first ones stay
    self.simulated.make([one] if one else [FIRST_BUCKET, cap])


def _forward(self: Any, *inputs: Any, **options: Any) -> Any:
    buckets: _Buckets = self.simulated
    if buckets.seen and not buckets.rebuilt:
        buckets.rebuilt = True
        buckets.make([FIRST_BUCKET, buckets.cap])
    buckets.seen = buckets.seen or torch.is_grad_enabled()
    return self.module(*inputs, **options)


class _Buckets:
    """Flat tensors that gradients are reduced in; `views`: the gradients are parts of them."""

    def __init__(self, parameters: list[nn.Parameter], cap: int, views: bool) -> None:
        self.parameters, self.cap, self.views = parameters, cap, views
        self.flat: list[Tensor] = []
        self.seen = self.rebuilt = False
        self.places: dict[int, Tensor] = {}
        if views:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._move)

    def make(self, limits: list[int]) -> None:
        """Buckets of at most the first, then the second of `limits` bytes, and the parameter that
        reaches it; old ones go first."""
        self.flat, self.places = [], {}
        for group in assigned(list(reversed(self.parameters)), limits):
            flat = group[0].new_empty(sum(parameter.numel() for parameter in group))
            parts = flat.split([parameter.numel() for parameter in group])
            self.flat.append(flat)
            if self.views:
                pairs = zip(group, parts, strict=True)
                self.places |= {id(p): part.view(p.shape) for p, part in pairs}

    def _move(self, parameter: Tensor) -> None:
        place = self.places[id(parameter)]
        if parameter.grad is not place:
            parameter.grad = place


def assigned(tensors: list[Any], limits: list[int]) -> list[list[Any]]:
    """Tensors of one dtype in their order, a bucket closed once it has `limits` bytes: the first
    limit for the first bucket of a dtype, the last for all after the others."""
    found: list[list[Any]] = []
    open_: dict[torch.dtype, list[Any]] = {}
    closed: dict[torch.dtype, int] = {}
    for tensor in tensors:
        bucket = open_.setdefault(tensor.dtype, [])
        bucket.append(tensor)
        limit = limits[min(closed.get(tensor.dtype, 0), len(limits) - 1)]
        if sum(t.numel() * t.element_size() for t in bucket) >= limit:
            found.append(open_.pop(tensor.dtype))
            closed[tensor.dtype] = closed.get(tensor.dtype, 0) + 1
    return [*found, *open_.values()]


def _broadcast(tensors: list[Tensor]) -> None:
    """Parameters and buffers go to the other processes in flat copies."""
    flying: list[Tensor] = []
    for group in assigned([tensor.detach() for tensor in tensors], [BROADCAST]):
        flying = flying[-(IN_FLIGHT - 1) :]
        flying.append(group[0].new_empty(sum(tensor.numel() for tensor in group)))
