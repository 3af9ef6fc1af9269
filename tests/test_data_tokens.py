"""Tokenizers and tokens that are given: their ids, their sizes, what ends a document, where they
are looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Project, tiny
from test_data import config, quick, texts
from test_data_files import lines
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lsai_core.base.errors import UserError
from lsai_lab.benches.training import run
from lsai_lab.data import Dataset, prepare
from lsai_lab.data.documents import SPLITS
from lsai_lab.data.tokenizer import EOT, train_tokenizer
from lsai_lab.runs.inputs import key_config, resolved_paths
from lsai_lab.runs.kinds import Context


def sentence_piece(path: Path, vocab_size: int = 500, end: str = "</s>") -> Path:
    """A tokenizer of another kind than ours: words marked with ▁, one put in front; it cuts texts,
    and fills up batches."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", "<s>", end], show_progress=False
    )
    tokenizer.train_from_iterator(texts(200), trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def test_a_given_tokenizer_makes_the_tokens(tmp_path: Path, shared: Project) -> None:
    path = sentence_piece(tmp_path / "theirs" / "tokenizer.json")
    items = [*texts(100), "kot </s> pies", " ".join(texts(2000))]
    (tmp_path / "a.jsonl").write_bytes(lines(items))
    dataset = quick(
        tmp_path / "a.jsonl", tmp_path / "root", tokenizer=str(path.parent), vocab_size=500
    )
    assert dataset.vocab_size == 500 and dataset.meta["tokenizer"]["end_of_text"] == {
        "token": "</s>",
        "id": 2,
    }
    assert (dataset.folder / "tokenizer.json").read_bytes() == path.read_bytes()
    whole = Tokenizer.from_file(str(path))
    whole.no_truncation()
    whole.no_padding()
    whole.encode_special_tokens = True
    wanted = sorted([*whole.encode(item, add_special_tokens=False).ids, 2] for item in items)
    found = []
    for split in SPLITS:
        tokens = dataset.tokens(split).tolist()
        ends = [at + 1 for at, token in enumerate(tokens) if token == 2]
        found += [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert sorted(found) == wanted
    # By content, not by place, and its size need not be told again.
    sentence_piece(tmp_path / "copy" / "tokenizer.json")
    code, out, err = shared.lsai(
        "data",
        "prepare",
        f"file:{tmp_path}/a.jsonl",
        "--tokenizer",
        tmp_path / "copy",
        "--root",
        tmp_path / "root",
    )
    assert code == 0 and str(dataset.folder) in out, err
    sentence_piece(tmp_path / "copy" / "tokenizer.json", vocab_size=400)
    other = quick(
        tmp_path / "a.jsonl", tmp_path / "root", tokenizer=str(tmp_path / "copy"), vocab_size=500
    )
    assert other.id != dataset.id and other.vocab_size == 400


def test_what_ends_a_document_is_the_tokenizers_to_say(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(texts(30)))
    path = sentence_piece(tmp_path / "t" / "tokenizer.json", end="<|fin|>")
    values: dict[str, Any] = {"tokenizer": str(path), "vocab_size": 500}
    with pytest.raises(
        UserError, match=r"none of its tokens ends a document .*tokenizer_config.json"
    ):
        quick(tmp_path / "a.jsonl", tmp_path / "root", **values)
    for said in ("<|fin|>", {"content": "<|fin|>", "lstrip": False}):
        (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps({"eos_token": said}))
        assert (
            quick(tmp_path / "a.jsonl", tmp_path / "root", **values).meta["tokenizer"][
                "end_of_text"
            ]["id"]
            == 2
        )
    (tmp_path / "t" / "tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        quick(tmp_path / "a.jsonl", tmp_path / "root", **values)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\x80\x81", b'{"model": {"type": "Other"}}', b"[" * 100_000]
)
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "a.jsonl").write_bytes(lines(texts(30)))
    with pytest.raises(
        UserError, match=r"tokenizer\.json: cannot be read as a tokenizer\.json"
    ) as error:
        quick(tmp_path / "a.jsonl", tmp_path / "root", tokenizer=str(tmp_path))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"no such file; it wants a tokenizer\.json"):
        quick(tmp_path / "a.jsonl", tmp_path / "root", tokenizer=str(tmp_path / "nothing"))


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_the_setting(tmp_path: Path) -> None:
    path = sentence_piece(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_bytes(lines(texts(30)))
    with pytest.raises(
        UserError, match=r"500 tokens, more than data.vocab_size=400; set data.vocab_size=500"
    ):
        quick(tmp_path / "a.jsonl", tmp_path / "root", tokenizer=str(path))


def test_ids_beyond_16_bits_are_kept(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(70_000)]
    vocab = {"<unk>": 0, "<|endoftext|>": 1} | {
        word: number for number, word in enumerate(words, 2)
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    items = [" ".join(words[number : number + 1000]) for number in range(0, 70_000, 1000)]
    (tmp_path / "a.jsonl").write_bytes(lines(items))
    dataset = quick(
        tmp_path / "a.jsonl", tmp_path / "root", tokenizer=str(tmp_path), vocab_size=262_144
    )
    tokens = np.concatenate([dataset.tokens(split) for split in SPLITS])
    assert dataset.vocab_size == 70_002 and tokens.dtype == np.uint32
    assert sorted(set(tokens.tolist())) == list(range(1, 70_002))
    assert dataset.meta["files"]["train.bin"]["bytes"] == 4 * len(dataset.tokens("train"))


def test_a_data_set_of_before_stays_readable(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(texts(100)))
    dataset = quick(tmp_path / "a.jsonl", tmp_path / "root")
    meta = dataset.meta
    del meta["left_out"]
    for key in ("column", "tokenizer"):
        del meta["config"][key]
    (dataset.folder / "meta.json").write_text(json.dumps(meta))
    old = Dataset(dataset.folder)
    assert old.tokens("train").dtype == np.uint16 and EOT in old.tokenizer().get_vocab()
    assert (dataset.folder / "train.bin").stat().st_size == 2 * len(old.tokens("train"))


@pytest.mark.parametrize(
    ("dtype", "size"), [("uint16", 50_257), ("int64", 100_000), ("uint32", 262_144)]
)
def test_tokens_that_are_given_are_kept_in_their_order(
    tmp_path: Path, dtype: str, size: int
) -> None:
    row = np.random.default_rng(0).integers(size, size=10_000)
    row[123] = size - 1
    for part, name in enumerate(("a.npy", "b.npy")):
        np.save(tmp_path / name, row[part * 5000 : (part + 1) * 5000].astype(dtype))
    dataset = quick(f"tokens:{tmp_path}/*.npy", tmp_path / "root", vocab_size=size)
    assert np.array_equal(np.concatenate([dataset.tokens(split) for split in SPLITS]), row)
    assert [len(dataset.tokens(split)) for split in SPLITS] == [8500, 1000, 500]
    assert dataset.vocab_size == size and dataset.tokens("train").dtype == (
        np.uint16 if size < 65_536 else np.uint32
    )
    with pytest.raises(UserError, match="without a tokenizer"):
        dataset.tokenizer()
    with pytest.raises(
        UserError, match=rf"id {size - 1}, which is outside a vocabulary of {size - 1}"
    ):
        quick(f"tokens:{tmp_path}/*.npy", tmp_path / "root", vocab_size=size - 1)
    named = quick(f"tokens:{tmp_path}/*.npy", tmp_path / "root", vocab_size=size)
    assert named.id == dataset.id


def test_tokens_with_their_tokenizer(tmp_path: Path, shared: Project) -> None:
    tokenizer = train_tokenizer(texts(200), 400)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(texts(200))).ids
    np.save(tmp_path / "a.npy", np.array(ids, dtype=np.uint16))
    words = ("data", "prepare", f"tokens:{tmp_path}/a.npy", "--root", tmp_path / "root")
    code, out, err = shared.lsai(*words, "--tokenizer", tmp_path)
    assert code == 0 and f"{round(len(ids) * 0.85):,} tokens" in out, err
    dataset = Dataset(next((tmp_path / "root/datasets").glob("tokens-a-*")))
    assert dataset.tokenizer().decode(dataset.tokens("train").tolist()).startswith("dokument 0: ")
    code, out, _ = shared.lsai("data", "list", "--root", tmp_path / "root")
    row = next(line.split() for line in out.splitlines() if line.startswith(dataset.folder.name))
    assert code == 0 and row[-2:] == [f"{len(ids):,}", str(dataset.vocab_size)]
    code, _, err = shared.lsai(*words)
    assert code == 2 and "--vocab-size, or which, with --tokenizer" in err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (np.zeros((3, 4), int), r"shape \(3, 4\); it wants integers of shape \(N,\)"),
        (np.zeros(100), "holds float64"),
        (np.array(["a"] * 100), "holds <U1"),
        (np.array(5), r"shape \(\)"),
        (np.full(100, -1), "id -1"),
        (np.zeros(2, int), "only 2 tokens"),
        # which would run code
        (np.array([{"a": 1}] * 100, dtype=object), "cannot be read as a .npy file"),
        (b"\x93NUMPY", "cannot be read as a .npy file"),
        (b"", "cannot be read as a .npy file"),
    ],
)
def test_token_files_that_are_none(tmp_path: Path, row: Any, message: str) -> None:
    if isinstance(row, bytes):
        (tmp_path / "a.npy").write_bytes(row)
    else:
        np.save(tmp_path / "a.npy", row, allow_pickle=True)
    with pytest.raises(UserError, match=message) as error:
        quick(f"tokens:{tmp_path}/a.npy", tmp_path / "root")
    assert "\n" not in str(error.value)
    assert not [path for path in (tmp_path / "root" / "datasets").iterdir() if path.is_dir()]


def test_a_plan_finds_a_given_tokenizer_from_another_folder_and_keys_it_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence_piece(tmp_path / "here" / "t" / "tokenizer.json")
    (tmp_path / "here" / "a.jsonl").write_bytes(lines(texts(30)))
    (tmp_path / "root").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    planned = resolved_paths(
        {"data": {"source": "file:a.jsonl", "tokenizer": "t"}}, tmp_path / "root"
    )["data"]
    monkeypatch.chdir(tmp_path / "root")
    made = config(planned["source"], tokenizer=planned["tokenizer"], vocab_size=500)
    assert prepare(made, tmp_path / "data", progress=False).vocab_size == 500
    keys = [
        key_config(
            tiny(
                model={"vocab_size": 600},
                data={"source": "file:x", "tokenizer": place, "vocab_size": 500},
            )
        )
        for place in ("one", "two")
    ]
    assert keys[0] == keys[1] and keys[0]["data"]["tokenizer"]


def test_a_run_trains_on_tokens_of_a_large_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(70_000, size=20_000))
    data = {"source": f"tokens:{tmp_path}/a.npy", "vocab_size": 70_000}
    (tmp_path / "one").mkdir()
    changes: dict[str, Any] = {
        "model": {"vocab_size": 70_000},
        "data": data,
        "steps": 2,
        "checkpoint": {"export": True},
    }
    results = run(tiny(**changes), Context(tmp_path / "one", tmp_path / "data", tmp_path))
    # of random tokens nothing can be learned
    assert results["train_loss"] == pytest.approx(np.log(70_000), abs=0.1)
    assert (tmp_path / "one/model/config.json").exists() and not (
        tmp_path / "one/model/tokenizer.json"
    ).exists()
