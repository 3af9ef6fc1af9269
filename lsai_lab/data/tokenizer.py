"""Tokenizer: byte-level BPE (Hugging Face `tokenizers`; Radford et al. 2019, section 2.2), trained
on the training split only.

All 256 bytes are in the alphabet: any text encodes without an unknown token and decodes to itself.
`<|endoftext|>` has id 0 and ends every document; inside a text its characters are ordinary ones, so
a corpus cannot forge a document end. One batch of two million characters exists at any time. Files
are written with plain writes, because in a memory map a full disk would be a SIGBUS.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from lsai_lab.data.documents import SPLITS, Document, split_of

EOT = "<|endoftext|>"
EOT_ID = 0
PIECE_CHARS = 64 << 10
MIN_FREQUENCY = 2  # of a pair of tokens that is merged
# Both bound memory: the tokenizer's results take far more of it than the text, and each piece adds
# some of its own.
_BATCH_CHARS = 2_000_000
_BATCH_PIECES = 10_000


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on `texts` (streamed). Deterministic: equal texts give an equal tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=[EOT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    tokenizer.encode_special_tokens = True  # inside texts as ordinary characters
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json for encoding."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # which tokenizer.json does not keep
    return tokenizer


def pieces(text: str) -> Iterator[str]:
    """Cut a long text into pieces of at most `PIECE_CHARS` characters: memory stays bounded, and
    cores share the work.

    A cut is made before a single space between two other characters, where the pre-tokenizer always
    starts a word: the pieces' tokens are the whole text's. Only text without such a space is cut at
    the limit.
    """
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = end = start + PIECE_CHARS
        while (cut := text.rfind(" ", start + 1, cut)) != -1:
            if not text[cut - 1].isspace() and not text[cut + 1].isspace():
                break
        end = cut if cut != -1 else end
        yield text[start:end]
        start = end
    yield text[start:]


def encode_documents(
    documents: Iterable[Document],
    thresholds: tuple[int, int],
    tokenizer: Tokenizer,
    folder: Path,
    progress: tqdm,
) -> dict[str, dict[str, int]]:
    """Encode into `folder/{train,validation,test}.bin` (uint16, little-endian); `progress` counts
    text bytes. Returns of each split `documents`, `bytes` of UTF-8 text, and `tokens` with one
    `<|endoftext|>` per document."""
    stats = {name: {"documents": 0, "bytes": 0, "tokens": 0} for name in SPLITS}
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in SPLITS}
        for batch in _batches(documents, thresholds):
            encodings = tokenizer.encode_batch_fast(
                [text for _, text, _ in batch], add_special_tokens=False
            )
            for (split, _, size), encoding in zip(batch, encodings, strict=True):
                ids = encoding.ids if size is None else [*encoding.ids, EOT_ID]
                files[split].write(np.array(ids, dtype="<u2").tobytes())
                stats[split]["tokens"] += len(ids)
                stats[split]["documents"] += size is not None
                stats[split]["bytes"] += size or 0
                progress.update(size or 0)
    return stats


def _batches(
    documents: Iterable[Document], thresholds: tuple[int, int]
) -> Iterator[list[tuple[str, str, int | None]]]:
    """Pieces of documents: the split, the text, and with a document's last piece its whole size in
    bytes."""
    batch: list[tuple[str, str, int | None]] = []
    chars = 0
    for document in documents:
        split, cut = split_of(document, thresholds), list(pieces(document.text))
        for number, text in enumerate(cut, 1):
            batch.append((split, text, document.size if number == len(cut) else None))
            chars += len(text)
            if chars >= _BATCH_CHARS or len(batch) >= _BATCH_PIECES:
                yield batch
                batch, chars = [], 0
    yield batch
