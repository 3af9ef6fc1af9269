"""What a compiled block keeps and needs, without compiling it.

torch.compile decides twice about memory. Its partitioner cuts the joint graph of forward and backward pass so that the fewest
bytes cross (a minimum cut), and recomputes the rest: that is what a block keeps. This file runs that very partitioner, on a
graph of fake tensors, with Inductor's decompositions. Then Inductor fuses pointwise operations and reductions into kernels,
whose inner values exist in registers only. That is modelled: a result is memory if a matrix product, an attention kernel or
another opaque operator made it or reads it, or if it leaves the graph. `Replay` then walks through the graph, makes exactly these
tensors and drops each after its last use, the gradients that a backward pass is given at its end.

Gradient checkpointing reaches the partitioner as it does in torch.compile, as marks on the graph: recompute everything (`full`),
or keep what the model's own policies keep (`selective`, `attention`; `mlp` is `selective` without the product of gate and up).
"""

from __future__ import annotations

import functools
import operator
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


def _overload(node: fx.Node) -> torch._ops.OpOverload | None:
    return node.target if isinstance(node.target, torch._ops.OpOverload) else None


def _is_view(node: fx.Node) -> bool:
    overload = _overload(node)
    return (
        node.target is operator.getitem if overload is None else overload.is_view or "_unsafe_view" in overload.name()
    )


def _is_fused(node: fx.Node) -> bool:
    """Whether Inductor makes a kernel of its own of it, with what stands around it: PyTorch's operators, but products and attention."""
    overload = _overload(node)
    if overload is None or _is_view(node):
        return False
    name = overload._schema.name
    return name.startswith(("aten::", "prims::")) and name not in PRODUCTS and "attention" not in name


class Replay:
    """A graph as its compiled form would use memory: called with the inputs, returns the outputs, all fake tensors."""

    _boxed_call = True  # the caller hands over its list of inputs, so that they can die inside

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        nodes = list(graph.graph.nodes)
        self._output = nodes[-1]
        self._real = self._materialized(nodes)
        self._drop_after = self._last_uses(nodes)

    def _materialized(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """Nodes whose results exist in memory: those of opaque operators, and fused ones that something opaque reads."""
        real: set[fx.Node] = set()
        for node in nodes:
            if node.op == "placeholder" or (node.op == "call_function" and not _is_fused(node) and not _is_view(node)):
                real.add(node)
            if node.op == "output" or (node in real and node.op == "call_function"):
                real |= {self._root(source) for source in node.all_input_nodes}
        return real

    @staticmethod
    def _root(node: fx.Node) -> fx.Node:
        """The node whose memory `node` is a view of."""
        while _is_view(node):
            if node.target is operator.getitem and not _is_view(node.args[0]):  # type: ignore[arg-type]
                return node.args[0]  # type: ignore[return-value]
            node = node.all_input_nodes[0]
        return node

    def _reads(self, node: fx.Node) -> set[fx.Node]:
        """The memory that making `node` reads: its inputs, looked through views and through what is fused into it."""
        found: set[fx.Node] = set()
        waiting = [self._root(source) for source in node.all_input_nodes]
        seen: set[fx.Node] = set()
        while waiting:
            source = waiting.pop()
            if source in seen:
                continue
            seen.add(source)
            if source in self._real:
                found.add(source)
            else:
                waiting += [self._root(earlier) for earlier in source.all_input_nodes]
        return found

    def _last_uses(self, nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        last: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            if node in self._real:
                last[node] = node
                for source in self._reads(node):
                    last[source] = node
        # PyTorch 2.11 holds the gradients that a block is given until its backward pass is over, 2.13 does not.
        given = [node for node in nodes if node.op == "placeholder" and node.name.startswith("tangents")]
        for kept in (*map(self._root, self._output.all_input_nodes), *given):
            last.pop(kept, None)
        drop: dict[fx.Node, list[fx.Node]] = {}
        for source, user in last.items():
            drop.setdefault(user, []).append(source)
        return drop

    def __call__(self, inputs: list[Any]) -> list[Any]:
        memory: dict[fx.Node, Any] = {}
        given = list(inputs)
        inputs.clear()
        given.reverse()
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                memory[node] = given.pop()
            elif node in self._real:
                memory[node] = self._make(node)
            for source in self._drop_after.get(node, ()):
                del memory[source]
        return [self._value(leaf, memory) for leaf in self._output.args[0]]  # type: ignore[union-attr]

    def _make(self, node: fx.Node) -> Any:
        value = node.meta["val"]
        overload = _overload(node)
        name = overload._schema.name if overload else ""
        arguments = tuple(a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args)
        if PurposeTracker.active is not None:
            PurposeTracker.active.measure(name, arguments)
        made = [_like(item) for item in value] if isinstance(value, (tuple, list)) else _like(value)
        if PurposeTracker.active is not None:
            read = [source.meta["val"] for source in self._reads(node)]
            PurposeTracker.active.ran(name, arguments, tree_leaves(read), tree_leaves(made), "compiled ")
        if scratch := SCRATCH.get(name):
            blocks = [torch.empty(size, dtype=torch.uint8) for size in scratch(arguments)]
            del blocks  # counted, and freed at once
        return made

    def _value(self, leaf: Any, memory: dict[fx.Node, Any]) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        root, path = self._root(leaf), leaf
        if leaf is root:
            return memory[root]
        value, source = leaf.meta["val"], memory[root]
        if isinstance(source, list):
            while not (path.target is operator.getitem and path.args[0] is root):
                path = path.all_input_nodes[0]
            source = source[path.args[1]]  # type: ignore[index]
        if not isinstance(value, Tensor):
            return source
        return source.as_strided(value.shape, value.stride(), value.storage_offset())


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
        for node in joint.graph.nodes:
            if node.op == "call_function":
                # A part of a result is kept as the whole is.
                made: Any = node.args[0] if node.target is operator.getitem else node
                again = grad_checkpoint == "mlp" and _width(made) == layer.get_parameter("mlp.gate_up.weight").shape[0]
                policy = _POLICIES["full" if again else grad_checkpoint]
                node.meta["recompute"] = policy(None, made.target)
                node.meta["ac_graph_id"] = 0
    # The first inputs are parameters and buffers, which live anyway and cost nothing to save.
    options["static_lifetime_input_indices"] = list(range(_count(layer)))
    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)


def _width(node: fx.Node) -> int | None:
    """The last dimension of what a node makes."""
    made = node.meta.get("val")
    made = made[0] if isinstance(made, (tuple, list)) else made
    return made.shape[-1] if isinstance(made, Tensor) and made.ndim else None


def _count(layer: nn.Module) -> int:
    return len(list(layer.parameters())) + len(list(layer.buffers()))
