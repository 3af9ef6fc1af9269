"""Simulated steps, kept on disk: under the same code and PyTorch the same step takes the same memory.

A report predicts every recorded run, which takes minutes, and most of them it has predicted before. Each answer is a small file,
named by what was asked, in a folder that is named by what could answer otherwise: the code that simulates, PyTorch's version, and whether it sees a GPU. A folder of code that is not there any more goes after a month. Without a
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

import torch

from lsai_core.code import ROOT, closure, code_hash
from lsai_core.files import write_json
from lsai_core.profiling.predict.simulate import Simulated

FOLDER = ROOT / ".cache" / "predictions"
_KEPT_S = 30 * 24 * 3600.0


def remembered(question: str, answer: Callable[[], Simulated]) -> Simulated:
    """What `answer()` returned for `question` the last time, or returns now."""
    path = FOLDER / _version() / f"{hashlib.sha256(question.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):  # not there, or not whole
        return Simulated(**json.loads(path.read_text(encoding="utf-8")))
    simulated = answer()
    with contextlib.suppress(OSError):
        if not path.parent.exists():
            _forget_old()
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dataclasses.asdict(simulated))
    return simulated


@functools.cache
def _version() -> str:
    code = code_hash(closure(["lsai_core.profiling.predict.simulate"]))
    return f"{code}-{torch.__version__}-{'gpu' if torch.cuda.is_available() else 'cpu'}"


def _forget_old() -> None:
    for folder in FOLDER.glob("*"):
        if folder.stat().st_mtime < time.time() - _KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)
