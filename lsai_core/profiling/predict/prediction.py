"""Peak memory of a run on each GPU, with its parts, and whether that fits.

The simulated step knows tensors only. What a run's libraries take from the same allocator is one constant, measured: two
cuBLAS workspaces of 32 MiB (one for the thread of the forward pass, one for autograd's) and small change; it is the difference
between the optimizer phase of the recorded memory study on an H200 and the bytes of weights, gradients and states. The driver's own
context and NCCL's buffers lie outside the allocator, and so does what it reserves beyond what is allocated: hence the
margins of `verdict`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Literal

from lsai_core.config import TrainConfig
from lsai_core.facts import deciding
from lsai_core.profiling.predict.gpus import Gpu
from lsai_core.profiling.predict.remembered import remembered
from lsai_core.profiling.predict.simulate import simulate
from lsai_core.profiling.predict.stand_ins import FUSED_KERNELS, expected_kernel

GIB = 2**30
LIBRARIES_GIB = 72 / 1024
PARTS = (
    "weights", "gradients", "optimizer", "activations", "loss", "FSDP buffers", "messages", "kernel scratch", "libraries",
)  # fmt: skip

# Shares of a GPU's memory up to which a predicted peak is called to fit, and up to which it may. Most recorded searches for the
# largest batch on an H200 ended at 0.94 to 0.96; two with gradient checkpointing at 0.75, in fragmented memory (the chapter
# shows them).
SURE, POSSIBLE = 0.90, 0.96

Verdict = Literal["fits", "tight", "too large"]


@dataclass(frozen=True)
class Prediction:
    """GiB of one process. `parts` divide `peak`, at the moment where it stands; `phases` are peaks of their own."""

    peak: float
    phases: dict[str, float]
    parts: dict[str, float]
    host: float  # in host memory: slices of weights, gradients and optimizer states (CPU offload), block inputs


def predict(config: TrainConfig, kernel: str | None = None, *, on: Literal["gpu", "cpu"] = "gpu") -> Prediction:
    """Predicted memory of `config` on each of its GPUs; nothing is allocated and no GPU is needed.

    `kernel`: the attention kernel, where it is known; otherwise what `auto` comes to on a current GPU. `on="cpu"`: live tensor
    bytes of a run on a CPU. Raises UserError inside of a distributed run.
    """
    # Reduced to what decides memory, so that runs which differ in the rest are predicted once.
    decisive = deciding(config, "memory")
    del decisive["device"], decisive["model"]["preset"]  # `on` stands for the one, and the other is a name
    if on == "gpu":
        kernel = kernel or expected_kernel(config)
        if kernel in FUSED_KERNELS and config.parallel.cp == 1:
            kernel, decisive["attention"] = "fused", {}
    return _predicted(json.dumps(decisive), kernel, on)


@functools.lru_cache(maxsize=256)
def _predicted(decisive: str, kernel: str | None, on: Literal["gpu", "cpu"]) -> Prediction:
    config = TrainConfig.model_validate(json.loads(decisive))
    question = json.dumps([decisive, kernel, on])
    result = remembered(question, lambda: simulate(config, kernel, on=on))
    libraries = LIBRARIES_GIB if on == "gpu" else 0.0
    parts = (
        dict.fromkeys(PARTS, 0.0) | {name: size / GIB for name, size in result.parts.items()} | {"libraries": libraries}
    )
    return Prediction(
        peak=result.peak / GIB + libraries,
        phases={name: size / GIB + libraries for name, size in result.phases.items()},
        parts=parts,
        host=_host_gib(config),
    )


def _host_gib(config: TrainConfig) -> float:
    from lsai_core.model import count_parameters
    from lsai_core.training.precision import weight_dtype
    from lsai_core.training.saved_inputs import host_gib

    total = 0.0
    if config.parallel.cpu_offload:
        stored = weight_dtype(config.precision).itemsize
        total += 4 * count_parameters(config.model).total * stored / config.parallel.shards
    return total / GIB + host_gib(config)


def verdict(peak_gib: float, gpu: Gpu) -> Verdict:
    """Whether a predicted peak fits `gpu`; `tight`: fragmentation decides."""
    share = peak_gib / gpu.memory_gib
    return "fits" if share <= SURE else "tight" if share <= POSSIBLE else "too large"
