"""Context parallelism: exact attention over a sequence that several ranks share, a slice each.

    cp = ContextParallel("zigzag", seq_len, group=group)
    out_BSHD = cp.attention(cp.shard(q), cp.shard(k), cp.shard(v))      # in training the slices
                                                                        come from the model itself

methods     the registry (ring, zigzag, lightseq, ulysses, usp, and torch's own as the peer) and
            `ContextParallel`
layout      which positions a rank holds, which pairs two shards have
plan        who computes what when, as data; the work of each rank
engine      one rank's part of a plan: fetch ahead, compute, merge, send back
heads       from slices of the sequence to slices of the heads and back (Ulysses)
operators   a ring's attention as one differentiable operator; parts: what operators work with
merge       two partial outputs into one
exchange    messages between ranks
peer        torch's context parallelism
"""

from lsai_core.context.layout import Layout, Tile
from lsai_core.context.methods import METHODS, ContextParallel, ContextSetting, Method, get_method
from lsai_core.context.plan import Plan

__all__ = [
    "METHODS",
    "ContextParallel",
    "ContextSetting",
    "Layout",
    "Method",
    "Plan",
    "Tile",
    "get_method",
]
