"""What Megatron-LM's layers of Transformer Engine keep in memory, where that differs from ours.

- SwiGLU is one operation that keeps its input; the projection behind it keeps its result.
- Where processes share a matrix by its rows, each keeps its part of the input and gathers the
  whole again in the backward pass.
- Each process looks up its part of the words, and has the gradient of that part alone.
- A matrix's gradient is added to its fp32 gradient within the product. For autograd there is a
  stand-in in bf16, one for each shape, which stays.

Sources: Megatron-LM 23e00ed (core 0.14), Transformer Engine 2.11. The functions below have the
shapes and lifetimes, and run on fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from lsai_core.model import transformer as decoder


class _Product(torch.autograd.Function):
    """x (..., in) times weight (out, in). Of x the `shares`-th part is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shares: int) -> Tensor:
        ctx.save_for_backward(x if shares == 1 else x.new_empty(x.numel() // shares), weight)
        ctx.shape = x.shape
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        kept, weight = ctx.saved_tensors
        whole = kept if kept.shape == ctx.shape else kept.new_empty(ctx.shape)
        del kept
        of_x = grad @ weight
        del whole  # it was needed to the end, for the gradient of the weight
        return of_x, None, None


class _SwiGLU(torch.autograd.Function):
    """(..., 2F) to (..., F)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.empty_like(ctx.saved_tensors[0])


class _Linear(nn.Linear):
    """A layer whose weight gets no gradient of its own; alone, or shared by rows or columns."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.weight, DTensor):
            return _Product.apply(x, self.weight.detach(), 1)
        assert isinstance(x, DTensor)
        mesh, (placement,) = self.weight.device_mesh, self.weight.placements
        by_rows = placement.is_shard(0)
        mine = x.to_local(grad_placements=[Partial()] if by_rows else None)
        out = _Product.apply(mine, self.weight.to_local().detach(), mesh.size() if by_rows else 1)
        made: Placement = Shard(out.ndim - 1) if by_rows else Partial()
        return DTensor.from_local(out, mesh, [made], run_check=False)


class _Embedding(nn.Embedding):
    """Of the words that are another process's nothing is found."""

    def forward(self, tokens: Tensor) -> Tensor:
        if not isinstance(self.weight, DTensor):
            return super().forward(tokens)
        mesh, own = self.weight.device_mesh, self.weight.to_local()
        assert isinstance(tokens, DTensor)
        found = nn.functional.embedding(tokens.to_local(), own)
        return DTensor.from_local(found, mesh, [Partial()], run_check=False)


class _MLP(decoder.MLP):
    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(_SwiGLU.apply(self.gate_up(x_BSD)))


def layers_of(block: decoder.Block) -> list[nn.Linear]:
    """The layers of a block that are Transformer Engine's."""
    return [block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down]


def use_engine_layers(model: decoder.Transformer) -> None:
    """Give `model` (on the meta device) these layers."""
    model.embedding.__class__ = _Embedding
    for block in model.blocks:
        assert isinstance(block, decoder.Block)
        block.mlp.__class__ = _MLP
        for layer in layers_of(block):
            layer.__class__ = _Linear


def stand_ins(model: nn.Module) -> dict[torch.Size, Tensor]:
    """The shapes of this process's engine layers, each with one of its weights."""
    weights = [layer.weight for layer in model.modules() if isinstance(layer, _Linear)]
    local = [w.to_local() if isinstance(w, DTensor) else w for w in weights]
    return {weight.shape: weight for weight in local}
