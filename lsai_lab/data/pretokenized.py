"""Text that is tokens already: `tokens:<path or glob>`, .npy files of one row of integers each, for
example made by

    numpy.save("tokens.npy", numpy.fromfile("train.bin", dtype=numpy.uint16))

`data.vocab_size` says how many tokens there are (every id is below it), or `data.tokenizer` which
they are. The files, in the order of their names, become one row. Its first 85% are the training
split, the next 10% validation and the rest the test: documents are not known, so the copies of one
may lie in two of them.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lsai_core.base.errors import UserError
from lsai_core.config.train import DataConfig
from lsai_lab.data.documents import SPLITS, TEST_SHARE, VALIDATION_SHARE, Corpus
from lsai_lab.data.local import fingerprint, matching_files
from lsai_lab.data.tokenizer import token_dtype

SUFFIX = ".npy"
CHUNK = 1 << 22  # tokens


def open_tokens(pattern: str, raw: Path, progress: bool) -> Corpus:
    """The token files that a path or glob matches, as for `file:`."""
    files = matching_files(
        f"tokens:{pattern}", lambda path: path.suffix.lower() == SUFFIX, [SUFFIX]
    )

    def rows() -> Iterator[np.ndarray]:
        return map(_row, files)

    description = {"kind": "tokens", "pattern": pattern, "files": len(files)}
    return Corpus(fingerprint((path.name, path) for path in files), description, rows=rows)


def _row(path: Path) -> np.ndarray:
    """The memory-mapped ids of a file, integers, shape (N,)."""
    try:
        row = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # of many classes, by where the file is damaged
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"{path}: cannot be read as a .npy file ({' '.join(str(error).split())[:200]})"
        ) from None
    if not isinstance(row, np.ndarray) or row.ndim != 1 or row.dtype.kind not in "iu":
        raise UserError(
            f"{path}: holds {row.dtype} of shape {row.shape}; it wants integers of shape (N,)"
        )
    return row


def write_splits(
    config: DataConfig, corpus: Corpus, vocab_size: int, folder: Path
) -> dict[str, dict[str, Any]]:
    """Write `folder/{train,validation,test}.bin`; returns how many `tokens` each holds. UserError:
    an id outside the vocabulary."""
    assert corpus.rows is not None
    total = sum(len(row) for row in corpus.rows())
    ends = [
        round(total * (1 - VALIDATION_SHARE - TEST_SHARE)),
        round(total * (1 - TEST_SHARE)),
        total,
    ]
    sizes = dict(zip(SPLITS, np.diff([0, *ends]).tolist(), strict=True))
    if not all(sizes.values()):
        raise UserError(
            f"{config.source} holds only {total} tokens; each of {', '.join(SPLITS)} needs some"
        )
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS]
        at = 0
        for chunk in (
            row[i : i + CHUNK] for row in corpus.rows() for i in range(0, len(row), CHUNK)
        ):
            low, high = int(chunk.min()), int(chunk.max())
            if low < 0 or high >= vocab_size:
                raise UserError(
                    f"{config.source} holds the id {low if low < 0 else high}, which is outside a "
                    f"vocabulary of "
                    f"{vocab_size}; data.vocab_size must exceed every id"
                )
            inside = [max(0, end - at) for end in ends[:-1]]  # where the splits end in this chunk
            for file, part in zip(
                files, np.split(chunk.astype(token_dtype(vocab_size)), inside), strict=True
            ):
                file.write(part.tobytes())
            at += len(chunk)
    return {split: {"tokens": size} for split, size in sizes.items()}
