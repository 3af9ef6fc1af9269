"""Preparing a dataset: find its source by name, fetch, split, train the tokenizer, encode, publish;
once for each content.

The corpus is streamed three times: for the split thresholds, for the tokenizer and to be encoded. A
dataset folder is whole or does not exist. Local sources (stdlib, file:) are hashed on every call,
so that a changed corpus makes a new dataset. Remote ones are found by the request alone, a hash
over the config, so that a prepared dataset works offline. Delete its folder and raw download to
fetch anew.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from lsai_core.base.errors import UserError
from lsai_core.base.files import write_json, write_text
from lsai_core.config.train import DataConfig
from lsai_lab.data import documents as documents_module
from lsai_lab.data import local
from lsai_lab.data import tokenizer as tokenizer_module
from lsai_lab.data.dataset import Dataset, file_facts, find_datasets, read_meta
from lsai_lab.data.documents import (
    MB,
    MIN_FILES,
    SPLITS,
    Corpus,
    Document,
    documents,
    progress_bar,
    split_of,
    survey,
)
from lsai_lab.data.tokenizer import EOT, EOT_ID, encode_documents, train_tokenizer

# raise it when a change of code in this package, not of a constant, changes the tokens of the same
# text
PIPELINE = 2
KINDS = {
    "stdlib": "sources of this Python's standard library; works everywhere, offline",
    "polish-docs": "Polish documentation from Debian packages (7.6 MB on Debian 12); needs apt-get",
    "speakleash:<name>": "a Polish dataset of speakleash.org; needs the network once",
    "file:<path or glob>": "local .txt, .jsonl, .jsonl.zst or .parquet files",
}


@dataclass(frozen=True)
class Source:
    """`slug` begins the dataset's folder name; a `remote` source is prepared once per request, a
    local one per content. `open(raw, progress)` fetches what is missing into the cache folder `raw`
    and returns the corpus."""

    slug: str
    remote: bool
    open: Callable[[Path, bool], Corpus]


def parse_source(text: str) -> Source:
    """The source that a config names; `UserError` for an unknown kind or a missing name."""
    # with requests, which a prepared dataset does not need
    from lsai_lab.data import polish_docs, speakleash

    kind, colon, name = text.partition(":")
    if text == "stdlib":
        return Source("stdlib", False, local.open_stdlib)
    if text == "polish-docs":
        return Source("polish-docs", True, polish_docs.open_corpus)
    if kind == "speakleash" and name:
        return Source(f"speakleash-{_slug(name)}", True, partial(speakleash.open_corpus, name))
    if kind == "file" and name:
        return Source(
            f"file-{_slug(Path(name).name.split('.')[0])}", False, partial(local.open_files, name)
        )
    hint = (
        f"{kind}: needs a name after the colon"
        if colon and not name
        else f"unknown source {text!r}"
    )
    raise UserError(f"{hint}; sources are {', '.join(KINDS)}")


def _slug(text: str) -> str:
    """A file name made from any text: at most 40 characters of a-z 0-9 and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "data"


def prepare(config: DataConfig, root: Path, *, progress: bool = True) -> Dataset:
    """The dataset that `config` describes, below `root`; built if it is not there yet.

    Raises `UserError` for a source that is unknown, unreachable, empty or too small, a damaged
    file, a `root` that cannot be written.
    """
    source, request = parse_source(config.source), _request(config)
    try:
        corpus, wanted = _wanted(source, request, root, progress)
        if found := _find(root, source, wanted):
            return Dataset(found)
        (root / "datasets").mkdir(parents=True, exist_ok=True)
        with FileLock(root / "datasets" / f".{source.slug}-{next(iter(wanted.values()))}.lock"):
            if found := _find(root, source, wanted):
                return Dataset(found)
            return _build(
                config,
                request,
                source,
                corpus or source.open(root / "raw", progress),
                root,
                progress,
            )
    except OSError as error:  # a full or read-only disk is the user's to mend
        where = f"{error.filename or root}: {error.strerror}"
        advice = "free space, mend its permissions, or set LSAI_DATA to another folder"
        raise UserError(f"cannot prepare the data at {where}; {advice}") from error


def prepared_id(config: DataConfig, root: Path) -> str:
    """The id of the prepared dataset that `config` means now, `""` if there is none; it fetches,
    builds and writes nothing."""
    with contextlib.suppress(UserError, OSError):
        source = parse_source(config.source)
        if found := _find(root, source, _wanted(source, _request(config), root, progress=False)[1]):
            return str(read_meta(found)["id"])
    return ""


def _wanted(
    source: Source, request: str, root: Path, progress: bool
) -> tuple[Corpus | None, dict[str, str]]:
    """What the meta.json of the dataset says; of a local source also its corpus, which decides
    that."""
    if source.remote:
        return None, {"request": request}
    corpus = source.open(root / "raw", progress)
    return corpus, {"id": _digest([request, corpus.fingerprint])}


def _build(
    config: DataConfig, request: str, source: Source, corpus: Corpus, root: Path, progress: bool
) -> Dataset:
    dataset_id = _digest([request, corpus.fingerprint])
    final = root / "datasets" / f"{source.slug}-{dataset_id}"
    # it was not found, so its meta.json is missing or damaged: opening it says so
    if final.exists():
        return Dataset(final)
    building = final.parent / f".{final.name}.part"
    # left by a killed process; ours, because we hold the lock
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        meta = _write_files(config, corpus, building, progress)
        if (
            not source.remote
            and source.open(root / "raw", progress).fingerprint != corpus.fingerprint
        ):
            raise UserError(
                f"{config.source} changed while it was being read; try again when it is complete"
            )
        created = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {"pipeline": PIPELINE, "id": dataset_id, "request": request, "created": created}
        write_json(building / "meta.json", facts | meta)
        os.rename(building, final)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Dataset(final)


def _write_files(
    config: DataConfig, corpus: Corpus, folder: Path, progress: bool
) -> dict[str, Any]:
    """Write tokenizer.json and the token files; return the body of meta.json."""
    whole_files = corpus.cut_files >= MIN_FILES

    def read() -> Iterator[Document]:
        return documents(corpus, config.max_mb, config.split_seed, whole_files)

    try:
        thresholds = survey(read(), config.source)
    except UserError:
        if not whole_files:
            raise
        whole_files = False  # max_mb ends the text in one of the first files
        thresholds = survey(read(), config.source)
    used = 0

    def training_texts() -> Iterator[str]:
        """Of the training documents, in order, up to `tokenizer_mb` (at least one)."""
        nonlocal used
        for document in read():
            if split_of(document, thresholds) != SPLITS[0]:
                continue
            if used and used + document.size > config.tokenizer_mb * MB:
                return
            used += document.size
            bar.update(document.size)
            yield document.text

    with progress_bar(progress, desc="tokenizer", unit="B", unit_scale=True) as bar:
        tokenizer = train_tokenizer(training_texts(), config.vocab_size)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    with progress_bar(progress, desc="encoding", unit="B", unit_scale=True) as bar:
        stats = encode_documents(read(), thresholds, tokenizer, folder, bar)
    if empty := [name for name in SPLITS if not stats[name]["tokens"]]:
        raise UserError(
            f"{config.source}: no document fell into {empty[0]}; use another split_seed or more "
            f"text"
        )
    return {
        "config": config.model_dump(),
        "source": corpus.description,
        "fingerprint": corpus.fingerprint,
        "tokenizer": {
            "kind": "byte-level BPE",
            "vocab_size": tokenizer.get_vocab_size(),
            "end_of_text": {"token": EOT, "id": EOT_ID},
            "trained_on_bytes": used,
        },
        "splits": {
            n: stat | {"bytes_per_token": stat["bytes"] / stat["tokens"]}
            for n, stat in stats.items()
        },
        "files": {
            name: file_facts(folder / name)
            for name in [*(f"{name}.bin" for name in SPLITS), "tokenizer.json"]
        },
    }


def _find(root: Path, source: Source, wanted: dict[str, str]) -> Path | None:
    """The newest dataset folder of this source whose meta.json says what is `wanted`."""
    matches = []
    for folder in find_datasets(root):
        # a damaged neighbour is reported when it is opened itself
        with contextlib.suppress(UserError):
            if (
                folder.name.startswith(f"{source.slug}-")
                and (meta := read_meta(folder)).items() >= wanted.items()
            ):
                matches.append((str(meta.get("created", "")), folder))
    return max(matches)[1] if matches else None


def _request(config: DataConfig) -> str:
    """A hash over all that decides the tokens of a text: the config, and the constants of the
    modules that make tokens."""
    rules = {
        f"{module.__name__}.{name}": repr(value)
        for module in (documents_module, local, tokenizer_module)
        for name, value in vars(module).items()
        if name[0].isupper() and name.isupper()
    }
    return _digest([PIPELINE, rules, config.model_dump()])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
