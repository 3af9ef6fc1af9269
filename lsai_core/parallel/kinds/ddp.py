"""Data parallelism with whole copies (PyTorch's DistributedDataParallel: Li et al. 2020,
arXiv:2006.15704).

Every process keeps all weights, gradients and optimizer states, and trains on a batch of its own.
As soon as the gradients of a few layers are there, they are averaged over the processes, in buckets
of 25 MB, while the backward pass goes on to the layers before. Each process then makes the same
update. With several micro-batches a step, gradients are averaged in the last one only.

Buckets stay as they are cut at first. DDP would cut them anew after the first step, by the order in
which gradients came; sums would then be rounded otherwise, and a resumed run, whose first step is a
later one, would not be the same to the last bit. Only `find_unused_parameters` switches that off;
PyTorch's C++ says once, past Python's warnings, that no parameter was unused.

Weights and gradients are what one process has (`bf16_autocast` computes under autocast), and
gradients are summed in their own dtype.
"""

import contextlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import Transformer
from lsai_core.parallel.way import Way, only_copies


def wrap(model: Transformer, config: TrainConfig) -> None:
    """Let the processes average the gradients of `model`, which all initialize alike."""
    if config.compile:
        # Blocks are compiled one by one, and need not be cut where buckets end.
        torch._dynamo.config.optimize_ddp = False
    wrapper = DistributedDataParallel(
        model, init_sync=False, gradient_as_bucket_view=True, find_unused_parameters=True
    )

    def micro_batch(last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else wrapper.no_sync()

    model.micro_batch = micro_batch
    model.wrapper = wrapper.__call__  # no module, which would hold the model that holds it


WAY = Way(wrap=wrap, refusal=only_copies)
