"""A cache of predictions on disk: with the same code and PyTorch the same step takes the same
memory.

A report predicts every recorded run, which takes minutes, and most of them it has predicted before.
Each answer is a small file whose name is a hash of the question. The name of its folder says what
else the answer depends on: a hash of the code, PyTorch's version, and whether there is a GPU. A
folder is deleted once nothing was added to it for a month. Where nothing can be written, every
answer is computed.
"""

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


def cached_on_disk(
    module: str, question: str, answer: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return `answer()`, a dictionary of plain JSON values, from the disk if it is there.

    `question` names all that the answer depends on, except the code; `module` is the one that
    computes it, and the code is all that this module imports. A disk that cannot be read or written
    raises nothing.
    """
    path = FOLDER / _version(module) / f"{hashlib.sha256(question.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError):  # not there, or not whole
        return dict(json.loads(path.read_text(encoding="utf-8")))
    found = answer()
    with contextlib.suppress(OSError):
        if not path.parent.exists():
            _delete_old()
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    return found


@functools.cache
def _version(module: str) -> str:
    # torch would take most of a second to say so
    gpu = "gpu" if Path("/dev/nvidiactl").exists() else "cpu"
    return f"{version_of(module)}-{importlib.metadata.version('torch')}-{gpu}"


def _delete_old() -> None:
    for folder in FOLDER.glob("*"):
        if folder.stat().st_mtime < time.time() - _KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)
