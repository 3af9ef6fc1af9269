"""Local sources: the standard library and files of the user. A file's name says how it is read:

.txt .md .text   UTF-8 text, cut into documents (`documents.cut_text`)
.jsonl .ndjson   one JSON record a line: {"text": str or list of str, ...}, or a bare string
.json            the same, or one array of such records
.csv             a first row with the columns' names, then one document a row
.parquet         a column of strings (also views, dictionaries, or UTF-8 in bytes), one document a
                 row

Any of them but parquet may be compressed: .gz and .zst, of any number of members or frames. A
compressed file whose name says nothing more (corpus.zst) is read as .jsonl. Where records have
fields, `column` names the text. A null is left out.
"""

import contextlib
import csv
import functools
import hashlib
import io
import json
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lsai_core.base.errors import UserError
from lsai_lab.data.documents import Corpus, Part, cut_target, cut_text
from lsai_lab.project.files import content_hash, matching_paths, repo_root

CODECS = {".gz": "gzip", ".zst": "zstd"}
TEXT_SUFFIXES = (".txt", ".md", ".text")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".ndjson", ".json", ".csv", ".parquet")
MAX_RECORD = 64 << 20
BUFFER = 1 << 20
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
        fingerprint((path.relative_to(root).as_posix(), path) for path in files), description, texts
    )


def open_files(pattern: str, column: str, raw: Path, progress: bool) -> Corpus:
    """The files that a path or glob (`**` works) matches in the current folder, or else in the
    checkout."""
    files = matching_files(f"file:{pattern}", lambda path: _kind(path) in SUFFIXES, SUFFIXES)
    plain = [path for path in files if _kind(path) in TEXT_SUFFIXES]

    @functools.cache
    def target() -> int:
        return cut_target(sum(_text_size(path) for path in plain))

    def texts() -> Iterator[str | Part | None]:
        for path in files:
            if path in plain:
                content = content_hash(path).digest()
                yield from (Part(text, content) for text in _text_documents(path, target()))
            else:
                yield from _READERS[_kind(path)](path, column)

    size = sum(path.stat().st_size for path in files)
    description = {"kind": "file", "pattern": pattern, "files": len(files), "bytes": size}
    return Corpus(fingerprint((path.name, path) for path in files), description, texts, len(plain))


def matching_files(
    source: str, known: Callable[[Path], bool], suffixes: Iterable[str]
) -> list[Path]:
    """The files that `source`, a kind with a path or glob, names, sorted; UserError if there are
    none, or one of no known kind."""
    pattern = os.path.expanduser(source.partition(":")[2])
    matches = matching_paths(pattern)
    if not matches and not os.path.isabs(pattern):
        root = repo_root()
        matches = [os.path.join(root, match) for match in matching_paths(pattern, root)]
    files = sorted(Path(match) for match in matches if os.path.isfile(match))
    if not files:
        folder = (
            f" (a folder needs a glob, such as {source.partition(':')[0]}:folder/*)"
            if matches
            else ""
        )
        raise UserError(f"{source}: no such file{folder}")
    for path in files:
        if not known(path):
            raise UserError(f"{path}: cannot be read as text; known kinds: {' '.join(suffixes)}")
    return files


def _kind(path: Path) -> str:
    """The suffix in lower case that says what the file holds, its compression aside."""
    inner, suffix = os.path.splitext(path.name.lower())
    if suffix not in CODECS:
        return suffix
    kind = os.path.splitext(inner)[1]
    return "packed parquet" if kind == ".parquet" else kind if kind in SUFFIXES else ".jsonl"


def fingerprint(files: Iterable[tuple[str, Path]]) -> str:
    """Hash over names and contents."""
    total = hashlib.blake2b(digest_size=16)
    for name, path in files:
        total.update(f"{name}\0".encode("utf-8", "surrogateescape") + content_hash(path).digest())
    return total.hexdigest()


@contextlib.contextmanager
def as_user_error(path: Path) -> Iterator[None]:
    """While open, an error about the content of the file `path` becomes a UserError of one line
    that names it; faults of the disk stay OSErrors."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text ({error.reason}); convert it, e.g. with iconv -t UTF-8"
        ) from None
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what = " ".join(str(error).split())[:300]
        form = "read as parquet" if _kind(path) == ".parquet" else "decompressed"
        raise UserError(f"{path}: cannot be {form}; cut off or damaged ({what})") from None


def open_stream(path: Path, codec: str | None = None) -> io.BufferedReader:
    """Open for reading bytes, decompressed by `codec` or, where that is None, as the file's suffix
    says.

    A cut-off or damaged stream raises an OSError without errno.
    """
    return io.BufferedReader(
        pa.input_stream(str(path), compression=codec or CODECS.get(path.suffix.lower())), BUFFER
    )


def _open_text(path: Path, newline: str | None = None) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_stream(path), encoding="utf-8-sig", newline=newline)


def _text_size(path: Path) -> int:
    """Bytes of text in a file, decompressed."""
    if path.suffix.lower() not in CODECS:
        return path.stat().st_size
    with as_user_error(path), open_stream(path) as file:
        return sum(len(chunk) for chunk in iter(lambda: file.read(BUFFER), b""))


def _text_documents(path: Path, target: int) -> Iterator[str]:
    with as_user_error(path), _open_text(path) as file:
        yield from cut_text(file, target)


def json_texts(path: Path, column: str = "text") -> Iterator[str | None]:
    """The texts of a file of one JSON record a line; a text given as a list is joined with blank
    lines (the convention of lm_dataformat)."""
    number = 0
    with as_user_error(path), open_stream(path) as file:
        while line := file.readline(MAX_RECORD):
            number += 1
            if len(line) == MAX_RECORD:
                raise UserError(
                    f"{path}: line {number} holds more than {MAX_RECORD >> 20} MiB; split that "
                    f"record"
                )
            if not line.isspace():
                try:
                    yield _text(json.loads(line), column)
                except (ValueError, TypeError, RecursionError) as error:
                    raise UserError(f"{path}: line {number}: {error}") from None


def _json_texts(path: Path, column: str) -> Iterator[str | None]:
    """The texts of a .json file: records one a line, or one array of them, which is streamed,
    too."""
    with as_user_error(path), _open_text(path) as file:
        begin = file.read(1)
        while begin and begin.isspace():
            begin = file.read(1)
        if begin == "[":
            yield from _array_texts(path, file, column)
            return
    yield from json_texts(path, column)


def _array_texts(path: Path, file: io.TextIOBase, column: str) -> Iterator[str | None]:
    """The texts of the records of an array, whose bracket has been read."""
    decoder, buffer, number, wanted = json.JSONDecoder(), "", 0, BUFFER
    while True:
        more = file.read(wanted)
        buffer, at = buffer + more, 0
        while (at := _BETWEEN.match(buffer, at).end()) < len(buffer):  # type: ignore[union-attr]
            if buffer[at] == "]":
                if buffer[at + 1 :].strip() or file.read().strip():
                    raise UserError(f"{path}: there is more text after its array, record {number}")
                return
            try:
                record, at = decoder.raw_decode(buffer, at)
                number += 1
                text = _text(record, column)
            except (ValueError, RecursionError) as error:
                if more and len(buffer) - at <= MAX_RECORD:
                    break
                raise UserError(f"{path}: record {number + 1}: {error}") from None
            except TypeError as error:
                raise UserError(f"{path}: record {number}: {error}") from None
            yield text
        if not more:
            raise UserError(
                f"{path}: its array does not end after record {number}; cut off or damaged"
            )
        # A record that is not whole yet is tried again with twice as much text, so that its cost
        # stays linear.
        buffer, wanted = buffer[at:], max(BUFFER, len(buffer) - at)


def _text(record: Any, column: str) -> str | None:
    """The text of a record, None for a null. Raises TypeError for what is none."""
    if isinstance(record, dict):
        if column not in record:
            there = ", ".join(map(str, record))[:200] or "nothing"
            raise TypeError(
                f"no field {column!r}; it has {there} (data.column, --column of lsai data prepare, "
                f"names the text)"
            )
        record = record[column]
    if isinstance(record, list) and all(isinstance(part, str) for part in record):
        return "\n\n".join(record)
    if record is not None and not isinstance(record, str):
        raise TypeError(f'expected a record {{"{column}": "..."}}')
    return record


def _csv_texts(path: Path, column: str) -> Iterator[str | None]:
    """The texts of a column; a row that ends before it has a null."""
    csv.field_size_limit(MAX_RECORD)
    with as_user_error(path), _open_text(path, newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            at = _place(path, next(rows, []), column)
            for row in rows:
                if row:
                    yield row[at] if at < len(row) else None
        except csv.Error as error:
            raise UserError(f"{path}: line {rows.line_num}: {error}") from None


def _place(path: Path, names: list[str], column: str) -> int:
    """Where `column` stands among the columns of `path`."""
    if names.count(column) != 1:
        what = "several columns" if column in names else "no column"
        there = ", ".join(names)[:200] or "nothing"
        raise UserError(
            f"{path}: {what} {column!r}; it has {there} (data.column, --column of lsai data "
            f"prepare, names the text)"
        )
    return names.index(column)


def _parquet_texts(path: Path, column: str) -> Iterator[str | None]:
    with as_user_error(path), pq.ParquetFile(path) as file:
        kind = file.schema_arrow.field(_place(path, file.schema_arrow.names, column)).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if kind not in _STRINGS:
            raise UserError(f"{path}: column {column!r} holds {kind}, not strings")
        for batch in file.iter_batches(64, columns=[column]):
            yield from batch.column(0).cast(pa.large_string()).to_pylist()


_BETWEEN = re.compile(r"[ \t\r\n,]*")
_STRINGS = (
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
    pa.null(),
)
_READERS: dict[str, Callable[[Path, str], Iterator[str | None]]] = {
    ".jsonl": json_texts,
    ".ndjson": json_texts,
    ".json": _json_texts,
    ".csv": _csv_texts,
    ".parquet": _parquet_texts,
}
