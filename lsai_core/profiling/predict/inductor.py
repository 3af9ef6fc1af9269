"""How Inductor uses memory: which values exist, in which kernels and order they are made, whose memory they take.

Pointwise operators and reductions are fused into kernels, whose inner values exist in registers only: a result is
memory if another operator (a product, attention) made it or reads it, or if it leaves the graph. Operators that read
the same are fused if they can, so that some results are made earlier than the graph says. Of the orders that Inductor
tries the one with the lowest peak is taken, by its own estimate. Then a result takes the memory of a dead one where it can.
The rules are those of torch/_inductor (scheduler.py, memory.py, codegen/wrapper.py), PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from lsai_core.profiling.predict.work import PRODUCTS

READS, ROW = 4, 1024  # a value of more reads is kept in memory, if a sum of longer rows and something else read it

_NOTHING = torch.empty(0)


def value_of(node: fx.Node) -> Tensor:
    """The tensor that `node` makes; an empty one if it makes several, or none."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else _NOTHING


def _freed(node: fx.Node) -> int:
    """Bytes that end with `node`; Inductor takes some inputs to live on."""
    return 0 if node.name.startswith(("primals", "tangents")) else value_of(node).nbytes


def _kind(node: fx.Node) -> tuple[torch.dtype, int]:
    return value_of(node).dtype, value_of(node).numel()


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
    return overload.is_view or "_unsafe_view" in overload.name()


def _is_fused(node: fx.Node) -> bool:
    """Whether Inductor makes a kernel of it and of what stands around: most of PyTorch's operators."""
    if is_part(node):
        return _is_fused(node.args[0])  # type: ignore[arg-type]
    name = schema(node)
    own = name.startswith(("aten::", "prims::")) and name not in PRODUCTS and "attention" not in name
    return own and not _is_view(node)


def root(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is a view of."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


Kernel = list[fx.Node]  # results that are made together


class Plan:
    """`given`: inputs; `kernels`: in order; `drops`: what dies with each; `taken`: whose memory a result takes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.given = [node for node in graph.nodes if node.op == "placeholder"]
        _join(graph, self.given)
        nodes = list(graph.nodes)
        self.output = nodes[-1]
        self._real = self._materialized(nodes)
        made = [node for node in nodes if node in self._real and node.op == "call_function"]
        self.reads = {node: _behind(node, self._real) for node in made}
        kernels = self._fused(made)
        orders = self._ordered(kernels, [0] * len(kernels)), self._ordered(kernels, self._sizes(kernels))
        self.kernels = min(orders, key=lambda order: max(self._levels(order), default=0))
        self.drops = self._last_uses(self.kernels)
        self.taken = self._reused()

    def _materialized(self, nodes: list[fx.Node]) -> dict[fx.Node, None]:
        """Nodes whose results are memory, in the order in which Inductor names them: those of opaque operators, and
        fused ones that something opaque reads, from then on."""
        real: dict[fx.Node, None] = {}
        for node in nodes:
            opaque = node.op == "call_function" and not _is_fused(node) and not _is_view(node)
            if node.op == "output" or (opaque and not is_part(node)):
                real |= dict.fromkeys(map(root, node.all_input_nodes))
            if node.op == "placeholder" or opaque or self._read_again(node, real):
                real[node] = None
        return real

    def _read_again(self, node: fx.Node, real: Iterable[fx.Node]) -> bool:
        """Whether a kernel keeps `node` between a sum over long rows and what follows, being too dear to repeat."""
        if node.op != "call_function" or not _is_fused(node) or len(node.users) < 2:
            return False
        summed = any(_is_fused(user) and ROW * _kind(user)[1] < _kind(node)[1] for user in node.users)
        return summed and len(_behind(node, real)) > READS

    def _fused(self, nodes: list[fx.Node]) -> list[Kernel]:
        """A result is made with the first fused one that reads the same and stands behind all that it needs."""
        kernels: list[Kernel] = []
        place: dict[fx.Node, int] = {}
        for node in nodes:
            reads, at = self.reads[node], len(kernels)
            if is_part(node):
                at = place[node.args[0]]  # type: ignore[index]
            elif _is_fused(node):
                first = max((place.get(source, 0) for source in reads), default=0)
                at = next((at for at in range(first, at) if self._shares(kernels[at], reads)), at)
            kernels += [[]] if at == len(kernels) else []
            kernels[at].append(node)
            place[node] = at
        names = [*self._real]
        return sorted(
            (sorted(kernel, key=names.index) for kernel in kernels), key=lambda kernel: names.index(kernel[0])
        )

    def _shares(self, kernel: Kernel, reads: set[fx.Node]) -> bool:
        return _is_fused(kernel[0]) and any(node in reads or reads & self.reads[node] for node in kernel)

    def _ordered(self, kernels: list[Kernel], size: list[int]) -> list[Kernel]:
        """Each after what it needs, the smallest first."""
        place = {node: at for at, kernel in enumerate(kernels) for node in kernel}
        order: dict[int, None] = {}

        def visit(which: Iterable[int]) -> None:
            for at in sorted({*which} - order.keys(), key=lambda at: (size[at], at)):
                if at not in order:
                    needs = {place[source] for node in kernels[at] for source in self.reads[node] if source in place}
                    visit(needs - {at})
                    order[at] = None

        visit(range(len(kernels)))
        return [kernels[at] for at in order]

    def _sizes(self, kernels: list[Kernel]) -> list[int]:
        """What each makes and reads; nothing for several results. Ordered so, most gradients of weights come last."""
        touched = [{*kernel}.union(*(self.reads[node] for node in kernel)) for kernel in kernels]
        several = [any(map(is_part, kernel)) for kernel in kernels]
        return [0 if none else sum(map(_freed, nodes)) for none, nodes in zip(several, touched, strict=True)]

    def _last_uses(self, kernels: list[Kernel]) -> list[list[fx.Node]]:
        last: dict[fx.Node, int] = {}
        for at, kernel in enumerate(kernels):
            for node in kernel:
                last |= dict.fromkeys((node, *self.reads[node]), at)
        # PyTorch 2.11 holds the gradients that a block is given until its backward pass is over, 2.13 does not.
        given = [node for node in self.given if node.name.startswith("tangents")]
        for kept in (*map(root, self.output.all_input_nodes), *given):
            last.pop(kept, None)
        drops: list[list[fx.Node]] = [[] for _ in kernels]
        for source in self._real:
            if source in last:
                drops[last[source]].append(source)
        return drops

    def _levels(self, kernels: list[Kernel]) -> list[int]:
        """Bytes at each kernel, as Inductor estimates them."""
        made = accumulate(sum(map(_freed, kernel)) for kernel in kernels)
        freed = accumulate((sum(map(_freed, dead)) for dead in self._last_uses(kernels)), initial=0)
        return [more - less for more, less in zip(made, freed, strict=False)]

    def _reused(self) -> dict[fx.Node, fx.Node]:
        """That of an input which dies, where a fused kernel can write over it; else that of the newest dead result of its
        dtype and size, unless the peak would rise (`AllocateLine`)."""
        levels = self._levels(self.kernels)
        taken: dict[fx.Node, fx.Node] = {}
        free = defaultdict[Any, list[tuple[int, fx.Node]]](list)
        for step, (kernel, drops) in enumerate(zip(self.kernels, self.drops, strict=True)):
            dead = [source for source in drops if _freed(source)]
            for node in (
                kernel
                if _is_fused(kernel[0]) or (schema(kernel[0]) in PRODUCTS and "aten" in schema(kernel[0]))
                else ()
            ):
                kind, size = _kind(node), value_of(node).nbytes
                over = [source for source in dead if _kind(source) == kind and self._writes_over(kernel, node, source)]
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
        """Whether nothing of `kernel` but sums before `node` reads `source`, too."""
        through: dict[fx.Node, set[fx.Node]] = {}
        for other in (other for other in self.reads if other in kernel):  # in the graph's order
            through[other] = self.reads[other].union(*(through.get(inner, ()) for inner in self.reads[other]))
        others = (other for other in kernel if other is not node and source in through[other])
        small = all(
            other in through[node] and (_kind(other)[1] < _kind(source)[1] or self._read_again(other, self._real))
            for other in others
        )
        return _is_fused(node) and source not in kernel and source in through[node] and small


def _behind(node: fx.Node, real: Iterable[fx.Node]) -> set[fx.Node]:
    """The memory that making `node` reads: its inputs, looked through views and through what is fused into it."""
    waiting = [root(source) for source in node.all_input_nodes]
    seen: set[fx.Node] = set()
    while waiting:
        source = waiting.pop()
        if source not in seen and source not in real:
            waiting += [root(earlier) for earlier in source.all_input_nodes]
        seen.add(source)
    return seen.intersection(real)


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
