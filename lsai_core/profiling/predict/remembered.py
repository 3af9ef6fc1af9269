"""Simulated steps, kept on disk: under the same code and PyTorch the same step takes the same memory.

A report predicts every recorded run, which takes minutes, and most of them it has predicted before. Each answer is a small file,
named by what was asked, in a folder that is named by what could answer otherwise: the package's code but for what only shows
results, PyTorch's version, and whether it sees a GPU. A folder of code that is not there any more goes after a month. Without a
place to write, nothing is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

import lsai_core
from lsai_core.files import write_json
from lsai_core.profiling.predict.simulate import Simulated

PACKAGE = Path(lsai_core.__file__).parent
FOLDER = PACKAGE.parent / ".cache" / "predictions"
_SHOWS_ONLY = ("report", "cli", "cluster")
_KEPT_S = 30 * 24 * 3600.0


def remembered(question: str, answer: Callable[[], Simulated]) -> Simulated:
    """What `answer()` returned for `question` the last time, or returns now."""
    path = FOLDER / _version() / f"{hashlib.sha256(question.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):  # not there, or not whole
        return Simulated(**json.loads(path.read_text()))
    simulated = answer()
    with contextlib.suppress(OSError):
        if not path.parent.exists():
            _forget_old()
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dataclasses.asdict(simulated))
    return simulated


@functools.cache
def _version() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {torch.cuda.is_available()}".encode())
    for path in sorted(PACKAGE.rglob("*.*")):
        if path.suffix in (".py", ".json") and path.relative_to(PACKAGE).parts[0] not in _SHOWS_ONLY:
            digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _forget_old() -> None:
    for folder in FOLDER.glob("*"):
        if folder.stat().st_mtime < time.time() - _KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)
