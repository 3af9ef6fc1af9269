"""`debian-docs`: 130 MB of English and some Polish technical text, the same for everybody.

`debian_docs.csv` names the documentation packages of Debian 12 and their checksums. Their HTML and
manual pages become plain text, as in `polish_docs`. Of all pages together each line is kept once,
where it first stands, so that frames of pages, chapters that are there twice, and standard phrases
do not repeat, and no line of the training text is in the validation text. The pages then lie in the
order of their hashes. All that happens once, in some ten minutes: the texts stay in the raw cache.

Debian's servers keep the newest version of a package. An older one, from snapshot.debian.org, may
be put into the folder of the raw cache by hand.
"""

import csv
import gzip
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import requests
from filelock import FileLock

from lsai_core.base.errors import UserError
from lsai_core.base.files import atomic_writer
from lsai_lab.data.documents import Corpus, progress_bar
from lsai_lab.data.local import json_texts
from lsai_lab.data.polish_docs import MIN_CHARS, html_to_text, roff_to_text
from lsai_lab.project.files import content_hash

SERVER = "https://deb.debian.org/debian/"
LIST = Path(__file__).with_name("debian_docs.csv")  # path on the server, sha256
HTML = re.compile(r"\.x?html?(\.gz)?$")
OTHER_LANGUAGES = "/translations/"  # of the kernel's documentation
TIMEOUT_S = (10, 60)  # connect, read


def open_corpus(raw: Path, progress: bool) -> Corpus:
    """The pages of all listed packages. UserError: one cannot be fetched, or is damaged."""
    path = raw / "debian-docs" / "documents.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with LIST.open(encoding="utf-8") as file:
        packages = {Path(row["path"]).name: row for row in csv.DictReader(file)}
    with FileLock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            for name, row in progress_bar(progress, packages.items(), desc="packages"):
                _fetch(row["path"], row["sha256"], path.with_name(name))
            files = [path.with_name(name) for name in packages]
            with atomic_writer(path) as out:
                for text in shuffled(once(progress_bar(progress, files, desc="pages"))):
                    out.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
    description = {"kind": "debian-docs", "packages": [*packages], "bytes": path.stat().st_size}
    return Corpus(
        content_hash(path).hexdigest(), description, lambda: json_texts(path), download=path
    )


def _fetch(place: str, sha256: str, path: Path) -> None:
    """Make `path` the package at `place` on the server, if it is not there."""
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
    if found is None:
        body, found = _download(SERVER + place), None
        found = hashlib.sha256(body).hexdigest()
        if found == sha256:
            with atomic_writer(path) as file:
                file.write(body)
    if found != sha256:
        raise UserError(f"{path.name}: sha256 {found}, not {sha256}; delete {path} and try again")


def _download(url: str) -> bytes:
    try:
        response = requests.get(url, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        raise UserError(f"{url}: {type(error).__name__}; is the network up? Try again") from None
    if not response.ok:
        raise UserError(
            f"{url}: the server answered {response.status_code}; snapshot.debian.org keeps older "
            f"versions: put {url.rpartition('/')[2]} into data/raw/debian-docs"
        )
    return response.content


def pages(package: Path) -> Iterator[str]:
    """The texts of the HTML and manual pages of a package, in its order."""
    for name, data in _files(package):
        text = ""
        if OTHER_LANGUAGES in name:
            continue
        if HTML.search(name):
            html = gzip.decompress(data) if name.endswith(".gz") else data
            text = html_to_text(html.decode("utf-8", "replace"))
        elif name.endswith(".gz") and "/man/" in name:
            text = roff_to_text(gzip.decompress(data).decode("utf-8", "replace"))
        if len(text) >= MIN_CHARS:
            yield text


def _files(package: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of a package: an `ar` archive (deb(5)), in which data.tar.*
    holds them."""
    with package.open("rb") as file:
        file.seek(8)  # the archive's signature
        while header := file.read(60):
            name, size = header[:16].decode("ascii").rstrip(" /"), int(header[48:58])
            if name.startswith("data.tar"):
                with tarfile.open(None, "r:*", io.BytesIO(file.read(size))) as archive:
                    for member in archive:
                        content = archive.extractfile(member) if member.isfile() else None
                        if content is not None:
                            yield member.name, content.read()
                return
            file.seek(size + size % 2, io.SEEK_CUR)


def once(packages: Iterable[Path]) -> Iterator[str]:
    """The pages of packages without the lines that stood earlier in any of them, and without pages
    of which less than `MIN_CHARS` is left."""
    seen: set[bytes] = set()
    for package in packages:
        for page in pages(package):
            kept = []
            for line in page.splitlines():
                digest = hashlib.blake2b(line.encode(), digest_size=8).digest()
                if line and digest not in seen:
                    seen.add(digest)
                    kept.append(line)
            text = "\n".join(kept)
            if len(text) >= MIN_CHARS:
                yield text


def shuffled(texts: Iterable[str]) -> list[str]:
    """The texts in the order of their hashes: as good as by chance, and the same everywhere."""
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
