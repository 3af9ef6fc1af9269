"""How long a step takes, estimated from a GPU's ceilings: its matrix products, its trips over memory, its communication.

    matrix products   6 FLOPs per parameter and token (8 for those that full checkpointing runs twice), at the matmul ceiling of
                      the dtype; attention 3.5 times its forward pass (4.5), causal, at the ceiling of bf16 (fp32);
                      checkpointing that keeps attention's results repeats the products alone
    memory            the update reads 2 and writes 1 value per parameter, and its states (AdamW: 2) both ways; an activation is written, read by the next operation, and
                      once more each in the backward pass: 4 trips, 5 or 6 where checkpointing makes some or all of them
                      twice; all at the copy ceiling. The bytes are what one process would keep without checkpointing
    communication     two gathers of the weights and one reduce-scatter of the gradients; it hides behind the rest and counts only
                      where it takes longer. Beyond the GPUs of a node (assumed: 8) it goes in rings through one 400 Gb/s
                      adapter a GPU, and each hop of a ring takes its time. CPU offload moves slices over PCIe, which does not hide.
    host              what it takes to launch a block's kernels: bounds the steps of small models

A ceiling is the one that a `machine` record has measured on that GPU, or the data sheet's times the share that the H200's record
reached. `EFFICIENCY` is what a step's matrix products, of many shapes and with gaps between them, are expected to keep of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lsai_core.config import ParallelConfig, TrainConfig
from lsai_core.model import count_parameters
from lsai_core.profiling.flops import MATMUL_DTYPE, flops_per_token, theoretical_peak
from lsai_core.profiling.gpus import Gpu
from lsai_core.profiling.predict.prediction import predict
from lsai_core.recompute import PERIOD
from lsai_core.shapes import parameters_in
from lsai_core.training.optimizer import bytes_per_parameter
from lsai_core.training.precision import compute_dtype, weight_dtype

EFFICIENCY = 0.95
MATMUL_SHARE, COPY_SHARE = 0.69, 0.88  # of the data sheet's figures, measured on the H200
TRIPS = {"none": 4, "selective": 5, "alternating": 5, "attention": 6, "full": 6}
PCIE_GB_PER_S = 55.0  # host to device and back, measured on the H200
# Assumed: GPUs of a node, each one's adapter to other nodes, a step of a ring over nodes.
NODE, NETWORK_GB_PER_S, HOP_S = 8, 50.0, 15e-6
# The host's time for a block's forward and backward pass, alone and with FSDP2: H200, study `fsdp`, part grid.
HOST_S, HOST_SHARDED_S = 2.5e-3, 6.5e-3


@dataclass(frozen=True)
class Estimate:
    """Seconds of one optimizer step over `tokens` (a GPU's), where they go, and where the ceilings come from."""

    matmul_s: float
    memory_s: float
    communication_s: float
    offload_s: float
    host_s: float
    tokens: int
    source: str

    @property
    def step_s(self) -> float:
        return max(self.matmul_s + self.memory_s, self.communication_s, self.host_s) + self.offload_s

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.tokens / self.step_s


def estimate(
    config: TrainConfig, gpu: Gpu, measured: Mapping[str, float] | None = None, kernel: str | None = None
) -> Estimate | None:
    """The estimate of a step's time on `gpu`; None if no matmul ceiling is known for its dtypes.

    `measured`: results of a `ceilings` run on that kind of GPU (`matmul_<dtype>_tflops`, `copy_gb_per_s`); `kernel`: the
    attention kernel, where it is known.
    """
    measured = measured or {}
    dtype, in_fp8 = MATMUL_DTYPE[config.precision], 0
    if config.fp8.recipe != "none":
        in_fp8 = parameters_in(config.model, tuple(name for name in config.fp8.layers if name != "output"))
    plain, fast = (_tflops(name, gpu, measured) for name in (dtype, "fp8"))
    if plain is None or (in_fp8 and fast is None):
        return None
    tokens = config.batch_size * config.grad_accum * config.seq_len // config.parallel.cp
    flops = flops_per_token(config.model, config.seq_len, config.attention.window)
    again = config.grad_checkpoint in ("attention", "full")
    in_output = config.model.vocab_size * config.model.d_model  # outside of the blocks: never computed twice
    linear = 6.0 * in_output / plain
    in_blocks = (flops.counted_parameters - in_output - in_fp8) / plain + in_fp8 / (fast or plain)
    linear += (8.0 if again else 6.0) * in_blocks
    if config.grad_checkpoint == "alternating":  # gate and up once more in every second block
        share = (config.model.n_layers // PERIOD) / config.model.n_layers
        rate = fast if fast and in_fp8 and "gate_up" in config.fp8.layers else plain
        linear += 2.0 * share * parameters_in(config.model, ("gate_up",)) / rate
    attention = ((flops.windowed or flops.causal_discounted) - 6.0 * flops.counted_parameters) / 3.0
    attention *= (4.5 if config.grad_checkpoint == "full" else 3.5) / plain
    matmul_s = tokens * (linear + attention) / 1e12 / EFFICIENCY

    total, shards = count_parameters(config.model).total, config.parallel.shards
    stored, computed = weight_dtype(config.precision).itemsize, compute_dtype(config.precision).itemsize
    copy = (measured.get("copy_gb_per_s") or COPY_SHARE * gpu.memory_gb_per_s) * 1e9
    states = 2 * bytes_per_parameter(config.optim, weight_dtype(config.precision))  # read and written
    updated = 0 if config.parallel.cpu_offload else (3 * stored + states) * total / shards
    inputs = {"grad_checkpoint": "none", "saved_inputs": "gpu", "inputs_on_gpu": 0}
    settings = {**inputs, "mlp_chunk": None, "grad_accum": 1, "parallel": ParallelConfig()}
    alone = config.model_copy(update=settings)
    kept = predict(alone, kernel).parts["activations"] * 2**30 / config.parallel.cp
    memory_s = (updated + TRIPS[config.grad_checkpoint] * kept * config.grad_accum) / copy

    share = (shards - 1) / shards
    sent = share * total * (2 * computed + 4) * config.grad_accum
    link = gpu.link_gb_per_s if shards <= NODE else min(gpu.link_gb_per_s, NODE * NETWORK_GB_PER_S)
    communication_s = sent / (link * 1e9) if shards > 1 else 0.0
    if shards > NODE:
        communication_s += 3 * (config.model.n_layers + 1) * config.grad_accum * (shards - 1) * HOP_S
    host_s = (HOST_S if shards == 1 else HOST_SHARDED_S) * config.model.n_layers * config.grad_accum
    moved = total * stored / shards * (1 + 2 * config.grad_accum) if config.parallel.cpu_offload else 0.0
    source = "measured ceilings" if measured else "data sheet"
    return Estimate(matmul_s, memory_s, communication_s, moved / (PCIE_GB_PER_S * 1e9), host_s, tokens, source)


def _tflops(dtype: str, gpu: Gpu, measured: Mapping[str, float]) -> float | None:
    if found := measured.get(f"matmul_{dtype}_tflops"):
        return float(found)
    sheet = theoretical_peak(gpu.driver_name, dtype)
    return None if sheet is None else MATMUL_SHARE * sheet.tflops
