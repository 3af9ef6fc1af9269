"""Downloads that end whole or not at all.

A file is fetched into `<name>.part` and renamed when its size agrees with the server's and its content passes the
caller's check. A broken connection is retried with growing pauses and continues where it stopped (HTTP Range, RFC 9110
section 14); `If-Range` makes the server start over if the file has changed meanwhile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any, BinaryIO, TypeVar

import requests
from filelock import FileLock

from lsai_core.errors import UserError
from lsai_lab.data.documents import progress_bar

T = TypeVar("T")
ATTEMPTS = 5
BACKOFF_S = 0.5
TIMEOUT_S = (10, 60)  # connect, read
CHUNK = 64 << 10  # a broken connection loses less than one chunk
MAX_JSON = 16 << 20
RETRY_STATUS = {408, 416, 425, 429, 500, 502, 503, 504}


class NotFound(UserError):
    """The server answered 404."""


class _Broken(Exception):
    """A fault that a retry may mend."""


def get_json(url: str) -> Any:
    """Fetch and parse a small JSON file. Raises `NotFound`, or `UserError` for any other failure."""

    def get() -> Any:
        with requests.get(url, timeout=TIMEOUT_S, stream=True) as response:
            _check_status(response, url)
            body = b""
            for chunk in response.iter_content(CHUNK):
                body += chunk
                if len(body) > MAX_JSON:
                    raise UserError(f"{url}: more than {MAX_JSON >> 20} MiB of JSON; is this the right server?")
            try:
                return json.loads(body, parse_constant=_no_number)
            except (ValueError, RecursionError):
                raise UserError(f"{url}: the answer is not JSON; is this the right server?") from None

    return _retry(url, get)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def size_in_bytes(value: Any, where: str) -> int | None:
    """A size that a server states, None if it states none. Raises `UserError` for what is no whole number."""
    if value in (None, "", 0):
        return None
    if re.fullmatch("[0-9]{1,18}", str(value)):
        return int(value)
    raise UserError(f"{where} is {str(value)[:40]!r}, not a size in bytes; try again later")


def download(url: str, path: Path, *, expected: int | None, check: Callable[[Path], None], progress: bool) -> Path:
    """Fetch `url` to `path` unless it is there already.

    `expected` is the size in bytes that another authority states, `check` raises `UserError` if the content is not
    whole. One process downloads, others wait. Raises `NotFound`, or `UserError` for any other failure; then `path` does
    not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part, seen = path.with_name(f"{path.name}.part"), dict[str, str]()
    with FileLock(path.with_name(f".{path.name}.lock")):
        if path.exists():
            return path
        try:
            with part.open("wb") as file:
                _retry(url, lambda: _fetch(url, file, seen, expected, progress), file.tell)
            try:
                check(part)
            except UserError as error:
                raise UserError(f"{url}: the download is damaged ({error}); try again") from None
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
    return path


def _fetch(url: str, file: BinaryIO, seen: dict[str, str], expected: int | None, progress: bool) -> None:
    """One request that completes `file`, or raises, mostly with more in `file` than before. `seen["tag"]`: of which version it is."""
    have = file.tell()
    resume = {"Range": f"bytes={have}-", "If-Range": seen["tag"]} if have and seen.get("tag") else {}
    headers = {"Accept-Encoding": "identity"} | resume
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
        told, status = response.headers, response.status_code
        resumed = status == 206 and told.get("Content-Range", "").startswith(f"bytes {have}-")
        if status in (200, 206, 416) and not resumed:
            file.truncate(file.seek(0))
        _check_status(response, url)
        if status == 206 and not resumed:
            raise _Broken("the server continued at the wrong place")
        length = size_in_bytes(told.get("Content-Length"), f"{url}: Content-Length")
        total = file.tell() + length if length is not None else expected
        if expected is not None and total != expected:
            sizes = f"the server sends {total} bytes but its manifest says {expected}"
            raise UserError(f"{url}: {sizes}; it may be updating, try later")
        # A weak ETag must not be used with If-Range; the date is the next best (RFC 9110, section 13.1.5).
        tags = (told.get("ETag", ""), told.get("Last-Modified", ""))
        seen["tag"] = next((tag for tag in tags if tag.isascii() and tag and not tag.startswith("W/")), "")
        options: dict[str, Any] = {"total": total, "initial": file.tell(), "unit": "B", "unit_scale": True}
        with progress_bar(progress, desc=url.rpartition("/")[2], **options) as bar:
            for chunk in response.iter_content(CHUNK):
                bar.update(file.write(chunk))
                if expected is not None and file.tell() > expected:
                    break  # of a length that the server did not state
    if total is not None and file.tell() != total:
        raise _Broken(f"{file.tell()} of {total} bytes arrived")


def _retry(url: str, action: Callable[[], T], done: Callable[[], int] = lambda: 0) -> T:
    """The result of `action`, tried again after faults of the network; one that moved `done` further than ever resets the count."""
    failures, most = 0, done()
    while True:
        try:
            return action()
        except (_Broken, requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            now = done()
            failures, most = (1 if now > most else failures + 1), max(most, now)
            if failures >= ATTEMPTS:
                reason = "no connection" if isinstance(error, requests.ConnectionError) else error
                raise UserError(f"{url}: gave up after {ATTEMPTS} attempts ({reason}); try again later") from error
            sleep(BACKOFF_S * 2 ** (failures - 1))
        except requests.RequestException as error:
            raise UserError(f"{url}: {error}") from error


def _check_status(response: requests.Response, url: str) -> None:
    if response.status_code == 404:
        raise NotFound(f"{url}: not found on the server (404)")
    if response.status_code in RETRY_STATUS:
        raise _Broken(f"status {response.status_code} {response.reason}")
    if response.status_code not in (200, 206):
        raise UserError(f"{url}: the server answered {response.status_code} {response.reason}")
