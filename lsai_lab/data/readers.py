"""Readers: the texts in one local file, streamed. The file's name says how it is read.

    .txt .md .text   UTF-8 text, cut into documents (see `text_documents`)
    .jsonl           one JSON record a line: {"text": str or list of str, ...} or a bare string
    .jsonl.zst       the same, compressed; any number of zstd frames; a truncated file is an error
    .parquet         a string column `text`, one document a row

Memory stays bounded: text is read line by line, a JSON record may hold at most 64 MiB, parquet is read in small
batches.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from lsai_core.errors import UserError

TEXT_SUFFIXES = (".txt", ".md", ".text")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.zst", ".parquet")
MAX_RECORD = 64 << 20
BUFFER = 1 << 20
MIN_DOCUMENT, MAX_DOCUMENT = 1 << 10, 64 << 10


def read_texts(path: Path, document_chars: int = MAX_DOCUMENT) -> Iterator[str]:
    """The texts in `path`, in order. `document_chars` is the target length of the documents cut from plain text.

    Raises `UserError` for an unknown suffix and for content that is not what the suffix says.
    """
    name = path.name.lower()
    if name.endswith(TEXT_SUFFIXES):
        return text_documents(path, document_chars)
    if name.endswith((".jsonl", ".jsonl.zst")):
        return json_texts(path)
    if name.endswith(".parquet"):
        return parquet_texts(path)
    raise UserError(f"{path}: cannot be read as text; known kinds: {' '.join(SUFFIXES)}")


def document_target(total_bytes: int) -> int:
    """Target length for documents cut from plain text: 1/200 of all the text, between 1 KiB and 64 KiB.

    So a small file still yields enough documents for three splits, and a large one keeps long contexts.
    """
    return min(max(total_bytes // 200, MIN_DOCUMENT), MAX_DOCUMENT)


def text_documents(path: Path, target: int) -> Iterator[str]:
    """Plain text cut into documents: each ends at the first blank line after `target` characters, else at the first
    line end after twice, else (text without line ends) at four times that many."""
    parts: list[str] = []
    size = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            while line := file.readline(4 * target - size):
                parts.append(line)
                size += len(line)
                ends = line.endswith("\n")
                if size >= 4 * target or (ends and size >= (target if line.isspace() else 2 * target)):
                    yield "".join(parts)
                    parts, size = [], 0
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}); convert it, e.g. with iconv -t UTF-8") from None
    if parts:
        yield "".join(parts)


def open_stream(path: Path, compressed: bool) -> BinaryIO:
    """Open for reading bytes. `compressed`: decode zstd, all frames; a cut-off frame raises an OSError without
    errno."""
    if compressed:
        return cast(BinaryIO, io.BufferedReader(pa.input_stream(str(path), compression="zstd"), BUFFER))
    return path.open("rb", buffering=BUFFER)


def json_texts(path: Path) -> Iterator[str]:
    """The texts of a JSONL file; a text given as a list is joined with blank lines (the convention of
    lm_dataformat)."""
    number = 0
    try:
        with open_stream(path, compressed=path.name.lower().endswith(".zst")) as file:
            while line := file.readline(MAX_RECORD):
                number += 1
                if len(line) == MAX_RECORD:
                    raise UserError(f"{path}: line {number} holds more than {MAX_RECORD >> 20} MiB; split that record")
                if not line.isspace():
                    yield _text(json.loads(line))
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: does not decompress ({error})") from None
    except OSError as error:
        if error.errno is not None:  # the disk's fault, not the file's
            raise
        raise UserError(f"{path}: does not decompress ({error}); the file is cut off or damaged") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: line {number}: {error}") from None


def _text(record: Any) -> str:
    text = record.get("text") if isinstance(record, dict) else record
    if isinstance(text, list) and all(isinstance(part, str) for part in text):
        return "\n\n".join(text)
    if not isinstance(text, str):
        raise TypeError('expected a record {"text": "..."}')
    return text


def parquet_texts(path: Path) -> Iterator[str]:
    """The column `text` of a parquet file, about 8 MiB at a time; nulls are left out."""
    try:
        with pq.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise UserError(f"{path}: no column 'text'; it has {', '.join(file.schema_arrow.names)}")
            kind = file.schema_arrow.field("text").type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise UserError(f"{path}: column 'text' holds {kind}, not strings")
            for group in range(file.num_row_groups):
                meta = file.metadata.row_group(group)
                rows = max(1, meta.num_rows * (8 << 20) // max(meta.total_byte_size, 1))
                for batch in file.iter_batches(min(rows, 4096), row_groups=[group], columns=["text"]):
                    yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: cannot be read as parquet ({error})") from None
