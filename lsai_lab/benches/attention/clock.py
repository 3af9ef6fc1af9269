"""Time and memory of one attention call, forward and backward apart.

Before each timed pass a gigabyte is overwritten. That empties the caches, as the rest of a training
step does, and keeps the GPU busy while Python issues the pass, so that the CUDA events enclose the
kernels and not the interpreter. The first call of a point compiles or chooses a kernel and is kept
apart; the second tells the peak memory beyond the inputs and how many repeats fit into a point's
time.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lsai_core.attention import attention
from lsai_core.profiling.live_tensors import LiveTensors
from lsai_core.profiling.steptime import StepTimer
from lsai_lab.benches.attention.config import BACKWARD_FLOPS, Shape

MIB = 2**20
_LONG_MS = 200.0  # from here on one repeat is enough: the call itself averages
_MIN_REPEATS, _MAX_REPEATS = 3, 20


class Clock:
    """Times functions on `device` with cold caches. Holds the memory that it overwrites, up to 1
    GiB on a GPU."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        size = min(2**30, torch.cuda.mem_get_info(device)[0] // 16) if self.on_gpu else 2**26
        self.overwritten = torch.empty(size, dtype=torch.uint8, device=device)
        # Library workspaces are taken by the first matrix product; no point's memory shall contain
        # them.
        small = torch.ones(64, 64, dtype=dtype, device=device)
        torch.mm(small, small)

    @property
    def typical(self) -> int:
        """The percentile of the repeats that counts: on a GPU the median, on a CPU, where other
        work only ever slows one, the fastest."""
        return 50 if self.on_gpu else 0

    def repeat(self, passes: Sequence[Callable[[], None]], times: int) -> list[list[float]]:
        """Milliseconds of each of `passes`, which run one after the other, `times` times over."""
        timer = StepTimer(self.device)
        for _ in range(times):
            for one in passes:
                self.overwritten.zero_()
                timer.restart()
                timer.mark()
                one()
                timer.mark()
        found = timer.durations_ms()
        return [found[index :: len(passes)] for index in range(len(passes))]


def random_inputs(
    shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> list[Tensor]:
    """q (B, S, H, D), k and v (B, S, K, D) and the output's gradient (B, S, H, D), standard
    normal."""
    generator = torch.Generator(device).manual_seed(seed)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    sizes = [(shape.batch, shape.length, count, shape.head_dim) for count in heads]
    return [torch.randn(size, dtype=dtype, device=device, generator=generator) for size in sizes]


class Step:
    """Attention on given inputs: forward and, with `training`, backward. `sent()`: bytes sent to
    other processes so far."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: list[Tensor],
        training: bool = True,
        sent: Callable[[], int] = lambda: 0,
    ) -> None:
        self.function, self.training, self.sent = function, training, sent
        self.qkv, self.dout_BSHD = (
            [x.detach().requires_grad_(training) for x in inputs[:3]],
            inputs[3],
        )
        self.out_BSHD: Tensor | None = None
        self.gradients: tuple[Tensor, ...] = ()

    @property
    def passes(self) -> list[Callable[[], None]]:
        """Forward and, for training, backward. Not kept: bound methods would make the step part of
        a reference cycle, so that its inputs would stay in memory until some later point and be
        freed while that one's peak is taken."""
        return [self.forward, self.backward] if self.training else [self.forward]

    def forward(self) -> None:
        self.gradients = ()
        self.out_BSHD = self.function(*self.qkv)

    def backward(self) -> None:
        """Keeps the gradients, so that they count as memory; `release` drops them."""
        assert self.out_BSHD is not None
        self.gradients = torch.autograd.grad(self.out_BSHD, self.qkv, self.dout_BSHD)
        self.out_BSHD = None

    def release(self) -> None:
        self.out_BSHD, self.gradients = None, ()


class Call(Step):
    def __init__(self, backend: str, shape: Shape, inputs: list[Tensor], training: bool) -> None:
        self.backend, self.shape = backend, shape
        function = partial(attention, backend=backend, window=shape.window, causal=shape.causal)
        super().__init__(function, inputs, training)


def repeats_in(point_ms: float, one_ms: float) -> int:
    """How often to repeat what takes `one_ms`."""
    least = 1 if one_ms > _LONG_MS else _MIN_REPEATS
    return max(least, min(_MAX_REPEATS, int(point_ms / max(one_ms, 1e-3))))


def measure(call: Call, clock: Clock, *, point_ms: float) -> dict[str, Any]:
    """Time and memory of `call` as one flat row.

    `forward_ms`, `backward_ms` and their sum `training_ms` are typical repeats (`Clock.typical`),
    with `_p25` and `_p75`; `*_tflops` by the formulas of `config`; `memory_forward_mib` and
    `memory_training_mib` are peaks beyond the inputs, None where they cannot be counted. Without
    gradients there are the forward figures alone. `first_call_s` is the wall time of the first
    call.
    """
    began = time.perf_counter()
    clock.repeat(call.passes, 1)
    first_call_s = time.perf_counter() - began
    memory, estimate_ms = _with_memory(call, clock)
    repeats = repeats_in(point_ms, estimate_ms)
    forward, *backward = (np.array(ms) for ms in clock.repeat(call.passes, repeats))
    call.release()
    flops = call.shape.forward_flops
    row = {"repeats": repeats, "first_call_s": round(first_call_s, 3)}
    row |= figures("forward", forward, flops, clock.typical)
    for ms in backward:
        row |= figures("backward", ms, BACKWARD_FLOPS * flops, clock.typical)
        row |= figures("training", forward + ms, (1 + BACKWARD_FLOPS) * flops, clock.typical)
    return row | memory


def figures(name: str, ms: np.ndarray, flops: float, typical: int) -> dict[str, float]:
    """Milliseconds with quartiles, and TFLOP/s. `typical`: the percentile of the repeats that
    counts."""
    low, value, high = (short(value) for value in np.percentile(ms, [25, typical, 75]))
    rate = float(f"{flops / value / 1e9:.4g}")
    return {
        f"{name}_ms": value,
        f"{name}_ms_p25": low,
        f"{name}_ms_p75": high,
        f"{name}_tflops": rate,
    }


def short(value: float) -> float:
    return float(f"{value:.5g}")


def _with_memory(call: Call, clock: Clock) -> tuple[dict[str, float | None], float]:
    """Peaks in MiB beyond what lies in memory before the call, and the call's milliseconds."""
    call.release()
    ms, peaks = 0.0, list[float | None]()
    if clock.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for one in call.passes:
            ms += clock.repeat([one], 1)[0][0]
            peaks.append((torch.cuda.max_memory_allocated() - before) / MIB)
    else:
        if call.backend != "flex":  # it runs inside an operator that no dispatch mode may look into
            tracker = LiveTensors()
            tracker.add([*call.qkv, call.dout_BSHD])
            before = tracker.live
            with tracker:
                for one in call.passes:
                    one()
                    peaks.append((tracker.peak - before) / MIB)
        ms = sum(times[0] for times in clock.repeat(call.passes, 1))
    call.release()
    return dict(zip(("memory_forward_mib", "memory_training_mib"), peaks, strict=False)), ms
