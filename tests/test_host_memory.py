"""Freed memory stays with the process: allocating it again touches no new pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from lsai_core.training.host_memory import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else True
torch.ones(128 << 20)  # 512 MiB, touched and freed: room for the next ones, whatever lies between
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(16 << 20)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is what is tuned")
def test_freed_memory_is_reused() -> None:
    def faults(mode: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True
        )
        kept, count = done.stdout.split()
        if kept == "False":
            pytest.skip("no glibc here")
        return int(count)

    assert faults("keep") * 10 < faults("plain")
