"""What a compiled block keeps and needs, without compiling it.

torch.compile decides twice about memory. Its partitioner cuts the joint graph of both passes so that the fewest bytes
cross, and recomputes the rest: that is what a block keeps. This file runs that very partitioner on fake tensors. Then
Inductor fuses pointwise operations and reductions into kernels, whose inner values exist in registers only: here a
result is memory if another operator (a product, attention) made it or reads it, or if it leaves the graph. Inductor
also gives dead results' memory to later ones. `Replay` makes and drops these tensors, the gradients that a backward
pass is given at its end.

Gradient checkpointing reaches the partitioner as in torch.compile, as marks on the graph: recompute everything
(`full`), or keep what the model's own policies keep; `mlp` is two checkpointed parts, attention as `selective` and the
rest as `full`.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from lsai_core.profiling.predict.tracker import SCRATCH, PurposeTracker
from lsai_core.profiling.predict.work import PRODUCTS
from lsai_core.recompute import BlockCheckpoint, keep_attention, keep_expensive

_POLICIES: dict[BlockCheckpoint, Callable[..., CheckpointPolicy]] = {
    "selective": keep_expensive,
    "mlp": keep_expensive,
    "attention": keep_attention,
    "full": lambda *_: CheckpointPolicy.PREFER_RECOMPUTE,
}


_NOTHING = torch.empty(0)


def _value(node: fx.Node) -> Tensor:
    """The tensor that `node` makes; an empty one if it makes several, or none."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else _NOTHING


def _kind(node: fx.Node) -> tuple[torch.dtype, int]:
    return _value(node).dtype, _value(node).numel()


def _overload(node: fx.Node) -> torch._ops.OpOverload | None:
    return node.target if isinstance(node.target, torch._ops.OpOverload) else None


def _schema(node: fx.Node) -> str:
    overload = _overload(node)
    return overload._schema.name if overload else ""


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _is_view(node: fx.Node) -> bool:
    if (overload := _overload(node)) is None:
        return _is_part(node) and _is_view(node.args[0])  # type: ignore[arg-type]
    return overload.is_view or "_unsafe_view" in overload.name()


def _is_fused(node: fx.Node) -> bool:
    """Whether Inductor makes a kernel of it and of what stands around: most of PyTorch's operators."""
    if _is_part(node):
        return _is_fused(node.args[0])  # type: ignore[arg-type]
    name = _schema(node)
    own = name.startswith(("aten::", "prims::")) and name not in PRODUCTS and "attention" not in name
    return own and not _is_view(node)


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is a view of."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


class Replay:
    """A graph as its compiled form would use memory: called with the inputs, returns the outputs, all fake tensors."""

    _boxed_call = True  # the caller hands over its list of inputs, so that they can die inside

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        nodes = list(graph.graph.nodes)
        self._output = nodes[-1]
        self._real = self._materialized(nodes)
        self._drop_after = self._last_uses(nodes)
        self._taken = self._reused(nodes)
        self._held = set(self._taken.values())

    def _materialized(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """Nodes whose results are memory: those of opaque operators, and fused ones that something opaque reads."""
        real: set[fx.Node] = set()
        for node in nodes:
            opaque = node.op == "call_function" and not _is_fused(node) and not _is_view(node)
            if node.op == "placeholder" or opaque:
                real.add(node)
            if node.op == "output" or (opaque and not _is_part(node)):
                real |= {_root(source) for source in node.all_input_nodes}
        return real

    def _reads(self, node: fx.Node) -> set[fx.Node]:
        """The memory that making `node` reads: its inputs, looked through views and through what is fused into it."""
        return self._behind(node) & self._real

    def _behind(self, node: fx.Node) -> set[fx.Node]:
        """What `_reads` finds, and what is fused into the kernel that makes `node`."""
        waiting = [_root(source) for source in node.all_input_nodes]
        seen: set[fx.Node] = set()
        while waiting:
            source = waiting.pop()
            if source not in seen and source not in self._real:
                waiting += [_root(earlier) for earlier in source.all_input_nodes]
            seen.add(source)
        return seen

    def _last_uses(self, nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        last: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            if node in self._real:
                last[node] = node
                for source in self._reads(node):
                    last[source] = node
        # PyTorch 2.11 holds the gradients that a block is given until its backward pass is over, 2.13 does not.
        given = [node for node in nodes if node.op == "placeholder" and node.name.startswith("tangents")]
        for kept in (*map(_root, self._output.all_input_nodes), *given):
            last.pop(kept, None)
        drop: dict[fx.Node, list[fx.Node]] = {}
        for source, user in last.items():
            drop.setdefault(user, []).append(source)
        return drop

    def _reused(self, nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Whose memory a result takes, as Inductor plans it (`AllocateLine`): that of an input which dies, if a fused
        kernel reads it once; else the newest dead one of its dtype and size, unless the peak would rise."""
        steps = [node for node in nodes if node in self._real and node.op == "call_function"]
        levels, level = list[int](), 0
        for node in steps:
            levels.append(level := level + _value(node).nbytes)
            level -= sum(_value(source).nbytes for source in self._drop_after.get(node, ()))
        taken: dict[fx.Node, fx.Node] = {}
        free = defaultdict[Any, list[tuple[int, fx.Node]]](list)
        for step, node in enumerate(steps):
            kind, size = _kind(node), _value(node).nbytes
            dead = [
                source for source in self._drop_after.get(node, ()) if source.op != "placeholder" and _kind(source)[1]
            ]
            twice = self._summed(node) if _is_fused(node) else {*dead}
            once = [source for source in dead if _kind(source) == kind and source not in twice]
            if once:
                taken[node] = once[0]
                dead.remove(once[0])
            elif free[kind] and (_is_fused(node) or (_schema(node) in PRODUCTS and "aten" in _schema(node))):
                since, source = free[kind][-1]
                between = levels[since + 1 : step]
                if not between or size + max(between) <= max(levels):
                    free[kind].pop()
                    taken[node] = source
                    levels[since + 1 : step] = [level + size for level in between]
            for source in dead:
                free[_kind(source)].append((step, source))
        return taken

    def _summed(self, node: fx.Node) -> set[fx.Node]:
        """What the kernel of `node` reads for a sum, before it reads it again."""
        inner = self._behind(node) - self._real
        sums = (part for part in inner if any(_kind(part)[1] < _kind(source)[1] for source in part.all_input_nodes))
        return {source for part in sums for source in self._reads(part)}

    def __call__(self, inputs: list[Any]) -> list[Any]:
        memory: dict[fx.Node, Any] = {}
        given = list(inputs)
        inputs.clear()
        given.reverse()
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                memory[node] = given.pop()
            elif node in self._real and node not in memory:
                made = self._make(node, memory.pop(self._taken.get(node, node), None))
                memory |= {part: made[part.args[1]] for part in node.users} if isinstance(made, list) else {node: made}
                del made
            for source in self._drop_after.get(node, ()):
                if source not in self._held:
                    memory.pop(source, None)  # of several results there are the parts alone
        return [self._leaf(leaf, memory) for leaf in self._output.args[0]]  # type: ignore[union-attr]

    def _make(self, node: fx.Node, taken: Tensor | None) -> Any:
        made: Any
        value, name = node.meta["val"], _schema(node)
        arguments = tuple(a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args)
        if PurposeTracker.active is not None:
            PurposeTracker.active.measure(name, arguments)
        if taken is not None:
            made = _as(taken, value)
        else:
            made = [_like(item) for item in value] if isinstance(value, (tuple, list)) else _like(value)
        if PurposeTracker.active is not None:
            read = [source.meta["val"] for source in self._reads(node)]
            PurposeTracker.active.ran(name, arguments, tree_leaves(read), tree_leaves(made), "compiled ")
        if scratch := SCRATCH.get(name):
            blocks = [torch.empty(size, dtype=torch.uint8) for size in scratch(arguments)]
            del blocks  # counted, and freed at once
        return made

    def _leaf(self, leaf: Any, memory: dict[fx.Node, Any]) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        source = memory[_root(leaf)]
        return source if leaf is _root(leaf) else _as(source, leaf.meta["val"])


def _as(source: Tensor, value: Tensor) -> Tensor:
    """A tensor like `value` in the memory of `source`, and no view of it."""
    return source.as_strided(value.shape, value.stride(), value.storage_offset()).data


def _like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def compiled(layer: nn.Module, grad_checkpoint: BlockCheckpoint) -> Callable[..., Any]:
    """`layer` (its plain forward) as torch.compile would run it, as far as memory is concerned.

    Call with the layer's parameters and buffers (`dict(named)`) and its arguments, all fake tensors.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table

    def call(named: dict[str, Tensor], *arguments: Tensor) -> Any:
        return torch.func.functional_call(layer, named, arguments, tie_weights=False)

    def plan(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Replay:
        return Replay(gm)

    return aot_function(
        call,
        fw_compiler=plan,
        bw_compiler=plan,
        inference_compiler=plan,
        partition_fn=functools.partial(_partition, layer=layer, grad_checkpoint=grad_checkpoint),
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )


def _partition(
    joint: fx.GraphModule, inputs: Sequence[Any], *, layer: nn.Module, grad_checkpoint: BlockCheckpoint, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    if grad_checkpoint != "none":
        nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
        results: Any = joint.graph.output_node().args[0]
        again = _feed_forward(nodes, results[0]) if grad_checkpoint == "mlp" else []
        for node in nodes:
            made: Any = node.args[0] if _is_part(node) else node  # a part of a result is kept as the whole is
            node.meta["recompute"] = _POLICIES["full" if node in again else grad_checkpoint](None, made.target)
            node.meta["ac_graph_id"] = int(node in again)  # what one checkpointed part takes from another is kept
    # The first inputs are parameters and buffers, which live anyway and cost nothing to save.
    options["static_lifetime_input_indices"] = list(range(_count(layer)))
    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)


def _feed_forward(nodes: list[fx.Node], last: fx.Node) -> list[fx.Node]:
    """The nodes of a block's second half, which ends at `last`: those behind the addition of what attention gave."""
    products = [node for node in nodes[: nodes.index(last)] if _schema(node) in PRODUCTS]
    attention = products[-2 if "chunked" in _schema(products[-1]) else -3]
    added = next(node for node in nodes[nodes.index(attention) :] if _schema(node) == "aten::add")
    return nodes[nodes.index(added) + 1 : nodes.index(last) + 1]


def _count(layer: nn.Module) -> int:
    return len(list(layer.parameters())) + len(list(layer.buffers()))
