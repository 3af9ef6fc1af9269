"""What a compiled block keeps and needs, without compiling it.

torch.compile decides twice about memory. Its partitioner cuts the joint graph of both passes so
that the fewest bytes cross, and recomputes the rest: that is what a block keeps. This file runs
that very partitioner on fake tensors. Then Inductor plans what exists when (`inductor.py`):
`Replay` makes and drops these tensors.

Gradient checkpointing reaches the partitioner as in torch.compile, as marks on the graph: recompute
everything (`full`), or keep what the model's own policies keep; `mlp` is two checkpointed parts,
attention as `selective` and the rest as `full`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from lsai_core.config.model import BlockCheckpoint
from lsai_core.model.recompute import keep_attention, keep_expensive
from lsai_core.prediction.inductor import Plan, is_part, root, schema
from lsai_core.prediction.tracker import BODIES, SCRATCH, PurposeTracker
from lsai_core.prediction.work import PRODUCTS

Policy = Callable[..., CheckpointPolicy]
# What gradient checkpointing keeps of a compiled block.
POLICIES: dict[BlockCheckpoint, Policy] = {
    "selective": keep_expensive,
    "mlp": keep_expensive,
    "attention": keep_attention,
    "full": lambda *_: CheckpointPolicy.PREFER_RECOMPUTE,
}


class Replay:
    """A graph as its compiled form would use memory: called with the inputs, returns the outputs,
    all fake tensors."""

    _boxed_call = True  # the caller hands over its list of inputs, so that they can die inside

    def __init__(self, graph: fx.GraphModule, handed_over: Sequence[int] | None = None) -> None:
        self._plan = Plan(graph.graph, handed_over)
        self._held = set(self._plan.taken.values())

    def __call__(self, inputs: list[Any]) -> list[Any]:
        plan = self._plan
        memory: dict[fx.Node, Any] = {
            node: made for node, made in zip(plan.given, inputs, strict=True) if node.users
        }
        inputs.clear()
        for kernel, drops in zip(plan.kernels, plan.drops, strict=True):
            self._make(kernel, memory)
            for source in drops:
                if source not in self._held:
                    memory.pop(source, None)  # of several results there are the parts alone
        return [self._leaf(leaf, memory) for leaf in plan.output.args[0]]  # type: ignore[union-attr]

    def _make(self, kernel: list[fx.Node], memory: dict[fx.Node, Any]) -> None:
        plan, name, tracker = self._plan, schema(kernel[0]), PurposeTracker.active
        arguments = tuple(a.meta["val"] if isinstance(a, fx.Node) else a for a in kernel[0].args)
        if tracker is not None:
            tracker.measure(name, arguments)
        results: list[Any] = []
        for node in kernel:
            if node not in memory:
                value, taken = node.meta["val"], memory.pop(plan.taken.get(node, node), None)
                several = isinstance(value, (tuple, list))
                if tracker is not None and name in BODIES:
                    made = tree_leaves(
                        tracker.inside(BODIES[name], *(self._leaf(a, memory) for a in node.args))
                    )
                else:
                    made = [
                        _like(v) if taken is None else _as(taken, v)
                        for v in (value if several else [value])
                    ]
                which: Any = {part: part.args[1] for part in node.users} if several else {node: 0}
                memory |= {part: made[at] for part, at in which.items()}
                results += made
        if tracker is not None:
            read = set().union(*(plan.reads[node] for node in kernel)).difference(kernel)
            tracker.ran(
                name,
                arguments,
                tree_leaves([source.meta["val"] for source in read]),
                results,
                "compiled ",
            )
            if name in SCRATCH:
                tracker.scratch(SCRATCH[name](arguments), "activations")

    def _leaf(self, leaf: Any, memory: dict[fx.Node, Any]) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        source = memory[root(leaf)]
        return source if leaf is root(leaf) else _as(source, leaf.meta["val"])


def _as(source: Tensor, value: Tensor) -> Tensor:
    """A tensor like `value` in the memory of `source`, and no view of it."""
    return source.as_strided(value.shape, value.stride(), value.storage_offset()).data


def _like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def compiled(
    layer: nn.Module,
    grad_checkpoint: BlockCheckpoint,
    policies: dict[BlockCheckpoint, Policy] = POLICIES,
) -> Callable[..., Any]:
    """`layer` (its plain forward) as torch.compile would run it, as far as memory is concerned;
    `policies` as `POLICIES`.

    Call with the layer's parameters and buffers (`dict(named)`) and its arguments, all fake
    tensors.
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
        partition_fn=functools.partial(
            _partition, layer=layer, grad_checkpoint=grad_checkpoint, policies=policies
        ),
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )


def _partition(
    joint: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    layer: nn.Module,
    grad_checkpoint: BlockCheckpoint,
    policies: dict[BlockCheckpoint, Policy],
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    if grad_checkpoint != "none":
        nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
        results: Any = joint.graph.output_node().args[0]
        again = _feed_forward(nodes, results[0]) if grad_checkpoint == "mlp" else []
        for node in nodes:
            # a part of a result is kept as the whole is
            made: Any = node.args[0] if is_part(node) else node
            node.meta["recompute"] = policies["full" if node in again else grad_checkpoint](
                None, made.target
            )
            # what one checkpointed part takes from another is kept
            node.meta["ac_graph_id"] = int(node in again)
    # The first inputs are parameters and buffers, which live anyway and cost nothing to save.
    options["static_lifetime_input_indices"] = list(range(_count(layer)))
    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)


def _feed_forward(nodes: list[fx.Node], last: fx.Node) -> list[fx.Node]:
    """The nodes of a block's second half, which ends at `last`: those behind the addition of what
    attention gave."""
    products = [node for node in nodes[: nodes.index(last)] if schema(node) in PRODUCTS]
    attention = products[-2 if "chunked" in schema(products[-1]) else -3]
    added = next(node for node in nodes[nodes.index(attention) :] if schema(node) == "aten::add")
    return nodes[nodes.index(added) + 1 : nodes.index(last) + 1]


def _count(layer: nn.Module) -> int:
    return len(list(layer.parameters())) + len(list(layer.buffers()))
