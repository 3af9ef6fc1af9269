"""Sums of matrix products over chunks: the gradient of a weight whose tokens go through a layer in
parts."""

import torch
from torch import Tensor

from lsai_core import kernels


def plus_product(total: Tensor | None, a_VC: Tensor, b_CD: Tensor, only: bool) -> Tensor:
    """total + a @ b, summed in fp32 over several chunks; a single product stays in the dtype of its
    factors."""
    if only:
        return a_VC @ b_CD
    on_gpu = a_VC.is_cuda or kernels.serves(a_VC)
    if not on_gpu or a_VC.dtype == torch.float32:
        wide = torch.promote_types(a_VC.dtype, torch.float32)
        product = a_VC.to(wide) @ b_CD.to(wide)
        return product if total is None else total.add_(product)
    if total is None:
        return fp32_product(a_VC, b_CD)
    add_fp32_product_(a_VC, b_CD, total)
    return total


@torch.library.custom_op("lsai::fp32_product", mutates_args=())
def fp32_product(a_VC: Tensor, b_CD: Tensor) -> Tensor:
    """a @ b in fp32, of 16-bit factors on a GPU."""
    return torch.mm(a_VC, b_CD, out_dtype=torch.float32)


@fp32_product.register_fake
def _(a_VC: Tensor, b_CD: Tensor) -> Tensor:
    return a_VC.new_empty((a_VC.shape[0], b_CD.shape[1]), dtype=torch.float32)


@torch.library.custom_op("lsai::add_fp32_product_", mutates_args=("total_VD",))
def add_fp32_product_(a_VC: Tensor, b_CD: Tensor, total_VD: Tensor) -> None:
    """Add a @ b to `total_VD`, which is fp32."""
    torch.addmm(total_VD, a_VC, b_CD, out_dtype=torch.float32, out=total_VD)


@add_fp32_product_.register_fake
def _(a_VC: Tensor, b_CD: Tensor, total_VD: Tensor) -> None:
    return None
