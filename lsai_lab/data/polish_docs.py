"""`polish-docs`: real Polish text that any Debian or Ubuntu machine can fetch without root.

`apt-get download` brings the packages libreoffice-help-pl (the help of LibreOffice, HTML) and manpages-pl (manual
pages, roff), `dpkg-deb -x` unpacks them, and `plaintext` turns each page into plain text. The texts are kept in the raw
cache as one JSONL file, so that this happens once.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from lsai_core.errors import UserError
from lsai_core.files import atomic_writer
from lsai_lab.data.documents import Corpus, progress_bar
from lsai_lab.data.plaintext import html_to_text, roff_to_text
from lsai_lab.data.readers import json_texts

PACKAGES = ("libreoffice-help-pl", "manpages-pl")
MIN_CHARS = 200  # shorter pages are redirections (".so man1/other.1") and stubs


class PolishDocsSource:
    """The Polish documentation packages of this machine's distribution."""

    slug, remote = "polish-docs", True

    def open(self, raw: Path, progress: bool) -> Corpus:
        path = raw / "polish-docs" / "documents.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            if not path.exists():
                _fetch(path, progress)

        def texts() -> Iterator[str]:
            return json_texts(path)

        packages = sorted({json.loads(line)["meta"]["package"] for line in path.open("rb")})
        description = {"kind": "polish-docs", "packages": packages, "bytes": path.stat().st_size}
        return Corpus(hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest(), description, texts)


def _fetch(path: Path, progress: bool) -> None:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise UserError(
                f"polish-docs needs {tool}, which this machine lacks; use data.source stdlib, file:<path> or "
                "speakleash:<name>, or copy data/datasets/ from a Debian or Ubuntu machine"
            )
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unpack-") as name:
        folder = Path(name)
        _call(["apt-get", "download", *PACKAGES], folder, "is the network up, and has `apt-get update` been run?")
        packages = sorted(folder.glob("*.deb"))
        if len(packages) < len(PACKAGES):
            raise UserError(f"apt-get download brought only {[p.name for p in packages]} of {', '.join(PACKAGES)}")
        count = 0
        with atomic_writer(path) as file:
            for package in packages:
                files = folder / package.stem
                _call(["dpkg-deb", "-x", package.name, files.name], folder, "the package may be damaged, try again")
                for text in progress_bar(progress, _pages(files), desc=package.name.split("_")[0], unit=" pages"):
                    record = {"text": text, "meta": {"package": package.stem}}
                    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                    count += 1
            if not count:
                raise UserError(f"{', '.join(p.name for p in packages)} hold no HTML or manual pages")


def _pages(folder: Path) -> Iterator[str]:
    """The texts of all distinct pages, sorted by path."""
    seen: set[str] = set()
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        if path.suffix == ".html":
            text = html_to_text(path.read_text(encoding="utf-8", errors="replace"))
        elif path.suffix == ".gz" and "man" in path.parts:
            text = roff_to_text(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))
        else:
            continue
        if len(text) >= MIN_CHARS and text not in seen:
            seen.add(text)
            yield text


def _call(command: list[str], folder: Path, hint: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"`{' '.join(command)}` failed: {lines[-1]}; {hint}")
