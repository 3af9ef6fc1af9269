"""How a run ended, told from the exception that ended it."""

from __future__ import annotations

import re
import sys

from lsai_core.errors import Preempted, Unavailable, UserError
from lsai_lab.runs.records import Outcome

# What allocators say when memory is out and they do not raise an error of their own type.
_MEMORY_WORDS = re.compile(r"out of memory|can('|no)t allocate memory|not enough memory|bad_alloc|alloc_failed", re.I)


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's, the CPU allocator's and Python's out-of-memory errors."""
    torch = sys.modules.get("torch")  # if nothing imported it, nothing raised its error
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    if isinstance(error, SystemError):  # C code that got no memory and did not say so
        return "without exception set" in str(error)
    return isinstance(error, RuntimeError) and bool(_MEMORY_WORDS.search(str(error)))


def outcome_of(error: BaseException) -> tuple[Outcome, str]:
    """The outcome and one line of reason for a run that raised `error`."""
    line = " ".join(str(error).split())[:500] or type(error).__name__
    if is_out_of_memory(error):
        return "oom", line
    if isinstance(error, Unavailable):
        return "unavailable", line
    if isinstance(error, Preempted):
        return "preempted", line
    if isinstance(error, UserError):
        return "failed", line
    return "failed", f"{type(error).__name__}: {line}"
