"""torch's scaled_dot_product_attention, its flash kernels (see `lsai_core.attention.sdpa`)."""

import functools

from torch.nn.attention import SDPBackend

from lsai_core.attention.registry import AMPERE_ON, FLOATING, HALF, Backend
from lsai_core.attention.sdpa import sdpa_attention

BACKEND = Backend(
    "sdpa_flash",
    functools.partial(sdpa_attention, kernel=SDPBackend.FLASH_ATTENTION),
    dtypes={"cpu": FLOATING, "cuda": HALF},
    window=frozenset({"cpu"}),
    head_dims=(1, 256),
    compute_capability=AMPERE_ON,
    rocm=True,
    speed=2,
    about="torch's SDPA, FlashAttention-2; on CPUs a kernel of torch's own",
    color="#56B4E9",
    marker="v",
)
