"""Attention with a choice of kernel: one function, `attention`, and a registry of the kernels
behind it.

    out_BSHD = attention(q_BSHD, k_BSKD, v_BSKD, backend="auto", window=None, causal=True)

Every backend computes the same thing, softmax(q k^T / sqrt(D)) v under a causal mask (or, on
request, none), on the layout that the projections produce: (batch B, sequence S, heads H or
key-value heads K, head dimension D). They differ in what they keep in memory and in how fast they
are, which is what the studies measure. A request is never served by another kernel than the one
named: it runs, or it raises (`Unavailable`: this machine lacks something; `UserError`: the
combination can never work).
"""

from lsai_core.attention.choice import (
    BACKENDS,
    attention,
    available_backends,
    choose,
    get_backend,
    resolve,
)
from lsai_core.attention.registry import Backend, Case

__all__ = [
    "BACKENDS",
    "Backend",
    "Case",
    "attention",
    "available_backends",
    "choose",
    "get_backend",
    "resolve",
]
