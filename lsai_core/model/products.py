"""Sums of matrix products over chunks: the gradient of a weight whose tokens go through a layer in
parts."""

from __future__ import annotations

import torch
from torch import Tensor


def plus_product(total: Tensor | None, a_VC: Tensor, b_CD: Tensor, only: bool) -> Tensor:
    """total + a @ b, summed in fp32 over several chunks; a single product stays in the dtype of its
    factors."""
    if only:
        return a_VC @ b_CD
    if a_VC.device.type != "cuda" or a_VC.dtype == torch.float32:
        wide = torch.promote_types(a_VC.dtype, torch.float32)
        product = a_VC.to(wide) @ b_CD.to(wide)
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(a_VC, b_CD, out_dtype=torch.float32)
    return torch.addmm(total, a_VC, b_CD, out_dtype=torch.float32, out=total)
