"""Say what the tensors of a step are for: gradients, the loss, and the buffers that sharding needs.

The names are given from outside, around the functions that make these tensors; the step itself
knows nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from lsai_core.model import transformer as decoder
from lsai_core.prediction.tracker import PurposeTracker, _bytes

# Methods of FSDP2's parameter groups in which gathered weights and the buffers of the two
# collectives are made.
_SHARDING = ("unshard", "wait_for_unshard", "post_backward")


@contextlib.contextmanager
def named_purposes(model: nn.Module, tracker: PurposeTracker, cpu_offload: bool) -> Iterator[None]:
    """While open, tensors for the loss, the gradients and FSDP are named so; `cpu_offload`:
    gradients leave the GPU."""
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p: tracker.mark(p.grad, "gradients"))
        for parameter in model.parameters()
    ]
    group_class = _group_class()
    with contextlib.ExitStack() as stack:
        named = _named(tracker, "loss", decoder.linear_cross_entropy)
        stack.enter_context(mock.patch.object(decoder, "linear_cross_entropy", named))
        named = _named(tracker, "loss", torch.nn.functional.cross_entropy)
        stack.enter_context(mock.patch.object(torch.nn.functional, "cross_entropy", named))
        for name in _SHARDING:
            method = _sharding_method(tracker, getattr(group_class, name), name, cpu_offload)
            stack.enter_context(mock.patch.object(group_class, name, method))
        yield
    for hook in hooks:
        hook.remove()


def _named(tracker: PurposeTracker, purpose: str, function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with tracker.purpose(purpose):
            return function(*arguments, **options)

    return call


def _group_class() -> type:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return FSDPParamGroup


def _sharding_method(tracker: PurposeTracker, method: Any, name: str, cpu_offload: bool) -> Any:
    @functools.wraps(method)
    def call(group: Any, *arguments: Any, **options: Any) -> Any:
        with tracker.purpose("FSDP buffers"):
            if name == "unshard" and cpu_offload and tracker.live:
                # The slices come to the GPU before they are gathered.
                tracker.scratch(
                    [_bytes(p.sharded_param._local_tensor) for p in group.fsdp_params],
                    "FSDP buffers",
                )
            result = method(group, *arguments, **options)
        if name == "post_backward":
            for parameter in group.fsdp_params:
                gradient = parameter.sharded_param.grad
                if gradient is not None and cpu_offload:
                    tracker.move_to_host(gradient)
                elif gradient is not None:
                    tracker.mark(gradient, "gradients")
        return result

    return call
