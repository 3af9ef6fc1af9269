"""Documents: the unit that is split, encoded and counted.

A document's key is compared with two thresholds, so equal texts always land in the same split: no
copy of a training document is ever tested on. Documents cut from one of `MIN_FILES` or more files
of plain text share the file's key. With at least `SURVEY` distinct documents the thresholds are
fixed quantiles, so adding documents moves none of the others; with fewer they are taken from the
sorted keys.
"""

import dataclasses
import functools
import hashlib
import io
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from lsai_core.base.errors import UserError

MB = 1_000_000
SPLITS = ("train", "validation", "test")
VALIDATION_SHARE, TEST_SHARE = 0.10, 0.05
SURVEY = 1000
MIN_FILES = 20  # the smallest split of so many files is one of them
MIN_DOCUMENT, MAX_DOCUMENT = 1 << 10, 64 << 10  # characters that cutting aims at


class TooFew(UserError):
    """There are not enough documents for the splits."""


class Document(NamedTuple):
    """One text: `size` is its length in bytes of UTF-8, `key` a 64-bit hash of (split seed,
    content)."""

    text: str
    size: int
    key: int


class Part(NamedTuple):
    """A document cut from a file of plain text; `file` identifies the file by its content."""

    text: str
    file: bytes


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What a source yields: its texts (iterable again and again; None is a null of a record), a
    hash over their content (`fingerprint`), what meta.json keeps (`description`), from how many
    files of plain text it is cut (`cut_files`), and the file that was fetched for it, if one was
    (`download`). A source of tokens has `rows` of them and no texts."""

    fingerprint: str
    description: dict[str, Any]
    texts: Callable[[], Iterator[str | Part | None]] = lambda: iter(())
    cut_files: int = 0
    download: Path | None = None
    rows: Callable[[], Iterator[np.ndarray]] | None = None


def documents(
    corpus: Corpus,
    max_mb: float | None,
    split_seed: int,
    whole_files: bool = False,
    left_out: Counter[str] | None = None,
) -> Iterator[Document]:
    """The texts of `corpus` in order, streamed, as long as they fit into `max_mb` (10^6 bytes of
    UTF-8) altogether.

    Null and blank texts are left out, and counted in `left_out`. Lone surrogates (from JSON
    escapes) are replaced. `whole_files`: all documents cut from one file share a key, and so a
    split.
    """
    salt = hashlib.blake2b(str(split_seed).encode(), digest_size=16).digest()
    left = float("inf") if max_mb is None else max_mb * MB
    for item in corpus.texts():
        text, file = item if isinstance(item, Part) else (item, None)
        if text is None or not text or text.isspace():
            if left_out is not None:
                left_out["null" if text is None else "blank"] += 1
            continue
        data = text.encode("utf-8", "replace")
        left -= len(data)
        if left < 0:
            return
        key = hashlib.blake2b(
            file if whole_files and file else data, digest_size=8, key=salt
        ).digest()
        yield Document(data.decode(), len(data), int.from_bytes(key, "big"))


def cut_text(file: io.TextIOBase, target: int) -> Iterator[str]:
    """Text cut into documents: each ends at the first blank line after `target` characters, else at
    the first line end after twice, else (text without line ends) at four times that many."""
    parts: list[str] = []
    size = 0
    while line := file.readline(4 * target - size):
        parts.append(line)
        size += len(line)
        ends = line.endswith("\n")
        if size >= 4 * target or (ends and size >= (target if line.isspace() else 2 * target)):
            yield "".join(parts)
            parts, size = [], 0
    if parts:
        yield "".join(parts)


def cut_target(size: int) -> int:
    """How long a document is to be (characters) where `size` bytes of text are cut: a small text
    still yields enough documents for three splits, and a large one keeps long contexts."""
    return min(max(size // 200, MIN_DOCUMENT), MAX_DOCUMENT)


def with_records_cut(corpus: Corpus, max_mb: float | None) -> Corpus:
    """`corpus` with every record cut into documents, as plain text is: for one that holds a few
    long texts."""

    @functools.cache
    def target() -> int:
        size = sum(document.size for document in documents(corpus, None, 0))
        return cut_target(size if max_mb is None else min(size, int(max_mb * MB)))

    def texts() -> Iterator[str | Part | None]:
        for text in corpus.texts():
            if isinstance(text, str):
                yield from cut_text(io.StringIO(text), target())
            else:
                yield text

    return dataclasses.replace(corpus, texts=texts)


def survey(documents: Iterable[Document], what: str) -> tuple[int, int]:
    """The keys at which validation and test begin, from the first `SURVEY` distinct documents.
    TooFew if there are not three."""
    keys: set[int] = set()
    for document in documents:
        keys.add(document.key)
        if len(keys) == SURVEY:
            train = round(2**64 * (1 - VALIDATION_SHARE - TEST_SHARE))
            return train, train + round(2**64 * VALIDATION_SHARE)
    if not keys:
        raise TooFew(f"{what} holds no text (or its first document is larger than max_mb)")
    if len(keys) < len(SPLITS):
        raise TooFew(
            f"{what} holds only {len(keys)} distinct document(s); each of {', '.join(SPLITS)} "
            f"needs one"
        )
    ordered = sorted(keys)
    n_test, n_validation = (
        max(1, round(len(keys) * share)) for share in (TEST_SHARE, VALIDATION_SHARE)
    )
    return ordered[-n_test - n_validation], ordered[-n_test]


def split_of(document: Document, thresholds: tuple[int, int]) -> str:
    """The split that a document belongs to."""
    return SPLITS[bisect_right(thresholds, document.key)]


def progress_bar(wanted: bool, items: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """tqdm's bar over `items` or by hand; silent if not `wanted`, or if standard error is no
    terminal."""
    return tqdm(items, disable=None if wanted else True, **options)
