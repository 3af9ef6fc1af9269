"""How Inductor uses memory: which values exist, in which kernels and order they are made, whose
memory they take.

Pointwise operators and reductions are fused into kernels, whose inner values exist in registers
only: a result is memory if another operator (a product, attention) made it or reads it, or if it
leaves the graph. Kernels that read the same are fused if they can be, so that some results exist
earlier than the graph says. Of the orders that Inductor tries it takes the one whose peak it
estimates to be the lowest. Then a result takes the memory of a dead one where it can. The rules are
those of torch/_inductor (scheduler.py, memory.py, codegen/wrapper.py), PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from lsai_core.prediction.work import PRODUCTS

# a value of more reads is kept in memory, if a sum of longer rows and something else read it
READS, ROW = 4, 1024
# one of more reads ends a loop's body: what follows is another that reads it (`realize_hint`)
BODY_READS = 8

# Operators whose kernels add to memory at places that values say: their results are memory.
_SCATTERS = (
    *("aten::_unsafe_masked_index_put_accumulate", "aten::_unsafe_index_put", "aten::index_put"),
    *("aten::scatter_add", "aten::scatter_reduce"),
)
_INTO = {name for name in PRODUCTS if "aten" in name}  # operators that write where Inductor says
_SAME = ("_unsafe_view", "wait_tensor")
_NOTHING = torch.empty(0)


def _value(node: fx.Node) -> Tensor:
    """The tensor that `node` makes; an empty one if it makes several, or none."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else _NOTHING


def _freed(node: fx.Node) -> int:
    """Bytes that end with `node`; Inductor takes some inputs to live on."""
    return 0 if node.name.startswith(("primals", "tangents")) else _value(node).nbytes


def _kind(node: fx.Node) -> tuple[torch.dtype, int]:
    return _value(node).dtype, _value(node).numel()


def _overload(node: fx.Node) -> torch._ops.OpOverload | None:
    return node.target if isinstance(node.target, torch._ops.OpOverload) else None


def schema(node: fx.Node) -> str:
    overload = _overload(node)
    return overload._schema.name if overload else ""


def is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _is_view(node: fx.Node) -> bool:
    if (overload := _overload(node)) is None:
        return is_part(node) and _is_view(node.args[0])  # type: ignore[arg-type]
    # a collective's result is the memory that its kernel was given
    return overload.is_view or any(name in overload.name() for name in _SAME)


def _is_fused(node: fx.Node) -> bool:
    """Whether Inductor makes a kernel of it and of what stands around: most of PyTorch's
    operators."""
    if is_part(node):
        return _is_fused(node.args[0])  # type: ignore[arg-type]
    name = schema(node)
    own = (
        name.startswith(("aten::", "prims::")) and name not in PRODUCTS and "attention" not in name
    )
    return own and not _is_view(node)


def root(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is a view of."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


Kernel = list[fx.Node]  # results that are made together


class Plan:
    """`given`: inputs; `kernels`: in order; `drops`: what dies with each; `taken`: whose memory a
    result takes.

    `reads`: the memory that making a node reads, looked through views and through what is fused
    into it. `handed_over`: which of the graph's inputs it may write over, if that is known.
    """

    def __init__(self, graph: fx.Graph, handed_over: Sequence[int] | None = None) -> None:
        self.given = [node for node in graph.nodes if node.op == "placeholder"]
        owned = range(len(self.given)) if handed_over is None else handed_over
        self._kept = {node for at, node in enumerate(self.given) if at not in owned}
        _join(graph, self.given)
        nodes = list(graph.nodes)
        self.output = nodes[-1]
        self.reads: dict[fx.Node, set[fx.Node]] = {}
        # what the body of a loop reads that makes a node: memory, sums, results of other bodies
        self._body: dict[fx.Node, dict[fx.Node, None]] = {}
        self._sums: set[fx.Node] = set()  # reductions, and what they are fused into
        self._real = self._materialized(nodes)
        kernels = self._fused()
        orders = (
            self._ordered(kernels, [0] * len(kernels)),
            self._ordered(kernels, self._sizes(kernels)),
        )
        tried = [
            (order, drops, _levels(order, drops))
            for order in orders
            for drops in [self._last_uses(order)]
        ]
        self.kernels, self.drops, levels = min(tried, key=lambda plan: max(plan[2], default=0))
        self.taken = self._reused(levels)

    def _materialized(self, nodes: list[fx.Node]) -> dict[fx.Node, None]:
        """Nodes whose results are memory, in Inductor's order: those of opaque operators and of
        scatters, and fused ones from when something opaque reads them; what stands before that
        repeats them."""
        real: dict[fx.Node, None] = {}
        for node in nodes:
            sources = [root(source) for source in node.all_input_nodes]
            opaque = node.op == "call_function" and not _is_fused(node) and not _is_view(node)
            if node.op == "output" or (opaque and not is_part(node)):
                real |= dict.fromkeys(sources)
            inner = [source for source in sources if source not in real]
            self.reads[node] = (
                set(sources).intersection(real).union(*(self.reads[source] for source in inner))
            )
            if self._sums.intersection(inner) or (
                _is_fused(node) and any(_longer(source, node) for source in sources)
            ):
                self._sums.add(node)
            if (
                node.op == "placeholder"
                or opaque
                or schema(node) in _SCATTERS
                or (_summed_and_read(node) and len(self.reads[node]) > READS)
            ):
                real[node] = None
            self._body[node] = self._read_by_body(sources, real)
        return real

    def _read_by_body(
        self, sources: list[fx.Node], real: dict[fx.Node, None]
    ) -> dict[fx.Node, None]:
        read: dict[fx.Node, None] = {}
        for source in sources:
            before = self._body.get(source, {})
            ends = source in real or len(before) > BODY_READS or _sums_up(source)
            read |= {source: None} if ends else before
        return read

    def _fused(self) -> list[Kernel]:
        """A fused result is made with others that read the same, behind all that it needs: sums
        rather with sums."""
        kernels: list[Kernel] = []
        place: dict[Any, int] = {}
        for node in (node for node in self._real if node.op == "call_function"):
            first = max((place.get(source, 0) for source in self.reads[node]), default=0)
            like = {at: self._likeness(kernels[at], node) for at in range(first, len(kernels))}
            at = max(like, key=like.__getitem__, default=0)
            if is_part(node) and node.args[0] in place:
                at = place[node.args[0]]
            elif not like or not like[at][1]:
                at = len(kernels)
                kernels.append([])
            kernels[at].append(node)
            place[node] = at
        return kernels

    def _likeness(self, kernel: Kernel, node: fx.Node) -> tuple[int, int]:
        """Bytes that both touch, if both sum or neither does; and if not."""
        if not _is_fused(kernel[0]) or not _is_fused(node):
            return 0, 0
        touched = {*kernel}.union(*(self.reads[other] for other in kernel)) & self.reads[node]
        shared = sum(_value(source).nbytes for source in touched)
        return shared * ((node in self._sums) != self._sums.isdisjoint(kernel)), shared

    def _ordered(self, kernels: list[Kernel], size: list[int]) -> list[Kernel]:
        """Each after what it needs, the smallest first."""
        place = {node: at for at, kernel in enumerate(kernels) for node in kernel}
        order: dict[int, None] = {}

        def visit(which: Iterable[int]) -> None:
            for at in sorted({*which} - order.keys(), key=lambda at: (size[at], at)):
                if at not in order:
                    needs = {
                        place[source]
                        for node in kernels[at]
                        for source in self.reads[node]
                        if source in place
                    }
                    visit(needs - {at})
                    order[at] = None

        visit(range(len(kernels)))
        return [kernels[at] for at in order]

    def _sizes(self, kernels: list[Kernel]) -> list[int]:
        """What each makes and reads; nothing for several results. Ordered so, most gradients of
        weights come last."""
        touched = [{*kernel}.union(*(self.reads[node] for node in kernel)) for kernel in kernels]
        several = [any(map(is_part, kernel)) for kernel in kernels]
        return [
            0 if none else sum(map(_freed, nodes))
            for none, nodes in zip(several, touched, strict=True)
        ]

    def _last_uses(self, kernels: list[Kernel]) -> list[list[fx.Node]]:
        last: dict[fx.Node, int] = {}
        for at, kernel in enumerate(kernels):
            for node in kernel:
                last |= dict.fromkeys((node, *self.reads[node]), at)
        # PyTorch 2.11 holds the gradients that a block is given until its backward pass is over,
        # 2.13 does not.
        given = [node for node in self.given if node.name.startswith("tangents")]
        for kept in (*map(root, self.output.all_input_nodes), *given):
            last.pop(kept, None)
        drops: list[list[fx.Node]] = [[] for _ in kernels]
        for source in self._real:
            if source in last:
                drops[last[source]].append(source)
        return drops

    def _reused(self, levels: list[int]) -> dict[fx.Node, fx.Node]:
        """That of an input which dies, where a fused kernel can write over it; else that of the
        newest dead result of its dtype and size, unless the peak would rise (`AllocateLine`).
        `levels`: the bytes at each kernel."""
        taken: dict[fx.Node, fx.Node] = {}
        free = defaultdict[Any, list[tuple[int, fx.Node]]](list)
        for step, (kernel, drops) in enumerate(zip(self.kernels, self.drops, strict=True)):
            dead = [source for source in drops if _freed(source) and source not in self._kept]
            given = not _is_fused(kernel[0]) and schema(kernel[0]) not in _INTO
            for node in () if given else kernel:
                kind, size = _kind(node), _value(node).nbytes
                over = [
                    source
                    for source in dead
                    if _kind(source) == kind and self._writes_over(kernel, node, source)
                ]
                if over:
                    taken[node] = over[0]
                    dead.remove(over[0])
                elif free[kind]:
                    since, source = free[kind][-1]
                    between = levels[since + 1 : step]
                    if not between or size + max(between) <= max(levels):
                        free[kind].pop()
                        taken[node] = source
                        levels[since + 1 : step] = [level + size for level in between]
            for source in dead:
                if source.op != "placeholder":
                    free[_kind(source)].append((step, source))
        return taken

    def _writes_over(self, kernel: Kernel, node: fx.Node, source: fx.Node) -> bool:
        """Whether nothing of `kernel` but what `node` waits for reads `source`, too. A body that
        reads what another one made of the same size writes over that."""
        made = self._body[node].keys() - self._real.keys()
        if source not in self._body[node] or any(_kind(one) == _kind(node) for one in made):
            return False
        others = (other for other in kernel if other is not node and source in self.reads[other])
        waits = all(other in self.reads[node] or _longer(source, other) for other in others)
        return _is_fused(node) and source not in kernel and source in self.reads[node] and waits


def _levels(kernels: list[Kernel], drops: list[list[fx.Node]]) -> list[int]:
    """Bytes at each kernel, as Inductor estimates them."""
    made = accumulate(sum(map(_freed, kernel)) for kernel in kernels)
    freed = accumulate((sum(map(_freed, dead)) for dead in drops), initial=0)
    return [more - less for more, less in zip(made, freed, strict=False)]


def _longer(source: fx.Node, node: fx.Node) -> bool:
    """Whether `source` has more elements than `node`."""
    return _kind(node)[1] < _kind(source)[1]


def _sums_up(node: fx.Node) -> bool:
    """Whether it is a reduction, whose result is a buffer of its own."""
    return _is_fused(node) and any(_longer(root(read), node) for read in node.all_input_nodes)


def _summed_and_read(node: fx.Node) -> bool:
    """Whether a sum over long rows and something else read `node`: if dear to repeat, it is kept
    between them."""
    rows = [
        user for user in node.users if _is_fused(user) and ROW * _kind(user)[1] < _kind(node)[1]
    ]
    return node.op == "call_function" and _is_fused(node) and 0 < len(rows) < len(node.users)


def _join(graph: fx.Graph, given: list[fx.Node]) -> None:
    """Inputs that share memory become views of the first of them."""
    first: dict[int, fx.Node] = {}
    for node in given:
        if isinstance(value := node.meta["val"], Tensor):
            owner = first.setdefault(value.untyped_storage()._cdata, node)
            if owner is not node:
                with graph.inserting_after(given[-1]):
                    view = graph.call_function(torch.ops.aten.alias.default, (owner,))
                view.meta["val"] = value
                node.replace_all_uses_with(view)
