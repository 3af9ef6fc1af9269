"""Sources: where text comes from, by name.

stdlib              the sources of this Python's standard library (works everywhere, offline)
polish-docs         Polish documentation packages of Debian (needs apt-get)
speakleash:<name>   a dataset of Speakleash, the Polish text collection (needs the network once)
file:<path or glob> local text, JSONL, zstd-compressed JSONL or parquet
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from lsai_core.errors import UserError
from lsai_lab.data.documents import Corpus

KINDS = {
    "stdlib": "sources of this Python's standard library; works everywhere, offline",
    "polish-docs": "Polish documentation from Debian packages (7.6 MB on Debian 12); needs apt-get",
    "speakleash:<name>": "a Polish dataset of speakleash.org; needs the network once",
    "file:<path or glob>": "local .txt, .jsonl, .jsonl.zst or .parquet files",
}


class Source(Protocol):
    """`slug` begins the dataset's folder name; a `remote` source is prepared once per request, a local one per
    content."""

    slug: str
    remote: bool

    def open(self, raw: Path, progress: bool) -> Corpus:
        """Fetch what is missing into the cache folder `raw` and return the corpus."""
        ...


def parse_source(text: str) -> Source:
    """The source that a config names. Raises `UserError` for an unknown kind or a missing name."""
    from lsai_lab.data.local import FileSource, StdlibSource
    from lsai_lab.data.polish_docs import PolishDocsSource
    from lsai_lab.data.speakleash import SpeakleashSource

    kind, colon, name = text.partition(":")
    if text == "stdlib":
        return StdlibSource()
    if text == "polish-docs":
        return PolishDocsSource()
    if kind == "speakleash" and name:
        return SpeakleashSource(name)
    if kind == "file" and name:
        return FileSource(name)
    hint = f"{kind}: needs a name after the colon" if colon and not name else f"unknown source {text!r}"
    raise UserError(f"{hint}; sources are {', '.join(KINDS)}")
