"""Tokenizer: byte-level BPE (Hugging Face `tokenizers`), trained on the training split only.

Byte-level means that all 256 bytes are in the alphabet: any text encodes without an unknown token and decodes to
itself. The vocabulary is 1 special token + 256 bytes + the merges that the training text supports, at most `vocab_size`
(a small corpus may support fewer). `<|endoftext|>` has id 0 and ends every document; inside a text its characters are
encoded as ordinary text, so a corpus cannot forge a document end. Source: Radford et al. 2019 (GPT-2), section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOT = "<|endoftext|>"
EOT_ID = 0
PIECE_CHARS = 64 << 10
MIN_FREQUENCY = 2  # of a pair of tokens that is merged


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on `texts` (streamed). Deterministic: equal texts give an equal tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return for_encoding(tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json for encoding."""
    return for_encoding(Tokenizer.from_file(str(path)))


def for_encoding(tokenizer: Tokenizer) -> Tokenizer:
    """Encode `<|endoftext|>` inside texts as ordinary characters (a setting that tokenizer.json does not keep)."""
    tokenizer.encode_special_tokens = True
    return tokenizer


def pieces(text: str) -> Iterator[str]:
    """Cut a long text into pieces of at most `PIECE_CHARS` characters, so that memory stays bounded and cores share the
    work.

    A cut is made before a single space between two other characters. The pre-tokenizer always starts a word there, so
    the pieces' tokens are exactly the whole text's. Only text without such a space (no words) is cut at the limit.
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
