"""The fp8 recipes: what each needs, how it converts a model, and what a run reports about it.

    fused                 this project's layers (`fused.py`): delayed scaling, casts fused with what
                          writes and reads them
    tensorwise            this project's layer (`tensorwise.py`), nothing but torch
    torchao_tensorwise    torchao.float8, one current scale per tensor, gradients in e5m2
    torchao_rowwise       torchao.float8, one power-of-two scale per row, e4m3 throughout, CUTLASS
                          kernels
    te_delayed            Transformer Engine, one scale per tensor from the maxima of earlier steps
    te_current            Transformer Engine, one current scale per tensor
    te_block              Transformer Engine, one scale per 1 x 128 values (weights: 128 x 128)

A recipe replaces the chosen linear layers of a model and leaves parameters, their names and their
dtypes alone, so that exports are those of the bf16 model. The weights stay in high precision: fp8
is how they are multiplied, not how they are kept. The state dict gains one tensor with recipe
`fused`, the history of its scales (`scales.py`).

torchao's layers are plain operations that torch.compile fuses; Transformer Engine brings its own
kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch

from lsai_core.base.errors import Unavailable
from lsai_core.config.train import Fp8Config, Fp8Recipe, TrainConfig
from lsai_core.fp8 import packages
from lsai_core.fp8.fused import FusedFp8Linear, FusedFp8MLP
from lsai_core.fp8.scales import Scales
from lsai_core.fp8.shapes import parameters_in
from lsai_core.fp8.tensorwise import Fp8Linear
from lsai_core.kernels import NOT_NVIDIA, cuda_capability, on_rocm
from lsai_core.model.transformer import Transformer, matmul_parameters

RECIPES: tuple[str, ...] = tuple(name for name in get_args(Fp8Recipe) if name != "none")
_PLACES = {
    "qkv": "attention.qkv",
    "attention_output": "attention.output",
    "gate_up": "mlp.gate_up",
    "down": "mlp.down",
}


@functools.cache
def missing(recipe: str, device: torch.device) -> str | None:
    """Why this machine cannot run `recipe` on `device`; None if it can. Imports the recipe's
    package."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "needs a CUDA GPU and torch sees none here"
        if on_rocm():
            return NOT_NVIDIA
        capability = cuda_capability(device)
        if capability < (8, 9):
            found = f"{capability[0]}.{capability[1]}"
            return (
                f"needs a GPU with fp8 tensor cores (compute capability 8.9 or newer), this "
                f"one "
                f"has {found}"
            )
    elif recipe.startswith("te_"):
        return "needs a CUDA GPU with fp8 tensor cores (Transformer Engine has no CPU kernels)"
    elif (reason := _no_products_on_cpu()) is not None:
        return reason
    if recipe.startswith("torchao_"):
        return packages.no_torchao()
    if recipe.startswith("te_"):
        return packages.no_transformer_engine(recipe)
    return None


@functools.cache
def _no_products_on_cpu() -> str | None:
    """torch multiplies fp8 on CPUs, correct and slow, in most of its builds; trying is the only way
    to know."""
    one, a8 = torch.ones(()), torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(a8, a8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError) as error:
        return (
            f"needs fp8 matmuls, which this torch does not have for CPUs: "
            f"{' '.join(str(error).split())[:200]}"
        )
    return None


def available_recipes(device: torch.device | str) -> dict[str, str | None]:
    """Every recipe with None if it can run on `device` here, or the reason why it cannot."""
    return {name: missing(name, torch.device(device)) for name in RECIPES}


def require(recipe: str, device: torch.device) -> None:
    """Raise Unavailable if this machine lacks what `recipe` (or `none`) needs."""
    if recipe != "none" and (reason := missing(recipe, device)) is not None:
        raise Unavailable(f"fp8 recipe {recipe} {reason}")


def convert(
    model: Transformer,
    fp8: Fp8Config,
    names_of: Callable[[Transformer, Fp8Config], list[str]] | None = None,
) -> None:
    """Replace the layers that `fp8` names, in place, before the model is compiled or sharded;
    recipe `none`: nothing. `names_of` finds them in a model of other parts than ours."""
    names_of = names_of or linear_names
    if fp8.recipe == "none":
        return
    if fp8.recipe == "fused":
        convert_by_fused(model, fp8.layers)
        return
    if fp8.recipe.startswith("torchao_"):
        packages.convert_by_torchao(
            model, names_of(model, fp8), fp8.recipe.removeprefix("torchao_")
        )
        return
    for name in names_of(model, fp8):
        parent_name, _, child = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, torch.nn.Linear)
        own = fp8.recipe == "tensorwise"
        converted = (
            Fp8Linear.from_linear(linear) if own else packages.transformer_engine_linear(linear)
        )
        setattr(model.get_submodule(parent_name), child, converted)


def convert_by_fused(model: Transformer, layers: Sequence[str]) -> None:
    """The recipe `fused`: the feed-forward layer as a whole where both of its projections are
    chosen."""
    converted: list[torch.nn.Module] = []

    def replace(parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        setattr(parent, name, module)
        converted.append(module)

    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        attention, mlp = block.attention, block.mlp
        if "qkv" in layers:
            replace(attention, "qkv", FusedFp8Linear.from_linear(attention.qkv))
        if "attention_output" in layers:
            replace(attention, "output", FusedFp8Linear.from_linear(attention.output))
        if "gate_up" in layers and "down" in layers:
            replace(block, "mlp", FusedFp8MLP(mlp.gate_up, mlp.down))
        else:
            for name in sorted({"gate_up", "down"} & set(layers)):
                replace(mlp, name, FusedFp8Linear.from_linear(getattr(mlp, name)))
    if "output" in layers and model.output is not None:
        replace(model, "output", FusedFp8Linear.from_linear(model.output))
    model.fp8_scales = Scales(converted, model.embedding.weight.device)


def begin_step(model: Transformer) -> None:
    """To be called before the forward pass of each step: delayed scaling makes its scales. Nothing
    for other recipes."""
    if model.fp8_scales is not None:
        model.fp8_scales.begin_step()


def end_step(model: Transformer) -> None:
    """To be called after the last backward pass of each step: delayed scaling remembers what it
    saw."""
    if model.fp8_scales is not None:
        model.fp8_scales.end_step()


def linear_names(model: Transformer, fp8: Fp8Config) -> list[str]:
    """Module names of the layers that `fp8` names, in the order of the model."""
    inside = [_PLACES[layer] for layer in fp8.layers if layer in _PLACES]
    names = [f"blocks.{i}.{place}" for i in range(len(model.blocks)) for place in inside]
    return [*names, "output"] if "output" in fp8.layers else names


def context(fp8: Fp8Config) -> contextlib.AbstractContextManager[Any]:
    """What forward and loss run within: Transformer Engine's recipe, or nothing. Not needed in the
    backward pass."""
    return (
        packages.transformer_engine_context(fp8.recipe)
        if fp8.recipe.startswith("te_")
        else contextlib.nullcontext()
    )


def facts(config: TrainConfig) -> dict[str, Any]:
    """What a record says: the recipe, the converted layers, and their share of the parameters that
    are multiplied with."""
    fp8 = config.fp8
    if fp8.recipe == "none":
        return {"fp8_recipe": "none"}
    share = parameters_in(config.model, fp8.layers) / matmul_parameters(config.model)
    broken = config.compile and fp8.recipe.startswith("te_")
    how = (
        {}
        if not broken
        else {"compile_note": "compiled around Transformer Engine's layers, which stay outside"}
    )
    return {
        "fp8_recipe": fp8.recipe,
        "fp8_layers": ", ".join(fp8.layers),
        "fp8_parameter_share": share,
        **how,
    }
