"""Documents: the unit that is split, encoded and counted.

Whatever the source, its texts pass through `documents` once per pass over the corpus: text that is no valid Unicode
(lone surrogates from JSON escapes) is repaired, blank texts are dropped, `max_mb` ends the stream after whole
documents, and each document gets a 64-bit key from its content (or that of the file it was cut from). Everything is a generator: a corpus of any size streams
through.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

MB = 1_000_000


class Document(NamedTuple):
    """One text: `size` is its length in bytes of UTF-8, `key` a 64-bit hash of (split seed, content)."""

    text: str
    size: int
    key: int


class Part(NamedTuple):
    """A document cut from a file of plain text; `file` identifies the file by its content."""

    text: str
    file: bytes


@dataclass(frozen=True)
class Corpus:
    """What a source yields: its texts (iterable again and again) and the facts that identify them.

    `cut_files`: how many files of plain text it is cut from.

    `fingerprint` is a hash over the content; `description` goes into the dataset's meta.json; `unchanged` says whether
    the content is still what was fingerprinted.
    """

    fingerprint: str
    description: dict[str, Any]
    texts: Callable[[], Iterator[str | Part]]
    unchanged: Callable[[], bool] = lambda: True
    cut_files: int = 0


def documents(corpus: Corpus, max_mb: float | None, split_seed: int, whole_files: bool = False) -> Iterator[Document]:
    """The non-blank texts of `corpus` in order, as long as they fit into `max_mb` (10^6 bytes of UTF-8) altogether.

    `whole_files`: all documents cut from one file share a key, so that they land in the same split.
    """
    salt = hashlib.blake2b(str(split_seed).encode(), digest_size=16).digest()
    left = float("inf") if max_mb is None else max_mb * MB
    for item in corpus.texts():
        text, file = item if isinstance(item, Part) else (item, None)
        if not text or text.isspace():
            continue
        try:
            data = text.encode()
        except UnicodeEncodeError:
            data = text.encode("utf-8", "replace")
            text = data.decode()
        left -= len(data)
        if left < 0:
            return
        identity = file if whole_files and file else data
        key = hashlib.blake2b(identity, digest_size=8, key=salt).digest()
        yield Document(text, len(data), int.from_bytes(key, "big"))


def slug_of(text: str) -> str:
    """A file name made from any text: at most 40 characters of a-z 0-9 and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "data"
