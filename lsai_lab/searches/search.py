"""The search for the largest size that works, by trying: what the searches for a batch and for a
model share.

It begins where a step is predicted to fit, which decides nothing else. Steps that grow from there
bracket the answer, bisection narrows it.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from lsai_core.base.errors import Unavailable
from lsai_core.base.limits import host_limit_gib
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.largest import largest_within
from lsai_core.prediction.memory import predict
from lsai_core.profiling.gpus import OUTSIDE_GIB
from lsai_core.training import step
from lsai_lab.benches.points import Points, Row
from lsai_lab.launch.launch import require_devices
from lsai_lab.runs.kinds import Context
from lsai_lab.searches.config import SearchConfig
from lsai_lab.searches.tries import GIB, Work, attempt, server

_FIRST_STEP = 1.03  # from the prediction to the second try


def require(config: SearchConfig) -> str:
    """The attention kernel of the search's training. Raises Unavailable if this machine lacks what
    it needs, or the limit cannot be set here."""
    train = config.train
    require_devices(train.device, train.parallel.world_size)
    device = step.resolve_device(train.device)
    kernel = step.require(train, device)
    if device.type == "cpu" and sys.platform != "linux":
        raise Unavailable(
            "the search on a CPU limits memory with Linux's RLIMIT_DATA; this is not Linux"
        )
    return kernel


class Search:
    """The tries of a search: each is a row of `metrics.jsonl` as soon as it has ended.

    `limit_gib` is the memory of the GPU or, on a CPU, what one process may allocate, `usable_gib`
    that without the driver's; `host_limit_gib` is what all may take of the host's (CPU offload),
    else None. Raises Unavailable if this machine lacks what the run needs, or the limit cannot be
    set here.
    """

    def __init__(self, work: Work, config: SearchConfig, context: Context) -> None:
        train = config.train
        self.kernel = require(config)
        self.device = step.resolve_device(train.device)
        self.on_gpu = self.device.type == "cuda"
        self.limit_gib = (
            torch.cuda.get_device_properties(0).total_memory / GIB
            if self.on_gpu
            else config.cpu_limit_gib
        )
        self.usable_gib = self.limit_gib - (OUTSIDE_GIB if self.on_gpu else 0.0)
        self.host_limit_gib = (
            host_limit_gib() if self.on_gpu and train.parallel.cpu_offload else None
        )
        self._work, self.config = work, config
        self._started, self._out_of_time = time.perf_counter(), False
        self.measured: dict[int, dict[str, float]] = {}  # by size
        (context.folder / "metrics.jsonl").unlink(missing_ok=True)
        self.tries = Points(context.folder / "metrics.jsonl", context.on_rows)
        modules = [work.__module__, *["lsai_core.parallel.build"] * train.parallel.distributed]
        self._server = server(modules, on_gpu=self.on_gpu)

    def run(self, start: int) -> tuple[int, dict[str, Any]]:
        """The largest size that works, 0 if none does, and what the record says of any search."""
        config = self.config
        largest = search_largest(
            self._works, start=start, limit=config.max_size, resolution=config.resolution
        )
        limit = "GPU memory" if self.on_gpu else "process allocation limit (RLIMIT_DATA)"
        if self.host_limit_gib is not None:
            limit += f" and {self.host_limit_gib:.0f} GiB of the host's"
        return largest, {
            "estimated_size": start,
            "attention_kernel": self.kernel,
            "world_size": config.train.parallel.world_size,
            "device": torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu",
            "search_limit_gib": self.limit_gib,
            "search_limit_kind": limit,
            "search_resolution": config.resolution,
            "search_capped": largest == config.max_size,
            "search_out_of_time": self._out_of_time,
            "search_s": time.perf_counter() - self._started,
            "tries": self.tries.rows,
        }

    def _works(self, size: int) -> bool:
        """Try it. RuntimeError if not even size 1 runs."""
        config, limit = self.config, self.host_limit_gib
        if self.tries.rows and time.perf_counter() - self._started > config.budget_s:
            self._out_of_time = True
            return False
        # it would end more than the try
        if limit is not None and (needed := _on_host_gib(config.sized(size))) > limit:
            note = f"needs {needed:.0f} GiB of the host's memory, of which {limit:.0f} may be used"
            end: Row = {"outcome": "oom", "note": note, "seconds": 0.0}
        else:
            end, self.measured[size] = attempt(
                self._server,
                self._work,
                (config, size),
                processes=config.train.parallel.world_size,
                timeout_s=config.try_timeout_s,
            )
        self.tries.add({"size": size, **end, **self.measured.get(size, {})})
        if size == 1 and end["outcome"] == "failed":
            raise RuntimeError(f"size 1 does not run: {end['note']}")
        return end["outcome"] == "ok"


def search_largest(
    works: Callable[[int], bool], *, start: int, limit: int, resolution: float = 0.0
) -> int:
    """Largest size in 1..limit that works, 0 if none does. `resolution`: stop when the bracket is
    narrower than this share of the largest size that worked (0: exact)."""
    fits, fails, size, factor = 0, limit + 1, min(start, limit), _FIRST_STEP
    while True:
        fits, fails = (size, fails) if works(size) else (fits, size)
        if fails - fits <= max(1, int(resolution * fits)):
            return fits
        if fails == limit + 1:  # nothing has failed yet
            size = min(max(fits + 1, int(factor * fits)), limit)
        elif fits == 0:
            size = max(1, min(fails - 1, int(fails / factor)))
        else:
            size = (fits + fails) // 2
        factor = min(2.0, factor**2)


def predicted_size(
    config: SearchConfig,
    usable_gib: float,
    on_host_gib: float | None,
    *,
    begin: int,
    stride: float,
    first: int | None = None,
) -> int:
    """The largest size whose step is predicted to fit a device with `usable_gib` and, with CPU
    offload, a host with `on_host_gib`; 1 if none is. `begin` and `stride`: the first size
    predicted, and the factor to the second. `first`: each try takes a step of that size before, and
    may then give memory back in every step."""
    before = predict(config.sized(first)) if first else None

    def filled(size: int) -> float:
        train = config.sized(size)
        found = predict(train)
        on_device = (found.least(before) if before else found.needs) / usable_gib
        return max(on_device, _on_host_gib(train) / on_host_gib) if on_host_gib else on_device

    return max(
        1, largest_within(filled, 1.0, first=1, last=config.max_size, begin=begin, stride=stride)[0]
    )


def _on_host_gib(train: TrainConfig) -> float:
    """What all processes are predicted to keep in the host's memory."""
    return predict(train).host * train.parallel.world_size
