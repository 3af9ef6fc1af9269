"""Remote sources: the real Speakleash client against a local server with its layout and faults, and
polish-docs with stand-ins for apt-get and dpkg-deb."""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from speakleash_server import SpeakleashServer, compress
from typer.testing import CliRunner

from lsai_core.base.errors import UserError
from lsai_core.config.strict import validated
from lsai_core.config.train import DataConfig
from lsai_lab.data import Dataset, prepare, speakleash
from lsai_lab.data.polish_docs import html_to_text, roff_to_text

RECORDS = [
    {"text": f"Dokument numer {i}. " + f"Zdanie o liczbie {i * i}. " * 20, "meta": {"n": i}}
    for i in range(200)
]

# Hardly compressible, so that the file has several of the client's chunks.
BIG = [{"text": f"{i} " + random.Random(i).randbytes(1500).hex()} for i in range(400)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpeakleashServer]:
    monkeypatch.setattr(speakleash, "BACKOFF_S", 0.001)
    with SpeakleashServer() as running:
        monkeypatch.setenv("LSAI_SPEAKLEASH_URL", running.url)
        yield running


def quick(source: str, root: Path, **values: Any) -> Dataset:
    return prepare(
        validated(DataConfig, {"source": source, "vocab_size": 400, **values}, "test"),
        root,
        progress=False,
    )


def assert_nothing(root: Path) -> None:
    assert not list(root.glob("datasets/*/*")) and not list(root.glob("raw/speakleash/*.zst"))


def everything(dataset: Dataset) -> str:
    return "".join(
        dataset.tokenizer().decode(dataset.tokens(s).tolist())
        for s in ("train", "validation", "test")
    )


@pytest.mark.parametrize("frames", [1, 5])
def test_speakleash_dataset_is_fetched_once_and_then_works_offline(
    server: SpeakleashServer, tmp_path: Path, frames: int
) -> None:
    records: list[Any] = [
        *RECORDS,
        {"text": ["pierwszy akapit", "drugi akapit"], "meta": {}},
        "goły tekst",
    ]
    server.add("plwiki", records, frames)
    dataset = quick("speakleash:plwiki", tmp_path)
    assert sum(facts["documents"] for facts in dataset.meta["splits"].values()) == 202
    assert (
        dataset.meta["source"]["license"] == "CC-BY" and dataset.meta["source"]["documents"] == 202
    )
    text = everything(dataset)
    assert "pierwszy akapit\n\ndrugi akapit" in text and "goły tekst" in text
    assert [path for path, _ in server.requests] == [
        "/datasets_text/plwiki.manifest",
        "/datasets_text/plwiki.jsonl.zst",
    ]

    server.datasets.clear()
    server.requests.clear()
    assert quick("speakleash:plwiki", tmp_path).folder == dataset.folder  # the prepared dataset
    # from the raw download
    assert quick("speakleash:plwiki", tmp_path, vocab_size=300).id != dataset.id
    shutil.copytree(tmp_path / "datasets", tmp_path / "elsewhere" / "datasets")
    assert quick("speakleash:plwiki", tmp_path / "elsewhere").id == dataset.id
    assert not server.requests


def test_missing_dataset_is_named_with_its_neighbours(
    server: SpeakleashServer, tmp_path: Path
) -> None:
    server.add("plwiki", RECORDS)
    with pytest.raises(UserError, match="no dataset 'plwik'; did you mean plwiki"):
        quick("speakleash:plwik", tmp_path)
    server.add("x", RECORDS, statuses=[404])
    with pytest.raises(UserError, match=r"x\.jsonl\.zst: not found"):
        quick("speakleash:x", tmp_path)
    assert_nothing(tmp_path)


def test_dropped_connections_resume_where_they_stopped(
    server: SpeakleashServer, tmp_path: Path
) -> None:
    served = server.add("d", BIG, frames=4, drop_at=150_000, drops=3)
    dataset = quick("speakleash:d", tmp_path)
    assert sum(facts["documents"] for facts in dataset.meta["splits"].values()) == len(BIG)
    ranges = [asked for path, asked in server.requests if path.endswith("zst")]
    # whole chunks of 64 KiB are kept
    assert ranges == [None, "bytes=131072-", "bytes=262144-", "bytes=393216-"]
    assert (tmp_path / "raw/speakleash/d.jsonl.zst").read_bytes() == served.data
    assert not list(tmp_path.glob("raw/speakleash/*.part*"))


def test_a_file_that_changes_meanwhile_is_fetched_anew_and_an_interrupted_one_leaves_nothing(
    server: SpeakleashServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = server.add("d", BIG, drop_at=150_000, drops=1)
    new = compress(BIG[::-1])
    assert len(new) != len(served.data)

    def pause(seconds: float) -> None:  # before the second attempt
        served.data = new

    served.manifest["file_size"] = None
    with monkeypatch.context() as patch:
        patch.setattr(speakleash, "sleep", pause)
        quick("speakleash:d", tmp_path / "changed")
    assert server.requests[-1][1] == "bytes=131072-", "answered with 200 and the new file"
    assert (tmp_path / "changed/raw/speakleash/d.jsonl.zst").read_bytes() == new

    served.drops = 1
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(speakleash, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        quick("speakleash:d", tmp_path / "interrupted")
    assert not list(tmp_path.glob("interrupted/raw/speakleash/d*"))
    quick("speakleash:d", tmp_path / "interrupted")


def test_passing_server_faults_are_retried_and_lasting_ones_reported(
    server: SpeakleashServer, tmp_path: Path
) -> None:
    server.add("d", RECORDS, statuses=[503, 500, 429])
    quick("speakleash:d", tmp_path)
    server.add("e", RECORDS, statuses=[503] * 50)
    with pytest.raises(UserError, match=r"gave up after 5 attempts \(status 503"):
        quick("speakleash:e", tmp_path)
    server.add("f", RECORDS, statuses=[403])
    with pytest.raises(UserError, match="answered 403"):
        quick("speakleash:f", tmp_path)
    server.add("g", RECORDS, drop_at=0, drops=50)
    with pytest.raises(UserError, match="gave up"):
        quick("speakleash:g", tmp_path)
    assert len(list(tmp_path.glob("datasets/*/meta.json"))) == 1


def test_wrong_size_truncated_and_damaged_files_never_become_datasets(
    server: SpeakleashServer, tmp_path: Path
) -> None:
    server.add("size", RECORDS, file_size=12345)
    with pytest.raises(UserError, match="manifest says 12345"):
        quick("speakleash:size", tmp_path)
    cut = server.add("cut", RECORDS)
    cut.data = cut.data[:-7]
    cut.manifest["file_size"] = len(cut.data)
    with pytest.raises(UserError, match="download is damaged"):
        quick("speakleash:cut", tmp_path)
    bad = server.add("bad", RECORDS)
    bad.data = b"x" * len(bad.data)
    with pytest.raises(UserError, match="download is damaged"):
        quick("speakleash:bad", tmp_path)
    assert_nothing(tmp_path)
    assert not list(tmp_path.glob("raw/speakleash/*.part"))


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "length": (
        {"headers": {"Content-Length": "abc"}},
        r"\d+ of 40\d* bytes arrived|download is damaged|gave up",
    ),
    "huge length": (
        {"headers": {"Content-Length": "9" * 40}},
        r"\d+ of 4000 bytes arrived|download is damaged|gave up",
    ),
    "another file": (
        {"headers": {"Content-Length": "999999"}},
        "999999 bytes, but its manifest says 4000",
    ),
    "redirection": ({"status": 302, "headers": {"Location": "http://[::1"}}, "d.jsonl.zst: "),
    "wrong place": (
        {"status": 206, "headers": {"Content-Range": "bytes 5-9/10"}},
        "continued at the wrong place",
    ),
    "416": ({"status": 416}, "gave up after 5 attempts .status 416"),
    "endless": (
        {"body": b"x" * 1_000_000, "headers": {}},
        r"\d+ of 40\d* bytes arrived|download is damaged",
    ),
    "nan": ({"manifest": b'{"file_size": NaN}'}, "'NaN', not a size"),
    "infinite": ({"manifest": b'{"file_size": 1e999}'}, "'inf', not a size"),
    "negative": ({"manifest": b'{"file_size": -5}'}, "'-5', not a size"),
    "list": ({"manifest": b'{"file_size": [1]}'}, "not a size"),
    "deep": ({"manifest": b"[" * 200_000}, "no JSON dict"),
    "no object": ({"manifest": b"[]"}, "no JSON dict"),
    "large": ({"manifest": b" " * 200_000_000}, "more than 16 MiB"),
    "stats": (
        {"manifest": b'{"stats": [1], "file_size": 3}', "body": b"abc"},
        "download is damaged",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_server_that_lies_is_one_line(
    server: SpeakleashServer, tmp_path: Path, case: str
) -> None:
    lie, message = HOSTILE[case]
    good = compress(RECORDS)[:4000]

    def answer(request: Any) -> None:
        manifest = request.path.endswith("manifest")
        body = lie.get("manifest", b'{"file_size": 4000}') if manifest else lie.get("body", good)
        request.send_response(200 if manifest else lie.get("status", 200))
        headers = {"Content-Length": str(len(body))} if manifest else lie.get("headers", {})
        for key, value in headers.items():
            request.send_header(key, value)
        request.end_headers()
        with contextlib.suppress(OSError):
            request.wfile.write(body)
        request.close_connection = True

    server._answer = answer  # type: ignore[method-assign]
    with pytest.raises(UserError, match=message):
        quick("speakleash:d", tmp_path)
    assert_nothing(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.part")) < 100_000


@pytest.mark.parametrize("size", ["stale", "smaller", "float", "text", "none", "zero"])
def test_a_manifest_that_is_not_exact_is_told_and_the_file_is_used(
    server: SpeakleashServer, tmp_path: Path, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served = server.add("d", RECORDS)
    real = len(served.data)
    stated = {
        "stale": real + 1,
        "smaller": real - 1,
        "float": float(real),
        "text": str(real),
        "none": None,
        "zero": 0,
    }
    served.manifest["file_size"] = stated[size]
    dataset = quick("speakleash:d", tmp_path)
    assert sum(facts["documents"] for facts in dataset.meta["splits"].values()) == len(RECORDS)
    assert dataset.meta["source"]["bytes"] == real
    told = capsys.readouterr().err
    if size in ("stale", "smaller"):
        assert told.count("note: ") == 1 and f"{real} bytes, {stated[size]} by its manifest" in told
    else:
        assert told == ""


def test_a_download_that_decodes_but_cannot_be_used_is_named_so_that_it_can_be_deleted(
    server: SpeakleashServer, tmp_path: Path, fake_apt: Path
) -> None:
    file = tmp_path / "raw/speakleash/d.jsonl.zst"
    for records in ([{"text": "ok"}, {"txt": "a"}], [{"text": None}] * 5, [{"text": "one"}]):
        server.add("d", records)
        for _ in range(2):  # it stays until it is deleted
            with pytest.raises(UserError, match=rf"delete {file} to fetch it again"):
                quick("speakleash:d", tmp_path)
        file.unlink()
    server.add("d", RECORDS)
    quick("speakleash:d", tmp_path)
    quick("polish-docs", tmp_path)
    pages = tmp_path / "raw/polish-docs/documents.jsonl"
    for damaged in ("{", '{"text": "a"}\n', "5\n", '{"text": 5, "meta": {"package": "x"}}\n'):
        pages.write_text(damaged)
        with pytest.raises(UserError, match=rf"{pages}.*delete .*to fetch it again"):
            quick("polish-docs", tmp_path, vocab_size=300)


def test_list_reads_the_index_alone_and_no_server_is_one_line(
    server: SpeakleashServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lsai_lab.cli.data import app

    for name in ("plwiki", "thesis"):
        server.add(name, RECORDS)
    shown = CliRunner().invoke(app, ["list", "--speakleash", "--root", str(tmp_path)]).output
    assert "speakleash:plwiki" in shown and "speakleash:thesis" in shown
    assert [path for path, _ in server.requests] == ["/datasets_text/speakleash.json"]
    assert '"license": "CC-BY"' in CliRunner().invoke(app, ["info", "speakleash:thesis"]).output
    monkeypatch.setenv("LSAI_SPEAKLEASH_URL", "http://127.0.0.1:9/")
    with pytest.raises(UserError, match="gave up after 5 attempts"):
        speakleash.list_names()


def test_command_line_prepares_and_shows(tmp_path: Path) -> None:
    from lsai_lab.cli.data import app

    (tmp_path / "a.txt").write_text("\n\n".join(f"akapit {i} " * 20 for i in range(200)))
    source, root = f"file:{tmp_path}/a.txt", ["--root", str(tmp_path / "root")]
    shown = CliRunner().invoke(app, ["prepare", source, "--vocab-size", "300", *root])
    assert shown.exit_code == 0 and "validation" in shown.output
    folder = next((tmp_path / "root/datasets").glob("file-a-*")).name
    assert folder in CliRunner().invoke(app, ["list", *root]).output
    assert "tokens" in CliRunner().invoke(app, ["info", folder, *root]).output
    wrong = CliRunner().invoke(app, ["prepare", source, "--vocab-size", "5", *root])
    assert isinstance(wrong.exception, UserError) and "vocab_size" in str(wrong.exception)


APT = """#!/bin/sh
[ "$1" = download ] || exit 9
[ -n "$FAKE_APT_FAILS" ] && { echo "E: Unable to locate package $2" >&2; exit 100; }
echo run >> "$FAKE_LOG"
shift
for package; do echo > "${package}_1.0_all.deb"; done
"""
DPKG = """#!/bin/sh
[ "$1" = -x ] || exit 9
mkdir -p "$3" && cp -r "$FAKE_FILES"/$(echo "$2" | cut -d_ -f1)/. "$3"
"""


@pytest.fixture
def fake_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    bin_, files = tmp_path / "bin", tmp_path / "files"
    bin_.mkdir()
    for name, script in (("apt-get", APT), ("dpkg-deb", DPKG)):
        (bin_ / name).write_text(script)
        (bin_ / name).chmod(0o755)
    pages, man = files / "libreoffice-help-pl/help", files / "manpages-pl/usr/share/man/pl/man1"
    pages.mkdir(parents=True)
    man.mkdir(parents=True)
    for i in range(20):
        body = (
            f"<p>Strona <b>{i}</b> pomocy o arkuszu.</p>"
            + "<p>Kliknij komórkę i wpisz wartość.</p>" * 10
        )
        (pages / f"{i}.html").write_text(
            f"<html><head><title>x</title></head><body>{body}</body></html>"
        )
        roff = (
            f".TH P{i} 1\n.SH NAZWA\nprogram{i} \\- robi coś\n.PP\n"
            + "Opis \\fBprogramu\\fP i opcji.\n" * 20
        )
        (man / f"p{i}.1.gz").write_bytes(gzip.compress(roff.encode()))
    (man / "alias.1.gz").write_bytes(gzip.compress(b".so man1/p1.1\n"))
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_FILES", str(files))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return bin_


def test_polish_docs_are_fetched_unpacked_and_cleaned_once(fake_apt: Path, tmp_path: Path) -> None:
    dataset = quick("polish-docs", tmp_path / "root")
    assert sum(facts["documents"] for facts in dataset.meta["splits"].values()) == 40
    assert dataset.meta["source"]["packages"] == [
        "libreoffice-help-pl_1.0_all",
        "manpages-pl_1.0_all",
    ]
    text = everything(dataset)
    assert (
        "Strona 7 pomocy o arkuszu." in text
        and "program3 - robi coś" in text
        and "Opis programu i opcji." in text
    )
    assert "<p>" not in text and "\\f" not in text
    assert quick("polish-docs", tmp_path / "root", vocab_size=300).id != dataset.id
    assert (tmp_path / "log").read_text().count("run") == 1


def test_polish_docs_without_apt_or_packages_is_one_line(
    fake_apt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_APT_FAILS", "1")
    with pytest.raises(
        UserError, match=r"Unable to locate package libreoffice-help-pl; .*apt-get update"
    ):
        quick("polish-docs", tmp_path / "root")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs apt-get, which this machine lacks"):
        quick("polish-docs", tmp_path / "root")
    assert not list((tmp_path / "root").rglob("*.jsonl")) and not list(
        (tmp_path / "root").rglob(".unpack-*")
    )


def test_html_becomes_plain_text() -> None:
    html = """<html><head><title>t</title><script>var x;</script></head><body><nav>menu</nav>
    <h1>Wykres &amp; tabela</h1>
    <ul><li>jeden <b>dwa</b></li><li>trzy</li></ul><pre>a = 1\nb = 2</pre>
    <table><tr><td>x</td><td>y</td></tr></table>
    <footer>stopka</footer></body></html>"""
    assert [line for line in html_to_text(html).splitlines() if line] == [
        "Wykres & tabela",
        "jeden dwa",
        "trzy",
        "a = 1",
        "b = 2",
        "x y",
    ]


def test_roff_becomes_plain_text() -> None:
    roff = r"""'\\" komentarz
.\" komentarz
.TH LS 1 "maj 2020"
.SH NAZWA
ls \- wypisuje \(lqpliki\(rq
.de XX
makro
..
.PP
Zobacz
.BR info (1),
oraz \fIkatalog\fP\|\(em
C:\e i \[u0119].
.TP
.B \-\-all
bez ukrywania
.nf
linia 1
linia 2
.fi"""
    text = roff_to_text(roff)
    assert "ls - wypisuje “pliki”" in text
    assert "Zobacz info(1), oraz katalog— C:\\ i ę." in text
    assert "--all bez ukrywania" in text and "linia 1\nlinia 2" in text
    assert "makro" not in text and "komentarz" not in text
