"""Gradient checkpointing: what of a block is kept for the backward pass, and what is computed
again.

full       the block's input (Chen et al. 2016, arXiv:1604.06174)
attention  also what the attention kernel returns, output and log-sum-exp, because at long sequences
           only attention is dear to repeat, and its ring with it (Li et al. 2023, DistFlashAttn,
           arXiv:2310.03294, section 3.3)
selective  also the results of matrix products, so that only cheap pointwise operations run twice
           (Korthikanti et al. 2022, arXiv:2205.05198)
alternating
           selective, but every second block computes its feed-forward layer again: gate and up are
           the widest results, and half of them is much memory for a fifteenth of the FLOPs
           (torchtitan's op mode repeats every second product, to the same end)

Every block keeps its share of the memory, so two modes, one for so many blocks and one for the
others, come to any amount of memory between theirs (`checkpoint_blocks`).
"""

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lsai_core.attention.choice import BACKENDS

# The operators of attention kernels, or their namespaces, beside every operation with "attention"
# in its name. Of `context_attend` both modes keep the results, so that a block's recomputation
# never repeats a ring.
ATTENTION_OPERATORS = frozenset({"lsai::context_attend"}).union(
    *(backend.operators for backend in BACKENDS.values())
)
# What selective checkpointing keeps beside them: matrix products (plain, batched, fp8) and what was
# exchanged between ranks. Of this project's operators not the casts and not SwiGLU, which are cheap
# to repeat.
KEPT_OPERATIONS = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_mm",
        "fp8_product",
        "reduce_scatter_tensor",
        "context_to_heads",
        "context_to_sequence",
    }
)


# Functions with names, because torch.compile does not follow a partial here.
def full_contexts() -> Any:
    """`context_fn` of torch's checkpoint for `full` in a compiled block.

    Without one, PyTorch 2.11 does not mark the operations inside of an autograd.Function as to be
    repeated, and keeps the results of both norms: twice the block's input.
    """
    return create_selective_checkpoint_contexts(keep_nothing)


def selective_contexts() -> Any:
    """`context_fn` of torch's checkpoint for `selective`."""
    return create_selective_checkpoint_contexts(keep_expensive)


def attention_contexts() -> Any:
    """`context_fn` of torch's checkpoint for `attention`."""
    return create_selective_checkpoint_contexts(keep_attention)


def keep_expensive(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """The policy of `selective`: keep the results of attention and of `KEPT_OPERATIONS`, compute
    the others again."""
    return _kept(_is_attention(operation) or _name(operation)[1] in KEPT_OPERATIONS)


def keep_attention(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """The policy of `attention`: keep attention's results, compute the others again."""
    return _kept(_is_attention(operation))


def keep_nothing(_context: Any, _operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """The policy of `full`: compute everything again."""
    return _kept(False)


def _kept(kept: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_attention(operation: Any) -> bool:
    namespace, name = _name(operation)
    return "attention" in name or bool({namespace, f"{namespace}::{name}"} & ATTENTION_OPERATORS)


def _name(operation: Any) -> tuple[str, str]:
    """The namespace and the name of an operation, without its overload."""
    namespace, _, name = str(getattr(operation, "name", lambda: operation)()).rpartition("::")
    return namespace, name.partition(".")[0]
