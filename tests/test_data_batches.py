"""Batches: a pure function of (seed, step), every token once an epoch, the same order for every
batch size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lsai_core.base.errors import UserError
from lsai_core.training.batches import permute
from lsai_lab.data import BatchStream, sequential_batches

TOKENS = np.arange(1001, dtype=np.uint16)  # 100 windows of 10, and the last target


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_permutation_is_one(size: int) -> None:
    image = permute(np.arange(size), size, seed=3, epoch=5)
    assert sorted(image.tolist()) == list(range(size))


def test_permutation_shuffles_and_depends_on_seed_and_epoch() -> None:
    positions = np.arange(10_000)
    images = [permute(positions, 10_000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for i, image in enumerate(images):
        assert abs(np.corrcoef(positions, image)[0, 1]) < 0.05
        for other in images[:i]:
            assert (image == other).mean() < 0.01
    # the same on every machine and version
    assert images[0][:5].tolist() == [307, 3433, 24, 9408, 2143]


def test_targets_are_inputs_moved_by_one_and_shapes_are_right() -> None:
    x_BS, y_BS = BatchStream(TOKENS, 4, 10, seed=0).batch(0)
    assert x_BS.shape == y_BS.shape == (4, 10)
    assert x_BS.dtype == y_BS.dtype == torch.int64
    assert torch.equal(y_BS, x_BS + 1)
    assert x_BS.is_contiguous() and y_BS.is_contiguous()


def test_an_epoch_predicts_every_token_once() -> None:
    stream = BatchStream(TOKENS, 5, 10, seed=0)
    targets = torch.cat([stream.batch(step)[1].flatten() for step in range(20)])
    assert sorted(targets.tolist()) == list(range(1, 1001))
    second = torch.cat([stream.batch(step)[1].flatten() for step in range(20, 40)])
    assert sorted(second.tolist()) == list(range(1, 1001)) and not torch.equal(targets, second)


def test_order_does_not_depend_on_batch_size_and_resume_is_exact() -> None:
    def sequences(batch_size: int, steps: int) -> torch.Tensor:
        stream = BatchStream(TOKENS, batch_size, 10, seed=7)
        return torch.cat([stream.batch(step)[0] for step in range(steps)])

    # 240 samples, across epochs and unequal ends
    assert torch.equal(sequences(3, 80), sequences(8, 30))
    later = BatchStream(TOKENS, 8, 10, seed=7).batch(29)[0]
    assert torch.equal(later, sequences(8, 30)[-8:])
    assert not torch.equal(later, BatchStream(TOKENS, 8, 10, seed=8).batch(29)[0])


def test_less_than_one_batch_is_refused() -> None:
    BatchStream(TOKENS, 100, 10, seed=0)
    with pytest.raises(
        UserError, match="100 windows of seq_len=10, fewer than one batch of batch_size=101"
    ):
        BatchStream(TOKENS, 101, 10, seed=0)


def test_sequential_batches_cover_the_split_in_order() -> None:
    batches = list(sequential_batches(TOKENS, 30, 10))
    assert [len(x_BS) for x_BS, _ in batches] == [30, 30, 30, 10]
    assert torch.cat([y_BS.flatten() for _, y_BS in batches]).tolist() == list(range(1, 1001))
    limited = list(sequential_batches(TOKENS, 30, 10, limit=45))
    starts = torch.cat([x_BS[:, 0] for x_BS, _ in limited])
    assert [len(x_BS) for x_BS, _ in limited] == [30, 15]
    other = torch.cat([x_BS[:, 0] for x_BS, _ in sequential_batches(TOKENS, 7, 10, limit=45)])
    assert torch.equal(starts, other)  # whatever the size of a batch
    # spread over the split
    assert starts.diff().min() >= 10 and starts[0] == 0 and starts[-1] >= 970
    with pytest.raises(UserError, match="less than one window"):
        sequential_batches(TOKENS[:10], 4, 10)
