"""Tokenizer: byte-level BPE (Hugging Face `tokenizers`; Radford et al. 2019, section 2.2), trained
on the training split only, or one that is given as a tokenizer.json.

In ours all 256 bytes are in the alphabet: any text encodes without an unknown token and decodes to
itself. `<|endoftext|>` has id 0 and ends every document; inside a text its characters are ordinary
ones, so a corpus cannot forge a document end. One batch of two million characters exists at any
time. Files are written with plain writes, because in a memory map a full disk would be a SIGBUS.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from lsai_core.base.errors import UserError
from lsai_lab.data.documents import SPLITS, Document, split_of

EOT = "<|endoftext|>"
EOT_ID = 0
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# What ends a document in published tokenizers, where no tokenizer_config.json says it.
END_TOKENS = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
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


@dataclass(frozen=True)
class Encoder:
    """A tokenizer, the token that ends a document, and the size of the vocabulary (all ids are
    below it).

    `cuts`: whether `pieces` of a text have the tokens of the whole, as ours guarantees.
    """

    tokenizer: Tokenizer
    end_token: str
    end_id: int
    vocab_size: int
    cuts: bool


def own_encoder(tokenizer: Tokenizer) -> Encoder:
    """The encoder of a tokenizer that was trained here."""
    return Encoder(tokenizer, EOT, EOT_ID, tokenizer.get_vocab_size(), cuts=True)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json for encoding whole texts. UserError: it is none."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # of no narrower class
        raise UserError(
            f"{path}: cannot be read as a tokenizer.json ({' '.join(str(error).split())[:200]})"
        ) from None
    tokenizer.encode_special_tokens = True  # which tokenizer.json does not keep
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # equal texts have equal tokens
    return tokenizer


def given_tokenizer(name: str) -> Path:
    """The tokenizer.json that `name`, that file or the folder with it, means. UserError: there is
    none."""
    path = Path(name).expanduser()
    path = path / TOKENIZER if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"data.tokenizer={name}: no such file; it wants a tokenizer.json, or the folder that "
            f"holds one"
        )
    return path


def given_encoder(path: Path) -> Encoder:
    """The encoder of a given tokenizer.json. What ends a document is the `eos_token` of the
    tokenizer_config.json beside it, else one of `END_TOKENS`."""
    tokenizer = load_tokenizer(path)
    named = eos_token(path.with_name(TOKENIZER_CONFIG))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    wanted = END_TOKENS if named is None else (named,)
    end = next((token for token in wanted if token in ids), None)
    if end is None:
        raise UserError(
            f"{path}: none of its tokens ends a document (looked for {', '.join(wanted)}); "
            f'put a {TOKENIZER_CONFIG} with {{"eos_token": "..."}} beside it'
        )
    return Encoder(tokenizer, end, ids[end], max(ids.values()) + 1, cuts=False)


def eos_token(path: Path) -> str | None:
    """The `eos_token` of a tokenizer_config.json; None if there is no such file, or if it names
    none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def token_dtype(vocab_size: int) -> str:
    """How token files hold ids of a vocabulary: unsigned little-endian integers of 16 bits, or of
    32 where it is larger."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


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
    encoder: Encoder,
    folder: Path,
    progress: tqdm,
) -> dict[str, dict[str, int]]:
    """Encode into `folder/{train,validation,test}.bin` (see `token_dtype`); `progress` counts text
    bytes. Returns of each split `documents`, `bytes` of UTF-8 text, and `tokens` with one end of
    text per document."""
    stats = {name: {"documents": 0, "bytes": 0, "tokens": 0} for name in SPLITS}
    dtype = token_dtype(encoder.vocab_size)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in SPLITS}
        for batch in _batches(documents, thresholds, encoder.cuts):
            texts = [text for _, text, _ in batch]
            encodings = encoder.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for (split, _, size), encoding in zip(batch, encodings, strict=True):
                ids = encoding.ids if size is None else [*encoding.ids, encoder.end_id]
                files[split].write(np.array(ids, dtype=dtype).tobytes())
                stats[split]["tokens"] += len(ids)
                stats[split]["documents"] += size is not None
                stats[split]["bytes"] += size or 0
                progress.update(size or 0)
    return stats


def _batches(
    documents: Iterable[Document], thresholds: tuple[int, int], cuts: bool
) -> Iterator[list[tuple[str, str, int | None]]]:
    """Pieces of documents: the split, the text, and with a document's last piece its whole size in
    bytes."""
    batch: list[tuple[str, str, int | None]] = []
    chars = 0
    for document in documents:
        split, cut = (
            split_of(document, thresholds),
            list(pieces(document.text)) if cuts else [document.text],
        )
        for number, text in enumerate(cut, 1):
            batch.append((split, text, document.size if number == len(cut) else None))
            chars += len(text)
            if chars >= _BATCH_CHARS or len(batch) >= _BATCH_PIECES:
                yield batch
                batch, chars = [], 0
    yield batch
