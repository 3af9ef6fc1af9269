"""The timeline of a step of a run, in a notebook."""

from __future__ import annotations

from lsai_core.base.errors import UserError
from lsai_lab.report.load import AnyRun, folder_of
from lsai_lab.report.show import Picture
from lsai_lab.report.step import pictures
from lsai_lab.runs.find import machine_of, opened


def timeline(run: AnyRun) -> Picture:
    """The memory of a training step by cause, simulated, with what the run measured (and its
    allocator recorded, with `profile.snapshot`) beside it; and the kernels of a step, if the run
    was traced (`profile.trace`). Takes seconds the first time. UserError if there is nothing to
    show.

    >>> lab.timeline("h100/memory.bf16")
    peak 7.0... GiB in the ...
    """
    folder = folder_of(run)
    if found := pictures(opened(folder, machine_of(folder))):
        return Picture("".join(found))
    raise UserError(f"{folder.name} is no training run, and nothing was traced in it")
