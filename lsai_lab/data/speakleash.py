"""Speakleash (speakleash.org): a public collection of Polish text, as its own client
(github.com/speakleash/speakleash) finds it.

    <base>/speakleash.json      the index: [{"name": ...}, ...]
    <base>/<name>.manifest      JSON: description, license, category, stats, and file_size, the size
                                in bytes of the next
    <base>/<name>.jsonl.zst     records {"text": str or list of str, "meta": {...}}, zstd
                                (lm_dataformat)

A download is whole or does not exist: it becomes the file when as much has arrived as the server
states, and it decodes. Manifests are not always as new as their files: a size that differs is told,
and refused only if it is another file's (`OTHER_FILE`). A broken connection continues where it
stopped (HTTP Range, RFC 9110 section 14), or begins anew if the file has changed meanwhile
(`If-Range`).
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any, BinaryIO, TypeVar

import requests
from filelock import FileLock

from lsai_core.base.errors import UserError, hint
from lsai_core.base.files import write_json
from lsai_lab.data.documents import Corpus, progress_bar
from lsai_lab.data.local import BUFFER, json_texts, open_stream
from lsai_lab.project.files import content_hash

T = TypeVar("T")
# since May 2024; before: speakleash.space
DEFAULT_URL = "https://d6t0.c15.e2-2.dev/speakleash-ds-pub/datasets_text/"
ATTEMPTS = 5
BACKOFF_S = 0.5
TIMEOUT_S = (10, 60)  # connect, read
CHUNK = 64 << 10  # a broken connection loses less than one chunk
MAX_JSON = 16 << 20
# a file so many times as large as its manifest says, or as small, is not the one that it describes
OTHER_FILE = 2
RETRY_STATUS = {408, 416, 425, 429, 500, 502, 503, 504}


class NotFound(UserError):
    """The server answered 404."""


class _Broken(Exception):
    """A fault that a retry may mend."""


def base_url() -> str:
    """Where the collection is: $LSAI_SPEAKLEASH_URL, else the public place; ends with a slash."""
    return (os.environ.get("LSAI_SPEAKLEASH_URL") or DEFAULT_URL).rstrip("/") + "/"


def list_names() -> list[str]:
    """The names of all datasets: one request."""
    index = _get_json(base_url() + "speakleash.json", list)
    return sorted(str(item["name"]) for item in index if isinstance(item, dict) and "name" in item)


def get_manifest(name: str) -> dict[str, Any]:
    """The manifest of one dataset. Raises `UserError` with the nearest names if there is none of
    this name."""
    try:
        return _get_json(f"{base_url()}{name}.manifest", dict)
    except NotFound:
        raise UserError(f"Speakleash has no dataset {name!r}{hint(name, list_names())}") from None


def open_corpus(name: str, raw: Path, progress: bool) -> Corpus:
    """One dataset of the collection. What is in the raw cache is complete and is used without
    asking the network."""
    if not re.fullmatch(r"[\w.\-]+", name) or name.startswith("."):  # it becomes a file's
        raise UserError(
            f"speakleash:{name}: a name has letters, digits, dots, dashes and underscores only"
        )
    data, manifest_file = (
        raw / "speakleash" / f"{name}{suffix}" for suffix in (".jsonl.zst", ".manifest")
    )
    manifest = None
    if data.exists():
        with contextlib.suppress(OSError, ValueError):
            manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    if not isinstance(manifest, dict):
        manifest = get_manifest(name)
        _download(base_url() + data.name, data, _stated_size(name, manifest), progress)
        write_json(manifest_file, manifest)
    stats = manifest["stats"] if isinstance(manifest.get("stats"), dict) else {}
    description: dict[str, Any] = {
        "kind": "speakleash",
        "name": name,
        "url": base_url(),
        "bytes": data.stat().st_size,
    }
    description |= {
        key: manifest.get(key) for key in ("description", "license", "category", "file_size")
    }
    description |= {key: stats.get(key) for key in ("documents", "characters")}
    return Corpus(
        content_hash(data).hexdigest(), description, lambda: json_texts(data), download=data
    )


def _stated_size(name: str, manifest: dict[str, Any]) -> int | None:
    """The size of the file by its manifest, bytes (527, 527.0 or "527"); None if it states none."""
    size = manifest.get("file_size") or None
    if size is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}(\.0*)?", str(size)):
        what = f"file_size is {str(size)[:40]!r}, not a size in bytes"
        raise UserError(f"{base_url()}{name}.manifest: {what}; try again later")
    return int(float(size)) if isinstance(size, float) else int(str(size).partition(".")[0])


def _get_json(url: str, kind: type) -> Any:
    """Fetch and parse a small JSON file, which holds a `kind`. Raises `NotFound`, or `UserError`
    for any other failure."""

    def get() -> Any:
        with requests.get(url, timeout=TIMEOUT_S, stream=True) as response:
            _check_status(response, url)
            body = next(response.iter_content(MAX_JSON + 1), b"")
        if len(body) > MAX_JSON:
            raise UserError(
                f"{url}: more than {MAX_JSON >> 20} MiB of JSON; is this the right server?"
            )
        try:
            found = json.loads(body, parse_constant=str)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, kind):
            raise UserError(
                f"{url}: the answer is no JSON {kind.__name__}; is LSAI_SPEAKLEASH_URL right?"
            )
        return found

    return _retry(url, get)


def _download(url: str, path: Path, expected: int | None, progress: bool) -> None:
    """Fetch `url`, of `expected` bytes by its manifest, to `path` unless it is there; one process
    at a time. UserError: no `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part, seen = path.with_name(f"{path.name}.part"), dict[str, str]()
    with FileLock(path.with_name(f".{path.name}.lock")):
        if path.exists():
            return
        try:
            with part.open("wb") as file:
                _retry(url, lambda: _fetch(url, file, seen, expected, progress), file.tell)
            with open_stream(part, "zstd") as file:
                while file.read(BUFFER):
                    pass
            if expected and (size := part.stat().st_size) != expected:
                print(
                    f"note: {url}: {size} bytes, {expected} by its manifest; it decodes whole and "
                    f"is used",
                    file=sys.stderr,
                )
            part.rename(path)
        except OSError as error:
            if error.errno is not None:  # the disk's fault, not the file's
                raise
            raise UserError(f"{url}: the download is damaged ({error}); try again") from None
        finally:
            part.unlink(missing_ok=True)


def _fetch(
    url: str, file: BinaryIO, seen: dict[str, str], expected: int | None, progress: bool
) -> None:
    """One request that completes `file`, or raises, mostly with more in `file` than before.
    `seen["tag"]`: of which version it is."""
    have = file.tell()
    resume = (
        {"Range": f"bytes={have}-", "If-Range": seen["tag"]} if have and seen.get("tag") else {}
    )
    headers = {"Accept-Encoding": "identity"} | resume
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
        told, status = response.headers, response.status_code
        resumed = status == 206 and told.get("Content-Range", "").startswith(f"bytes {have}-")
        if status in (200, 206, 416) and not resumed:
            file.truncate(file.seek(0))
        _check_status(response, url)
        if status == 206 and not resumed:
            raise _Broken("the server continued at the wrong place")
        length = told.get("Content-Length", "")
        stated = length.isdecimal() and len(length) <= 18
        total = file.tell() + int(length) if stated else expected
        if total and expected and not expected / OTHER_FILE <= total <= expected * OTHER_FILE:
            raise UserError(
                f"{url}: {total} bytes, but its manifest says {expected}; it may be updating, try "
                f"later"
            )
        # A weak ETag must not be used with If-Range; the date is the next best (RFC 9110, section
        # 13.1.5).
        tags = (told.get("ETag", ""), told.get("Last-Modified", ""))
        seen["tag"] = next(
            (tag for tag in tags if tag.isascii() and tag and not tag.startswith("W/")), ""
        )
        options: dict[str, Any] = {
            "total": total,
            "initial": file.tell(),
            "unit": "B",
            "unit_scale": True,
        }
        with progress_bar(progress, desc=url.rpartition("/")[2], **options) as bar:
            for chunk in response.iter_content(CHUNK):
                bar.update(file.write(chunk))
                if total is not None and file.tell() > total:
                    break  # of a length that the server did not state
    if total is not None and file.tell() != total:
        raise _Broken(f"{file.tell()} of {total} bytes arrived")


def _retry(url: str, action: Callable[[], T], done: Callable[[], int] = lambda: 0) -> T:
    """The result of `action`, tried again after faults of the network; one that moved `done`
    further than ever resets the count."""
    failures, most = 0, done()
    while True:
        try:
            return action()
        except (
            _Broken,
            requests.ConnectionError,
            requests.Timeout,
            requests.exceptions.ChunkedEncodingError,
        ) as error:
            now = done()
            failures, most = (1 if now > most else failures + 1), max(most, now)
            if failures >= ATTEMPTS:
                reason = "no connection" if isinstance(error, requests.ConnectionError) else error
                raise UserError(
                    f"{url}: gave up after {ATTEMPTS} attempts ({reason}); try again later"
                ) from error
            sleep(BACKOFF_S * 2 ** (failures - 1))
        # the latter for a redirection to no address
        except (requests.RequestException, ValueError) as error:
            raise UserError(f"{url}: {error}") from error


def _check_status(response: requests.Response, url: str) -> None:
    if response.status_code == 404:
        raise NotFound(f"{url}: not found on the server (404)")
    if response.status_code in RETRY_STATUS:
        raise _Broken(f"status {response.status_code} {response.reason}")
    if response.status_code not in (200, 206):
        raise UserError(f"{url}: the server answered {response.status_code} {response.reason}")
