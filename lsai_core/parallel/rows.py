"""The order of rows in matrices that processes share (tensor parallelism).

Query, key and value share one matrix, and so do gate and up. A process that computes some heads
needs their rows of all three parts, and keeps them one behind the other. So the shared matrix, the
processes' parts in their order, has its rows in another order than the matrix of one process.
"""

import torch
from torch import Tensor

from lsai_core.config.model import ModelConfig


def row_order(config: ModelConfig, tp: int, name: str) -> Tensor | None:
    """Which row of the parameter `name`, as one process has it, is each row of it as `tp` processes
    share it: int64 (rows,), or None where the order is the same."""
    if tp == 1:
        return None
    if name.endswith("attention.qkv.weight"):
        sizes = [heads * config.head_dim for heads in (config.n_heads, *[config.n_kv_heads] * 2)]
    elif name.endswith("mlp.gate_up.weight"):
        sizes = [config.d_ff, config.d_ff]
    else:
        return None
    parts = [part.chunk(tp) for part in torch.arange(sum(sizes)).split(sizes)]
    return torch.cat([part[rank] for rank in range(tp) for part in parts])


def out_of_order(values: Tensor, order: Tensor | None) -> Tensor:
    """Whole `values` of processes that share them in the order of one process."""
    return values if order is None else values[order.argsort().to(values.device)]
