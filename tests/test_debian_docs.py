"""`debian-docs`: packages of Debian become text in which no line stands twice."""

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from lsai_core.base.errors import UserError
from lsai_core.config.strict import validated
from lsai_core.config.train import DataConfig
from lsai_lab.data import Dataset, debian_docs, prepare

WORDS = ("weights", "gradients", "moments", "tokens", "layers", "steps")
FRAME = "<p>This frame stands on every page.</p>"
MAN = (
    ".TH LS 1\n.SH NAME\nls \\- list files\n.PP\nIt lists \\fBall\\fP the files.\n"
    + "And more.\n" * 30
)


def deb(files: dict[str, bytes]) -> bytes:
    """A package as deb(5) has it, with an odd member before the files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    made = b"!<arch>\n"
    for name, data in (("debian-binary", b"2.0"), ("data.tar.xz", packed.getvalue())):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n"
        made += header.encode() + data + b"\n" * (len(data) % 2)
    return made


def page(name: str, copies: int = 1) -> bytes:
    lines = [f"<p>Sentence {n} of {name} is about {WORDS[n % 6]}.</p>" for n in range(12)]
    return ("<html><title>x</title>" + FRAME + "".join(lines) * copies + "</html>").encode()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages in the raw cache, as if put there by hand, and no server."""
    raw = tmp_path / "raw" / "debian-docs"
    raw.mkdir(parents=True)
    docs = {f"./usr/share/doc/a/{n}.html": page(f"page {n}") for n in range(30)}
    docs["./usr/share/doc/a/whole.html"] = page("page 3") + page("page 4")
    docs["./usr/share/doc/a/translations/x.html"] = page("another language")
    more = {f"./usr/share/doc/b/{n}.html": page(f"chapter {n}", copies=2) for n in range(30)}
    more["./usr/share/man/man1/ls.1.gz"] = gzip.compress(MAN.encode())
    more["./usr/share/doc/b/0.html.gz"] = gzip.compress(page("packed page"))
    rows = ["path,sha256"]
    for name, files in (("a_1_all.deb", docs), ("b_1_all.deb", more)):
        data = deb(files)
        (raw / name).write_bytes(data)
        rows.append(f"pool/{name},{hashlib.sha256(data).hexdigest()}")
    (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(debian_docs, "LIST", tmp_path / "list.csv")
    monkeypatch.setattr(debian_docs, "SERVER", "http://127.0.0.1:9/")
    return raw


def prepared(root: Path) -> Dataset:
    config = validated(DataConfig, {"source": "debian-docs", "vocab_size": 300}, "test")
    return prepare(config, root, progress=False)


def test_no_line_stands_twice(packages: Path, tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    texts = {
        split: dataset.tokenizer().decode(dataset.tokens(split).tolist())
        for split in ("train", "validation", "test")
    }
    lines = [
        line for text in texts.values() for line in text.replace("<|endoftext|>", "\n").split("\n")
    ]
    lines = [line for line in lines if line]
    assert len(lines) == len(set(lines))
    assert lines.count("This frame stands on every page.") == 1
    everything = "\n".join(texts.values())
    assert "Sentence 7 of chapter 29 is about gradients." in everything
    assert "Sentence 1 of packed page" in everything and "It lists all the files." in everything
    assert "another language" not in everything and "<p>" not in everything
    assert sum(facts["documents"] for facts in dataset.meta["splits"].values()) == 62
    assert prepared(tmp_path).id == dataset.id


def test_another_file_or_no_server_is_one_line(packages: Path, tmp_path: Path) -> None:
    file = packages / "b_1_all.deb"
    file.write_bytes(b"!<arch>\n")
    with pytest.raises(UserError, match=rf"b_1_all.deb: sha256 .*delete {file} and try again"):
        prepared(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=r"pool/b_1_all.deb: ConnectionError; is the network up"):
        prepared(tmp_path)
    assert not (packages / "documents.jsonl").exists()
