"""What one process does for a point: its inputs, the step, and its share of the answer.

Inputs are random; for a comparison with float64 they are drawn whole and equal on every process, and the first process holds the
result against the exact one, beside eager attention's own error in the same number format (`attention_bench.errors`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lsai_core.attention import attention
from lsai_core.context import ContextParallel, get_method
from lsai_core.context.heads import key_heads
from lsai_core.context.kernels import local_kernel
from lsai_core.context.methods import Setting
from lsai_core.context.peer import torch_missing, torch_sent_bytes
from lsai_core.errors import Unavailable
from lsai_core.parallel.world import World
from lsai_lab.benches.attention.clock import Step, random_inputs
from lsai_lab.benches.attention.errors import eager_values, exact_attention, relative_errors, values
from lsai_lab.benches.context.config import ALONE, ONE_TORCH, ContextBenchConfig, Measure
from lsai_lab.benches.context.timing import SharedClock, traced

TORCH_KERNEL = "sdpa_cudnn"  # of torch's context parallelism, see lsai_core.context.peer


class Rank:
    """This process's part of every point. Every method is collective: all processes of `world` must call it alike."""

    def __init__(self, config: ContextBenchConfig, world: World, device: torch.device) -> None:
        self.config, self.world, self.device = config, world, device
        self.clock = SharedClock(device, world)
        self._exact: tuple[int, list[Tensor], dict[str, Any]] | None = None
        # Library workspaces are taken by the first matrix product; no point's memory shall contain them.
        small = torch.ones(64, 64, dtype=config.torch_dtype, device=device)
        torch.mm(small, small)

    def kernel(self, method: str, length: int) -> str:
        """The kernel that computes a method's tiles. UserError or Unavailable if the method cannot work here."""
        config, processes = self.config, self.config.processes
        pieces, size = 1, length
        if method == ONE_TORCH or (method not in ALONE and get_method(method).peer):
            if (reason := torch_missing()) is not None:
                raise Unavailable(f"torch's context parallelism {reason}")
            return TORCH_KERNEL
        if method not in ALONE:
            setting = Setting(method, length)
            pieces, size = setting.pieces(processes), setting.layout(processes).length // processes
        ranges = key_heads(config.heads, config.kv_heads, pieces)
        heads, kv_heads = config.heads // pieces, ranges[0][1] - ranges[0][0]
        found = local_kernel(
            config.kernel, self.device, config.torch_dtype, config.head_dim, grouped=heads != kv_heads, length=size * pieces
        )  # fmt: skip
        return found.name

    def measure(self, measure: Measure, method: str, length: int, expected_ms: float | None) -> dict[str, Any]:
        """This process's answer; see `SharedClock.measure`, `traced` and `relative_errors` (the first process's alone)."""
        kernel = self.kernel(method, length)
        if measure != "error":
            self._exact = None
        before = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # another length's blocks are of little use
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        cp = None if method in ALONE else ContextParallel(method, length, kernel=self.config.kernel)
        facts = {"kernel": kernel, "plan_imbalance": cp.plan.imbalance() if cp else 1.0}
        if measure == "error":
            return facts | self._errors(cp, kernel, length)
        processes = 1 if cp is None else self.config.processes
        shape = self.config.shape(length // processes)
        seed = self.config.seed + 1000 * self.world.rank + length % 997
        inputs = random_inputs(shape, self.config.torch_dtype, self.device, seed)
        step = self._step(cp, kernel, inputs)
        if measure == "trace":
            found = traced(step, self.clock)
        else:
            options: dict[str, Any] = {"point_ms": self.config.point_ms, "expected_ms": expected_ms}
            found = self.clock.measure(step, memory_before=before, **options)
        if cp is not None and cp.method.peer:
            _, k, v = step.qkv
            forward, backward = (torch_sent_bytes(k, v, cp.size, backward=b) / 2**20 for b in (False, True))
            found |= {"sent_forward_mib": forward, "sent_training_mib": forward + backward}
        return facts | found

    def _step(self, cp: ContextParallel | None, kernel: str, inputs: list[Tensor]) -> Step:
        if cp is None:
            return Step(partial(attention, backend=kernel), inputs)
        return Step(cp.attention, inputs, sent=lambda: cp.sent_bytes)

    def _errors(self, cp: ContextParallel | None, kernel: str, length: int) -> dict[str, Any]:
        shape = self.config.shape(length)
        whole = random_inputs(shape, self.config.torch_dtype, self.device, self.config.seed)
        found = values(self._step(cp, kernel, [cp.shard(x) for x in whole] if cp else whole))
        if cp is not None:
            found = [cp.unshard(x) for x in found]
        if not self.world.is_main:
            return {}
        if self._exact is None or self._exact[0] != length:  # every method is held against the same values
            exact = exact_attention(shape, whole)
            self._exact = (length, exact, relative_errors(eager_values(shape, whole), exact, "bound_"))
        _, exact, bounds = self._exact
        return {**bounds, **relative_errors(found, exact)}
