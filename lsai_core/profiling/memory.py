"""Peak memory of the forward pass, the backward pass and the optimizer step, each by itself.

    meter = PhaseMemory(device, seeds=[model, optimizer])
    for batch in measured_steps:
        with meter.phase("forward"):   loss = ...
        with meter.phase("backward"):  loss.backward()
        with meter.phase("optimizer"): optimizer.step(); optimizer.zero_grad()
    results.update(meter.summary())

A step ends with its optimizer phase; of a phase that comes several times the largest counts. On a
GPU the figures are the caching allocator's: *allocated* (tensors), *active* (also what waits for a
stream) and *reserved* (taken from the driver). Every phase resets their peaks, so the overall peak
is the largest. On a CPU they are live tensor bytes (`live_tensors`).
"""

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lsai_core.profiling.live_tensors import LiveTensors, Seed

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
Peaks = dict[str, int]  # kind ("allocated", "reserved", "active") -> bytes
# Why a tensor is there, from the bottom of a picture to its top.
CAUSES = ("weights", "gradients", "optimizer", "activations", "backward", "other")

_GIB = 2**30


@dataclass(frozen=True)
class Moment:
    """Bytes that are there after an operator that made or freed something, by cause."""

    phase: Phase
    operator: str
    bytes_of: Mapping[str, int]

    @property
    def allocated_gib(self) -> float:
        """All of them, in GiB."""
        return sum(self.bytes_of.values()) / _GIB


def cause_of_results(phase: str) -> str:
    """Results of the forward pass's operators wait for the backward pass (`activations`); those of
    another phase are in use there."""
    return "activations" if phase == "forward" else phase


def running_phase(updating: bool) -> Phase:
    """The phase that a program is in that says only when its optimizer is `updating`."""
    if updating:
        return "optimizer"
    # of autograd's engine, in this thread
    return "backward" if torch._C._current_graph_task_id() >= 0 else "forward"


class PhaseMemory:
    """Measures the phases of training steps on `device` and resets the process's CUDA peak
    counters.

    `seeds`: the modules, optimizers and tensors that exist before a phase begins, for a CPU to
    count. A GPU needs none.
    """

    def __init__(self, device: torch.device | str, seeds: Iterable[Seed] = ()) -> None:
        self._seeds = list(seeds)
        on_gpu = torch.device(device).type == "cuda"
        self._counters: _Cuda | _Tracked = _Cuda(torch.device(device)) if on_gpu else _Tracked()
        self._steps: list[dict[str, Peaks]] = []
        self._open = False

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Measure one phase. Phases do not nest; those up to and including `optimizer` make one
        step."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}; known: {', '.join(PHASES)}")
        if self._open:
            self._note("between", self._counters.peaks())
        else:
            self._steps.append({})
            self._open = True
        with self._counters.measuring(self._seeds):
            yield
        self._note(name, self._counters.peaks())
        self._counters.reset()
        self._open = name != "optimizer"

    def summary(self) -> dict[str, float | str]:
        """Flat results over the measured steps, in GiB; without one `memory_kind` and
        `rss_peak_gib` only.

        `mem_<phase>_peak_gib` is the largest allocated peak over the steps, with `_mean` the mean
        of the steps' peaks; `mem_peak_allocated_gib`, and on a GPU `mem_peak_reserved_gib` and
        `mem_peak_active_gib`, cover whole steps.
        """
        results: dict[str, float | str] = {
            "memory_kind": self._counters.kind(self._seeds),
            "rss_peak_gib": rss_peak_gib(),
        }
        if not self._steps:
            return results
        results["mem_steps_measured"] = len(self._steps)
        for phase in PHASES:
            if values := [step[phase]["allocated"] for step in self._steps if phase in step]:
                results |= _max_and_mean(f"mem_{phase}_peak_gib", values)
        overall = [_largest(step.values()) for step in self._steps]
        for kind in overall[0]:
            results |= _max_and_mean(f"mem_peak_{kind}_gib", [peaks[kind] for peaks in overall])
        return results

    def _note(self, name: str, peaks: Peaks) -> None:
        step = self._steps[-1]
        step[name] = _largest([step[name], peaks]) if name in step else peaks


class _Cuda:
    """The CUDA caching allocator's counters. They follow the host's calls, so no synchronization is
    needed."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # the counters do not exist before
        self._device = device

    def kind(self, seeds: Iterable[Seed]) -> str:
        return "CUDA caching allocator"

    def peaks(self) -> Peaks:
        stats = torch.cuda.memory_stats(self._device)
        return {
            kind: stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved", "active")
        }

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    @contextlib.contextmanager
    def measuring(self, seeds: Iterable[Seed]) -> Iterator[None]:
        self.reset()
        yield


class _Tracked:
    """Live tensor bytes on the CPU; the tracker costs time, so it is on within phases only."""

    def __init__(self) -> None:
        self._tracker = LiveTensors()

    def kind(self, seeds: Iterable[Seed]) -> str:
        # the compiler: loaded where a model trains, a second elsewhere
        from torch._dynamo import OptimizedModule

        modules = (
            module
            for seed in seeds
            if isinstance(seed, torch.nn.Module)
            for module in seed.modules()
        )
        compiled = any(
            isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in modules
        )
        return "live tensor bytes (tracked" + ("; compiled code ran eagerly)" if compiled else ")")

    def peaks(self) -> Peaks:
        return {"allocated": self._tracker.peak}

    def reset(self) -> None:
        self._tracker.reset_peak()

    @contextlib.contextmanager
    def measuring(self, seeds: Iterable[Seed]) -> Iterator[None]:
        self._tracker.add(seeds)
        self.reset()
        with self._tracker:
            yield


def rss_peak_gib() -> float:
    """Largest resident set of this process since it started, in GiB; NaN where the system has no
    such count (Windows)."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss survives exec on Linux and would show the parent's peak
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / _GIB
    try:
        import resource
    except ImportError:
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB


def _largest(many: Iterable[Peaks]) -> Peaks:
    result: Peaks = {}
    for peaks in many:
        for kind, value in peaks.items():
            result[kind] = max(value, result.get(kind, 0))
    return result


def _max_and_mean(name: str, values: list[int]) -> dict[str, float | str]:
    return {name: max(values) / _GIB, f"{name}_mean": sum(values) / len(values) / _GIB}
