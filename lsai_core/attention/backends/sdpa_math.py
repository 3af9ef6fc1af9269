"""torch's scaled_dot_product_attention, its plain operations (see `lsai_core.attention.sdpa`)."""

import functools

from torch.nn.attention import SDPBackend

from lsai_core.attention.registry import FLOATING, Backend
from lsai_core.attention.sdpa import sdpa_attention

BACKEND = Backend(
    "sdpa_math",
    functools.partial(sdpa_attention, kernel=SDPBackend.MATH),
    dtypes={"cpu": FLOATING, "cuda": FLOATING, "meta": FLOATING},
    window=frozenset({"cpu", "cuda", "meta"}),
    speed=1,
    about="torch's SDPA, plain operations, fp32 inside",
    color="#882255",
    marker="*",
)
