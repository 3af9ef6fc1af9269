"""Local sources: the standard library and files of the user. A file's name says how it is read:

.txt .md .text   UTF-8 text, cut into documents (see `_text_documents`)
.jsonl           one JSON record a line: {"text": str or list of str, ...} or a bare string
.jsonl.zst       the same, compressed; any number of zstd frames; a truncated file is an error
.parquet         a string column `text`, one document a row
"""

import glob
import hashlib
import io
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lsai_core.base.errors import UserError
from lsai_lab.data.documents import Corpus, Part
from lsai_lab.project.files import content_hash, repo_root

TEXT_SUFFIXES = (".txt", ".md", ".text")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.zst", ".parquet")
MAX_RECORD = 64 << 20
BUFFER = 1 << 20
MIN_DOCUMENT, MAX_DOCUMENT = 1 << 10, 64 << 10
NOT_LIBRARY = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")


def open_stdlib(raw: Path, progress: bool) -> Corpus:
    """This Python's standard library: one document per .py file, sorted by path, without tests and
    installed packages."""
    root, files = Path(sysconfig.get_path("stdlib")), list[Path]()
    for folder, folders, names in os.walk(root):
        # Not into folders of installed packages, which may hold a hundred times as many files.
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UserError(f"no .py files of the standard library at {root}; use another data.source")
    files.sort()

    def texts() -> Iterator[str]:
        return (path.read_text(encoding="utf-8", errors="replace") for path in files)

    description = {"kind": "stdlib", "python": platform.python_version(), "files": len(files)}
    return Corpus(
        _fingerprint((path.relative_to(root).as_posix(), path) for path in files),
        description,
        texts,
    )


def open_files(pattern: str, raw: Path, progress: bool) -> Corpus:
    """The files that a path or glob (`**` works) matches in the current folder, or else in the
    checkout."""
    files = _matches(pattern)
    plain = [path for path in files if path.name.lower().endswith(TEXT_SUFFIXES)]
    # Documents of 1/200 of all the text, between 1 KiB and 64 KiB: a small file still yields enough
    # of them for three splits, and a large one keeps long contexts.
    target = min(max(sum(path.stat().st_size for path in plain) // 200, MIN_DOCUMENT), MAX_DOCUMENT)

    def texts() -> Iterator[str | Part]:
        for path in files:
            if path in plain:
                content = content_hash(path).digest()
                yield from (Part(text, content) for text in _text_documents(path, target))
            else:
                yield from (
                    _parquet_texts(path)
                    if path.name.lower().endswith(".parquet")
                    else json_texts(path)
                )

    size = sum(path.stat().st_size for path in files)
    description = {"kind": "file", "pattern": pattern, "files": len(files), "bytes": size}
    return Corpus(_fingerprint((path.name, path) for path in files), description, texts, len(plain))


def _matches(given: str) -> list[Path]:
    pattern = os.path.expanduser(given)
    matches = glob.glob(pattern, recursive=True)
    if not matches and not os.path.isabs(pattern):
        matches = glob.glob(str(repo_root() / pattern), recursive=True)
    files = sorted(Path(match) for match in matches if os.path.isfile(match))
    if not files:
        folder = " (a folder needs a glob, such as file:folder/*.txt)" if matches else ""
        raise UserError(f"file:{given}: no such file{folder}")
    for path in files:
        if not path.name.lower().endswith(SUFFIXES):
            raise UserError(f"{path}: cannot be read as text; known kinds: {' '.join(SUFFIXES)}")
    return files


def _fingerprint(files: Iterable[tuple[str, Path]]) -> str:
    """Hash over names and contents."""
    total = hashlib.blake2b(digest_size=16)
    for name, path in files:
        total.update(f"{name}\0".encode() + content_hash(path).digest())
    return total.hexdigest()


def _text_documents(path: Path, target: int) -> Iterator[str]:
    """Plain text cut into documents: each ends at the first blank line after `target`
    characters, else at the first line end after twice, else (text without line ends) at four
    times that many."""
    parts: list[str] = []
    size = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            while line := file.readline(4 * target - size):
                parts.append(line)
                size += len(line)
                ends = line.endswith("\n")
                if size >= 4 * target or (
                    ends and size >= (target if line.isspace() else 2 * target)
                ):
                    yield "".join(parts)
                    parts, size = [], 0
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text ({error.reason}); convert it, e.g. with iconv -t UTF-8"
        ) from None
    if parts:
        yield "".join(parts)


def open_stream(path: Path, compressed: bool) -> io.BufferedReader:
    """Open for reading bytes. `compressed`: decode zstd, all frames; a cut-off frame raises an
    OSError without errno."""
    return io.BufferedReader(
        pa.input_stream(str(path), compression="zstd" if compressed else None), BUFFER
    )


def json_texts(path: Path) -> Iterator[str]:
    """The texts of a JSONL file; a text given as a list is joined with blank lines (the convention
    of lm_dataformat)."""
    number = 0
    try:
        with open_stream(path, compressed=path.name.lower().endswith(".zst")) as file:
            while line := file.readline(MAX_RECORD):
                number += 1
                if len(line) == MAX_RECORD:
                    raise UserError(
                        f"{path}: line {number} holds more than {MAX_RECORD >> 20} MiB; split that "
                        f"record"
                    )
                if not line.isspace():
                    yield _text(json.loads(line))
    except (ValueError, TypeError, RecursionError, OSError) as error:
        # the disk's fault, not the file's
        if isinstance(error, OSError) and error.errno is not None:
            raise
        damaged = isinstance(error, pa.ArrowInvalid | OSError)
        what = (
            f"does not decompress ({error}); cut off or damaged"
            if damaged
            else f"line {number}: {error}"
        )
        raise UserError(f"{path}: {what}") from None


def _text(record: Any) -> str:
    text = record.get("text") if isinstance(record, dict) else record
    if isinstance(text, list) and all(isinstance(part, str) for part in text):
        return "\n\n".join(text)
    if not isinstance(text, str):
        raise TypeError('expected a record {"text": "..."}')
    return text


def _parquet_texts(path: Path) -> Iterator[str]:
    """The column `text` of a parquet file; nulls are left out."""
    try:
        with pq.ParquetFile(path) as file:
            kinds = {field.name: field.type for field in file.schema_arrow}
            if "text" not in kinds:
                raise UserError(f"{path}: no column 'text'; it has {', '.join(kinds)}")
            if kinds["text"] not in (pa.string(), pa.large_string()):
                raise UserError(f"{path}: column 'text' holds {kinds['text']}, not strings")
            for batch in file.iter_batches(64, columns=["text"]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: cannot be read as parquet ({error})") from None
