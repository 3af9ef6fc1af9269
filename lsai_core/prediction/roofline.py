"""How long a step takes: the work of its simulated step (`work.py`) at speeds that were measured.

    products        every matrix product, also a repeated one: at the rate of its size, its bytes at
                    the copy rate
    attention       each kernel's passes at its rate in the nearest shape; of plain operations:
                    products and memory
    memory          what other kernels and the update read and write, at a cost over a copy's, and
                    each kernel's start
    communication   the messages of a step (`exchanges.py`), most of them hidden unless they take
                    longest; beyond a node in rings, hop by hop. CPU offload moves slices over
                    PCIe, which does not hide
    host            operators that it calls, kernels of compiled blocks, groups of FSDP2, on one
                    host: others differ
    waiting         of the slowest stage of a pipeline, for the first micro-batch to come and the
                    last one to return: a micro-batch's time in every other stage (Narayanan et al.
                    2021, arXiv:2104.04473, 2.2); with two stages a process `interleaved.py`

`python tests/measured_speeds.py` writes `measured.json` from committed records: rates of calls
timed alone, costs (a copied byte is 1, others are seconds) of the training runs that it names.
Other GPUs are an H200 at the ratio of the data sheets. A device with a passport (`lsai probe`) has
the passport's rates and costs; what that leaves out is the table's.

Messages, where they were measured on GPUs with as fast a link, go at the rate of their size, and
products beside them last longer, as measured; otherwise weights go at the data sheet's rate of the
link. On a CPU nothing is hidden: the host's time is part of the step's.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lsai_core.attention.choice import get_backend
from lsai_core.attention.measured import Ranking, nearest, select_rankings, shipped
from lsai_core.attention.registry import Case
from lsai_core.config.precision import compute_dtype, weight_dtype
from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import count_parameters
from lsai_core.optimizers.build import state_bytes
from lsai_core.parallel.pipeline import stages_of
from lsai_core.prediction.exchanges import copied_bytes, exchanges
from lsai_core.prediction.fake_kernels import FUSED
from lsai_core.prediction.interleaved import step_s
from lsai_core.prediction.memory import predict
from lsai_core.prediction.speeds import measured
from lsai_core.profiling.flops import flops_per_token, theoretical_peak
from lsai_core.profiling.gpus import Gpu, find_gpu
from lsai_core.profiling.passport import Message

REFERENCE = "NVIDIA H200"
# costs by their names in the table
MEMORY, HOST = ("compiled", "eager", "update"), ("call", "kernel", "group")
# assumed: GPUs of a node, one's adapter, a hop of a ring over nodes
NODE, NETWORK_GB_PER_S, HOP_S = 8, 50.0, 15e-6


@dataclass(frozen=True)
class Estimate:
    """Seconds of one optimizer step over `tokens` (of all GPUs together), where they go on one
    GPU, and where the rates come from."""

    products_s: float
    attention_s: float
    memory_s: float
    communication_s: float
    exposed_s: float
    offload_s: float
    host_s: float
    tokens: int
    source: str
    waiting_s: float = 0.0

    @property
    def busy_s(self) -> float:
        computed_s = self.products_s + self.attention_s + self.memory_s
        busy_s = max(computed_s, self.communication_s, self.host_s)
        return busy_s + self.exposed_s + self.offload_s

    @property
    def step_s(self) -> float:
        return self.busy_s + self.waiting_s

    @property
    def tokens_per_s(self) -> float:
        """Training speed of all GPUs together."""
        return self.tokens / self.step_s


def estimate(config: TrainConfig, gpu: Gpu, kernel: str | None = None) -> Estimate | None:
    """The estimate of a step's time on `gpu`; None if no rates are known for its dtypes, or for
    what its processes exchange (`untimed`).

    `kernel`: the attention kernel, where it is known; otherwise the fastest one measured.
    """
    if untimed(config, gpu) is not None:
        return None
    ranks: Sequence[int | None] = range(config.parallel.pp) if config.parallel.pp > 1 else [None]
    try:
        found = [_of_rank(config, gpu, kernel, rank) for rank in ranks]
    except LookupError:
        return None
    slowest = max(found, key=lambda one: one.busy_s)
    busy_s = [one.busy_s for one in found]
    if config.parallel.stages > config.parallel.pp:
        return replace(slowest, waiting_s=max(0.0, step_s(config, busy_s) - slowest.busy_s))
    return replace(slowest, waiting_s=(sum(busy_s) - slowest.busy_s) / config.grad_accum)


def _of_rank(config: TrainConfig, gpu: Gpu, kernel: str | None, rank: int | None) -> Estimate:
    """The estimate of process `rank`, by default the one that needs the most memory, without what
    it waits for the others. Raises LookupError as `estimate` gives None."""
    speed, parallel = Speed(gpu), config.parallel
    products, count = counted(config, kernel, gpu.on, rank)
    products_s = sum(
        times * speed.product_s(shape, config.precision) for shape, times in products.items()
    )
    attention_s = _attention_s(config, kernel, speed) * _share_of_blocks(config, rank)
    hidden_s, exposed_s, slowed_s = _exchanged_s(config, speed)
    cost = {name: speed.costs[name] * number for name, number in count.items()}
    total, stored = count_parameters(config.model).total, weight_dtype(config.precision).itemsize
    moved = total * stored / parallel.shards * (1 + 2 * config.grad_accum)
    host_s = sum(cost[name] for name in HOST)
    by_sheet = parallel.shards > 1 and gpu.passport is not None and not gpu.passport.messages
    return Estimate(
        products_s=products_s + slowed_s,
        attention_s=attention_s,
        memory_s=sum(cost[name] for name in MEMORY) / speed.copy
        + (host_s if gpu.is_cpu else cost["start"]),
        communication_s=hidden_s,
        exposed_s=exposed_s,
        offload_s=moved / speed.h2d if parallel.cpu_offload else 0.0,
        host_s=0.0 if gpu.is_cpu else host_s,
        tokens=config.tokens_per_step,
        source=speed.source + ", exchanges by the data sheet" * by_sheet,
    )


def _share_of_blocks(config: TrainConfig, rank: int | None) -> float:
    """Which part of the model's blocks process `rank` of a pipeline computes."""
    if rank is None:
        return 1.0
    own = stages_of(config)[rank :: config.parallel.pp]
    return sum(len(stage) for stage in own) / config.model.n_layers


def _exchanged_s(config: TrainConfig, speed: Speed) -> tuple[float, float, float]:
    """Seconds of messages that computation hides, of those that it does not, and by how many the
    hidden ones make products last longer. Raises LookupError where the link is not known."""
    hidden_s = exposed_s = slowed_s = 0.0
    for sent in exchanges(config):
        link = speed.link(sent.operation, sent.size, sent.processes)
        took_s = sent.sent / link.alone
        if sent.processes > NODE:
            took_s += sent.calls * (sent.processes - 1) * HOP_S
        if sent.hidden:
            hidden_s += took_s
            slowed_s += sent.sent / link.beside * (1 - 1 / link.slowdown)
        else:
            exposed_s += took_s
    return hidden_s, exposed_s, slowed_s


@dataclass(frozen=True)
class Link:
    """Bytes per second that each process sends, `alone` and `beside` products, which then take
    `slowdown` times as long."""

    alone: float
    beside: float
    slowdown: float = 1.0


def untimed(config: TrainConfig, gpu: Gpu) -> str | None:
    """Why the time of a step by this way of sharing the model is not predicted, or None.

    FSDP gathers weights behind products, so that the data sheet's rate is near enough. What other
    ways exchange must have been measured among GPUs of that kind.
    """
    parallel = config.parallel
    if parallel.async_tp:
        return "not predicted: what parallel.async_tp hides is not measured"
    asked = {sent.operation for sent in exchanges(config)}
    plain = parallel.sharded and parallel.tp * parallel.pp * parallel.replicate == 1
    known = {message.operation for message in _messages_among(gpu)}
    if asked and not plain and not asked <= known:
        return f"not predicted: messages among GPUs like {gpu.name} are not measured"
    return None


def counted(
    config: TrainConfig,
    kernel: str | None = None,
    on: Literal["gpu", "cpu"] = "gpu",
    rank: int | None = None,
) -> tuple[dict[str, float], dict[str, float]]:
    """One step's products as `work.py` names them, and what else of it costs time, by the table's
    names; of process `rank`, by default the one that needs the most memory."""
    # Only a pipeline is simulated with all of its micro-batches.
    parallel = config.parallel
    again = 1 if parallel.pp > 1 else config.grad_accum / min(2, config.grad_accum)
    work = defaultdict[str, float](float)
    for name, times in predict(config, kernel, on=on, rank=rank).work.items():
        work[name] = times * again
    products = {name: times for name, times in work.items() if name[-1].isdigit()}
    stored, foreign = weight_dtype(config.precision), config.optim.kernel == "torch"
    # The gradient is read twice, weight and states both ways; torch's kernels scale the gradient
    # apart.
    updated = 0.0
    if not parallel.cpu_offload:
        weights = (6 if foreign else 4) * stored.itemsize * count_parameters(config.model).total
        states = 2 * state_bytes(config.model, config.optim, stored)
        updated = (weights + states) / parallel.state_parts
    compiled, groups = work["compiled kernels"], config.model.n_layers + 1
    return products, {
        "compiled": work["compiled bytes"] + updated * (not foreign),
        "eager": work["bytes"] + copied_bytes(config),
        "update": updated * foreign,
        "start": work["kernels"] + (compiled or sum(products.values())),
        "call": work["calls"] * (not compiled),
        "kernel": compiled,
        "group": groups / parallel.pp * config.grad_accum * parallel.sharded,
    }


class Speed:
    """What a GPU does per second: by its passport, else its own measured rates, else those of the
    H200 at the ratio of the data sheets. `costs`: as in the table."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.costs, table = gpu, dict(measured()["costs"]), measured()["rates"]
        if gpu.passport is not None:
            self.like, self._rates = gpu, gpu.passport.rates.model_dump(exclude_none=True)
            self.costs |= gpu.passport.costs.model_dump(exclude_none=True)
            device, when = gpu.passport.device.name, gpu.passport.measured
            self.source = f"rates of the passport {gpu.passport_file}, of {device}, {when}"
            self.source += ", while other work disturbed it" * bool(gpu.passport.disturbed)
        else:
            self.like = find_gpu(gpu.driver_name if gpu.driver_name in table else REFERENCE)
            self._rates = table[self.like.driver_name]
            self.source = "measured rates" if self.like == gpu else "data sheet"
        bandwidths = 1.0 if self.like == gpu else gpu.memory_gb_per_s / self.like.memory_gb_per_s
        self.copy = 1e9 * self._rates["copy_gb_per_s"] * bandwidths
        self.h2d = 1e9 * self._rates.get("h2d_gb_per_s", self._rates["copy_gb_per_s"])

    def ratio(self, dtype: str, like: str) -> float:
        """Of the data sheets' peaks, over that of the GPU named `like`. Raises LookupError if its
        own is not known."""
        if like == self.gpu.driver_name:
            return 1.0
        own, other = self.gpu.peak(dtype), theoretical_peak(like, dtype)
        if not (own and other):
            raise LookupError(dtype)
        return own / other.tflops

    def tflops(self, dtype: str, gflop: float) -> float:
        """Of products of `gflop`. Raises LookupError if the dtype's rates are not known."""
        rate = _at(gflop, self._rates[dtype])
        return rate * self.ratio(dtype, self.like.driver_name)

    def link(self, operation: str, size: float, shards: int) -> Link:
        """How `operation` goes among `shards` processes on messages of `size` bytes: as measured
        among the nearest number, else by the data sheet. Raises LookupError if neither tells."""
        most = 1e9 * NODE * NETWORK_GB_PER_S if shards > NODE else math.inf
        alike = [one for one in _messages_among(self.gpu) if one.operation == operation]
        if not alike:
            if not self.gpu.link_gb_per_s:
                raise LookupError(operation)
            rate = min(most, 1e9 * self.gpu.link_gb_per_s)
            return Link(rate, rate)
        near = min((message.processes for message in alike), key=lambda n: abs(n - shards))
        alike = sorted((m for m in alike if m.processes == near), key=lambda m: m.bytes)

        def at(name: str, otherwise: float) -> float:
            known = [(m.bytes, getattr(m, name)) for m in alike if getattr(m, name)]
            return _at(size, known) if known else otherwise

        alone = at("bus_gb_per_s", 0.0)
        beside = at("beside_gb_per_s", alone)
        slowdown = max(1.0, at("product_slowdown", 1.0))
        return Link(min(most, 1e9 * alone), min(most, 1e9 * beside), slowdown)

    def product_s(self, product: str, precision: str) -> float:
        """Seconds of a product, named as in `work.py`. Raises LookupError as `tflops`."""
        dtype, flops, moved = product.split()
        full = "tf32" if precision == "tf32" else "fp32"
        name, gflop = (
            {"bfloat16": "bf16", "float8": "fp8", "float32": full}[dtype],
            1e-9 * int(flops),
        )
        return max(1e-3 * gflop / self.tflops(name, gflop), int(moved) / self.copy)


def _messages_among(gpu: Gpu) -> Sequence[Message]:
    """How fast GPUs like `gpu` exchange messages: by its passport, else as the table has it of
    them, or else of GPUs whose link is as fast by the data sheet."""
    if gpu.passport is not None:
        return gpu.passport.messages
    if own := _shipped_messages(gpu.driver_name):
        return own
    alike = (n for n in measured()["messages"] if find_gpu(n).link_gb_per_s == gpu.link_gb_per_s)
    return next(map(_shipped_messages, alike), ())


@functools.cache
def _shipped_messages(name: str) -> Sequence[Message]:
    return [Message.model_validate(message) for message in measured()["messages"].get(name, [])]


def _at(size: float, curve: Sequence[Sequence[float]]) -> float:
    """The value at `size`, between those of [size, value], small to large."""
    sizes, values = zip(*curve, strict=True)
    return float(np.interp(np.log(size), np.log(sizes), values))


def _rankings(gpu: Gpu) -> list[Sequence[Ranking]]:
    """Measured attention: the device's own, then what ships, which needs a data sheet's peak."""
    own = gpu.passport.attention if gpu.passport else []
    found = [[Ranking(gpu.driver_name, gpu.capability, **row.model_dump()) for row in own]]
    if not gpu.peak("bf16"):
        return [*found]
    return [*found, select_rankings(shipped(), gpu.driver_name, "9.0")]


def _attention_s(config: TrainConfig, kernel: str | None, speed: Speed) -> float:
    """Of fused kernels; 0 for plain operations. In fp32, where none was measured, at the rate of
    products."""
    if kernel and kernel != FUSED and not get_backend(kernel).fused:
        return 0.0
    model, length, window = config.model, config.seq_len, config.attention.window
    flops = flops_per_token(model, length, window)
    forward = (flops.causal_discounted - 6.0 * flops.counted_parameters) / 3.0
    forward *= 1e-12 * config.batch_size * config.grad_accum * length
    forward /= config.parallel.cp * config.parallel.tp
    repeated = config.computed_again / model.n_layers
    dtype, grouped = compute_dtype(config.precision), model.n_heads != model.n_kv_heads
    window = window if window and window < length else None
    case = Case("cuda", dtype, model.head_dim, window, grouped=grouped, length=length)
    found = None
    for rankings in _rankings(speed.gpu):
        usable = [r for r in rankings if r.training and kernel in (None, FUSED, *r.training)]
        found = found or nearest(case, usable)
    if found is None:
        return (
            (3.5 + repeated)
            * forward
            / speed.tflops("bf16" if dtype.itemsize == 2 else "fp32", 1e3)
        )
    name = kernel if kernel in found.training else next(iter(found.training))
    seconds = 3.5 * forward / found.training[name] + repeated * forward / found.inference[name]
    return seconds / speed.ratio("bf16", found.gpu)
