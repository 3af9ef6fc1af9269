"""Forms in which text comes: compressed, JSON, CSV, parquet's kinds of strings, odd names, nulls,
long records."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Project
from test_data import documents_of, quick, texts

from lsai_core.base.errors import UserError
from lsai_lab.data import Dataset
from lsai_lab.data import local as local_module
from lsai_lab.data.documents import SPLITS
from lsai_lab.runs.inputs import resolved_paths

ITEMS = [f'{text}, "quoted"\nand a second line' for text in texts(60)]


def lines(items: list[Any], column: str = "text") -> bytes:
    return "".join(
        json.dumps({"id": 1, column: item}, ensure_ascii=False) + "\n" for item in items
    ).encode()


def array(items: list[Any], indent: int | None = None) -> bytes:
    return json.dumps(
        [{"text": item} for item in items], ensure_ascii=False, indent=indent
    ).encode()


def table(items: list[Any], column: str = "text") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["id", column])
    writer.writerows([number, item] for number, item in enumerate(items))
    return file.getvalue().encode()


def zst(data: bytes) -> bytes:
    half = len(data) // 2
    return b"".join(
        pa.compress(part, codec="zstd", asbytes=True) for part in (data[:half], data[half:])
    )


def gz(data: bytes) -> bytes:
    half = len(data) // 2
    return gzip.compress(data[:half]) + gzip.compress(data[half:])


BOM = b"\xef\xbb\xbf"
FORMS = {
    "a.jsonl": lines(ITEMS),
    "a.ndjson": lines(ITEMS),
    "a.json": lines(ITEMS),
    "b.json": array(ITEMS),
    "c.json": b" \n" + array(ITEMS, indent=2) + b"\n",
    "d.json": BOM + array(ITEMS),
    "bom.jsonl": BOM + lines(ITEMS),
    "a.jsonl.gz": gz(lines(ITEMS)),
    "a.json.gz": gz(lines(ITEMS)),
    "b.json.gz": gz(array(ITEMS)),
    "A.JSON.GZ": gz(array(ITEMS)),
    "a.jsonl.zst": zst(lines(ITEMS)),
    "a.json.zst": zst(lines(ITEMS)),
    "a.zst": zst(lines(ITEMS)),
    "a.gz": gz(lines(ITEMS)),
    "part-0.v2.zst": zst(lines(ITEMS)),
    "a.csv": table(ITEMS),
    "bom.csv": BOM + table(ITEMS),
    "a.csv.gz": gz(table(ITEMS)),
    "a.csv.zst": zst(table(ITEMS)),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_holds_the_same_documents(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FORMS[name])
    dataset = quick(tmp_path / name, tmp_path / "root")
    found = [text for split in SPLITS for text in documents_of(dataset, split)]
    assert sorted(found) == sorted(ITEMS)


@pytest.mark.parametrize("suffix", [".txt.gz", ".txt.zst", ".md.gz"])
def test_compressed_plain_text_is_cut_as_it_is_uncompressed(tmp_path: Path, suffix: str) -> None:
    text = "\n\n".join(f"akapit {number} " * 30 for number in range(3000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / f"b{suffix}").write_bytes(
        gz(text.encode()) if suffix.endswith("gz") else zst(text.encode())
    )
    plain, packed = (
        quick(tmp_path / "a.txt", tmp_path / "root"),
        quick(tmp_path / f"b{suffix}", tmp_path / "root"),
    )
    for split in SPLITS:
        assert np.array_equal(plain.tokens(split), packed.tokens(split))


def test_a_large_array_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "BUFFER", 1000)
    items = [*texts(50), "długi " * 5000, *texts(20, seed=1)]
    (tmp_path / "a.json").write_bytes(array(items))
    dataset = quick(tmp_path / "a.json", tmp_path / "root")
    assert sorted(text for split in SPLITS for text in documents_of(dataset, split)) == sorted(
        items
    )


@pytest.mark.parametrize(
    "kind", ["string", "large_string", "string_view", "dictionary", "binary", "binary_view"]
)
def test_every_kind_of_strings_in_parquet_is_text(tmp_path: Path, kind: str) -> None:
    column = pa.array(ITEMS)
    column = (
        column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pa, kind)())
    )
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    dataset = quick(tmp_path / "a.parquet", tmp_path / "root")
    assert sorted(text for split in SPLITS for text in documents_of(dataset, split)) == sorted(
        ITEMS
    )


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet"])
def test_nulls_are_left_out_and_counted_alike(tmp_path: Path, form: str, shared: Project) -> None:
    items = [*ITEMS[:30], None, "", *ITEMS[30:], None]
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(pa.table({"text": items}), path)
    else:
        path.write_bytes({"jsonl": lines, "json": array, "csv": table}[form](items))
    if form == "csv":  # whose null is a row that ends too early
        path.write_bytes(path.read_bytes() + b"7\r\n8\r\n")
    code, out, err = shared.lsai(
        "data", "prepare", f"file:{path}", "--vocab-size", 300, "--root", tmp_path / "root"
    )
    assert code == 0, err
    counts = {"null": 2, "blank": 3 if form == "csv" else 1}
    told = ", ".join(
        f"{count} {what} texts"
        for what, count in sorted(counts.items(), key=lambda c: c[0] == "blank")
    )
    assert any(
        line.startswith("left out") and sorted(line[12:].split(", ")) == sorted(told.split(", "))
        for line in out.splitlines()
    )
    dataset = Dataset(next((tmp_path / "root/datasets").glob("file-a-*")))
    assert dataset.meta["left_out"] == counts
    assert sum(facts["documents"] for facts in dataset.meta["splits"].values()) == 60


@pytest.mark.parametrize("form", ["jsonl", "csv.gz", "parquet"])
def test_another_column_is_named_and_a_wrong_name_told(
    tmp_path: Path, form: str, shared: Project
) -> None:
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(pa.table({"id": range(60), "body": ITEMS}), path)
    else:
        path.write_bytes(lines(ITEMS, "body") if form == "jsonl" else gz(table(ITEMS, "body")))
    words = ("data", "prepare", f"file:{path}", "--vocab-size", 300, "--root", tmp_path / "root")
    assert shared.lsai(*words, "--column", "body")[0] == 0
    dataset = quick(path, tmp_path / "root", column="body", vocab_size=300)  # the same
    assert len(list((tmp_path / "root/datasets").glob("file-*"))) == 1
    assert sorted(text for split in SPLITS for text in documents_of(dataset, split)) == sorted(
        ITEMS
    )
    code, _, err = shared.lsai(*words)
    assert code == 2 and len(err.strip().splitlines()) == 1
    assert "'text'; it has id, body" in err and "--column" in err
    with pytest.raises(UserError, match="'stdlib' has none"):
        quick("stdlib", tmp_path / "root", column="body")


DAMAGED: dict[str, tuple[bytes, str]] = {
    "cut.json.gz": (
        gzip.compress(lines(ITEMS))[:-12],
        "cannot be decompressed; cut off or damaged",
    ),
    "cut.txt.gz": (gzip.compress("\n\n".join(ITEMS).encode())[:-12], "cannot be decompressed"),
    "no.csv.gz": (table(ITEMS), "cannot be decompressed"),
    "cut.json": (array(ITEMS)[:-30], "record 60: "),
    "open.json": (array(ITEMS)[:-1], "array does not end after record 60"),
    "after.json": (b'["a"]\n["b"]\n["c"]\n', "more text after its array"),
    "wrong.json": (b'[{"text": 5}]', 'record 1: expected a record {"text"'),
    "other.json": (b'{\n "text": "a"\n}\n', "line 1: "),
    "chat.jsonl": (
        b'{"messages": [{"role": "user", "content": "a"}]}\n',
        "no field 'text'; it has messages",
    ),
    "latin.jsonl": ('{"text": "zażółć"}\n'.encode("cp1250"), "line 1"),
    "latin.csv": ("text\nzażółć\n".encode("cp1250"), "not UTF-8"),
    "latin.json": ('[{"text": "zażółć"}]'.encode("cp1250"), "not UTF-8"),
    "quote.csv": (b'text\n"open', "line 2: unexpected end of data"),
    "empty.csv": (b"", "no column 'text'; it has nothing"),
    "semicolons.csv": (b"id;text\n1;a\n", "no column 'text'; it has id;text"),
    "twice.csv": (b"text,text\na,b\n", "several columns 'text'"),
    "number.jsonl": (b"5\n", "expected a record"),
    "packed.parquet.gz": (b"x", "cannot be read as text; known kinds"),
    "a.tar": (b"x", "cannot be read as text; known kinds"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_cannot_be_read_is_one_line_that_names_the_file(tmp_path: Path, name: str) -> None:
    content, message = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        quick(tmp_path / name, tmp_path / "root")
    assert message in str(error.value) and name in str(error.value) and "\n" not in str(error.value)


def test_damaged_pages_of_a_parquet_file_are_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ITEMS}), tmp_path / "a.parquet", compression="zstd")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[200:900] = bytes(700)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as parquet"):
        quick(tmp_path / "a.parquet", tmp_path / "root")
    pq.write_table(pa.table({"text": [1, 2, 3]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="column 'text' holds int64, not strings"):
        quick(tmp_path / "a.parquet", tmp_path / "root")


NAMES = [
    "run[1].jsonl",
    "a*b.jsonl",
    "what?.jsonl",
    "[a]/[b].jsonl",
    "zażółć gęślą.jsonl",
    "{x}.jsonl",
    "a,b=c.jsonl",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_with_marks_of_globs_is_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "in [brackets]" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(lines(ITEMS))
    first = quick(path, tmp_path / "root")
    monkeypatch.chdir(tmp_path / "in [brackets]")
    assert quick(f"file:{name}", tmp_path / "root").meta["fingerprint"] == first.meta["fingerprint"]
    # As a plan writes it down, for a run that works in another folder.
    root = tmp_path / "project"
    root.mkdir()
    for pattern in (name, "**/*.jsonl"):
        planned = resolved_paths({"data": {"source": f"file:{pattern}"}}, root)["data"]["source"]
        monkeypatch.chdir(root)
        assert quick(planned, tmp_path / "root").meta["fingerprint"] == first.meta["fingerprint"]
        monkeypatch.chdir(tmp_path / "in [brackets]")


@pytest.mark.parametrize("records", [1, 2])
def test_a_few_long_records_are_cut_as_text_is(tmp_path: Path, records: int) -> None:
    book = " ".join(map(str, range(100_000)))
    (tmp_path / "a.jsonl").write_bytes(lines([f"{number}. {book}" for number in range(records)]))
    dataset = quick(tmp_path / "a.jsonl", tmp_path / "root")
    counts = [dataset.meta["splits"][split]["documents"] for split in SPLITS]
    assert sum(counts) > 40 and min(counts) >= 1
    assert sum(facts["bytes"] for facts in dataset.meta["splits"].values()) == records * (
        len(book) + 3
    )
    # less than the first record
    limited = quick(tmp_path / "a.jsonl", tmp_path / "root", max_mb=0.1)
    assert 50_000 < sum(facts["bytes"] for facts in limited.meta["splits"].values()) <= 100_000


def test_three_long_records_stay_whole(tmp_path: Path) -> None:
    books = [f"{number}. " + "zdanie " * 20_000 for number in range(3)]
    (tmp_path / "a.jsonl").write_bytes(lines(books))
    dataset = quick(tmp_path / "a.jsonl", tmp_path / "root")
    assert sorted(documents_of(dataset, split) for split in SPLITS) == sorted(
        [book] for book in books
    )
