"""fp8 weights that a sharded model gathers in fp8: half of the bytes on the wire, and each rank
casts its own slice only.

Without it FSDP gathers bf16 weights and every rank casts all of them, once in the forward pass and
once in the backward pass. Here a rank casts its fp32 (or bf16) slice with the scale that all ranks
share, the delayed one of `scales.py`, and the products take what arrives as it is; the backward
pass turns it. The maximum of a slice goes into this rank's state, and the step's end takes the
largest over the ranks, as for every tensor. In a first step, which has no history, the ranks agree
on a weight's maximum before the cast. The extension points of FSDP2 (`fsdp_pre_all_gather`,
`fsdp_post_all_gather`) are those that torchao's float8 uses.

What autograd sees as the weight is `GatheredWeight`: shape and dtype of the bf16 weight, so that
its gradient is bf16, and inside the fp8 values. It knows one operator, the cast to fp8, which for
it means: hand out what is there.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lsai_core import kernels
from lsai_core.fp8 import scales
from lsai_core.fp8.fused import E4M3, FusedFp8Linear, FusedFp8MLP, cast_by_state

aten = torch.ops.aten


@torch.library.custom_op("lsai::fp8_turned", mutates_args=())
def fp8_turned(x8_NK: Tensor) -> Tensor:
    """Transposed in memory: (K, N), row-major."""
    if kernels.available(x8_NK.device):
        from lsai_core.kernels.fp8_cast import turned

        return turned(x8_NK)
    return x8_NK.t().clone(memory_format=torch.contiguous_format)


@fp8_turned.register_fake
def _(x8_NK: Tensor) -> Tensor:
    return x8_NK.new_empty(x8_NK.shape[1], x8_NK.shape[0])


class GatheredWeight(Tensor):
    """A weight (N, K) of dtype `dtype` to autograd, of which only the e4m3 values `data8` exist."""

    data8: Tensor

    @staticmethod
    def __new__(cls, data8: Tensor, dtype: torch.dtype) -> GatheredWeight:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            data8.size(),
            strides=data8.stride(),
            dtype=dtype,
            device=data8.device,
            requires_grad=False,
        )

    def __init__(self, data8: Tensor, dtype: torch.dtype) -> None:
        self.data8 = data8

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["data8"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, _size: Any, _stride: Any
    ) -> GatheredWeight:
        return GatheredWeight(inner["data8"], dtype)

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.lsai.fp8_cast.default:
            weight, _state, gradient, row, column = args
            assert not gradient
            data8, empty = weight.data8, weight.data8.new_empty(0)
            return data8 if row else empty, fp8_turned(data8) if column else empty
        if func is aten.as_strided.default:  # FSDP gives the weight the shape that it has
            assert tuple(args[1]) == tuple(args[0].shape) and tuple(args[2]) == args[0].stride()
        elif func not in (aten.detach.default, aten.alias.default, aten.view.default):
            raise NotImplementedError(f"{func} on a weight that exists in fp8 only")
        return GatheredWeight(args[0].data8, args[0].dtype)


def gather_in_fp8(model: nn.Module, processes: int) -> None:
    """Let FSDP gather the weights of the `fused` recipe's layers in fp8; to be called once the
    slices have memory.

    Weights whose rows do not divide by the number of `processes` in a group stay with bf16.
    """
    for module in model.modules():
        if isinstance(module, FusedFp8Linear):
            _extend(module, module, 1, processes)
        elif isinstance(module, FusedFp8MLP):
            _extend(module.gate_up, module, 1, processes)
            _extend(module.down, module, 4, processes)


def _extend(
    linear: nn.Linear, owner: FusedFp8Linear | FusedFp8MLP, index: int, processes: int
) -> None:
    """`owner.state[index]` is the scaling state of `linear`'s weight."""
    if linear.out_features % processes:
        return

    def before(
        self: Tensor, mesh: Any, _size: Any, _stride: Any, _module: Any, _policy: Any
    ) -> Any:
        # Looked up now, because moving a model replaces its buffers. Autograd need not know that
        # maxima change, as in `fused.py`.
        with torch.autograd._unsafe_preserve_version_counter(owner.state):
            state_34 = owner.state[index]
            if scales.calibrating():
                largest = self.abs().amax().float()
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
                scales.calibrate(state_34, largest, E4M3)
            return (cast_by_state(self, state_34, E4M3, row=True, column=False)[0],), None

    def after(
        _self: Tensor,
        gathered: Any,
        _metadata: Any,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        # `out` lies on the memory that the values have just been gathered into.
        return None if out is not None else (GatheredWeight(gathered[0], dtype), (gathered[0],))

    local: Any = linear.weight._local_tensor  # type: ignore[attr-defined]
    local.fsdp_pre_all_gather = MethodType(before, local)
    local.fsdp_post_all_gather = MethodType(after, local)
