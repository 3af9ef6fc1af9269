"""The newest measured ceilings of a device: what `lsai_lab.benches.machine` measured, found among the records."""

import contextlib
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lsai_core.errors import UserError
from lsai_core.profiling.gpus import Gpu
from lsai_lab.files import repo_root
from lsai_lab.runs.records import Run, recorded_runs


def newest_ceilings(runs: Iterable[Run], device: str) -> dict[str, Any]:
    """Results of the newest ceilings of a kind of device among `runs`, or nothing."""
    ended = (run.summary for run in runs if (run.summary.kind, run.summary.outcome) == ("ceilings", "ok"))
    found = [summary for summary in ended if summary.results.get("ceilings_device") == device]
    return max(found, key=lambda summary: summary.started).results if found else {}


def measured_ceilings(gpu: Gpu, reports: Path | None = None) -> dict[str, Any]:
    """Results of the newest recorded ceilings of that kind of GPU; nothing where there are none, or no checkout."""
    with contextlib.suppress(UserError):
        return newest_ceilings(_recorded(reports or repo_root() / "reports"), gpu.driver_name)
    return {}


@functools.cache
def _recorded(reports: Path) -> list[Run]:
    return [run for run in recorded_runs(reports) if run.summary.kind == "ceilings"]
