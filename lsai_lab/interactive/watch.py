"""`lab.watch`: the phases, memory and kernels of any training loop, in a notebook."""

from collections.abc import Sequence
from typing import Any, Self

import pandas as pd
import torch

from lsai_core.base.errors import UserError
from lsai_core.base.shown import Shown
from lsai_core.base.tables import Part
from lsai_core.profiling.memory import CAUSES, PHASES
from lsai_core.profiling.watch import GIB, STEPS, StepWatch
from lsai_lab.report.show import Picture
from lsai_lab.report.timelines import lanes, memory_picture
from lsai_lab.runs.frames import Frame, Values

_TOP = 10  # kernels that are shown


class Watched(Shown):
    """What `lab.watch` gives: a context manager around a training loop, and afterwards `phases`
    (peak GiB and ms), `memory` (GiB by cause at the highest moment), `moments` (GiB by cause after
    each operator), `kernels`, `step_ms` and pictures: `plot()`. Each is empty, or None, while the
    loop has not come so far; `steps` says how far."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | Sequence[Any], top: int
    ) -> None:
        self._seen = StepWatch(model, optimizer, top)

    def __enter__(self) -> Self:
        self._seen.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._seen.__exit__(*error)

    @property
    def steps(self) -> int:
        """How many steps were seen."""
        return self._seen.steps

    @property
    def step_ms(self) -> float | None:
        """Median of the timed steps, ms: from the seventh on. None before."""
        return self._seen.step_ms

    @property
    def reserved_gib(self) -> float | None:
        """What a GPU's allocator had reserved by the third step; None on a CPU."""
        return self._seen.reserved_gib

    @property
    def phases(self) -> pd.DataFrame:
        """One row a phase: the peak of live tensors, and the time of its operators or kernels in a
        traced step, which on a CPU takes longer than `step_ms`."""
        peaks, times = self._seen.phases_gib, self._seen.phase_ms
        rows = [(phase, peaks.get(phase), times.get(phase)) for phase in PHASES]
        return Frame(rows, columns=["phase", "peak_gib", "ms"])

    @property
    def memory(self) -> pd.Series:
        """GiB by cause at the highest moment of the step, the largest first."""
        found = Values(self._seen.causes_gib, name="GiB", dtype=float)
        return found.sort_values(ascending=False)

    @property
    def moments(self) -> pd.DataFrame:
        """One row a moment of the step: `phase`, `operator`, and GiB by cause."""
        rows = [
            {"phase": moment.phase, "operator": moment.operator}
            | {cause: moment.bytes_of.get(cause, 0) / GIB for cause in CAUSES}
            for moment in self._seen.live_moments
        ]
        return Frame(rows, columns=["phase", "operator", *CAUSES])

    @property
    def kernels(self) -> pd.DataFrame:
        """The kernels, or operators on a CPU, with the most time: name, class, ms and calls of a
        step."""
        return Frame(self._seen.kernels, columns=["name", "class", "ms", "calls"])

    def plot(self) -> Picture:
        """The memory of the step by cause, and its kernels as lanes. UserError without a step."""
        if not self._seen.live_moments:
            raise UserError(_FAR.format(self.steps))
        moments = [(moment.phase, moment.bytes_of) for moment in self._seen.live_moments]
        pictures = [memory_picture(moments)]
        if self._seen.events:
            pictures.append(lanes(self._seen.events))
        return Picture("".join(pictures))

    def _parts(self) -> list[Part]:
        """Phases, memory by cause, kernels; how far the loop has come."""
        said = f"a step takes {self.step_ms:,.2f} ms" if self.step_ms else _FAR.format(self.steps)
        watched = f"{self.steps} step{'' if self.steps == 1 else 's'} watched"
        if not self._seen.live_moments:
            return [Part(watched, note=said)]
        causes = [(name, float(size)) for name, size in self.memory.items()]
        kernels = [tuple(row) for row in self.kernels.head(_TOP).itertuples(index=False)]
        phases = [tuple(row) for row in self.phases.itertuples(index=False)]
        return [
            Part(watched, note=said),
            Part("Phases (ms while they are traced)", ("phase", "peak GiB", "ms"), phases),
            Part("At the highest moment", ("cause", "GiB"), causes),
            Part(self._traced, ("name", "class", "ms", "calls"), kernels, note=self._no_kernels),
        ]

    @property
    def _traced(self) -> str:
        """What the profiler sees on the model's device."""
        return "Kernels of a step" if self._seen.on_gpu else "Operators of a step, on the CPU"

    @property
    def _no_kernels(self) -> str:
        """Why there are none yet, if so."""
        return "" if self._seen.kernels else f"none yet: {_FAR.format(self.steps)}"


_FAR = f"steps seen: {{}}; memory takes 2, kernels and times {STEPS}"


def watch(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | Sequence[Any], top: int = 25
) -> Watched:
    """Watch a training loop of your own: any module, any loop that calls `optimizer.step()`.

    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with lab.watch(model, optimizer) as seen:
    ...     for _ in range(8):
    ...         model(torch.randn(4, 8)).mean().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> list(seen.phases), seen.steps
    (['phase', 'peak_gib', 'ms'], 8)

    `optimizer`: one, or several of which the last ends the step. `top`: kernels that are kept.
    Memory is that of live tensors in the second step, compiled code run eagerly there; kernels are
    those of the fourth and fifth, the time the median of the others. UserError for a model without
    parameters.
    """
    return Watched(model, optimizer, top)
