"""Batches: which tokens a training step sees is a pure function of (seed, step).

The token file is cut into windows of seq_len + 1 tokens at stride seq_len (the last target of a
window is the first input of the next, so every token is predicted exactly once per epoch, and there
is no padding). Sample number n of a run is window `permute(n mod windows)` of epoch `n div
windows`; batch `step` holds samples step*batch_size to (step+1)*batch_size - 1. Consequences: the
order of samples does not depend on the batch size; a resumed run continues exactly from its step
number, with no state to save; data-parallel rank r of R takes `batch(step * R + r)`, and together
they see what one process would.

The permutation is a Feistel network over the window numbers with cycle walking (Black and Rogaway
2002, "Ciphers with arbitrary finite domains"): it needs no memory, and unlike a library's shuffle
it is the same in every version of NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from lsai_core.base.errors import UserError

if TYPE_CHECKING:
    import torch

ROUNDS = 6
_MASK = (1 << 64) - 1


class TokenSource(Protocol):
    """Text as tokens, in parts: what `train` learns from ("train") and is judged by
    ("validation")."""

    def tokens(self, split: Literal["train", "validation"]) -> np.ndarray:
        """The tokens of a split: unsigned integers, shape (N,), usually memory-mapped."""


class BatchStream:
    """Endless shuffled training batches over `tokens` (unsigned integers, shape (N,), usually
    memory-mapped).

    Raises `UserError` if `tokens` has fewer windows than one batch.
    """

    def __init__(self, tokens: np.ndarray, batch_size: int, seq_len: int, seed: int) -> None:
        self.tokens, self.batch_size, self.seq_len, self.seed = tokens, batch_size, seq_len, seed
        self.windows = count_windows(tokens, seq_len)
        if self.windows < batch_size:
            raise UserError(
                f"the text holds {len(tokens)} tokens, {self.windows} windows of "
                f"seq_len={seq_len}, fewer than "
                f"one batch of batch_size={batch_size}; use more text (data.max_mb, data.source) "
                f"or a smaller seq_len "
                "or batch_size"
            )

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of `step` (from 0): int64 CPU tensors x_BS, y_BS; y is x moved on by
        one token."""
        sample_B = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epoch_B, position_B = np.divmod(sample_B, self.windows)
        window_B = np.empty_like(position_B)
        for epoch in np.unique(epoch_B):
            here = epoch_B == epoch
            window_B[here] = permute(position_B[here], self.windows, self.seed, int(epoch))
        return _gather(self.tokens, window_B, self.seq_len)


def sequential_batches(
    tokens: np.ndarray, batch_size: int, seq_len: int, limit: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The windows of `tokens` in order, for evaluation: (x_BS, y_BS) int64 CPU tensors; the last
    batch may be smaller.

    `limit` is the largest number of windows, which then lie spread over all of `tokens`; 0 for all.
    Raises `UserError` if there is not one window.
    """
    windows = count_windows(tokens, seq_len)
    if not windows:
        raise UserError(
            f"the split holds {len(tokens)} tokens, less than one window of seq_len={seq_len}; "
            "use more text or a smaller seq_len"
        )
    stop = min(windows, limit) if limit else windows
    window_N = np.arange(stop) * windows // stop
    return (
        _gather(tokens, window_N[start : start + batch_size], seq_len)
        for start in range(0, stop, batch_size)
    )


def count_windows(tokens: np.ndarray, seq_len: int) -> int:
    """Windows of seq_len + 1 tokens at stride seq_len."""
    return max(len(tokens) - 1, 0) // seq_len


def permute(position: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The images of `position` (int64, each in [0, size)) under a pseudo-random permutation of [0,
    size)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low, shift = np.uint64((1 << half) - 1), np.uint64(half)
    keys = [_mix_int(_mix_int(_mix_int(seed) ^ epoch) ^ round_) for round_ in range(ROUNDS)]
    image = position.astype(np.uint64)
    outside = np.ones(len(image), dtype=bool)
    # the network permutes [0, 4^half); walking on until inside permutes [0, size)
    while outside.any():
        left, right = image[outside] >> shift, image[outside] & low
        for key in keys:
            left, right = right, left ^ (_mix(right ^ np.uint64(key)) & low)
        image[outside] = (left << shift) | right
        outside = image >= size
    return image.astype(np.int64)


def _mix(value: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014) on uint64, which wraps around."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _mix_int(value: int) -> int:
    return int(_mix(np.array([(value + 0x9E3779B97F4A7C15) & _MASK], dtype=np.uint64))[0])


def _gather(
    tokens: np.ndarray, window_B: np.ndarray, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch  # on first use, so that preparing data starts quickly

    block = np.stack([tokens[start : start + seq_len + 1] for start in window_B * seq_len]).astype(
        np.int64
    )
    tokens_BT = torch.from_numpy(block)
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()
