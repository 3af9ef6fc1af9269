"""fp8 layers of other packages: torchao and NVIDIA's Transformer Engine. Imported when first asked
for.

torchao replaces `nn.Linear` by a subclass of it whose casts torch.compile fuses. Its autograd
function keeps the bf16 input and the bf16 weight, like the project's own.

Transformer Engine quantizes with hand-written kernels that write both layouts at once. On Hopper it
keeps the quantized weight of every layer from the forward to the backward pass, in both layouts: up
to two bytes per parameter on top of the bf16 weights (14 GB for 7e9 parameters); the input of a
layer is kept in fp8 instead of bf16, which saves one byte per element only where nobody else keeps
it in bf16. The compiler is kept out of these layers: a compiled block ends a graph before each and
starts the next behind it, so that norms, rotation and SwiGLU are still fused among themselves.
"""

import contextlib
import ctypes
import functools
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn


def _not_imported(module: str, package: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # a binary package built for another torch fails in any way it likes
        if isinstance(error, ModuleNotFoundError) and str(error.name).startswith(
            module.partition(".")[0]
        ):
            return f"needs the package {package} (pip install 'lsai[fp8]')"
        reason = " ".join(str(error).split())[:300]
        return (
            f"needs the package {package}, which cannot be imported: {type(error).__name__}: "
            f"{reason}"
        )
    return None


@functools.cache
def no_torchao() -> str | None:
    """Why torchao's fp8 layers cannot be used here, or None."""
    return _not_imported("torchao.float8", "torchao")


def convert_by_torchao(model: nn.Module, names: list[str], recipe: str) -> None:
    """Replace the named layers by torchao's, in place. `recipe`: `tensorwise` or `rowwise`, its
    names."""
    float8 = import_module("torchao.float8")
    chosen = frozenset(names)
    float8.convert_to_float8_training(
        model,
        config=float8.Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda _module, name: name in chosen,
    )


@functools.cache
def no_transformer_engine(recipe: str) -> str | None:
    """Why Transformer Engine cannot run `recipe` on this GPU, or None."""
    _load_cudnn_of_torch()
    if (reason := _not_imported("transformer_engine.pytorch", "transformer-engine")) is not None:
        return reason
    engine = import_module("transformer_engine.pytorch")
    ask = engine.is_fp8_block_scaling_available if recipe == "te_block" else engine.is_fp8_available
    fits, why = ask(return_reason=True)
    return None if fits else f"does not run here: {why}"


def _load_cudnn_of_torch() -> None:
    """Load every part of the cuDNN that torch brings along, and point Transformer Engine to it.

    It would take the system's. Where torch has loaded a part of its own, of another version, the
    two do not fit together.
    """
    package = find_spec("nvidia.cudnn") if find_spec("nvidia") is not None else None
    for folder in (package and package.submodule_search_locations) or ():
        os.environ.setdefault("CUDNN_HOME", folder)
        for library in sorted(Path(folder, "lib").glob("libcudnn*.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _layer_class() -> type[nn.Module]:
    class TransformerEngineLinear(import_module("transformer_engine.pytorch").Linear):  # type: ignore[misc]
        """Transformer Engine's layer, outside of compiled graphs and without extra entries in the
        state dict."""

        # Decorated on the class, so that all blocks share one compiled piece: per layer, each would
        # be compiled anew.
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

        # The history of delayed scaling is not kept in checkpoints (they refuse te_delayed); other
        # recipes have none.
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

    return TransformerEngineLinear


def transformer_engine_linear(linear: nn.Linear) -> nn.Module:
    """The same layer by Transformer Engine, with the very same parameter."""
    weight = linear.weight
    converted = _layer_class()(
        linear.in_features,
        linear.out_features,
        bias=False,
        params_dtype=weight.dtype,
        device=str(weight.device),
    )
    converted.weight = weight
    return converted


def transformer_engine_context(recipe: str) -> contextlib.AbstractContextManager[Any]:
    """Transformer Engine's fp8 mode with `recipe` (te_delayed, te_current, te_block); its layers
    are bf16 outside of it."""
    engine, recipes = (
        import_module("transformer_engine.pytorch"),
        import_module("transformer_engine.common.recipe"),
    )
    scaling = {
        "te_delayed": recipes.DelayedScaling,
        "te_current": recipes.Float8CurrentScaling,
        "te_block": recipes.Float8BlockScaling,
    }[recipe]
    return engine.autocast(enabled=True, recipe=scaling())
