"""How fast preparing data is, against the tokenizer alone on the same text, and how much memory it takes.

The text is a source's, repeated until it has the asked size; in every copy a tenth of the lines get other words (their
letters are rotated), so that the tokenizer's word cache does not know everything after the first copy. Order: the first
half through `encode_batch` alone, then all of it through `prepare` in a process of its own (so that its peak memory is
its own), then the second half through `encode_batch`. A drift of the machine's speed thus meets both sides alike.
`encode_batch` is timed without reading, conversion and writing, with the same tokenizer.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import resource
import string
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer

from lsai_core.config import DataConfig
from lsai_core.strict import validated
from lsai_lab.data.documents import MB, documents
from lsai_lab.data.prepare import prepare, training_text
from lsai_lab.data.progress import progress_bar
from lsai_lab.data.sources import parse_source
from lsai_lab.data.split import survey
from lsai_lab.data.tokenizer import train_tokenizer

MIB = 1 << 20
RAW_BATCH = 8 * MB  # large, so that long documents do not leave cores idle: the baseline is meant to be strong


def bench(source: str, mb: float, vocab_size: int, root: Path, progress: bool = True) -> dict[str, Any]:
    """Measure on `mb` (10^6 bytes) of text from `source`; about 3 x `mb` of disk below `root` is used and freed.

    Returns MB/s of `encode_batch`, of the pipeline's encoding stage (read, split, encode, write, checksum) and of the
    whole `prepare`; their ratios to `encode_batch`; and the peak resident memory of `prepare` in MiB.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".bench-") as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        size = _write_corpus(corpus, source, mb, root, progress)
        config = validated(DataConfig, {"source": f"file:{corpus}", "vocab_size": vocab_size}, "lsai data bench")
        tokenizer = _tokenizer(config, folder)
        first = _encode_batch(tokenizer, config, folder, (0, size // 2), progress)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            meta, wall, rss = pool.submit(_measured_prepare, config, folder, progress).result()
        second = _encode_batch(tokenizer, config, folder, (size // 2, size), progress)
    raw = size / MB / (first + second)
    encoding, whole = size / MB / meta["seconds"]["encoding"], size / MB / wall
    return {
        "text_mb": round(size / MB, 1),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "tokenizers": tokenizers.__version__,
        "encode_batch_mb_s": round(raw, 2),
        "encoding_mb_s": round(encoding, 2),
        "encoding_ratio": round(encoding / raw, 2),
        "prepare_mb_s": round(whole, 2),
        "prepare_ratio": round(whole / raw, 2),
        "prepare_peak_rss_mib": round(rss / MIB),
    }


def _write_corpus(path: Path, source: str, mb: float, root: Path, progress: bool) -> int:
    """Write about `mb` of text as JSONL; return its size in bytes of UTF-8."""
    texts = list(parse_source(source).open(root / "raw", progress).texts())
    size, rng = 0, random.Random(0)
    letters = string.ascii_lowercase
    with path.open("w", encoding="utf-8") as file, progress_bar(progress, desc="text", total=int(mb * MB)) as bar:
        for copy in itertools.count():
            turned = letters[copy % 26 :] + letters[: copy % 26]
            table = str.maketrans(letters, turned)
            for text in texts:
                lines = (line.translate(table) if rng.random() < 0.1 else line for line in text.splitlines(True))
                varied = "".join(lines)
                file.write(json.dumps({"text": varied}, ensure_ascii=False) + "\n")
                added = len(varied.encode())
                size += added
                bar.update(added)
                if size >= mb * MB:
                    return size
    raise AssertionError("unreachable")


def _tokenizer(config: DataConfig, folder: Path) -> Tokenizer:
    """The tokenizer that `prepare` will train (training is deterministic)."""
    corpus = parse_source(config.source).open(folder, False)
    splitter = survey(documents(corpus, None, config.split_seed), config.source)
    read = documents(corpus, None, config.split_seed)
    with progress_bar(False) as bar:
        return train_tokenizer(training_text(read, splitter, config.tokenizer_mb, [0], bar), config.vocab_size)


def _encode_batch(
    tokenizer: Tokenizer, config: DataConfig, folder: Path, span: tuple[int, int], progress: bool
) -> float:
    """Seconds that `encode_batch` alone takes for the documents whose first byte lies in `span`."""
    seconds = 0.0
    corpus = parse_source(config.source).open(folder, False)
    total = span[1] - span[0]
    with progress_bar(progress, desc="encode_batch alone", total=total, unit="B", unit_scale=True) as bar:
        for batch, size in _text_batches(documents(corpus, None, config.split_seed), span):
            started = time.perf_counter()
            encodings = tokenizer.encode_batch(batch)
            seconds += time.perf_counter() - started
            del encodings  # freeing is not part of the baseline
            bar.update(size)
    return seconds


def _text_batches(read: Iterator[Any], span: tuple[int, int]) -> Iterator[tuple[list[str], int]]:
    batch: list[str] = []
    position = size = 0
    for document in read:
        if span[0] <= position < span[1]:
            batch.append(document.text)
            size += document.size
        position += document.size
        if size >= RAW_BATCH:
            yield batch, size
            batch, size = [], 0
    if batch:
        yield batch, size


def _measured_prepare(config: DataConfig, root: Path, progress: bool) -> tuple[dict[str, Any], float, int]:
    """meta.json, wall seconds and peak resident memory (bytes) of one `prepare`."""
    started = time.perf_counter()
    meta = prepare(config, root, progress=progress).meta
    return meta, time.perf_counter() - started, peak_rss()


def peak_rss() -> int:
    """Peak resident memory of this process in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the memory that the parent had when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
