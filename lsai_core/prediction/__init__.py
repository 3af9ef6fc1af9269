"""Memory and time of a training run, predicted without a GPU: see `simulate`, `compiled`,
`roofline`."""

from lsai_core.prediction.allocator import Verdict
from lsai_core.prediction.gpu_context import SimulatedGpu, simulated_gpu
from lsai_core.prediction.memory import LIBRARIES_GIB, Prediction, predict, verdict
from lsai_core.prediction.roofline import Estimate, estimate
from lsai_core.profiling.gpus import GPUS, Gpu, find_gpu

__all__ = [
    "GPUS",
    "LIBRARIES_GIB",
    "Estimate",
    "Gpu",
    "Prediction",
    "SimulatedGpu",
    "Verdict",
    "estimate",
    "find_gpu",
    "predict",
    "simulated_gpu",
    "verdict",
]
