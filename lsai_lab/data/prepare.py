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
from collections import Counter
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
    TooFew,
    documents,
    progress_bar,
    split_of,
    survey,
    with_records_cut,
)
from lsai_lab.data.pretokenized import open_tokens, write_splits
from lsai_lab.data.tokenizer import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    Encoder,
    encode_documents,
    eos_token,
    given_encoder,
    given_tokenizer,
    own_encoder,
    train_tokenizer,
)
from lsai_lab.project.files import content_hash

# raise it when a change of code in this package, not of a constant, changes the tokens of the same
# text
PIPELINE = 2
KINDS = {
    "stdlib": "sources of this Python's standard library; works everywhere, offline",
    "polish-docs": "Polish documentation from Debian packages (7.6 MB on Debian 12); needs apt-get",
    "debian-docs": "133 MB of Debian 12's documentation, each line once; needs the network once",
    "speakleash:<name>": "a Polish dataset of speakleash.org; needs the network once",
    "tokens:<path or glob>": "local .npy files of token ids, with --vocab-size or --tokenizer",
    "file:<path or glob>": "local .txt, .jsonl, .json, .csv (also .gz, .zst) or .parquet files",
}


@dataclass(frozen=True)
class Source:
    """`slug` begins the dataset's folder name; a `remote` source is prepared once per request, a
    local one per content. `open(raw, progress)` fetches what is missing into the cache folder `raw`
    and returns the corpus."""

    slug: str
    remote: bool
    open: Callable[[Path, bool], Corpus]


def parse_source(config: DataConfig) -> Source:
    """The source that a config names; `UserError` for an unknown kind or a missing name."""
    # with requests, which a prepared dataset does not need
    from lsai_lab.data import debian_docs, polish_docs, speakleash

    text, column = config.source, config.column
    kind, colon, name = text.partition(":")
    if kind == "tokens" and config.max_mb is not None:
        raise UserError(
            "data.max_mb counts text, of which tokens:<path or glob> has none; leave it out"
        )
    if kind != "file" and column != DataConfig().column:
        raise UserError(
            f"data.column={column!r} names the text of records in file:<path or glob>; {text!r} "
            f"has none"
        )
    if text == "stdlib":
        return Source("stdlib", False, local.open_stdlib)
    if text == "polish-docs":
        return Source("polish-docs", True, polish_docs.open_corpus)
    if text == "debian-docs":
        return Source("debian-docs", True, debian_docs.open_corpus)
    if kind == "speakleash" and name:
        return Source(f"speakleash-{_slug(name)}", True, partial(speakleash.open_corpus, name))
    if kind == "file" and name:
        return Source(
            f"file-{_slug(Path(name).name.split('.')[0])}",
            False,
            partial(local.open_files, name, column),
        )
    if kind == "tokens" and name:
        return Source(
            f"tokens-{_slug(Path(name).name.split('.')[0])}", False, partial(open_tokens, name)
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
    try:
        source, request = parse_source(config), _request(config)
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
        source = parse_source(config)
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
        with _naming(corpus.download):
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


@contextlib.contextmanager
def _naming(download: Path | None) -> Iterator[None]:
    """What is wrong with a text that was fetched also says which file is to be deleted, so that the
    next try fetches it again."""
    try:
        yield
    except UserError as error:
        if download is None:
            raise
        raise UserError(
            f"{error}; if it is the download's fault, delete {download} to fetch it again"
        ) from None


def _write_files(
    config: DataConfig, corpus: Corpus, folder: Path, progress: bool
) -> dict[str, Any]:
    """Write the tokenizer and the token files; return the body of meta.json."""
    encoder, given = None, config.tokenizer and given_tokenizer(config.tokenizer)
    if given:
        encoder = given_encoder(given)
        if encoder.vocab_size > config.vocab_size:
            raise UserError(
                f"{given} has {encoder.vocab_size} tokens, more than "
                f"data.vocab_size={config.vocab_size}; "
                f"set data.vocab_size={encoder.vocab_size} (and a model.vocab_size of at least "
                f"that)"
            )
        shutil.copyfile(given, folder / TOKENIZER)
    about: dict[str, Any] = {"kind": f"given ({given.name})" if given else "byte-level BPE"}
    left_out: Counter[str] = Counter()
    if corpus.rows is not None:
        vocab_size = encoder.vocab_size if encoder else config.vocab_size
        stats = write_splits(config, corpus, vocab_size, folder)
        about |= {} if given else {"kind": "not known"}
    else:
        read, thresholds = _survey(config, corpus)
        if encoder is None:
            encoder, about["trained_on_bytes"] = _trained(config, read, thresholds, progress)
            write_text(folder / TOKENIZER, encoder.tokenizer.to_str(pretty=True))
        with progress_bar(progress, desc="encoding", unit="B", unit_scale=True) as bar:
            stats = encode_documents(read(left_out=left_out), thresholds, encoder, folder, bar)
        if empty := [name for name in SPLITS if not stats[name]["tokens"]]:
            raise UserError(
                f"{config.source}: no document fell into {empty[0]}; use another split_seed or "
                f"more text"
            )
        stats = {
            n: stat | {"bytes_per_token": stat["bytes"] / stat["tokens"]}
            for n, stat in stats.items()
        }
    about["vocab_size"] = encoder.vocab_size if encoder else config.vocab_size
    about["end_of_text"] = {"token": encoder.end_token, "id": encoder.end_id} if encoder else None
    files = [*(f"{name}.bin" for name in SPLITS), *([TOKENIZER] if encoder else [])]
    return {
        "config": config.model_dump(),
        "source": corpus.description,
        "fingerprint": corpus.fingerprint,
        "left_out": dict(left_out),
        "tokenizer": about,
        "splits": stats,
        "files": {name: file_facts(folder / name) for name in files},
    }


def _survey(
    config: DataConfig, corpus: Corpus
) -> tuple[Callable[..., Iterator[Document]], tuple[int, int]]:
    """How the documents are read, the first way of which there are enough for three splits, and the
    keys that divide them."""
    read = partial(documents, corpus, config.max_mb, config.split_seed)
    ways = [read]
    if corpus.cut_files >= MIN_FILES:  # max_mb may end the text in one of the first files
        ways = [partial(read, whole_files=True), read]
    elif not corpus.cut_files:
        ways = [
            read,
            partial(
                documents, with_records_cut(corpus, config.max_mb), config.max_mb, config.split_seed
            ),
        ]
    for way in ways:
        try:
            return way, survey(way(), config.source)
        except TooFew as error:
            reason = error
    raise reason


def _trained(
    config: DataConfig,
    read: Callable[..., Iterator[Document]],
    thresholds: tuple[int, int],
    progress: bool,
) -> tuple[Encoder, int]:
    """A tokenizer trained on the training documents, in order, up to `tokenizer_mb` (at least one),
    and on how many bytes."""
    used = 0

    def texts() -> Iterator[str]:
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
        tokenizer = train_tokenizer(texts(), config.vocab_size)
    return own_encoder(tokenizer), used


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
    """A hash over all that decides the tokens of a text: the config, the given tokenizer, and the
    constants of the modules that make tokens."""
    rules = {
        f"{module.__name__}.{name}": repr(value)
        for module in (documents_module, local, tokenizer_module)
        for name, value in vars(module).items()
        if name[0].isupper() and name.isupper()
    }
    asked = config.model_dump()
    if config.tokenizer is not None:  # by content, not by place; its vocabulary is what it is
        path = given_tokenizer(config.tokenizer)
        del asked["vocab_size"]
        asked["tokenizer"] = [
            content_hash(path).hexdigest(),
            eos_token(path.with_name(TOKENIZER_CONFIG)),
        ]
    return _digest([PIPELINE, rules, asked])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
