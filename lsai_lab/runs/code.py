"""Where a run's code comes from, for people: the git commit, beside the hash of what can change the result."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lsai_core
from lsai_core.code import code_hash


@functools.cache
def git_state(root: Path) -> dict[str, Any]:
    """`{commit, dirty}` of the checkout at `root`, or $LSAI_COMMIT (set it when you copy the code to a machine or into a
    container without its history); without either both are null."""
    if os.environ.get("LSAI_COMMIT"):
        return {"commit": os.environ["LSAI_COMMIT"], "dirty": None}

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--verify", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None}
    status = git("status", "--porcelain", "--", "lsai_core", "lsai_lab", "params", "notebooks")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def code_facts(files: Iterable[Path], root: Path) -> dict[str, Any]:
    """What `summary.json` keeps about the code of a run."""
    return {"version": lsai_core.__version__, "hash": code_hash(files), **git_state(root)}
