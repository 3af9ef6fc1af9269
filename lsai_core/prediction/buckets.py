"""DistributedDataParallel as one of several processes without the others: the flat tensors in which
its reducer (torch/csrc/distributed/c10d/reducer.cpp) holds gradients, and nothing else of it.

The reducer is C++ that reads values, which fake tensors do not have. So here it is done by hand:
buckets of 25 MiB, the first of 1 MiB; or one bucket of all gradients, which is cut anew, by the
order of the backward pass, once a whole step was seen (not with `find_unused_parameters`). NCCL's
own buffers lie outside of PyTorch's allocator.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lsai_core.base.errors import UserError

MIB = 2**20
FIRST_BUCKET, BUCKET, BROADCAST = MIB, 25 * MIB, 250 * MIB
IN_FLIGHT = 2  # flat copies of parameters that are broadcast at a time


def attributes() -> list[tuple[Any, str, Any]]:
    """(owner, name, value) of what is another in DistributedDataParallel."""
    return [
        (DistributedDataParallel, "__init__", _begin),
        (DistributedDataParallel, "forward", _forward),
        (DistributedDataParallel, "no_sync", _no_sync),
    ]


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
    stays = find_unused_parameters and not static_graph
    self.simulated = _Buckets(learned, cap, stays, gradient_as_bucket_view)


def _forward(self: Any, *inputs: Any, **options: Any) -> Any:
    self.simulated.before_forward()
    return self.module(*inputs, **options)


@contextlib.contextmanager
def _no_sync(self: Any) -> Iterator[None]:
    before, self.simulated.summing = self.simulated.summing, False
    try:
        yield
    finally:
        self.simulated.summing = before


class _Buckets:
    """Flat tensors that gradients are reduced in. `stays`: they remain as they are cut first.
    `views`: gradients become parts of them when they are summed."""

    def __init__(self, parameters: list[nn.Parameter], cap: int, stays: bool, views: bool) -> None:
        self.parameters, self.cap, self.views = parameters, cap, views
        self.final, self.summing, self.seen = stays, True, False
        place = {id(parameter): index for index, parameter in enumerate(parameters)}
        groups = assigned(parameters, [FIRST_BUCKET, cap] if stays else [sys.maxsize])
        self._make(sorted(groups, key=lambda group: place[id(group[0])], reverse=True))
        for parameter in parameters if views else ():
            parameter.register_post_accumulate_grad_hook(self._move)

    def before_forward(self) -> None:
        """Cut the buckets anew if a step was seen; old ones go first."""
        if self.seen and not self.final:
            self.final = True
            self._make(assigned(list(reversed(self.parameters)), [FIRST_BUCKET, self.cap]))
        self.seen = self.seen or (torch.is_grad_enabled() and self.summing)

    def _make(self, groups: list[list[Any]]) -> None:
        self.flat, self.places = list[Tensor](), dict[int, Tensor]()
        for group in groups:
            flat = group[0].new_empty(sum(parameter.numel() for parameter in group))
            parts = flat.split([parameter.numel() for parameter in group])
            self.flat.append(flat)
            if self.views:
                pairs = zip(group, parts, strict=True)
                self.places |= {id(p): part.view(p.shape) for p, part in pairs}

    def _move(self, parameter: Tensor) -> None:
        if self.summing and parameter.grad is not (place := self.places[id(parameter)]):
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
