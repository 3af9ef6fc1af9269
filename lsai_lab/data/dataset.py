"""A prepared dataset: a folder of token files that training memory-maps.

    datasets/<source>-<id>/{train,validation,test}.bin   little-endian token ids, uint16, or uint32
                                                         for more than 65,536
                           tokenizer.json                Hugging Face tokenizers; not there if the
                                                         tokens came without one
                           meta.json                     what it is, counts, sizes, checksums;
                                                         written last

Opening a dataset compares sizes and checksums (BLAKE2b per 16 MiB block) with meta.json: all blocks
of files up to 2 GiB (about a second a GiB and core), of larger ones 128 evenly spaced ones. So a
damaged file is one clear error and never a strange loss.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from lsai_core.base.errors import UserError, hint
from lsai_lab.data.documents import SPLITS
from lsai_lab.data.tokenizer import TOKENIZER, load_tokenizer, token_dtype
from lsai_lab.project.files import folder_from_environment, repo_root

Split = Literal["train", "validation", "test"]
BLOCK = 16 << 20
MAX_BLOCKS_CHECKED = 128


class Dataset:
    """A verified dataset folder: `folder`, `id` (content hash), `meta` (meta.json). UserError: a
    file is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.meta = folder, read_meta(folder)
        self.id: str = self.meta["id"]
        for name, facts in self.meta["files"].items():
            path = folder / name
            size = path.stat().st_size if path.exists() else 0
            if size != facts["bytes"]:
                raise _damaged(folder, f"{path}: {size} bytes instead of {facts['bytes']}")
            count = len(facts["blake2b"])
            blocks = (
                np.linspace(0, count - 1, min(count, MAX_BLOCKS_CHECKED))
                .round()
                .astype(int)
                .tolist()
            )
            for block, digest in zip(blocks, _block_digests(path, blocks), strict=True):
                if digest != facts["blake2b"][block]:
                    raise _damaged(folder, f"{path}: damaged (checksum of block {block} differs)")

    def tokens(self, split: Split) -> np.memmap:
        """The tokens of a split: read-only memory map, uint16 or uint32, shape (N,)."""
        if split not in SPLITS:
            raise UserError(f"no split {split!r}{hint(split, SPLITS)}")
        return np.memmap(self.folder / f"{split}.bin", dtype=token_dtype(self.vocab_size), mode="r")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that these tokens were made with. UserError: they came without one."""
        if TOKENIZER not in self.meta["files"]:
            raise UserError(
                f"{self.folder} was made of tokens alone, without a tokenizer; name it with "
                f"data.tokenizer"
            )
        return load_tokenizer(self.folder / TOKENIZER)

    @property
    def vocab_size(self) -> int:
        """Every token is below this; at most the config's vocab_size."""
        return int(self.meta["tokenizer"]["vocab_size"])


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(f"{what}; delete {folder} and prepare the data again")


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of a dataset folder, unverified."""
    path = folder / "meta.json"
    try:
        meta = dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{folder} is no prepared dataset: it has no meta.json") from None
    except (ValueError, TypeError, RecursionError):
        meta = {}
    if "id" not in meta or not all(
        isinstance(meta.get(name), dict) for name in ("files", "tokenizer", "splits")
    ):
        raise _damaged(folder, f"{path}: damaged")
    return meta


def file_facts(path: Path) -> dict[str, Any]:
    """Size and block checksums of a file, as meta.json keeps them."""
    size = path.stat().st_size
    return {"bytes": size, "blake2b": _block_digests(path, range(-(-size // BLOCK)))}


def _block_digests(path: Path, blocks: Iterable[int]) -> list[str]:
    """BLAKE2b (16 bytes, hex) of the 16 MiB blocks with these numbers; a few at a time, on all of
    up to four cores."""

    def digest(block: int) -> str:
        with path.open("rb") as file:
            file.seek(block * BLOCK)
            return hashlib.blake2b(file.read(BLOCK), digest_size=16).hexdigest()

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(digest, blocks))


def data_root() -> Path:
    """Where data is kept: $LSAI_DATA, else `data/` in the checkout."""
    return (
        folder_from_environment("LSAI_DATA", Path())
        if os.environ.get("LSAI_DATA")
        else repo_root() / "data"
    )


def find_datasets(root: Path) -> list[Path]:
    """The folders of all prepared datasets below `root`, by name."""
    return sorted(path.parent for path in (root / "datasets").glob("[!.]*/meta.json"))
