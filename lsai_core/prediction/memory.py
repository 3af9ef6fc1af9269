"""Peak memory of a run on each GPU, with its parts, and whether that fits.

The simulated step knows tensors only. A run's libraries take one constant from the same allocator:
two cuBLAS workspaces. What the allocator reserves beyond that, and whether it gets by with a GPU's
memory, is found by replaying the step (`replay.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lsai_core.base.disk_cache import cached_on_disk
from lsai_core.config.affects import affecting
from lsai_core.config.precision import weight_dtype
from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import shaped
from lsai_core.optimizers.build import trained_bytes
from lsai_core.parallel.kinds.zero1 import SpreadOptimizer
from lsai_core.prediction.allocator import WORKSPACE, Verdict
from lsai_core.prediction.fake_kernels import FUSED, expected_kernel, is_usual, repeats
from lsai_core.prediction.process import one_of
from lsai_core.prediction.replay import Replayed, replay
from lsai_core.prediction.simulate import Simulated, held_back, simulate
from lsai_core.profiling.gpus import OUTSIDE_GIB, Gpu, usable_gib
from lsai_core.training.combinations import require_possible
from lsai_core.training.own_techniques import own_techniques
from lsai_core.training.step import prepare_optimizer

GIB = 2**30
LIBRARIES_GIB = 2 * WORKSPACE / GIB
SHAKES = 16
PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "loss",
    "FSDP buffers",
    "messages",
    "kernel scratch",
    "libraries",
)


@dataclass(frozen=True)
class Prediction:
    """GiB of one process. `parts` divide `peak`, at the moment where it stands; `phases` are peaks
    of their own."""

    peak: float
    phases: dict[str, float]
    parts: dict[str, float]
    # in host memory: slices of weights, gradients and optimizer states (CPU offload), block inputs
    host: float
    work: dict[str, int]  # of one or two micro-batches (`work.py`)
    reserved: float  # what the caching allocator takes from a GPU with memory to spare; 0 on a CPU
    rank: int = 0  # of the process
    _step: Simulated | None = field(default=None, repr=False, compare=False)
    _drawn: Sequence[float] = field(default=(), repr=False, compare=False)
    _unseen: float = field(default=0.0, repr=False, compare=False)  # messages that no tensor shows

    @property
    def timeline(self) -> dict[str, list[float]]:
        """GiB by part in equal slices of the forward pass, the backward pass and the update
        (`timeline.SLICES`), each at its highest moment."""
        assert self._step is not None, "predicted for a CPU"
        found = {name: [size / GIB for size in s] for name, s in self._step.timeline.items()}
        slices = len(next(iter(found.values())))
        return found | {"libraries": [self.parts["libraries"]] * slices}

    def on_gpu_with(
        self, available_gib: float, after: Prediction | None = None, **settings: Any
    ) -> Replayed:
        """The first steps where the allocator may reserve `available_gib`. `after`: the first step
        is that one's, e.g. of a smaller batch. `settings` of the allocator: `expandable`
        (segments), `collect_above` (garbage_collection_threshold); `shaken`, a seed
        (`replay.py`)."""
        assert self._step is not None, "predicted for a CPU"
        limit = max(0, int((available_gib - self._unseen) * GIB))
        return replay(
            self._step, self._drawn, limit, first=after._step if after else None, **settings
        )

    def surely_fits(self, available_gib: float) -> bool:
        """Whether every one of `SHAKES` replays gets through, wherever the driver puts segments,
        and no later step gives memory back."""
        shaken = (self.on_gpu_with(available_gib, shaken=seed) for seed in range(SHAKES))
        return all(found.fits and not found.flushes_late for found in shaken)

    @property
    def at_worst(self) -> float:
        """The most that any of these replays reserves, with memory to spare."""
        assert self._step is not None, "predicted for a CPU"
        shaken = (replay(self._step, self._drawn, shaken=seed) for seed in range(SHAKES))
        return max(found.reserved for found in shaken) / GIB + self._unseen

    @functools.cached_property
    def needs(self) -> float:
        """The least that the allocator must be able to reserve, so that later steps give no memory
        back. Where it can have more it reserves more: gaps that it could do without."""
        return self.least()

    def least(self, after: Prediction | None = None) -> float:
        """`needs`, or the least with which the steps after `after`'s get through, even if each
        gives memory back."""
        low, high = self.peak, max(self.peak, self.reserved)
        while high - low > 0.003 * high:
            middle = (low + high) / 2
            found = self.on_gpu_with(middle, after)
            low, high = (
                (low, middle)
                if found.fits and (after or not found.flushes_late)
                else (middle, high)
            )
        return high


def predict(
    config: TrainConfig,
    kernel: str | None = None,
    *,
    on: Literal["gpu", "cpu"] = "gpu",
    rank: int | None = None,
) -> Prediction:
    """Predicted memory of `config` on the GPU of process `rank`, by default the one that needs the
    most; nothing is allocated and no GPU is needed.

    `kernel`: the attention kernel, if known; otherwise what `auto` comes to on a current GPU.
    `on="cpu"`: live tensor bytes of a run on a CPU. Raises UserError inside of a distributed run.
    """
    require_possible(config, "predict")
    if rank is not None:
        return _of_rank(config, kernel, on, rank)
    return max(predict_ranks(config, kernel, on=on), key=lambda prediction: prediction.peak)


def predict_ranks(
    config: TrainConfig, kernel: str | None = None, *, on: Literal["gpu", "cpu"] = "gpu"
) -> list[Prediction]:
    """`predict` for rank 0 and every process that may need another amount."""
    require_possible(config, "predict")
    return [_of_rank(config, kernel, on, rank) for rank in differing_ranks(config)]


def differing_ranks(config: TrainConfig) -> list[int]:
    """Rank 0, and the processes that may need more: the stages of a pipeline, the one that keeps
    the most states. Where tensors are cut into slices, rank 0 has the largest of each."""
    if config.parallel.pp > 1:
        return list(range(config.parallel.pp))
    if config.parallel.kind != "zero1":
        return [0]
    asked = {"model": config.model, "optim": config.optim, "parallel": config.parallel}
    sizes = _shares(json.dumps({name: part.model_dump() for name, part in asked.items()}))
    return sorted({0, sizes.index(max(sizes))})


@functools.lru_cache(maxsize=256)
def _shares(asked: str) -> list[int]:
    """How many numbers each process of ZeRO-1 updates."""
    config = TrainConfig.model_validate(json.loads(asked))
    with one_of(config, 0):
        optimizer = prepare_optimizer(shaped(config.model), config)
    assert isinstance(optimizer, SpreadOptimizer)
    return optimizer.sizes


def _of_rank(
    config: TrainConfig, kernel: str | None, on: Literal["gpu", "cpu"], rank: int
) -> Prediction:
    # Reduced to what affects memory, so that runs which differ in the rest are predicted once.
    relevant = affecting(config, "memory")
    # `on` stands for the one, and the other is a name
    del relevant["device"], relevant["model"]["preset"]
    if on == "gpu":
        kernel = kernel or expected_kernel(config)
        if is_usual(kernel) and config.parallel.cp == 1:
            kernel, relevant["attention"] = FUSED if repeats(kernel) else kernel, {}
    own = json.dumps(own_techniques(config))
    return _predicted(json.dumps(relevant), kernel, on, own, rank)


@functools.lru_cache(maxsize=256)
def _predicted(
    relevant: str, kernel: str | None, on: Literal["gpu", "cpu"], own: str, rank: int
) -> Prediction:
    """`own`: the laboratory's techniques in it, with their hashes; none in most questions."""
    config = TrainConfig.model_validate(json.loads(relevant))
    question = json.dumps([relevant, kernel, on, rank, *([] if own == "{}" else [own])])
    kept = cached_on_disk(
        simulate.__module__, question, lambda: asdict(simulate(config, kernel, on=on, rank=rank))
    )
    return prediction_of(config, Simulated(**kept), on, rank)


def prediction_of(
    config: TrainConfig, result: Simulated, on: Literal["gpu", "cpu"] = "gpu", rank: int = 0
) -> Prediction:
    """What a simulated step of `config` in process `rank` comes to."""
    libraries = LIBRARIES_GIB if on == "gpu" else 0.0
    known = {name: size / GIB for name, size in result.parts.items()}
    parts = dict.fromkeys(PARTS, 0.0) | known | {"libraries": libraries}
    # Initial values are drawn in fp32, whole, also where a process keeps a slice, which it cuts out
    # before it casts it.
    share = 4 / weight_dtype(config.precision).itemsize
    slices = config.parallel.shards * config.parallel.tp
    drawn = [share * slices, share] if slices > 1 else [share]
    unseen = min(held_back(config) / GIB, parts["messages"])
    return Prediction(
        peak=result.peak / GIB + libraries,
        phases={name: size / GIB + libraries for name, size in result.phases.items()},
        parts=parts,
        host=_host_gib(config),
        work=result.work,
        reserved=replay(result, drawn).reserved / GIB + unseen if on == "gpu" else 0.0,
        rank=rank,
        _step=result if on == "gpu" else None,
        _drawn=drawn,
        _unseen=unseen,
    )


def _host_gib(config: TrainConfig) -> float:
    from lsai_core.model.saved_inputs import host_gib

    if not config.parallel.cpu_offload:
        return host_gib(config)
    kept_bytes = trained_bytes(config.model, config.optim, weight_dtype(config.precision))
    return kept_bytes / config.parallel.shards / GIB + host_gib(config)


def verdict(prediction: Prediction, gpu: Gpu) -> Verdict:
    """Whether a run fits `gpu`, by replaying it there.

    `fits`: it gets through with 3 % of the memory to spare. `tight`: with less, or only by giving
    cached memory back to the driver in every step, which is slow. Otherwise `too large`.
    """
    if gpu.is_cpu:  # no allocator gives memory back
        return "fits" if prediction.peak <= usable_gib(gpu) else "too large"
    if prediction.reserved <= usable_gib(gpu) or prediction.needs <= usable_gib(gpu):
        return "fits"
    return "tight" if prediction.on_gpu_with(gpu.memory_gib - OUTSIDE_GIB).fits else "too large"
