"""torch's own context parallelism, as the peer: ring attention over the zigzag layout with keys and
values gathered at once.

`torch.distributed.tensor.experimental.context_parallel` replaces `scaled_dot_product_attention`
while it is active. What it calls then is called here directly, with its defaults and cuDNN as the
kernel, so that one interface serves all methods; the tensors and the communication are the same,
the dispatch through DTensor is saved. It exists for CUDA only. Sources: PyTorch,
torch/distributed/tensor/experimental/_context_parallel.
"""

import functools
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lsai_core.kernels import NOT_NVIDIA, on_rocm


@functools.cache
def _implementation() -> Any:
    folder = "torch.distributed.tensor.experimental"
    for name in (
        f"{folder}._context_parallel._attention",
        f"{folder}._attention",
    ):  # its place in newer and older torch
        try:
            module = import_module(name)
        except ImportError:
            continue
        if hasattr(module, "_scaled_dot_product_ring_cudnn_attention_backward"):
            return module
    return None


def torch_missing() -> str | None:
    """Why it cannot run here; None if it can."""
    if not torch.cuda.is_available():
        return "has kernels for CUDA only, and this machine has no GPU"
    if on_rocm():
        return NOT_NVIDIA
    if _implementation() is None:
        return f"is not where it was looked for in torch {torch.__version__}"
    return None


@torch.compiler.disable
def torch_attention(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """(B, S / ranks, H, D), causal; slices in the zigzag layout."""
    group = dist.group.WORLD if group is None else group
    return _TorchAttention.apply(q_BSHD, k_BSKD, v_BSKD, _mesh(group))


def torch_sent_bytes(k_BSKD: Tensor, v_BSKD: Tensor, ranks: int, backward: bool) -> int:
    """What one rank sends, read off the source above: its keys and values to every other rank, in
    both passes; in the backward pass also their gradients, in fp32, to its neighbour after each of
    the `ranks` steps."""
    gathered = (ranks - 1) * (k_BSKD.nbytes + v_BSKD.nbytes)
    return gathered + (
        4 * ranks * (k_BSKD.numel() + v_BSKD.numel()) if backward and ranks > 1 else 0
    )


@functools.cache
def _mesh(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cuda")


class _TorchAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh) -> Tensor:  # type: ignore[override]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *rest = _implementation()._scaled_dot_product_ring_cudnn_attention(
            mesh, q, k, v, is_causal=True
        )
        # The debug mask comes last; the backward pass does not take it.
        ctx.mesh, ctx.rest = mesh, rest[:6]
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cum_q, cum_k, max_q, max_k, seed, offset = ctx.rest
        gradients = _implementation()._scaled_dot_product_ring_cudnn_attention_backward(
            ctx.mesh,
            dout.transpose(1, 2),
            *ctx.saved_tensors,
            seed,
            offset,
            None,
            cum_q,
            cum_k,
            max_q,
            max_k,
            0.0,
            True,
        )
        return *(gradient.transpose(1, 2) for gradient in gradients[:3]), None
