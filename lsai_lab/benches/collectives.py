"""The `collectives` kind: how fast the processes of a run exchange messages, alone and beside a
matrix product.

What ways of sharing a model cost is made of five exchanges: all-reduce (DDP), all-gather and
reduce-scatter (ZeRO, FSDP, tensor parallelism), all-to-all and send and receive (context and
pipeline parallelism). `bytes` is the larger of what a process has before and after it. The bus
bandwidth is that of NCCL's own tests: the bytes that each process must send, over the time of the
slowest, so that it compares with what a link can do whatever the number of processes.

Before a repeat the processes meet; then a number of calls runs in a row. Beside a product the calls
are begun first, and products fill the device until they have ended. Two slowdowns tell what each
costs the other.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lsai_core.training.step import resolve_device
from lsai_lab.benches.config import CollectivesConfig, Operation
from lsai_lab.benches.points import Points, Row
from lsai_lab.launch.launch import launch, require_devices
from lsai_lab.launch.srun import srun_command
from lsai_lab.runs.kinds import Context

_MOST_CALLS, _MOST_REPEATS = 20, 20


@dataclass(frozen=True)
class Point:
    """A message of `bytes`, alone or beside matrix products."""

    operation: Operation
    bytes: int
    beside: bool


def points(config: CollectivesConfig) -> Iterator[Point]:
    """Every point: size by size, first alone and then beside products."""
    besides = (False, True) if config.beside else (False,)
    for size, beside, operation in itertools.product(config.bytes, besides, config.operations):
        yield Point(operation, size, beside)


def bus_share(operation: Operation, processes: int) -> float:
    """Of a message's bytes, how many a process must send: the factor of NCCL's tests."""
    if operation == "send_receive":
        return 1.0
    passed_on = (processes - 1) / processes
    return 2 * passed_on if operation == "all_reduce" else passed_on


def require(config: CollectivesConfig) -> None:
    """Raise Unavailable if this machine lacks the processes' GPUs."""
    if srun_command(config.processes) is None:
        require_devices(config.device, config.processes)


def run(config: CollectivesConfig, context: Context) -> dict[str, Any]:
    """Measure; the results hold the bandwidth of the largest message of each operation."""
    if context.world.size == 1:
        require(config)
        command = srun_command(config.processes)
        return launch(
            context.folder,
            context.data_root,
            config.processes,
            on_rows=context.on_rows,
            command=command,
        )
    world, device = context.world, resolve_device(config.device)
    path, began = context.folder / "metrics.jsonl", time.perf_counter()
    kept = Points(path, context.on_rows) if world.is_main else None
    bench = _Bench(config, context, device)
    for point in points(config):
        left = world.gather(time.perf_counter() - began <= config.budget_s)[0]
        known = world.gather(bool(kept and kept.find(**point.__dict__)))[0]
        if known:
            continue
        row: Row = {"outcome": "skipped", "reason": f"the {config.budget_s:g} s were over"}
        if left:
            row = {"outcome": "ok", "reason": None, **bench.measure(point)}
        if kept:
            kept.add({**point.__dict__, **row})
    return _results(config, kept.rows, device) if kept else {}


def _results(config: CollectivesConfig, rows: list[Row], device: torch.device) -> dict[str, Any]:
    good = [row for row in rows if row["outcome"] == "ok"]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    results: dict[str, Any] = {"device_name": name, "world_size": config.processes}
    results |= {"points": len(rows), "points_ok": len(good)}
    for operation in config.operations:
        alone = [row for row in good if (row["operation"], row["beside"]) == (operation, False)]
        if alone:
            largest = max(alone, key=lambda row: row["bytes"])
            results[f"{operation}_bus_gb_per_s"] = largest["bus_gb_per_s"]
    return results


class _Bench:
    """One process's part of every point."""

    def __init__(self, config: CollectivesConfig, context: Context, device: torch.device) -> None:
        self.config, self.world, self.device = config, context.world, device
        self.dtype = getattr(torch, config.dtype)
        self.on_gpu = device.type == "cuda"
        self.flag = torch.zeros(1, device=device)
        shape = (config.product, config.product)
        self.factor = torch.ones(shape, dtype=self.dtype, device=device)
        self.product = torch.empty_like(self.factor)
        dist.all_reduce(self.flag)  # NCCL connects a group at its first collective
        self.product_ms = self._slowest(lambda: self._timed(None, 0, 3), 5) / 3

    def measure(self, point: Point) -> Row:
        """Milliseconds of a call (the slowest process's, the typical repeat's) with quartiles, and
        its bandwidths in 1e9 bytes per second."""
        message = _Message(point, self.world.rank, self.world.size, self.dtype, self.device)
        message.call_and_check()
        one_ms = self._slowest(lambda: self._timed(message, 1, 0), 2)
        calls = max(1, min(_MOST_CALLS, int(self.config.point_ms / 5 / one_ms)))
        repeats = max(3, min(_MOST_REPEATS, int(self.config.point_ms / (calls * one_ms))))
        products = 0
        if point.beside:  # until the last message has come, also if that takes half as long again
            products = max(1, round(1.5 * calls * one_ms / self.product_ms))
        found = [self._timed(message, calls, products) for _ in range(repeats)]
        everybody = np.array(self.world.gather(found)).max(axis=0)  # (repeats, 2)
        low, ms, high = np.percentile(everybody[:, 0] / calls, [25, self._typical, 75])
        rate = point.bytes / ms / 1e6
        row: Row = {"ms": _short(ms), "ms_p25": _short(low), "ms_p75": _short(high)}
        row |= {"calls": calls, "repeats": repeats, "gb_per_s": _short(rate)}
        row["bus_gb_per_s"] = _short(rate * bus_share(point.operation, self.world.size))
        if products:
            product_ms = float(np.percentile(everybody[:, 1], self._typical)) / products
            alone_ms = self._slowest(lambda: self._timed(None, 0, products), repeats) / products
            row |= {"products": products, "product_ms": _short(product_ms)}
            row["product_slowdown"] = _short(product_ms / alone_ms)
        return row

    @property
    def _typical(self) -> int:
        """On a CPU, where other work only ever slows a process, the fastest repeat counts."""
        return 50 if self.on_gpu else 0

    def _slowest(self, once: Callable[[], tuple[float, float]], repeats: int) -> float:
        """The longer of the two times of `once`, of the slowest process, the typical repeat."""
        found = [max(self.world.gather(max(once()))) for _ in range(repeats)]
        return float(np.percentile(found, self._typical))

    def _timed(self, message: "_Message | None", calls: int, products: int) -> tuple[float, float]:
        """Milliseconds from the common start until the last of `calls` has ended here, and until
        the last of `products` has."""
        self.world.barrier()
        dist.all_reduce(self.flag)
        return (self._on_gpu if self.on_gpu else self._on_cpu)(message, calls, products)

    def _on_gpu(self, message: "_Message | None", calls: int, products: int) -> tuple[float, float]:
        start, received, multiplied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        begun = [work for _ in range(calls) if message for work in message.begin()]
        for _ in range(products):
            torch.mm(self.factor, self.factor, out=self.product)
        multiplied.record()
        beside = torch.cuda.Stream()
        with torch.cuda.stream(beside):
            for work in begun:
                work.wait()
            received.record()
        torch.cuda.synchronize()
        return (start.elapsed_time(received) if calls else 0.0, start.elapsed_time(multiplied))

    def _on_cpu(self, message: "_Message | None", calls: int, products: int) -> tuple[float, float]:
        ended: list[float] = []
        start = time.perf_counter()

        def exchange() -> None:
            for _ in range(calls if message else 0):
                for work in message.begin() if message else ():
                    work.wait()
            ended.append(time.perf_counter())

        thread = threading.Thread(target=exchange)
        thread.start()
        for _ in range(products):
            torch.mm(self.factor, self.factor, out=self.product)
        multiplied = time.perf_counter()
        thread.join()
        return 1e3 * (ended[0] - start), 1e3 * (multiplied - start)


class _Message:
    """The tensors of a point, and the call that exchanges them. Of `size` processes, this is
    `rank`; its values are `rank + 1`."""

    def __init__(
        self, point: Point, rank: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.operation, self.rank, self.size = point.operation, rank, size
        part = max(1, point.bytes // dtype.itemsize // size)

        def filled(count: int) -> Tensor:
            return torch.full((count,), rank + 1.0, dtype=dtype, device=device)

        gives_part = self.operation == "all_gather"
        takes_part = self.operation == "reduce_scatter"
        self.given = filled(part if gives_part else part * size)
        self.taken = filled(part if takes_part else part * size)

    def begin(self) -> list[dist.Work]:
        """Begin the exchange."""
        given, taken = self.given, self.taken
        if self.operation == "all_reduce":
            return [dist.all_reduce(taken, async_op=True)]
        if self.operation == "all_gather":
            return [dist.all_gather_into_tensor(taken, given, async_op=True)]
        if self.operation == "reduce_scatter":
            return [dist.reduce_scatter_tensor(taken, given, async_op=True)]
        if self.operation == "all_to_all":
            return [dist.all_to_all_single(taken, given, async_op=True)]
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        pair = [dist.P2POp(dist.isend, given, after), dist.P2POp(dist.irecv, taken, before)]
        return list(dist.batch_isend_irecv(pair))

    def call_and_check(self) -> None:
        """The first call, which connects the processes. RuntimeError if it brings wrong values."""
        for work in self.begin():
            work.wait()
        total = self.size * (self.size + 1) / 2
        first, last = {
            "all_reduce": (total, total),
            "reduce_scatter": (total, total),
            "all_gather": (1, self.size),
            "all_to_all": (1, self.size),
            "send_receive": ((self.rank - 1) % self.size + 1,) * 2,
        }[self.operation]
        if (float(self.taken[0]), float(self.taken[-1])) != (first, last):
            raise RuntimeError(f"{self.operation} brought {self.taken[0]} and {self.taken[-1]}")
        self.taken.zero_()  # what is summed again and again stays finite
        if self.operation == "reduce_scatter":
            self.given.zero_()


def _short(value: float) -> float:
    return float(f"{value:.5g}")
