"""The tokenizer of a checkpoint: exported beside the model, compared where a run begins from
weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Project, losses, tiny
from test_data import texts
from test_data_files import lines
from test_data_tokens import sentence_piece
from tokenizers import Tokenizer

from lsai_core.base.errors import UserError
from lsai_lab.benches.training import run
from lsai_lab.data import prepare
from lsai_lab.runs.kinds import Context

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_exported_model_has_the_tokenizer_and_goes_on_with_the_same_text_only(
    tmp_path: Path, new_project: Callable[..., Project]
) -> None:
    from transformers import AutoTokenizer

    source = tmp_path / "a.jsonl"
    source.write_bytes(lines(texts(200)))
    given = sentence_piece(tmp_path / "given" / "tokenizer.json", vocab_size=320)
    project = new_project()
    sizes = {"vocab_size": 320, "source": f"file:{source}"}
    first = tiny(data=sizes, steps=2, checkpoint={"export": True})
    (tmp_path / "one").mkdir()
    run(first, Context(tmp_path / "one", tmp_path / "data", tmp_path))
    model = tmp_path / "one" / "model"
    dataset = prepare(first.data, tmp_path / "data", progress=False)
    read = AutoTokenizer.from_pretrained(model)
    text = "dokument 7: zażółć gęślą jaźń <|endoftext|>"
    assert read.eos_token == "<|endoftext|>" and read.eos_token_id == 0
    assert (
        read("dokument 7: zażółć")["input_ids"]
        == dataset.tokenizer().encode("dokument 7: zażółć").ids
    )
    assert read.decode(read(text)["input_ids"]) == text

    again = tiny(data=sizes, steps=2, init_from=str(model))
    (tmp_path / "two").mkdir()
    run(again, Context(tmp_path / "two", tmp_path / "data", tmp_path))
    assert len(losses(tmp_path / "two")) == 2
    other = tiny(data={**sizes, "tokenizer": str(given)}, steps=2, init_from=str(model))
    (tmp_path / "three").mkdir()
    message = (
        r"init_from: .*tokenizer\.json makes other tokens .*set data\.tokenizer=.*model and "
        r"data\.vocab_size=320"
    )
    with pytest.raises(UserError, match=message):
        run(other, Context(tmp_path / "three", tmp_path / "data", tmp_path))
    assert not list((tmp_path / "three").iterdir())

    # Before anything runs, and as the line says it fits.
    words = (
        "study",
        "memory",
        "--dry-run",
        "--parts",
        "train",
        "--set",
        f"init_from={model}",
        "--dataset",
        f"file:{source}",
    )
    assert project.lsai(*words)[0] == 0
    code, out, err = project.lsai(*words, "--set", f"data.tokenizer={given}")
    assert (code, out) == (2, "") and "makes other tokens" in err and "Traceback" not in err
    assert (
        project.lsai(*words, "--set", f"data.tokenizer={model}", "--set", "data.vocab_size=320")[0]
        == 0
    )


def test_a_tokenizer_that_is_written_otherwise_is_the_same(
    tmp_path: Path, new_project: Callable[..., Project]
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines(texts(200)))
    config = tiny(
        data={"vocab_size": 320, "source": f"file:{source}"}, steps=2, checkpoint={"export": True}
    )
    (tmp_path / "one").mkdir()
    run(config, Context(tmp_path / "one", tmp_path / "data", tmp_path))
    path = tmp_path / "one" / "model" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(16)
    path.write_text(json.dumps(json.loads(tokenizer.to_str()), indent=4))
    (tmp_path / "two").mkdir()
    begun = tiny(data=config.data.model_dump(), steps=2, init_from=str(path.parent))
    run(begun, Context(tmp_path / "two", tmp_path / "data", tmp_path))
    path.unlink()  # nothing to compare
    run(begun, Context(tmp_path / "two", tmp_path / "data", tmp_path))
