"""How long a step takes: the work of its simulated step (`work.py`) at speeds that were measured.

    products        every matrix product of the step, those that checkpointing repeats too: FLOPs at the measured rate of products of that
                    size, or its bytes at the copy rate
    attention       the forward pass (twice where checkpointing repeats it) and the backward pass, at the rate of the kernel in the
                    nearest shape of the attention study; attention of plain operations is products and memory like any other
    memory          what all other kernels read and write, and the update (the gradient twice, weight and states both ways, for torch's
                    kernels also the gradient that is scaled). Compiled code, eager operations and torch's update each take a factor
                    longer than a copy of as many bytes
    start           what each kernel takes beyond its work
    communication   two gathers of the weights and one reduce-scatter of the gradients; it hides behind the rest and counts only
                    where it takes longer. Beyond the GPUs of a node (assumed: 8) it goes in rings through one 400 Gb/s
                    adapter a GPU, and each hop of a ring takes its time. CPU offload moves slices over PCIe, which does not hide.
    host            what it takes to call operators, to start the kernels of compiled blocks, and per group of FSDP2: bounds the steps of
                    small models. It is that of one host; another one takes half or twice as long

Left out are data loading, waiting for slower processes, what communication takes from products, and kernels that wait for one another.
`measured.json` is written by `python -m lsai_lab.speeds` from committed records: rates from library calls that were timed alone, the
costs of bytes (a copy is 1), starts and the host (seconds) from the training runs that `CALIBRATED_ON` there names. A GPU that is not in it is taken for an H200 at the ratio of the data sheets.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lsai_core.attention import get_backend
from lsai_core.attention.measured import nearest, select_rankings, shipped
from lsai_core.attention.registry import Case
from lsai_core.config import TrainConfig
from lsai_core.model import count_parameters
from lsai_core.profiling.flops import flops_per_token, theoretical_peak
from lsai_core.profiling.gpus import Gpu, find_gpu
from lsai_core.profiling.predict.prediction import predict
from lsai_core.profiling.predict.stand_ins import FUSED
from lsai_core.training.optimizer import bytes_per_parameter
from lsai_core.training.precision import compute_dtype, weight_dtype

TABLE = Path(__file__).with_name("measured.json")
REFERENCE = "NVIDIA H200"
MEMORY, HOST = ("compiled", "eager", "update"), ("call", "kernel", "group")  # costs by their names in the table
# Assumed: GPUs of a node, each one's adapter to other nodes, a step of a ring over nodes.
NODE, NETWORK_GB_PER_S, HOP_S = 8, 50.0, 15e-6


@dataclass(frozen=True)
class Estimate:
    """Seconds of one optimizer step over `tokens` (a GPU's), where they go, and where the rates come from."""

    products_s: float
    attention_s: float
    memory_s: float
    start_s: float
    communication_s: float
    offload_s: float
    host_s: float
    tokens: int
    source: str

    @property
    def gpu_s(self) -> float:
        """Of kernels, but for communication."""
        return self.products_s + self.attention_s + self.memory_s + self.start_s

    @property
    def step_s(self) -> float:
        return max(self.gpu_s, self.communication_s, self.host_s) + self.offload_s

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.tokens / self.step_s


def estimate(config: TrainConfig, gpu: Gpu, kernel: str | None = None) -> Estimate | None:
    """The estimate of a step's time on `gpu`; None if no rates are known for its dtypes.

    `kernel`: the attention kernel, where it is known; otherwise the fastest one measured.
    """
    speed, parallel, count = Speed(gpu), config.parallel, counted(config, kernel)
    products, tf32 = count.pop("products"), config.precision == "tf32"
    try:
        products_s = sum(times * speed.product_s(shape, tf32) for shape, times in products.items())
        attention_s = _attention_s(config, kernel, speed)
    except LookupError:
        return None
    cost = {name: measured()["costs"][name] * number for name, number in count.items()}
    total, shards = count_parameters(config.model).total, parallel.shards
    stored, computed = weight_dtype(config.precision).itemsize, compute_dtype(config.precision).itemsize
    sent = (shards - 1) / shards * total * (2 * computed + 4) * config.grad_accum
    link = gpu.link_gb_per_s if shards <= NODE else min(gpu.link_gb_per_s, NODE * NETWORK_GB_PER_S)
    communication_s = sent / (link * 1e9) if shards > 1 else 0.0
    if shards > NODE:
        communication_s += 3 * (config.model.n_layers + 1) * config.grad_accum * (shards - 1) * HOP_S
    moved = total * stored / shards * (1 + 2 * config.grad_accum) if parallel.cpu_offload else 0.0
    return Estimate(
        products_s=products_s,
        attention_s=attention_s,
        memory_s=sum(cost[name] for name in MEMORY) / speed.copy,
        start_s=cost["start"],
        communication_s=communication_s,
        offload_s=moved / speed.h2d,
        host_s=sum(cost[name] for name in HOST),
        tokens=config.batch_size * config.grad_accum * config.seq_len // parallel.cp,
        source="measured rates" if speed.like == gpu else "data sheet",
    )


def counted(config: TrainConfig, kernel: str | None = None) -> dict[str, Any]:
    """What one step counts: bytes (`MEMORY`), kernels that start, what the host does (`HOST`); and `products` by dtype and shape."""
    work = predict(config, kernel).work
    again = config.grad_accum / min(2, config.grad_accum)
    work = {name: times * again for name, times in work.items()}
    products = {name: times for name, times in work.items() if name[-1].isdigit()}
    stored, foreign = weight_dtype(config.precision), config.optim.kernel == "torch"
    updated = (6 if foreign else 4) * stored.itemsize + 2 * bytes_per_parameter(config.optim, stored)
    updated *= count_parameters(config.model).total / config.parallel.shards * (not config.parallel.cpu_offload)
    groups = (config.model.n_layers + 1) * config.grad_accum * config.parallel.sharded
    compiled = work.get("compiled kernels", 0)
    return {
        "compiled": work.get("compiled bytes", 0) + updated * (not foreign),
        "eager": work["bytes"],
        "update": updated * foreign,
        "start": work["kernels"] + (compiled or sum(products.values())),
        "call": work["calls"] * (not compiled),
        "kernel": compiled,
        "group": groups,
        "products": products,
    }


@functools.cache
def measured() -> dict[str, Any]:
    """The table of speeds that comes with the package."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


class Speed:
    """What a GPU does per second: its own measured rates, else those of the H200 at the ratio of the data sheets."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, rates = gpu, measured()["rates"]
        self.like = find_gpu(gpu.driver_name if gpu.driver_name in rates else REFERENCE)
        self._rates = rates[self.like.driver_name]
        self.copy = 1e9 * self._rates["copy_gb_per_s"] * gpu.memory_gb_per_s / self.like.memory_gb_per_s
        self.h2d = 1e9 * self._rates["h2d_gb_per_s"]

    def ratio(self, dtype: str, like: str) -> float:
        """Of the data sheets' peaks, over that of the GPU named `like`. Raises LookupError if one is not known."""
        own, other = (theoretical_peak(name, dtype) for name in (self.gpu.driver_name, like))
        if own is None or other is None:
            raise LookupError(dtype)
        return own.tflops / other.tflops

    def product_s(self, shape: str, tf32: bool = False) -> float:
        """Seconds of a product, `shape` as in `work.py`. Raises LookupError if the dtype's rates are not known."""
        dtype, *sizes = shape.split()
        batch, rows, columns, inner = map(int, sizes)
        name = {"bfloat16": "bf16", "float8": "fp8", "float32": "tf32" if tf32 else "fp32"}[dtype]
        curve = self._rates[name]
        gflop = 2e-9 * batch * rows * columns * inner
        rate = np.interp(np.log(gflop), np.log([size for size, _ in curve]), [tflops for _, tflops in curve])
        size = {"bf16": 2, "fp8": 1}.get(name, 4)
        moved = batch * size * (rows * inner + columns * inner + rows * columns)
        return max(1e-3 * gflop / float(rate) / self.ratio(name, self.like.driver_name), moved / self.copy)


def _attention_s(config: TrainConfig, kernel: str | None, speed: Speed) -> float:
    """Of the fused kernels; 0 for attention of plain operations."""
    if kernel and kernel != FUSED and get_backend(kernel).plain_operations:
        return 0.0
    model, window = config.model, config.attention.window
    flops = flops_per_token(model, config.seq_len, window)
    forward = ((flops.windowed or flops.causal_discounted) - 6.0 * flops.counted_parameters) / 3.0
    forward *= config.batch_size * config.grad_accum * config.seq_len / config.parallel.cp
    repeated = config.grad_checkpoint == "full"
    window = None if window is None or window >= config.seq_len else window
    case = Case("cuda", compute_dtype(config.precision), model.head_dim, window, False, True,
                model.n_heads != model.n_kv_heads, config.seq_len)  # fmt: skip
    rankings = select_rankings(shipped(), speed.gpu.driver_name, "9.0")
    found = nearest(case, [ranking for ranking in rankings if kernel in (None, FUSED, *ranking.training)])
    if found is None:  # fp32: nothing was measured
        like = theoretical_peak(speed.gpu.driver_name, "fp32")
        return (3.5 + repeated) * forward / 1e12 / like.tflops if like else 0.0
    name = kernel if kernel in found.training else next(iter(found.training))
    seconds = 3.5 * forward / found.training[name] + repeated * forward / found.inference[name]
    return 1e-12 * seconds / speed.ratio("bf16", found.gpu)
