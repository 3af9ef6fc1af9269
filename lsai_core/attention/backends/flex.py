"""FlexAttention: a Python mask function, compiled into a fused kernel that skips the blocks which
the mask empties.

The block mask says, for tiles of 128 x 128 scores, which are empty (skipped), full (no mask needed)
or mixed (the mask function is evaluated). For a causal band that follows from the distance of two
tiles alone, so it is built on the grid of tiles and never on S x S scores: at 128K tokens that is a
million entries instead of sixteen billion.

On CUDA the kernel exists through torch.compile only. On a CPU the same definition runs uncompiled:
slow, with all scores in memory, but right, and forward only (torch refuses its backward pass
there). Source: Dong et al. 2024, arXiv:2412.05496.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lsai_core.attention.registry import FLOATING, HALF, Backend

TILE = 128


def band_block_mask(seq_len: int, window: int | None, device: torch.device) -> BlockMask:
    """Block mask of causal attention over `seq_len` positions, restricted to the last `window` of
    them if given."""
    reach = seq_len if window is None else window

    def inside(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < reach)

    tile_N = torch.arange((seq_len + TILE - 1) // TILE, device=device)
    # Distances query - key within a pair of tiles span (nearest, ..., nearest + 2 * (TILE - 1)).
    nearest_NN = (tile_N[:, None] - tile_N[None, :]) * TILE - (TILE - 1)
    farthest_NN = nearest_NN + 2 * (TILE - 1)
    touched_NN = (farthest_NN >= 0) & (nearest_NN < reach)
    full_NN = (nearest_NN >= 0) & (farthest_NN < reach)
    return BlockMask.from_kv_blocks(
        *_ordered(touched_NN & ~full_NN),
        *_ordered(full_NN),
        BLOCK_SIZE=TILE,
        mask_mod=inside,
        seq_lengths=(seq_len, seq_len),
    )


def _ordered(chosen_NN: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of tiles: how many are chosen (1, 1, N), and their columns first (1, 1, N, N);
    int32."""
    columns_NN = torch.argsort(chosen_NN.to(torch.int32), dim=-1, descending=True, stable=True)
    return chosen_NN.sum(-1, dtype=torch.int32)[None, None], columns_NN.to(torch.int32)[
        None, None
    ].contiguous()


@functools.lru_cache(maxsize=32)
def _kept_block_mask(seq_len: int, window: int | None, device: torch.device) -> BlockMask:
    # Built outside of inference mode: a mask made during evaluation must be usable in the next
    # training step.
    with torch.inference_mode(False):
        return band_block_mask(seq_len, window, device)


@functools.cache
def _compiled() -> Any:
    # fullgraph: without it, too many shapes would fall back to the uncompiled version, silently.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def flex_backend(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, window: int | None, causal: bool
) -> Tensor:
    """(B, S, H, D) in the dtype of q."""
    compiling = torch.compiler.is_compiling()
    # Inside a compiled region the few tile operations become part of the graph; elsewhere masks are
    # kept.
    make_mask = band_block_mask if compiling else _kept_block_mask
    run = flex_attention if compiling or q_BSHD.device.type != "cuda" else _compiled()
    out_BHSD = run(
        q_BSHD.transpose(1, 2),
        k_BSKD.transpose(1, 2),
        v_BSKD.transpose(1, 2),
        block_mask=make_mask(q_BSHD.shape[1], window, q_BSHD.device) if causal else None,
        enable_gqa=k_BSKD.shape[2] != q_BSHD.shape[2],
    )
    return out_BHSD.transpose(1, 2)


BACKEND = Backend(
    "flex",
    flex_backend,
    fused=True,
    dtypes={"cpu": FLOATING, "cuda": HALF | {torch.float32}},
    window=frozenset({"cpu", "cuda"}),
    head_dims=(16, 256),
    forward_only=frozenset({"cpu"}),
    compute_capability=((8, 0), (99, 0)),
    about="FlexAttention: a mask function compiled into a kernel",
    color="#E69F00",
    marker="P",
)
