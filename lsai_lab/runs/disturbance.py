"""How quiet the machine was while a run was measured: its own steps' spread, and who else used the
processor and the GPU.

A run beyond one of the bounds keeps its figures and gets `disturbed`, one line that says why; every
table can show it.
"""

import contextlib
import os
import time
from typing import Any

import psutil

from lsai_lab.machine.environment import gpu_neighbours

SPREAD = 0.20  # the interquartile range of a run's steps over their median
# the share of the machine's cores that other processes used on average during the run
OTHERS = 0.20
# How many other runs use the machine at the same time. A cluster's script tells the driver of those
# that it does not know of; the driver tells each run of all.
BESIDE = "LSAI_BESIDE"
_SHORTEST_S = 2.0  # a shorter run's clocks, of 10 ms, say little about others


class Quiet:
    """Begun before the work, asked after it."""

    def __init__(self) -> None:
        self.beside = int(os.environ.get(BESIDE, 0))
        self.before = {
            "load_average": round(os.getloadavg()[0], 2),
            "gpu_neighbours": gpu_neighbours(),
        }
        self._wall, self._busy = time.perf_counter(), _busy_s()

    def results(self, measured: dict[str, Any]) -> dict[str, Any]:
        """What to add to the results `measured`: `step_spread`, `other_cores`, and `disturbed` if a
        bound was passed."""
        wall, busy = time.perf_counter() - self._wall, _busy_s() - self._busy
        cores, others = os.cpu_count() or 1, max(0.0, busy / max(wall, 1e-9))
        found: dict[str, Any] = {"other_cores": round(others, 3)} if wall >= _SHORTEST_S else {}
        reasons = [f"{self.beside} other runs shared the machine"] if self.beside else []
        if wall >= _SHORTEST_S and others > OTHERS * cores:
            reasons.append(f"other processes used {others:.1f} of {cores} cores")
        if neighbours := max(self.before["gpu_neighbours"] or 0, gpu_neighbours() or 0):
            reasons.append(f"{neighbours} other processes on the GPU")
        quartiles = (
            measured.get("step_ms_p25"),
            measured.get("step_ms"),
            measured.get("step_ms_p75"),
        )
        if all(quartiles):
            low, median, high = (float(value) for value in quartiles if value)
            found["step_spread"] = round((high - low) / median, 4)
            if found["step_spread"] > SPREAD:
                reasons.append(
                    f"steps spread {found['step_spread']:.0%} of their median (interquartile range)"
                )
        return {**found, "disturbed": "; ".join(reasons)} if reasons else found


def _busy_s() -> float:
    """Seconds of processor time that the whole machine has used, less those of this process and its
    children, ended or not."""
    times = psutil.cpu_times()
    busy: float = sum(
        getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")
    )
    own = os.times()
    busy -= own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            used = child.cpu_times()
            busy -= used.user + used.system + used.children_user + used.children_system
    return busy
