"""torch's scaled_dot_product_attention, NVIDIA's kernel (see `lsai_core.attention.sdpa`)."""

import functools

from torch.nn.attention import SDPBackend

from lsai_core.attention.registry import AMPERE_ON, HALF, Backend
from lsai_core.attention.sdpa import sdpa_attention

BACKEND = Backend(
    "sdpa_cudnn",
    functools.partial(sdpa_attention, kernel=SDPBackend.CUDNN_ATTENTION),
    fused=True,
    dtypes={"cuda": HALF},
    head_dims=(8, 128),
    head_dim_multiple=8,
    single_token=False,
    compute_capability=AMPERE_ON,
    speed=5,
    about="torch's SDPA, NVIDIA cuDNN",
    color="#D55E00",
    marker="s",
)
