"""Tensor parallelism with sequence parallelism and a parallel loss (Shoeybi et al. 2019,
arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198), by PyTorch's `parallelize_module`.

The `parallel.tp` processes of a group see the same sequences and share every matrix. Query, key,
value, gate and up are cut by rows: a process computes its heads, and its channels of the
feed-forward layer. The two projections back are cut by columns: each process has a summand of their
results. Between them a process has a part of the sequence: the parts are gathered before the
products (all-gather), and the summands are added and cut into parts behind them (reduce-scatter).
So the residual stream, the norms and what they keep are shared as well.

The table of the embedding and the output layer are cut by words. Of the logits a process has its
words, for some tokens at a time; maximum, sum and the target's logit travel, the logits do not
(PyTorch's `loss_parallel`).

Norm weights are whole everywhere, and their gradients, of parts of the sequence, are summed.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from lsai_core.base.errors import Unavailable
from lsai_core.model.feed_forward import swiglu_down
from lsai_core.model.loss import Reduction, linear_cross_entropy
from lsai_core.model.norm import Norm
from lsai_core.model.transformer import Block, Transformer
from lsai_core.parallel.rows import row_order

_SEQUENCE = 1  # the dimension of a part of (B, S, D)


def share(model: Transformer, mesh: DeviceMesh) -> None:
    """Cut the matrices of `model` (on the meta device) over `mesh`, of one dimension, in place."""
    model.row_order = functools.partial(row_order, model.config, mesh.size())
    by_rows = functools.partial(ColwiseParallel, input_layouts=Shard(_SEQUENCE))
    by_columns = functools.partial(RowwiseParallel, output_layouts=Shard(_SEQUENCE))
    plan = {
        "embedding": by_columns(input_layouts=Replicate()),
        "blocks.*.attention.qkv": by_rows(),
        "blocks.*.attention.output": by_columns(),
        "blocks.*.mlp.gate_up": by_rows(),
        "blocks.*.mlp.down": by_columns(),
    }
    if model.output is not None:
        plan["output"] = by_rows(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    # What a collective is about to bring is of another class, which compiled blocks do not take.
    model.embedding.register_forward_hook(lambda module, given, found: found.clone())
    for module in model.modules():
        if isinstance(module, Norm):
            distribute_module(module, mesh)
            module.summed = (Partial(),)
        elif isinstance(module, Block):
            heads, kv_heads, _ = (n // mesh.size() for n in module.attention.heads)
            module.attention.heads = (heads, kv_heads, kv_heads)
            module.mlp.swiglu_down = functools.partial(_swiglu_down, mesh)
    model.loss = functools.partial(_loss, mesh)


def require_recomputation() -> None:
    """Raise Unavailable where compiled blocks with shared matrices cannot be computed again as a
    whole: PyTorch 2.13 saves a DeviceMesh among the tensors for the backward pass, and stops."""
    if tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11):
        raise Unavailable(
            f"parallel.tp with compile and grad_checkpoint full fails in PyTorch 2.13 (this is "
            f"{torch.__version__}, 2.11 works); take grad_checkpoint selective, or compile false"
        )


def sum_gradients(model: Transformer) -> None:
    """Let the processes sum the gradients of norm weights as they come; FSDP does it by itself."""
    for module in model.modules():
        if isinstance(module, Norm):
            module.weight.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))


def whole_sequence(part_BsD: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole sequence (B, S, D) of all processes' parts; they sum its gradient."""
    parts = DTensor.from_local(part_BsD, mesh, [Shard(_SEQUENCE)], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _swiglu_down(mesh: DeviceMesh, gate_up_BSE: Tensor, weight_DF: DTensor) -> Tensor:
    """`swiglu_down` of this process's channels; of the sum over processes its part (B, s, D)."""
    out_BSD = swiglu_down(gate_up_BSE, weight_DF.to_local())
    summand = DTensor.from_local(out_BSD, mesh, [Partial()], run_check=False)
    return summand.redistribute(placements=[Shard(_SEQUENCE)]).to_local()


def _loss(
    mesh: DeviceMesh,
    hidden_BsD: Tensor,
    weight_VD: DTensor,
    targets_BS: Tensor,
    reduction: Reduction = "mean",
) -> Tensor:
    """`linear_cross_entropy` of the whole sequence, each process with its words."""
    return linear_cross_entropy(
        whole_sequence(hidden_BsD, mesh),
        weight_VD.to_local(),
        targets_BS,
        reduction,
        cross_entropy_=functools.partial(_cross_entropy_, mesh, weight_VD.shape[0]),
    )


def _cross_entropy_(
    mesh: DeviceMesh,
    words: int,
    logits_NW: Tensor,
    targets_N: Tensor,
    scale: float,
    *,
    gradient: bool,
) -> Tensor:
    """The sum of the losses over tokens, fp32; with `gradient`, this process's logits are
    overwritten by `scale` times their gradient."""
    with torch.enable_grad(), loss_parallel():
        own_NW = logits_NW.detach().float().requires_grad_(gradient)
        shape, stride = torch.Size((len(targets_N), words)), (words, 1)
        logits_NV = DTensor.from_local(
            own_NW, mesh, [Shard(1)], run_check=False, shape=shape, stride=stride
        )
        loss = F.cross_entropy(logits_NV, targets_N, reduction="sum")
        if gradient:
            (grad_NW,) = torch.autograd.grad(loss, own_NW)
            logits_NW.copy_(grad_NW.mul_(scale))
    assert isinstance(loss, DTensor)
    return loss.detach().full_tensor()  # type: ignore[attr-defined]
