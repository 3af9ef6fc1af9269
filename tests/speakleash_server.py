"""A local HTTP server with Speakleash's public layout, and with faults on demand, for tests of the
real client.

Serves `speakleash.json`, `<name>.manifest` and `<name>.jsonl.zst` with Range, If-Range and ETag as
a file server does. Faults of a dataset: `drop_at` closes each connection after so many bytes of a
response's body, the first `drops` times; `statuses` are answered, in turn, before anything else.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pyarrow as pa


@dataclass
class Served:
    """One dataset: its file's bytes, its manifest, its faults."""

    data: bytes
    manifest: dict[str, Any]
    drop_at: int = 0
    drops: int = 0
    statuses: list[int] = field(default_factory=list)


def compress(records: list[Any], frames: int = 1) -> bytes:
    """JSONL, zstd-compressed as this many frames."""
    lines = [json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records]
    step = -(-len(lines) // frames)
    parts = [b"".join(lines[i : i + step]) for i in range(0, len(lines), step)]
    return b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in parts)


class SpeakleashServer:
    """Context manager; `url` is the base URL, `requests` the list of (path, Range header or None)
    served so far."""

    def __init__(self) -> None:
        self.datasets: dict[str, Served] = {}
        self.requests: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append((self.path, self.headers.get("Range")))
                outer._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/datasets_text/"

    def add(self, name: str, records: list[Any], frames: int = 1, **faults: Any) -> Served:
        """Serve a dataset; `faults` are fields of `Served` (or a `manifest` size that is wrong:
        `file_size`)."""
        data = compress(records, frames)
        size = faults.pop("file_size", len(data))
        manifest = {
            "name": name,
            "description": f"test data {name}",
            "license": "CC-BY",
            "category": "test",
            "file_size": size,
            "stats": {"documents": len(records), "characters": sum(len(str(r)) for r in records)},
        }
        served = self.datasets[name] = Served(data, manifest, **faults)
        return served

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        name = request.path.removeprefix("/datasets_text/")
        if name == "speakleash.json":
            return self._send(
                request, 200, json.dumps([{"name": key} for key in self.datasets]).encode()
            )
        base, _, kind = name.partition(".")
        served = self.datasets.get(base)
        if served is None or kind not in ("manifest", "jsonl.zst"):
            return self._send(request, 404, b"no such key")
        if kind == "manifest":
            return self._send(request, 200, json.dumps(served.manifest).encode())
        if served.statuses:
            return self._send(request, served.statuses.pop(0), b"")
        return self._send_data(request, served)

    def _send_data(self, request: BaseHTTPRequestHandler, served: Served) -> None:
        tag = '"' + hashlib.md5(served.data).hexdigest() + '"'
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        start, status, headers = 0, 200, {"ETag": tag, "Accept-Ranges": "bytes"}
        if asked and request.headers.get("If-Range", tag) == tag:
            start, status = int(asked[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(served.data) - 1}/{len(served.data)}"
        if start >= len(served.data):
            return self._send(request, 416, b"", {"Content-Range": f"bytes */{len(served.data)}"})
        cut = None
        if served.drops:
            served.drops -= 1
            cut = served.drop_at
        return self._send(request, status, served.data[start:], headers, cut)

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        request.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            request.send_header(key, value)
        request.end_headers()
        request.wfile.write(body[:cut])
        request.close_connection = True
