"""lsai_core: model, attention, kernels, fp8, context parallelism, FSDP2, training and profiling,
usable alone.

from lsai_core import TrainConfig, train
config = TrainConfig.model_validate({"model": {"preset": "lab-tiny"}, "steps": 100})
trained = train(config, tokens, Path("out"))  # `tokens`: see
                                              `lsai_core.training.batches.TokenSource`
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsai_core.config.train import TrainConfig
    from lsai_core.model.transformer import Transformer
    from lsai_core.prediction import predict, simulated_gpu
    from lsai_core.training.loop import train

__version__ = "0.1.0"
__all__ = ["TrainConfig", "Transformer", "predict", "simulated_gpu", "train"]

# Imported when first asked for: torch takes seconds, and not everybody who asks for the version
# needs it.
_WHERE = {
    "TrainConfig": ".config.train",
    "Transformer": ".model.transformer",
    "predict": ".prediction",
    "simulated_gpu": ".prediction.gpu_context",
    "train": ".training.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name], __name__), name)
