"""Sources: where text comes from, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lsai_core.errors import UserError
from lsai_lab.data.documents import Corpus

KINDS = {
    "stdlib": "sources of this Python's standard library; works everywhere, offline",
    "polish-docs": "Polish documentation from Debian packages (7.6 MB on Debian 12); needs apt-get",
    "speakleash:<name>": "a Polish dataset of speakleash.org; needs the network once",
    "file:<path or glob>": "local .txt, .jsonl, .jsonl.zst or .parquet files",
}


@dataclass(frozen=True)
class Source:
    """`slug` begins the dataset's folder name; a `remote` source is prepared once per request, a local one per content.

    `open(raw, progress)` fetches what is missing into the cache folder `raw` and returns the corpus.
    """

    slug: str
    remote: bool
    open: Callable[[Path, bool], Corpus]


def parse_source(text: str) -> Source:
    """The source that a config names. Raises `UserError` for an unknown kind or a missing name."""
    from lsai_lab.data import local, polish_docs, speakleash

    kind, colon, name = text.partition(":")
    if text == "stdlib":
        return Source("stdlib", False, local.open_stdlib)
    if text == "polish-docs":
        return Source("polish-docs", True, polish_docs.open_corpus)
    if kind == "speakleash" and name:
        return Source(f"speakleash-{_slug(name)}", True, partial(speakleash.open_corpus, speakleash.checked(name)))
    if kind == "file" and name:
        return Source(f"file-{_slug(Path(name).name.split('.')[0])}", False, partial(local.open_files, name))
    hint = f"{kind}: needs a name after the colon" if colon and not name else f"unknown source {text!r}"
    raise UserError(f"{hint}; sources are {', '.join(KINDS)}")


def _slug(text: str) -> str:
    """A file name made from any text: at most 40 characters of a-z 0-9 and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "data"
