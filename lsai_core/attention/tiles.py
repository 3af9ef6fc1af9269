"""What the kernels for tiles share: masks as bands, heads in front, gradients of grouped heads."""

import torch
from torch import Tensor

from lsai_core.attention.registry import Bound


def allowed(
    n_queries: int, n_keys: int, left: Bound, right: Bound, device: torch.device
) -> Tensor | None:
    """bool (queries, keys), True where i - left <= j <= i + right; None where nothing is
    excluded."""
    if left is None and right is None:
        return None
    ahead_ST = (
        torch.arange(n_keys, device=device)[None, :]
        - torch.arange(n_queries, device=device)[:, None]
    )
    mask_ST = torch.ones_like(ahead_ST, dtype=torch.bool)
    if left is not None:
        mask_ST &= ahead_ST >= -left
    if right is not None:
        mask_ST &= ahead_ST <= right
    return mask_ST


def sum_groups(grad_BTHD: Tensor, n_kv_heads: int) -> Tensor:
    """The gradient of `repeat_kv`: (B, T, H, D) -> (B, T, K, D)."""
    return (
        grad_BTHD
        if grad_BTHD.shape[2] == n_kv_heads
        else grad_BTHD.unflatten(2, (n_kv_heads, -1)).sum(3)
    )


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """Each (B, S, H, D) as a view (B, H, S, D), or back."""
    return [tensor.transpose(1, 2) for tensor in tensors]


def flash_window(left: Bound, right: Bound) -> tuple[tuple[int, int], bool]:
    """The arguments that FlashAttention-2 takes: (window_size, causal); -1 is no bound."""
    if left is None:
        return (-1, -1), right is not None
    return (left, -1 if right is None else right), False
