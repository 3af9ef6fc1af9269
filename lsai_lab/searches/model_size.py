"""The size of a model that a search grows, and where the search begins: at an estimate, which decides nothing else.

The estimate adds up what is kept (weights, gradients and the optimizer's states, a slice of each per process) and the activations that
wait for the backward pass: exact for weights alone. A try of a training step on several GPUs costs half a minute, so there the step is
predicted (`profiling.predict`), at three or four sizes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Literal

from lsai_core.config import ModelConfig, TrainConfig
from lsai_core.model import count_parameters
from lsai_core.presets import scaled_shape
from lsai_core.training.optimizer import bytes_per_parameter
from lsai_core.training.precision import compute_dtype, weight_dtype

GIB = 2**30
DEVICE_SHARE = 0.98  # a GPU holds some hundred MiB of libraries beside what can be allocated
_STRIDE = 1.25  # between the first two sizes predicted; estimates for H200s were up to 45 % off
Grow = Literal["all", "n_layers"]
Measure = Literal["load", "train"]


def sized(model: ModelConfig, grow: Grow, size: int) -> ModelConfig:
    """`all`: the shape of scaling factor `size` (`presets.scaled_shape`); `n_layers`: `model` with `size` layers."""
    if grow == "n_layers":
        return model.model_copy(update={"n_layers": size})
    return ModelConfig.model_validate({"preset": f"scaled-all-{size}", **scaled_shape(size, "all")})


def device_gib(train: TrainConfig, measure: Measure) -> float:
    """Estimated peak of one process, in GiB, on the device that computes."""
    model, own = train.model, count_parameters(train.model).total / train.parallel.shards
    if measure == "load":
        return own * weight_dtype(train.precision).itemsize / GIB
    total = 0.0 if train.parallel.cpu_offload else own * _bytes_kept(train)
    tokens = train.batch_size * train.seq_len // train.parallel.cp
    # Of a token: the inputs of the blocks; without checkpointing also what their products read.
    values = model.d_model
    if train.grad_checkpoint in ("none", "selective", "alternating"):
        values = 7 * model.d_model + 4 * model.n_kv_heads * model.head_dim + 3 * model.d_ff
    total += tokens * compute_dtype(train.precision).itemsize * model.n_layers * values
    if train.loss == "full":
        total += 3 * 4 * tokens * model.vocab_size
    return total / GIB


def host_gib(train: TrainConfig) -> float:
    """What a model in host memory takes there, all processes together: weights, gradients and the optimizer's states."""
    return _bytes_kept(train) * count_parameters(train.model).total * train.parallel.replicate / GIB


def _bytes_kept(train: TrainConfig) -> float:
    """Of a parameter: weight, gradient, the optimizer's states."""
    dtype = weight_dtype(train.precision)
    return 2 * dtype.itemsize + bytes_per_parameter(train.optim, dtype)


def grown(train: TrainConfig, grow: Grow, size: int) -> TrainConfig:
    """The run `train` with the model of that size."""
    return train.model_copy(update={"model": sized(train.model, grow, size)})


def first_size(
    train: TrainConfig, grow: Grow, measure: Measure, *, on_gpu: bool, limit_gib: float, host_limit_gib: float,
    max_size: int,
) -> int:  # fmt: skip
    """The largest size in 1..max_size that may fit devices of `limit_gib`, 1 if none does: of a training step on GPUs as predictions
    go, else by the estimate."""
    last, limit = max_size, limit_gib * DEVICE_SHARE
    if train.parallel.cpu_offload:
        last = _largest(max_size, lambda size: host_gib(grown(train, grow, size)) <= host_limit_gib)
    if predicted := on_gpu and measure == "train":
        # Not needed by the processes of a try.
        from lsai_core.profiling.predict.aim import largest_within
        from lsai_core.profiling.predict.prediction import OUTSIDE_GIB, predict

        limit = limit_gib - OUTSIDE_GIB
    begin = _largest(last, lambda size: device_gib(grown(train, grow, size), measure) <= limit)
    if not predicted:
        return begin
    found, _ = largest_within(
        lambda size: predict(grown(train, grow, size)).needs, limit, first=1, last=last, begin=begin, stride=_STRIDE
    )
    return max(1, found)


def _largest(last: int, fits: Callable[[int], bool]) -> int:
    """The largest size in 1..last that fits; 1 if none does."""
    return max(1, bisect.bisect_left(range(1, last + 1), True, key=lambda size: not fits(size)))
