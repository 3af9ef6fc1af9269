"""Local sources: the standard library and files of the user. Their content is hashed each time they are opened.

`stdlib`: one document per .py file (code with its documentation strings), sorted by path, without tests and installed
packages. `file:`: every file that the path or glob (`**` works) matches, sorted; see `readers` for the kinds. A
relative path is looked up in the current folder first, then in the checkout.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from lsai_core.errors import UserError
from lsai_lab.data.documents import Corpus, Part, slug_of
from lsai_lab.data.readers import SUFFIXES, TEXT_SUFFIXES, document_target, read_texts
from lsai_lab.files import repo_root

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class StdlibSource:
    """The .py files of this Python's standard library."""

    slug, remote = "stdlib", False

    def open(self, raw: Path, progress: bool) -> Corpus:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(_library_files(root))
        if not files:
            raise UserError(f"no .py files of the standard library at {root}; use another data.source")

        def texts() -> Iterator[str]:
            for path in files:
                yield path.read_text(encoding="utf-8", errors="replace")

        description = {"kind": "stdlib", "python": platform.python_version(), "files": len(files)}
        return Corpus(_fingerprint(files, root), description, texts)


def _library_files(root: Path) -> Iterator[Path]:
    """Without entering folders of installed packages, which may hold a hundred times as many files."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


class FileSource:
    """The files that a path or glob matches."""

    remote = False

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.slug = "file-" + slug_of(Path(pattern).name.split(".")[0])

    def open(self, raw: Path, progress: bool) -> Corpus:
        files = self._files()
        target = document_target(
            sum(path.stat().st_size for path in files if path.name.lower().endswith(TEXT_SUFFIXES))
        )
        before = [_stamp(path) for path in files]
        fingerprint = _fingerprint(files, None)

        def texts() -> Iterator[str | Part]:
            for path in files:
                if path.name.lower().endswith(TEXT_SUFFIXES):
                    content = _content(path)
                    yield from (Part(text, content) for text in read_texts(path, target))
                else:
                    yield from read_texts(path, target)

        def unchanged() -> bool:
            return [_stamp(path) for path in files] == before

        description = {"kind": "file", "pattern": self.pattern, "files": len(files), "bytes": sum(b for b, _ in before)}
        cut_files = sum(path.name.lower().endswith(TEXT_SUFFIXES) for path in files)
        return Corpus(fingerprint, description, texts, unchanged, cut_files)

    def _files(self) -> list[Path]:
        pattern = os.path.expanduser(self.pattern)
        matches = glob.glob(pattern, recursive=True)
        if not matches and not os.path.isabs(pattern):
            matches = glob.glob(str(repo_root() / pattern), recursive=True)
        files = sorted(Path(match) for match in matches if os.path.isfile(match))
        if not files:
            folder = " (a folder needs a glob, such as file:folder/*.txt)" if matches else ""
            raise UserError(f"file:{self.pattern}: no such file{folder}")
        for path in files:
            if not path.name.lower().endswith(SUFFIXES):
                raise UserError(f"{path}: cannot be read as text; known kinds: {' '.join(SUFFIXES)}")
        return files


def _fingerprint(files: list[Path], root: Path | None) -> str:
    """Hash over names (relative to `root`, or alone) and contents."""
    total = hashlib.blake2b(digest_size=16)
    for path in files:
        name = path.relative_to(root).as_posix() if root else path.name
        total.update(f"{name}\0".encode() + _content(path))
    return total.hexdigest()


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
