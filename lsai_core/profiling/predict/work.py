"""The work of a simulated step: which matrix products it computes, what its other kernels read and write, what the host calls.

`Counter` keys: `"bfloat16 1 8192 6144 4096"` counts products of that dtype and shape (batch, M, N, K); `calls` are operators that the host
dispatches, `kernels` those of them that are no product, `bytes` what these read and write; `compiled kernels` (products, too) and
`compiled bytes` are the same of compiled blocks. Attention's kernels are not counted: their time follows from the config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

Shape = tuple[int, int, int, int]


def _plain(a: Tensor, b: Tensor, *_: Any) -> list[Shape]:
    return [(a.shape[0] if a.ndim > 2 else 1, a.shape[-2], b.shape[-1], a.shape[-1])]


def _chunks(rows: int, gate_up_ED: Tensor, down_DF: Tensor, chunk: int) -> list[Shape]:
    """Both products of a chunked feed-forward layer."""
    sizes = [min(chunk, rows - start) for start in range(0, rows, chunk)]
    return [(1, size, *weight.shape) for size in sizes for weight in (gate_up_ED, down_DF)]


# Operators that make cuBLAS multiply matrices, by name: the shapes, from the arguments.
PRODUCTS: dict[str, Callable[[tuple[Any, ...]], list[Shape]]] = {
    "aten::mm": lambda a: _plain(*a),
    "aten::_scaled_mm": lambda a: _plain(*a),
    "aten::bmm": lambda a: _plain(*a),
    "aten::addmm": lambda a: _plain(*a[1:]),
    "aten::baddbmm": lambda a: _plain(*a[1:]),
    "lsai::fp8_product": lambda a: [(1, len(a[0]), len(a[1]), a[0].shape[1])],
    "lsai::chunked_mlp": lambda a: _chunks(len(a[0]), *a[1:]),
    "lsai::chunked_mlp_backward": lambda a: 3 * _chunks(len(a[1]), *a[2:]),  # forward again, and both gradients
    "lsai::predicted_engine": lambda a: [(1, len(a[0]), *a[1].shape)],
    "lsai::predicted_engine_backward": lambda a: 2 * [(1, len(a[0]), *a[3].shape)],
}
# They reserve or rename memory, or are timed elsewhere: no kernel, and nothing worth counting on the host.
_NONE = ("aten::empty", "aten::new_empty", "aten::as_strided", "aten::detach", "aten::alias", "aten::_unsafe_view", "prim::", "c10d::", "fsdp::",
         "lsai::predicted_attention", "lsai::context_attend")  # fmt: skip


def is_work(name: str) -> bool:
    """Whether the operator `name` is counted."""
    return not name.startswith(_NONE)


def add(work: Counter[str], name: str, arguments: tuple[Any, ...], touched: Iterable[Any], where: str = "") -> None:
    """The operator `name` has run: a product, or a kernel that reads and writes `touched`. `where`: `"compiled "` in compiled blocks."""
    if where:
        work[f"{where}kernels"] += 1
    if name in PRODUCTS:
        dtype = str(arguments[-2 if "add" in name else 0].dtype).removeprefix("torch.").partition("_")[0]
        dtype = "float8" if "engine" in name else dtype
        work.update(" ".join([dtype, *map(str, shape)]) for shape in PRODUCTS[name](arguments))
    elif is_work(name):
        work["kernels"] += not where
        tensors = [value for value in touched if isinstance(value, Tensor)]
        work[f"{where}bytes"] += sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)
