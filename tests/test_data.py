"""Preparing datasets from local text: content, splits, tokenizer, reuse, damage, disk and
concurrency."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from speakleash_server import compress

from lsai_core.base.errors import UserError
from lsai_core.config.strict import validated
from lsai_core.config.train import DataConfig
from lsai_lab.data import Dataset, prepare
from lsai_lab.data.documents import SPLITS
from lsai_lab.data.tokenizer import EOT, pieces, train_tokenizer

WORDS = [
    "zażółć",
    "gęślą",
    "jaźń",
    "kot",
    "pies",
    "dom",
    "las",
    "rzeka",
    "góra",
    "chmura",
    "wiatr",
    "deszcz",
    "słońce",
]


def texts(count: int, words: int = 40, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [f"dokument {i}: " + " ".join(rng.choice(WORDS, words)) for i in range(count)]


def write_jsonl(path: Path, items: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": item}) + "\n" for item in items))
    return path


def config(path: Path | str, **values: Any) -> DataConfig:
    source = path if isinstance(path, str) else f"file:{path}"
    return validated(DataConfig, {"source": source, "vocab_size": 400, **values}, "test")


def quick(path: Path | str, root: Path, **values: Any) -> Dataset:
    return prepare(config(path, **values), root, progress=False)


def documents_of(dataset: Dataset, split: Any) -> list[str]:
    text = dataset.tokenizer().decode(dataset.tokens(split).tolist(), skip_special_tokens=False)
    return text.split(EOT)[:-1]


def test_every_text_comes_back_from_exactly_one_split(tmp_path: Path) -> None:
    items = [*texts(300), f"a forged {EOT} inside", "lone surrogate \ud800 here", "", "   \n "]
    dataset = quick(write_jsonl(tmp_path / "a.jsonl", items), tmp_path / "root")
    text = dataset.tokenizer().decode(
        np.concatenate([dataset.tokens(s) for s in SPLITS]).tolist(), skip_special_tokens=False
    )
    # as text; below it is counted that it did not end a document
    assert f"a forged {EOT} inside" in text
    assert "lone surrogate ? here" in text
    ends = {split: int((dataset.tokens(split) == 0).sum()) for split in SPLITS}
    assert ends == {split: dataset.meta["splits"][split]["documents"] for split in SPLITS}
    assert sum(ends.values()) == 302
    found = [set(documents_of(dataset, split)) for split in SPLITS]
    assert not found[0] & found[1] and not found[0] & found[2] and not found[1] & found[2]
    assert set(items[:300]) <= set.union(*found)


def test_meta_counts_what_the_files_hold(tmp_path: Path) -> None:
    items = texts(200)
    dataset = quick(write_jsonl(tmp_path / "a.jsonl", items), tmp_path / "root")
    assert sum(facts["bytes"] for facts in dataset.meta["splits"].values()) == sum(
        len(item.encode()) for item in items
    )
    for split in SPLITS:
        tokens, facts = dataset.tokens(split), dataset.meta["splits"][split]
        assert tokens.dtype == np.uint16 and tokens.ndim == 1
        assert len(tokens) == facts["tokens"] and tokens.max() < dataset.vocab_size <= 400
        assert facts["bytes_per_token"] == pytest.approx(facts["bytes"] / facts["tokens"])
    shares = [dataset.meta["splits"][split]["documents"] for split in SPLITS]
    assert shares == [170, 20, 10]


def test_shares_of_a_large_corpus_and_copies_stay_together(tmp_path: Path) -> None:
    items = texts(3000, words=4)
    dataset = quick(write_jsonl(tmp_path / "a.jsonl", items + items[:500]), tmp_path / "root")
    counts = np.array([dataset.meta["splits"][split]["documents"] for split in SPLITS])
    assert counts.sum() == 3500
    assert np.allclose(counts / 3500, [0.85, 0.10, 0.05], atol=0.02)
    found = [set(documents_of(dataset, split)) for split in SPLITS]
    assert sum(map(len, found)) == 3000


@pytest.mark.parametrize("count", [3, 4, 10, 25])
def test_few_documents_fill_every_split(tmp_path: Path, count: int) -> None:
    dataset = quick(write_jsonl(tmp_path / "a.jsonl", texts(count)), tmp_path / "root")
    counts = [dataset.meta["splits"][split]["documents"] for split in SPLITS]
    assert sum(counts) == count and min(counts) >= 1 and counts[0] == max(counts)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "holds no text"),
        (["  "], "holds no text"),
        (["a"], "only 1 distinct"),
        (["a", "b", "a"], "only 2 distinct"),
    ],
)
def test_too_little_text_is_refused_and_leaves_nothing(
    tmp_path: Path, items: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        quick(write_jsonl(tmp_path / "a.jsonl", items), tmp_path / "root")
    assert not [path for path in (tmp_path / "root" / "datasets").iterdir() if path.is_dir()]


def test_same_content_is_prepared_once_and_deterministically(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(100))
    first = quick(path, tmp_path / "one")
    stamp = (first.folder / "train.bin").stat().st_mtime_ns
    again = quick(path, tmp_path / "one")
    assert again.folder == first.folder and (again.folder / "train.bin").stat().st_mtime_ns == stamp
    other = quick(path, tmp_path / "two")
    assert other.id == first.id
    for name in first.meta["files"]:
        assert (other.folder / name).read_bytes() == (first.folder / name).read_bytes()


def test_changed_content_or_config_is_another_dataset(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(100))
    ids = {quick(path, tmp_path / "root").id, quick(path, tmp_path / "root", split_seed=1).id}
    write_jsonl(path, texts(100, seed=1))
    ids.add(quick(path, tmp_path / "root").id)
    assert len(ids) == 3
    assert all(
        folder.endswith(tuple(ids))
        for folder in map(str, (tmp_path / "root" / "datasets").glob("file-a-*"))
    )


def test_tokenizer_learns_from_the_training_split_only(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(60))
    plain = quick(path, tmp_path / "root")
    held_out = documents_of(plain, "validation")[0]
    # The same document again with a word that would earn a token of its own, had the tokenizer seen
    # it. Its split depends on its content, so look for a version that is held out.
    for attempt in range(50):
        marked = f"{held_out} {attempt} " + "qqxqqyqqz " * 500
        with_mark = quick(write_jsonl(path, [*texts(60), marked]), tmp_path / "root")
        if not any("qqx" in text for text in documents_of(with_mark, "train")):
            break
    assert not any("qq" in token for token in with_mark.tokenizer().get_vocab())
    control = train_tokenizer([*documents_of(with_mark, "train"), marked], 400)
    assert any("qq" in token for token in control.get_vocab())


def test_tokenizer_text_and_corpus_are_limited(tmp_path: Path) -> None:
    items = texts(400)
    path = write_jsonl(tmp_path / "a.jsonl", items)
    small = quick(path, tmp_path / "root", tokenizer_mb=0.01)
    assert 8_000 < small.meta["tokenizer"]["trained_on_bytes"] <= 10_000
    cut = quick(path, tmp_path / "root", max_mb=0.03)
    used = sum(facts["bytes"] for facts in cut.meta["splits"].values())
    assert 29_000 < used <= 30_000
    found = set.union(*(set(documents_of(cut, split)) for split in SPLITS))
    assert found == set(items[: len(found)])  # whole documents, from the start
    with pytest.raises(UserError, match="max_mb"):
        quick(path, tmp_path / "root", max_mb=1e-5)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.zst", "parquet"])
def test_file_kinds_hold_the_same_text(tmp_path: Path, kind: str) -> None:
    items = texts(100)
    path = tmp_path / f"corpus.{kind}"
    if kind == "txt":
        path.write_text("\n\n".join(items))
    elif kind == "jsonl":
        write_jsonl(path, items)
    elif kind == "jsonl.zst":
        path.write_bytes(compress([{"text": item} for item in items], frames=3))
    else:
        pq.write_table(pa.table({"id": range(100), "text": items}), path, row_group_size=30)
    dataset = quick(path, tmp_path / "root")
    everything = "\n".join(text for split in SPLITS for text in documents_of(dataset, split))
    assert all(item in everything for item in items)
    assert min(dataset.meta["splits"][split]["documents"] for split in SPLITS) >= 1


@pytest.mark.parametrize("end", [" ", "\n", "\n\n"])
def test_one_text_file_of_any_shape_is_cut_without_loss(tmp_path: Path, end: str) -> None:
    text = "".join(f"zdanie numer {i}.{end}" for i in range(10_000))
    (tmp_path / "book.txt").write_text(text)
    dataset = quick(tmp_path / "book.txt", tmp_path / "root")
    splits = dataset.meta["splits"].values()
    assert sum(facts["bytes"] for facts in splits) == len(text.encode())


def test_all_documents_of_a_text_file_land_in_one_split_where_there_are_many_files(
    tmp_path: Path,
) -> None:
    for number in range(30):
        lines = "".join(f"plik{number:02} wiersz {i}.\n\n" for i in range(400))
        (tmp_path / f"{number:02}.txt").write_text(lines)
    for max_mb in (None, 0.015):  # the first two files alone would not fill three splits
        dataset = quick(f"file:{tmp_path}/*.txt", tmp_path / "root", max_mb=max_mb)
        seen = {s: {text[:6] for text in documents_of(dataset, s)} for s in SPLITS}
        assert all(seen.values())
        if max_mb is None:
            assert (
                not seen["train"] & seen["validation"]
                | seen["train"] & seen["test"]
                | seen["validation"] & seen["test"]
            )
            assert dataset.meta["splits"]["train"]["documents"] > len(seen["train"]) > 15


@pytest.mark.parametrize(
    "constant",
    ["tokenizer.EOT", "tokenizer.MIN_FREQUENCY", "documents.TEST_SHARE", "documents.MAX_DOCUMENT"],
)
def test_another_rule_of_making_tokens_makes_another_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constant: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(30))
    before = quick(path, tmp_path / "root").id
    module, name = constant.split(".")
    place = f"lsai_lab.data.{module}.{name}"
    old = getattr(importlib.import_module(f"lsai_lab.data.{module}"), name)
    monkeypatch.setattr(
        place, "<|end|>" if isinstance(old, str) else old / 2 if isinstance(old, float) else old + 1
    )
    assert quick(path, tmp_path / "root").id != before


def test_glob_takes_files_in_order_and_names_what_it_cannot_read(tmp_path: Path) -> None:
    for i, item in enumerate(texts(20)):
        (tmp_path / f"{i:02}.txt").write_text(item)
    dataset = quick(f"file:{tmp_path}/*.txt", tmp_path / "root")
    assert dataset.meta["source"]["files"] == 20
    (tmp_path / "x.doc").write_text("x")
    for pattern, message in [
        ("*.doc", "cannot be read as text"),
        ("*.nothing", "no such file"),
        ("", "needs a glob"),
    ]:
        with pytest.raises(UserError, match=message):
            quick(f"file:{tmp_path}/{pattern}", tmp_path / "root")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": 5}\n', 'line 2: expected a record {"text"'),
        ("a.jsonl", b'{"text": "ok"}\n{broken\n', "line 2"),
        ("a.jsonl.zst", compress(texts(50))[:-9], "cut off or damaged"),
        ("a.jsonl.zst", b"no zstd at all", "cannot be decompressed"),
        ("a.parquet", b"no parquet", "cannot be read as parquet"),
        ("a.txt", "zażółć".encode("cp1250"), "not UTF-8"),
    ],
)
def test_damaged_input_is_one_line_that_names_the_file(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        quick(tmp_path / name, tmp_path / "root")
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "source", ["nonsense", "file:", "speakleash:", "speakleash:../x", "stdlib:x"]
)
def test_unknown_sources_are_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(UserError, match=source.partition(":")[0]):
        quick(source, tmp_path / "root")


def test_damaged_dataset_is_one_clear_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(100))
    folder = quick(path, tmp_path / "root").folder
    whole = (folder / "train.bin").read_bytes()
    changed = bytearray(whole)
    changed[len(changed) // 2] ^= 0xFF
    for content, message in [
        (bytes(changed), "damaged"),
        (whole[:-2], "bytes instead of"),
        (b"", "bytes instead of"),
    ]:
        (folder / "train.bin").write_bytes(content)
        with pytest.raises(UserError, match=f"train.bin.*{message}.*delete"):
            quick(path, tmp_path / "root")
    (folder / "train.bin").write_bytes(whole)
    assert quick(path, tmp_path / "root").folder == folder
    (folder / "meta.json").write_text("{")
    with pytest.raises(UserError, match=r"meta.json: damaged"):
        Dataset(folder)
    (folder / "meta.json").unlink()
    with pytest.raises(UserError, match="no prepared dataset"):
        Dataset(folder)


def test_pieces_of_a_long_text_have_the_tokens_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    parts = ["kot", " pies", "  dwa", "\n", " \n ", "x1y", " !?", "'s", "ż", "\t"]
    text = "".join(rng.choice(parts, 120_000))
    tokenizer = train_tokenizer([text[:50_000]], 300)
    cut = list(pieces(text))
    assert len(cut) > 3 and "".join(cut) == text
    assert [i for piece in cut for i in tokenizer.encode(piece).ids] == tokenizer.encode(text).ids
    assert "".join(pieces("ą" * 200_000)) == "ą" * 200_000


CHILD = """
import sys
from pathlib import Path
from lsai_core.config.train import DataConfig
from lsai_lab.data import prepare
from lsai_core.base.errors import UserError
{before}
try:
    config = DataConfig(source=sys.argv[1], vocab_size=1000)
    print(prepare(config, Path(sys.argv[2]), progress=False).folder)
except UserError as error:
    print("error:", error)
"""


def child(path: Path, root: Path, before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD.format(before=before), f"file:{path}", str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_at_once_prepare_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(2000))
    slow = (
        "import importlib, time\np = importlib.import_module('lsai_lab.data.prepare')\nold = "
        "p.survey\n"
    )
    slow += "p.survey = lambda *a: (time.sleep(1), "
    slow += "Path(sys.argv[2], f'built-{time.time_ns()}').touch(), old(*a))[2]"
    outputs = [
        process.communicate()[0]
        for process in [child(path, tmp_path / "root", slow) for _ in range(2)]
    ]
    assert outputs[0] == outputs[1] and "file-a-" in outputs[0]
    assert len(list((tmp_path / "root").glob("built-*"))) == 1


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(2000))
    full = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    out, err = child(path, tmp_path / "root", full).communicate()
    assert out.startswith("error: cannot prepare the data at") and "Traceback" not in err
    assert not [entry for entry in (tmp_path / "root" / "datasets").iterdir() if entry.is_dir()]


def test_a_root_that_is_no_folder_is_a_clear_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(10))
    (tmp_path / "root").write_text("a file")
    with pytest.raises(UserError, match="cannot prepare the data at"):
        quick(path, tmp_path / "root")


def test_stdlib_works_and_leaves_tests_and_packages_out(tmp_path: Path) -> None:
    dataset = quick("stdlib", tmp_path, max_mb=0.5, vocab_size=600)
    assert dataset.folder.name.startswith("stdlib-")
    text = "".join(documents_of(dataset, "train"))
    assert "import" in text and dataset.meta["source"]["files"] > 300


def test_a_log_file_gets_no_progress_bars(tmp_path: Path, corpus: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from lsai_core.config.train import DataConfig; from "
        "lsai_lab.data import prepare;"
        "prepare(DataConfig(source=sys.argv[1], vocab_size=400), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, f"file:{corpus}", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
