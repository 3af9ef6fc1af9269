"""torch.compile (default mode) on a simulated GPU.

PyTorch's own front end (Dynamo) makes graphs of what a program compiles, and its partitioner says
what they keep for the backward pass; what Inductor would make of a graph is planned (`inductor.py`)
and replayed (`compiled.Replay`), not compiled. Dynamo looks at no function that runs inside of a
mode, so the simulation's modes are off while it runs, and on again for the replay.

Where a function breaks its graph (it prints, logs, reads a value), or Dynamo leaves all of it alone
(modules of torch.nn), what runs between the graphs is seen operator by operator. Refused is what
would be compiled for shapes that vary, most convolutions, whose tensors Inductor lays out anew, and
other modes and back ends than the default. Compiled blocks agree with recorded runs; for whole
models see tests/anybody_compiled.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lsai_core.base.attributes import attributes_as
from lsai_core.base.errors import UserError
from lsai_core.prediction.compiled import Replay
from lsai_core.prediction.inductor import schema

# Of what `presented` changes, what Dynamo itself must see as it is.
_REAL: list[tuple[Any, str, Any]] = [
    (torch._subclasses, "FakeTensor", FakeTensor),
    (torch, "is_autocast_enabled", torch.is_autocast_enabled),
    (torch, "get_autocast_dtype", torch.get_autocast_dtype),
]
UNSEEN = 2**20  # bytes of a tensor that do not matter
_CONVOLUTIONS = {"aten::convolution": 1, "aten::convolution_backward": 2}  # place of the weight


class Watch(Protocol):
    """What counts tensors: names those born inside by `purpose`, and sees what a function makes."""

    @property
    def running(self) -> str: ...

    def purpose(self, name: str) -> contextlib.AbstractContextManager[None]: ...

    def inside(self, function: Callable[..., Any], *arguments: Any) -> Any: ...


@contextlib.contextmanager
def compiling(
    fakes: FakeTensorMode, watch: Watch, meet: Callable[[nn.Module], None]
) -> Iterator[None]:
    """A context in which `torch.compile` plans instead of compiling; `fakes` and `watch` are on
    while what it plans is replayed. `meet` is told of compiled modules before they run."""
    from torch._dynamo import eval_frame, trace_rules  # a second to import

    world = _World(fakes, watch, meet)
    # what a function that was compiled before asks when it is called
    asked = eval_frame._callback_from_stance
    changed = [
        (torch, "compile", functools.partial(_compile, world, torch.compile)),
        (eval_frame, "_callback_from_stance", functools.partial(world.callback, asked)),
    ]
    try:
        with attributes_as(changed):
            yield
    finally:
        if world.used:  # Dynamo keeps few graphs of a function, and has seen the simulation's torch
            torch._dynamo.reset()
            trace_rules.clear_lru_cache()


class _World:
    """The simulation's modes, which are off while Dynamo runs, and on during a replay."""

    def __init__(
        self, fakes: FakeTensorMode, watch: Watch, meet: Callable[[nn.Module], None]
    ) -> None:
        self._fakes, self._watch, self.meet = fakes, watch, meet
        self._own = self.used = False
        self._traced = False
        self._counted = False  # whether operators that run now are seen by the watch

    def callback(self, original: Callable[[Any], Any], callback: Any) -> Any:
        """What Dynamo does with a frame."""
        if callable(callback) and not self._own:
            raise UserError(
                "simulated_gpu cannot follow what was compiled before it began; call torch.compile "
                "inside"
            )
        return original(callback)

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """While open, the simulation's modes are off."""
        functions: list[Any] = []
        own, self._own = self._own, True
        try:
            while torch._C._len_torch_function_stack():
                functions.append(torch._C._pop_torch_function_stack())
            eager = functools.partial(self._eager, self._fakes.dispatch)
            changed = [*_REAL, (self._fakes, "dispatch", eager)]
            with attributes_as(changed), _disable_current_modes():
                if not self.used:  # Dynamo takes a shape that differs from an earlier one to vary
                    torch._dynamo.reset()
                self.used = True
                yield
        finally:
            self._own = own
            if self._traced:  # Dynamo's leftovers hold each other, and the inputs
                self._traced = False
                gc.collect()
            for mode in reversed(functions):
                torch._C._push_on_torch_function_stack(mode)

    def _eager(self, dispatch: Callable[..., Any], func: Any, types: Any, *arguments: Any) -> Any:
        """What the fake tensors' mode does with an operator while the modes are off: one that runs
        between two graphs is seen like any other."""
        if self._counted or torch._guards.TracingContext.try_get() is not None:
            return dispatch(func, types, *arguments)
        args, kwargs = (*arguments, {})[:2]
        _refuse_unseen(tree_leaves(args))
        with self._seen():
            return self._watch.inside(functools.partial(func, **(kwargs or {})), *args)

    @contextlib.contextmanager
    def _seen(self) -> Iterator[None]:
        before, self._counted = self._counted, True
        try:
            with self._fakes:
                yield
        finally:
            self._counted = before

    def backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Dynamo's back end: the graph's two passes as they would use memory."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        self._traced = True
        if any(_varies(value) for value in inputs):
            raise UserError(
                "simulated_gpu cannot follow torch.compile for shapes that vary; give every step "
                "inputs of one shape"
            )
        plan = aot_autograd(
            fw_compiler=self._planned,
            bw_compiler=self._planned,
            inference_compiler=self._planned,
            partition_fn=functools.partial(
                min_cut_rematerialization_partition, compiler="inductor"
            ),
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        # now, while the modes are off, for it copies the graph's constants, which are no fakes
        with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
            return plan(graph, inputs)

    def _planned(self, graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if schema(node) in _CONVOLUTIONS and not _of_patches(node):
                raise UserError(
                    f"simulated_gpu cannot follow {schema(node)} in compiled code; predict the "
                    f"step without torch.compile"
                )
        replay = Replay(graph, _handed_over())

        def run(inputs: list[Any]) -> list[Any]:
            watch = self._watch
            _refuse_unseen(inputs)
            with self._seen(), watch.purpose(f"{watch.running}: compiled code"):
                return watch.inside(replay, inputs)  # type: ignore[no-any-return]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _of_patches(node: fx.Node) -> bool:
    """Whether a convolution reads each value once, as where pictures become tokens: its input and
    output are laid out anew only where they are made."""
    arguments: Any = node.args[_CONVOLUTIONS[schema(node)] :]
    weight, _bias, stride, padding, dilation, transposed, _, groups = arguments[:8]
    kernel = [*weight.meta["val"].shape[2:]]
    plain = not transposed and groups == 1 and not any(padding) and {*dilation} == {1}
    return plain and kernel == [*stride] and max(kernel) > 1


def _refuse_unseen(values: Iterable[Any]) -> None:
    """UserError for a tensor with values: one that was made from none between two graphs, where
    nothing sees it, or before the simulation."""
    for value in values:
        if type(value) is Tensor and value.device.type == "cpu" and value.nbytes > UNSEEN:
            raise UserError(
                f"simulated_gpu cannot follow torch.compile here: nothing sees a tensor of "
                f"{value.nbytes} bytes that is made between two graphs; make it before the call"
            )


def _handed_over() -> list[int] | None:
    """Which inputs of the backward graph nothing else holds, so that it may write over them: saved
    tensors that are neither inputs nor results of the forward pass. None: not known."""
    context = torch._guards.TracingContext.try_get()
    return context.fw_metadata.bw_donated_idxs if context and context.fw_metadata else None


def _varies(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def _compile(
    world: _World,
    original: Callable[..., Any],
    model: Callable[..., Any] | None = None,
    *,
    dynamic: bool | None = None,
    backend: Any = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    disable: bool = False,
    **_others: Any,
) -> Any:
    """`torch.compile`."""
    asked = {"dynamic": dynamic, "backend": backend, "mode": mode, "options": options}
    if model is None:
        return functools.partial(_compile, world, original, disable=disable, **asked)
    if disable:
        return model
    if isinstance(model, DistributedDataParallel):
        raise UserError(
            "simulated_gpu cannot follow torch.compile of DistributedDataParallel, which splits "
            "graphs; compile the module inside of it"
        )
    usual = {"dynamic": (None, False), "backend": ("inductor",), "mode": (None, "default")}
    for name, value in asked.items():
        if value not in usual.get(name, (None, {})):
            raise UserError(
                f"simulated_gpu cannot follow torch.compile({name}={str(value)[:60]}), the "
                f"default only"
            )
    make = functools.partial(original, backend=world.backend, dynamic=dynamic)
    with world.left():
        compiled = make(model)
    if isinstance(model, nn.Module):
        compiled.forward = _outside(world, compiled.forward, model)
        return compiled
    module: Any = getattr(model, "__self__", None)
    call = functools.wraps(model)(_outside(world, compiled, module))
    if getattr(model, "__name__", "") != "_call_impl":
        return call
    with world.left():
        forward = make(module.forward)
    return _of_module(call, _outside(world, forward, module), module)


def _of_module(
    call: Callable[..., Any], forward: Callable[..., Any], module: Any
) -> Callable[..., Any]:
    """What `module.compile()` calls: `call`, or if FSDP2 shards it, whose hooks are of no graph,
    these around the compiled `forward`."""

    def run(*arguments: Any, **options: Any) -> Any:
        sharded = isinstance(module, FSDPModule)
        if sharded:
            with attributes_as([(module, "forward", forward)]):
                return nn.Module._call_impl(module, *arguments, **options)
        return call(*arguments, **options)

    return run


def _outside(world: _World, function: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """`function`, compiled of `module` (or of none), as the simulation calls it; errors in one
    line."""

    def call(*arguments: Any, **options: Any) -> Any:
        from torch._dynamo import exc

        if torch.compiler.is_compiling():
            return function(*arguments, **options)
        if isinstance(module, nn.Module):
            world.meet(module)
        try:
            with world.left():
                return function(*arguments, **options)
        except exc.TorchDynamoException as error:
            raise _said(error) from None
        except (RuntimeError, AssertionError) as error:
            if isinstance(error, AssertionError) and "CUDA" not in str(error):
                raise
            # of a replay, or between graphs; the program's own stays readable behind it
            reason = str(error).strip().partition("\n")[0][:200]
            raise UserError(f"simulated_gpu cannot follow torch.compile here: {reason}") from error

    return call


def _said(error: BaseException) -> UserError:
    """One line: a refusal of this file that Dynamo has wrapped, or Dynamo's own reason."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, UserError):
            return inner
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    reason = str(error).strip().partition("\n")[0][:200]
    return UserError(
        f"simulated_gpu cannot follow torch.compile, which makes no single graph here: {reason}"
    )
