"""What everything else relies on with files: atomic writes and complete lines.

A file appears under its final name only when it is complete: it is written beside it under a
temporary name, flushed to disk and renamed. A crash, a kill or a full disk leaves either the old
file or the new one, never half of one.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file, `.name` its path, that becomes `path` when the block ends without an
    exception, and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_writer(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinities are refused: JSON has none."""
    write_text(
        path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file; an unfinished last line (a killed writer) is ignored."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
