"""Merging two partial outputs of attention by their log-sum-exp, in fp32, in place: on CUDA in one
kernel."""

import torch
from torch import Tensor

from lsai_core import kernels


def merge(out_BSHD: Tensor, lse_BHS: Tensor, part_BSHD: Tensor, part_lse_BHS: Tensor) -> None:
    """Merge a part, (B, S, H, D) of any dtype with its (B, H, S), into `out` and `lse`, which are
    fp32 (or fp64).

    A row of `out` that has seen no key yet has lse -inf; a part must have at least one key per row.
    """
    dense = out_BSHD.stride(3) == part_BSHD.stride(3) == 1
    if dense and out_BSHD.dtype == torch.float32 and kernels.available(out_BSHD.device):
        from lsai_core.kernels import merge_attention

        merge_attention.merge(out_BSHD, lse_BHS, part_BSHD, part_lse_BHS)
        return
    merged_BHS = torch.logaddexp(lse_BHS, part_lse_BHS)
    old_BSH1 = (lse_BHS - merged_BHS).exp().transpose(1, 2)[..., None]
    new_BSH1 = (part_lse_BHS - merged_BHS).exp().transpose(1, 2)[..., None]
    out_BSHD.mul_(old_BSH1).addcmul_(part_BSHD.to(out_BSHD.dtype), new_BSH1)
    lse_BHS.copy_(merged_BHS)
