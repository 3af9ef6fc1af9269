"""torch's scaled_dot_product_attention, its memory-efficient kernel (see
`lsai_core.attention.sdpa`)."""

import functools

import torch
from torch.nn.attention import SDPBackend

from lsai_core.attention.registry import AMPERE_ON, HALF, Backend
from lsai_core.attention.sdpa import sdpa_attention

BACKEND = Backend(
    "sdpa_efficient",
    functools.partial(sdpa_attention, kernel=SDPBackend.EFFICIENT_ATTENTION, grouped=False),
    fused=True,
    dtypes={"cuda": HALF | {torch.float32}},
    window=frozenset({"cuda"}),
    head_dim_multiple=8,
    grouped=False,
    masked=True,
    compute_capability=AMPERE_ON,
    rocm=True,
    speed=1,
    about="torch's SDPA, xFormers' memory-efficient kernel; takes fp32 and masks",
    color="#4D4D4D",
    marker="X",
)
