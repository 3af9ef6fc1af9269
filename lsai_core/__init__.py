"""lsai_core: model, attention, kernels, fp8, context parallelism, FSDP2, training and profiling,
usable alone.

    from lsai_core import TrainConfig, train
    config = TrainConfig.model_validate({"model": {"preset": "lab-tiny"}, "steps": 100})
    # `tokens`: see `lsai_core.training.batches.TokenSource`
    trained = train(config, tokens, Path("out"))

What it gives, imported when it is first asked for:

    settings    TrainConfig, ModelConfig, AttentionConfig
    model       Transformer, count_parameters, rope_tables, rotate (rotary position embedding)
    kernels     BACKENDS (of attention, by name), available_recipes (of fp8, on a device),
                ContextSetting (how context parallelism divides a sequence and its work)
    training    train; connect (one process to its group), build_sharded (its part of a model)
    memory      predict, simulate (one step on tensors without memory), simulated_gpu (any step),
                largest_batch (that fits), usable_gib and MARGIN (what a GPU can give),
                LiveTensors (what a real step keeps)
    GPUs        GPUS, find_gpu, theoretical_peak
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsai_core.attention.choice import BACKENDS
    from lsai_core.config.model import AttentionConfig, ModelConfig
    from lsai_core.config.train import TrainConfig
    from lsai_core.context.methods import ContextSetting
    from lsai_core.fp8.recipes import available_recipes
    from lsai_core.model.rope import rope_tables, rotate
    from lsai_core.model.transformer import Transformer, count_parameters
    from lsai_core.parallel.build import build_sharded
    from lsai_core.parallel.processes import connect
    from lsai_core.prediction.gpu_context import simulated_gpu
    from lsai_core.prediction.largest import largest_batch
    from lsai_core.prediction.memory import predict
    from lsai_core.prediction.simulate import simulate
    from lsai_core.profiling.flops import theoretical_peak
    from lsai_core.profiling.gpus import GPUS, MARGIN, find_gpu, usable_gib
    from lsai_core.profiling.live_tensors import LiveTensors
    from lsai_core.training.loop import train

__version__ = "0.1.0"
__all__ = [
    "BACKENDS",
    "GPUS",
    "MARGIN",
    "AttentionConfig",
    "ContextSetting",
    "LiveTensors",
    "ModelConfig",
    "TrainConfig",
    "Transformer",
    "available_recipes",
    "build_sharded",
    "connect",
    "count_parameters",
    "find_gpu",
    "largest_batch",
    "predict",
    "rope_tables",
    "rotate",
    "simulate",
    "simulated_gpu",
    "theoretical_peak",
    "train",
    "usable_gib",
]

# Of every compiled module, on Python 3.13.0 alone. In a report, a cell's warning is a fault.
warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)

# Imported when first asked for: torch takes seconds, and not everybody who asks for the version
# needs it.
_WHERE = {
    "lsai_core.attention.choice": ("BACKENDS",),
    "lsai_core.config.model": ("AttentionConfig", "ModelConfig"),
    "lsai_core.config.train": ("TrainConfig",),
    "lsai_core.context.methods": ("ContextSetting",),
    "lsai_core.fp8.recipes": ("available_recipes",),
    "lsai_core.model.rope": ("rope_tables", "rotate"),
    "lsai_core.model.transformer": ("Transformer", "count_parameters"),
    "lsai_core.parallel.build": ("build_sharded",),
    "lsai_core.parallel.processes": ("connect",),
    "lsai_core.prediction.memory": ("predict",),
    "lsai_core.prediction.simulate": ("simulate",),
    "lsai_core.prediction.gpu_context": ("simulated_gpu",),
    "lsai_core.prediction.largest": ("largest_batch",),
    "lsai_core.profiling.flops": ("theoretical_peak",),
    "lsai_core.profiling.gpus": ("GPUS", "MARGIN", "find_gpu", "usable_gib"),
    "lsai_core.profiling.live_tensors": ("LiveTensors",),
    "lsai_core.training.loop": ("train",),
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
