"""Rotary position embeddings: each pair of channels of q and k is turned by an angle that grows
with the position.

The angle of pair p at position s is s * theta^(-2p/D), so q.k depends on the distance of two
positions alone (Su et al. 2021, arXiv:2104.09864). Channel p is paired with channel p + D/2
("rotate half", as in Hugging Face's Llama), so that published checkpoints need no permutation.

The tables are computed once per forward pass and shared by all layers; they are no buffers. That
costs a handful of small operations and removes three ways to go wrong: a cast of the model to bf16
that also rounds the angles, `to_empty` after a meta construction that leaves garbage behind, and a
longest sequence that someone has to know in advance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lsai_core.config.model import ModelConfig, RopeScaling


def rope_tables(config: ModelConfig, positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles, float32 (S, 1, D/2) each, for integer positions (S,)."""
    exponents = (
        torch.arange(0, config.head_dim, 2, device=positions_S.device, dtype=torch.float32)
        / config.head_dim
    )
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _llama3_frequencies(frequencies, config.rope_scaling)
    angles = positions_S.to(torch.float32)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's context extension: slow waves are stretched by `factor`, fast ones stay, between
    they blend."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each channel pair of x (B, S, H, D) by its angle: in float32, rounded once to the dtype
    of x."""
    first, second = x_BSHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
        x_BSHD.dtype
    )
