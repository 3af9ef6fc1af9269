"""Encoding: documents in, three token files out, at the speed of the tokenizer.

The main thread reads and cuts documents into batches of two million characters; two worker threads encode them
(`encode_batch_fast` releases the GIL and uses all cores) and turn the result into uint16 arrays; the main thread
appends the arrays to the files in order. So reading, conversion and writing hide behind encoding, and at most a few
batches exist at any time: resident memory does not depend on the size of the corpus or of one document. Files are
written with plain writes, not through a memory map, because a full disk then is an exception and not a SIGBUS.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from lsai_lab.data.documents import Document
from lsai_lab.data.split import SPLITS, Splitter
from lsai_lab.data.tokenizer import EOT_ID, pieces

# Both bound memory: the tokenizer's results take far more of it than the text, and each piece adds some of its own.
BATCH_CHARS = 2_000_000
BATCH_PIECES = 10_000
WORKERS = 2


class Piece(NamedTuple):
    """A piece of a document; `size` (bytes) is the whole document's and stands on its `last` piece, 0 on the others."""

    split: int
    text: str
    last: bool
    size: int


@dataclass
class SplitStats:
    """What one split holds. `bytes` are bytes of UTF-8 text, `tokens` include one `<|endoftext|>` per document."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0


def encode_documents(
    documents: Iterable[Document], splitter: Splitter, tokenizer: Tokenizer, folder: Path, progress: tqdm
) -> list[SplitStats]:
    """Encode `documents` into `folder/{train,validation,test}.bin` (uint16, little-endian); `progress` counts text
    bytes."""
    stats = [SplitStats() for _ in SPLITS]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / f"{name}.bin").open("wb")) for name in SPLITS]
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS))
        pending: deque[tuple[list[Piece], Future[list[np.ndarray]]]] = deque()
        stack.callback(lambda: [future.cancel() for _, future in pending])

        def write_oldest() -> None:
            batch, future = pending.popleft()
            for file, tokens, stat in zip(files, future.result(), stats, strict=True):
                file.write(tokens.tobytes())
                stat.tokens += len(tokens)
            for piece in batch:
                stats[piece.split].documents += piece.last
                stats[piece.split].bytes += piece.size
            progress.update(sum(piece.size for piece in batch))

        for batch in _batches(documents, splitter):
            pending.append((batch, pool.submit(_encode, tokenizer, batch)))
            if len(pending) > WORKERS:
                write_oldest()
        while pending:
            write_oldest()
    return stats


def _batches(documents: Iterable[Document], splitter: Splitter) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    chars = 0
    for document in documents:
        split, done = splitter.split(document.key), 0
        for text in pieces(document.text):
            done += len(text)
            last = done == len(document.text)
            batch.append(Piece(split, text, last, document.size if last else 0))
            chars += len(text)
            if chars >= BATCH_CHARS or len(batch) >= BATCH_PIECES:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, batch: list[Piece]) -> list[np.ndarray]:
    """The batch's tokens, one uint16 array per split, each document ended by `<|endoftext|>`."""
    ids: list[list[int]] = [[] for _ in SPLITS]
    encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    for piece, encoding in zip(batch, encodings, strict=True):
        ids[piece.split].extend(encoding.ids)
        if piece.last:
            ids[piece.split].append(EOT_ID)
    return [np.array(values, dtype="<u2") for values in ids]
