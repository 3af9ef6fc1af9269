"""The work of a simulated step: its matrix products, what its other kernels read and write, what
the host calls.

`Counter` keys: `"bfloat16 1099511627776 402653184"` counts products of that dtype with so many
FLOPs and bytes; `calls` are operators that the host dispatches, `kernels` those that are no
product, `bytes` what these read and write; `compiled kernels` (products, too) and `compiled bytes`
are those of compiled blocks. Attention's time follows from the config.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

# Operators that make cuBLAS multiply matrices, by name: the multiply-adds, from the arguments and
# what comes out.
PRODUCTS: dict[str, Callable[[Any, Any], int]] = {
    **dict.fromkeys(
        ("aten::mm", "aten::bmm", "aten::_scaled_mm", "lsai::fp8_product"),
        lambda a, out: out.numel() * a[0].shape[-1],
    ),
    **dict.fromkeys(
        ("lsai::fp32_product", "lsai::add_fp32_product_"),
        lambda a, _: a[0].numel() * a[1].shape[-1],
    ),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), lambda a, out: out.numel() * a[1].shape[-1]),
    "lsai::chunked_mlp": lambda a, _: len(a[0]) * (a[1].numel() + a[2].numel()),
    "lsai::chunked_mlp_backward": lambda a, _: 3 * len(a[1]) * (a[2].numel() + a[3].numel()),
    "lsai::predicted_engine": lambda a, _: len(a[0]) * a[1].numel(),
    "lsai::predicted_engine_backward": lambda a, _: 2 * len(a[0]) * a[3].numel(),
}
# They reserve or rename memory, or are timed elsewhere: no kernel, and nothing worth counting on
# the host.
_NONE = (
    "aten::empty",
    "aten::new_empty",
    "aten::as_strided",
    "aten::detach",
    "aten::alias",
    "aten::_unsafe_view",
    "prim::",
    "c10d::",
    "_c10d_functional::",
    "fsdp::",
    "lsai::predicted_attention",
    "lsai::context_attend",
    "lsai::cross_entropy_",
)


def is_work(name: str) -> bool:
    """Whether the operator `name` is counted."""
    return not name.startswith(_NONE)


def add(
    work: Counter[str],
    name: str,
    arguments: Any,
    read: Sequence[Any],
    made: Sequence[Any],
    where: str,
) -> None:
    """The operator `name` has run and read and made these (tensors count). `where`: `"compiled "`
    or nothing."""
    tensors = [value for value in (*read, *made) if isinstance(value, Tensor)]
    moved = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)
    if where:
        work[f"{where}kernels"] += 1
    if name in PRODUCTS:
        dtype = (
            "float8"
            if "engine" in name
            else str(arguments[0].dtype).removeprefix("torch.").partition("_")[0]
        )
        work[f"{dtype} {2 * PRODUCTS[name](arguments, made[0] if made else None)} {moved}"] += 1
    elif is_work(name):
        work["kernels"] += not where
        work[f"{where}bytes"] += moved
