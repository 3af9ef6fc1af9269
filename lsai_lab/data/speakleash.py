"""Speakleash (speakleash.org): a public collection of Polish text, as its own client finds it.

    <base>/speakleash.json      the index: [{"name": ...}, ...]
    <base>/<name>.manifest      JSON: description, license, sources, category, stats (documents, characters, ...), and
                                file_size, the size in bytes of the next
    <base>/<name>.jsonl.zst     records {"text": str or list of str, "meta": {...}}, zstd (lm_dataformat)

Source of the layout: the client's repository github.com/speakleash/speakleash. Unlike that client, every answer's
status is checked, a download is complete and decodes or does not exist, and listing reads the index alone.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

from lsai_core.errors import UserError
from lsai_core.files import write_json
from lsai_lab.data.documents import Corpus
from lsai_lab.data.download import NotFound, download, get_json, size_in_bytes
from lsai_lab.data.local import BUFFER, json_texts, open_stream
from lsai_lab.files import content_hash

DEFAULT_URL = "https://d6t0.c15.e2-2.dev/speakleash-ds-pub/datasets_text/"  # since May 2024; before: speakleash.space


def base_url() -> str:
    """Where the collection is: $LSAI_SPEAKLEASH_URL, else the public place; ends with a slash."""
    return (os.environ.get("LSAI_SPEAKLEASH_URL") or DEFAULT_URL).rstrip("/") + "/"


def list_names() -> list[str]:
    """The names of all datasets: one request."""
    url = base_url() + "speakleash.json"
    index = get_json(url)
    if not isinstance(index, list):
        raise UserError(f"{url}: expected a list of datasets; is LSAI_SPEAKLEASH_URL right?")
    return sorted(str(item["name"]) for item in index if isinstance(item, dict) and "name" in item)


def get_manifest(name: str) -> dict[str, Any]:
    """The manifest of one dataset. Raises `UserError` with the nearest names if there is none of this name."""
    try:
        manifest = get_json(base_url() + f"{name}.manifest")
    except NotFound:
        near = difflib.get_close_matches(name, list_names(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "see `lsai data list --speakleash`"
        raise UserError(f"Speakleash has no dataset {name!r}; {hint}") from None
    if not isinstance(manifest, dict):
        raise UserError(f"{base_url()}{name}.manifest: expected a JSON object")
    return manifest


def checked(name: str) -> str:
    """`name`, if it can be a dataset's: it becomes a file's. Raises `UserError` otherwise."""
    if not re.fullmatch(r"[\w.\-]+", name) or name.startswith("."):
        raise UserError(f"speakleash:{name}: a name has letters, digits, dots, dashes and underscores only")
    return name


def open_corpus(name: str, raw: Path, progress: bool) -> Corpus:
    """One dataset of the collection. What is in the raw cache is complete and is used without asking the network."""
    data, manifest_file = (raw / "speakleash" / f"{name}{suffix}" for suffix in (".jsonl.zst", ".manifest"))
    manifest = _cached(manifest_file) if data.exists() else None
    if manifest is None:
        manifest = get_manifest(name)
        size = size_in_bytes(manifest.get("file_size"), f"{base_url()}{name}.manifest: file_size")
        download(base_url() + data.name, data, expected=size, check=_decodes, progress=progress)
        write_json(manifest_file, manifest)
    stats = manifest["stats"] if isinstance(manifest.get("stats"), dict) else {}
    facts = {key: manifest.get(key) for key in ("description", "license", "category", "file_size")}
    counts = {key: stats.get(key) for key in ("documents", "characters")}
    description = {"kind": "speakleash", "name": name, "url": base_url(), **facts, **counts}
    return Corpus(content_hash(data).hexdigest(), description, lambda: json_texts(data))


def _cached(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return manifest if isinstance(manifest, dict) else None
    return None


def _decodes(path: Path) -> None:
    """Raise `UserError` unless every zstd frame is complete."""
    with open_stream(path, compressed=True) as file:
        try:
            while file.read(BUFFER):
                pass
        except OSError as error:
            if error.errno is not None:
                raise
            raise UserError(str(error)) from None
