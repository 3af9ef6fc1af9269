"""Answers, kept on disk: under the same code and PyTorch the same step takes the same memory.

A report predicts every recorded run, which takes minutes, and most of them it has predicted before.
Each answer is a small file, named by what was asked, in a folder that is named by what could answer
otherwise: the code, PyTorch's version, and whether there is a GPU. A folder of code that is not
there any more goes after a month. Without a place to write, nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lsai_core.base.code import ROOT, version_of
from lsai_core.base.files import write_json

FOLDER = ROOT / ".cache" / "predictions"
_KEPT_S = 30 * 24 * 3600.0


def remembered(module: str, question: str, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `answer()`, of the code that `module` reaches, returned for `question` the last time, or
    returns now; plain JSON."""
    path = FOLDER / _version(module) / f"{hashlib.sha256(question.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError):  # not there, or not whole
        return dict(json.loads(path.read_text(encoding="utf-8")))
    found = answer()
    with contextlib.suppress(OSError):
        if not path.parent.exists():
            _forget_old()
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    return found


@functools.cache
def _version(module: str) -> str:
    # torch would take most of a second to say so
    gpu = "gpu" if Path("/dev/nvidiactl").exists() else "cpu"
    return f"{version_of(module)}-{importlib.metadata.version('torch')}-{gpu}"


def _forget_old() -> None:
    for folder in FOLDER.glob("*"):
        if folder.stat().st_mtime < time.time() - _KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)
