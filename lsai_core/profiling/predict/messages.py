"""What messages hold back where several processes share a sequence.

A message's memory is nobody else's before the GPU has come to the point at which the host let go of it, and the host runs ahead
until `IN_FLIGHT_BYTES` are on their way and one more round is posted (`lsai_core.context.exchange`). They are no live tensors any more, so
a simulated step does not show them; the allocator counts them as active.
"""

from __future__ import annotations

from lsai_core.config import TrainConfig
from lsai_core.context import get_method
from lsai_core.context.exchange import IN_FLIGHT_BYTES
from lsai_core.context.heads import key_heads
from lsai_core.parallel.sequence import setting
from lsai_core.training.precision import compute_dtype


def held_back(config: TrainConfig) -> int:
    """Bytes of one process at most: the limit and a round, or what a whole step sends and receives if that is less."""
    parallel, model = config.parallel, config.model
    if parallel.cp == 1 or get_method(parallel.cp_method).peer:
        return 0
    pieces = setting(config).pieces(parallel.cp)
    ring = parallel.cp // pieces
    tokens = config.batch_size * config.seq_len // parallel.cp
    head = 2 * tokens * model.head_dim * compute_dtype(config.precision).itemsize  # of one head, sent and received
    first, last = key_heads(model.n_heads, model.n_kv_heads, pieces)[0]
    around = 2 * (last - first) * pieces * head if ring > 1 else 0  # keys and values of the neighbours in the ring
    queries = model.n_heads * head * (pieces - 1) // pieces  # and as much of the output, on the way back
    keys = (last - first) * head * (pieces - 1)
    a_forward_pass = model.n_layers * (2 * queries + 2 * keys + (ring - 1) * around)
    # The backward pass sends the same and its gradients.
    return min(3 * a_forward_pass, IN_FLIGHT_BYTES + max(queries, keys, around))
