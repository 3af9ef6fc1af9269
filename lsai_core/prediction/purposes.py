"""Say what the tensors of a step are for: gradients, the loss, and the buffers that sharding needs.

The names are given from outside, around the functions that make these tensors; the step itself
knows nothing of it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from lsai_core.prediction.tracker import PurposeTracker, _bytes

# Methods of FSDP2's parameter groups in which gathered weights and the buffers of the two
# collectives are made.
_SHARDING = ("unshard", "wait_for_unshard", "post_backward")


def name_gradients_and_buffers(
    model: nn.Module, tracker: PurposeTracker, cpu_offload: bool
) -> None:
    """From now on gradients of `model` and tensors of FSDP are named so; `cpu_offload`: gradients
    leave the GPU."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: tracker.mark(p.grad, "gradients"))
    for module in model.modules():
        name_sharding(module, tracker, cpu_offload)


def name_sharding(module: nn.Module, tracker: PurposeTracker, cpu_offload: bool = False) -> None:
    """From now on tensors that FSDP2 makes for `module` itself are named so, if it is sharded."""
    for group in _parameter_groups(module):
        for name in _SHARDING:
            setattr(group, name, _sharding_method(tracker, group, name, cpu_offload))


def named(tracker: PurposeTracker, purpose: str, function: Any) -> Any:
    """`function`, what it makes named by `purpose`."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with tracker.purpose(purpose):
            return function(*arguments, **options)

    return call


def _parameter_groups(module: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    # until PyTorch 2.11 a state has one group, or none
    several = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None and "unshard" not in vars(group)]


def _sharding_method(tracker: PurposeTracker, group: Any, name: str, cpu_offload: bool) -> Any:
    method = getattr(group, name)

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        with tracker.purpose("FSDP buffers"):
            if name == "unshard" and cpu_offload and tracker.live:
                # The slices come to the GPU before they are gathered.
                tracker.scratch(
                    [_bytes(p.sharded_param._local_tensor) for p in group.fsdp_params],
                    "FSDP buffers",
                )
            result = method(*arguments, **options)
        if name == "post_backward":
            for parameter in group.fsdp_params:
                for whole in _whole_gradients(parameter):
                    tracker.mark(whole, "gradients")
                gradient = parameter.sharded_param.grad
                if gradient is not None and parameter.offload_to_cpu:
                    tracker.move_to_host(gradient)
                elif gradient is not None:
                    tracker.mark(gradient, "gradients")
        return result

    return call


def _whole_gradients(parameter: Any) -> list[Tensor]:
    """Those of FSDP2's `parameter` that a pipeline gathers until its last backward pass."""
    plain = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
    return [grad for grad in (plain, parameter.unsharded_accumulated_grad) if grad is not None]
