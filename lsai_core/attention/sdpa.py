"""torch's scaled_dot_product_attention, pinned to one of its kernels.

Left alone, torch picks a kernel by rules of its own, and a comparison would not know what it
measured. `sdpa_kernel` switches all kernels but one off, so that a request it cannot serve is an
error instead of a silent detour.

The kernels: `math` (plain operations, fp32 inside for 16-bit inputs), `efficient` (xFormers'
memory-efficient attention, the fused kernel that takes fp32 and masks), `flash` (FlashAttention-2,
arXiv:2307.08691; on CPUs a kernel of torch's own), `cudnn` (NVIDIA's, the fastest of the four on
Hopper). Sliding windows need a mask of S x S booleans here, because none of the four takes a
window; only `math`, `efficient` and the CPU kernel of `flash` accept one.
"""

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lsai_core.attention.registry import band_mask, repeat_kv


def sdpa_attention(
    q_BSHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    window: int | None,
    causal: bool,
    *,
    kernel: SDPBackend,
    grouped: bool = True,
) -> Tensor:
    """(B, S, H, D), computed by exactly `kernel`; `grouped` says whether the kernel itself takes K
    < H heads."""
    seq_len, n_heads = q_BSHD.shape[1:3]
    if not grouped:
        k_BSKD, v_BSKD = repeat_kv(k_BSKD, n_heads), repeat_kv(v_BSKD, n_heads)
    mask_SS = None if window is None else band_mask(seq_len, window, q_BSHD.device)
    with sdpa_kernel(kernel):
        out_BHSD = scaled_dot_product_attention(
            q_BSHD.transpose(1, 2),
            k_BSKD.transpose(1, 2),
            v_BSKD.transpose(1, 2),
            attn_mask=mask_SS,
            is_causal=causal and mask_SS is None,
            enable_gqa=k_BSKD.shape[2] != n_heads,
        )
    return out_BHSD.transpose(1, 2)
