"""The `batch_search` kind: the largest batch that trains, found by really training it on random
tokens: which ones they are does not matter to the memory of a step.
"""

from typing import Any

import torch

from lsai_core.optimizers.build import build_optimizer
from lsai_core.training import step
from lsai_lab.runs.kinds import Context
from lsai_lab.searches.config import BatchSearchConfig
from lsai_lab.searches.search import Search, predicted_size

# as every kind that can say what is missing
from lsai_lab.searches.search import require as require
from lsai_lab.searches.tries import begin_try, gpu_peaks


def run(config: BatchSearchConfig, context: Context) -> dict[str, Any]:
    """Search; returns `largest_batch`, `largest_batch_tokens`, the limit, and every try."""
    search = Search(_train_random_tokens, config, context)
    # Fragments make some batch run out of memory where a larger one does not, so the larger
    # prediction counts.
    starts = [
        predicted_size(config, search.usable_gib, None, begin=1, stride=4.0, first=first)
        for first in (None, 1)
    ]
    largest, found = search.run(max(starts))
    return {
        "largest_batch": largest,
        "largest_batch_tokens": largest * config.train.seq_len,
        **found,
    }


def _train_random_tokens(rank: int, argument: tuple[BatchSearchConfig, int]) -> dict[str, float]:
    """Train `steps` steps at a batch size; returns the peak of reserved GPU memory in GiB, on a CPU
    nothing."""
    config, size = argument
    train = config.sized(size)
    device = begin_try(train, config.cpu_limit_gib)
    model = step.prepare_model(train, device)
    optimizer = build_optimizer(model, train.optim)
    generator = torch.Generator().manual_seed(train.seed)
    tokens = torch.randint(
        train.model.vocab_size, (size * train.grad_accum, train.seq_len + 1), generator=generator
    )
    # One sequence first: library handles and optimizer states take their memory while there is
    # some, as they do in a run that warms up, and the allocator can then give back what it cached
    # for them.
    for sequences in (1, *[len(tokens)] * config.steps):
        x, y = tokens[:sequences, :-1], tokens[:sequences, 1:]
        step.train_step(model, optimizer, x, y, train, device)
    return {} if device.type == "cpu" else {"peak_gib": gpu_peaks()["peak_gib"]}
