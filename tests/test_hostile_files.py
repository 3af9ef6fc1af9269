"""Files from elsewhere: none executes, none is markup in HTML or PDF, each is one line and exit
code 2, or a recorded failure.

More of them are beside what they concern: wrong requests (`test_bad_input.py`), servers
(`test_data_remote.py`), damaged records (`test_selection.py`), outputs in a browser
(`test_book.py`). Each payload here would create the file `ran`, or set a page's title.
"""

from __future__ import annotations

import hashlib
import html.parser
import io
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from conftest import Project, tiny, write_run
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pypdf import PdfReader
from safetensors.torch import load_file, save_file
from test_book import PNG, SVG, reports
from test_data import quick, texts, write_jsonl

from lsai_core.base.errors import UserError
from lsai_core.model.hf import fill_from, load_hf, save_hf
from lsai_core.model.transformer import build_model
from lsai_core.parallel.world import World
from lsai_core.training.checkpoint import WholeCheckpoints
from lsai_core.training.sharded_checkpoint import ShardedCheckpoints
from lsai_lab.report.engines import HTML, PDF
from lsai_lab.report.render import render
from lsai_lab.report.runpages import write_run_pages
from lsai_lab.report.to_markdown import to_markdown
from lsai_lab.runs.records import find_runs


class Payload:
    """Whoever unpickles it creates the file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def refused(call: Callable[[], Any], ran: Path) -> None:
    """One line, and nothing was executed."""
    with pytest.raises(UserError) as told:
        call()
    assert str(told.value) and "\n" not in str(told.value), told.value
    assert not ran.exists()


# ------------------------------------------------------------------ YAML: studies, profiles, the
# book, claims, clusters

YAML = {
    "call": "study: !!python/object/apply:os.system ['touch RAN']\n",
    "new": "study: !!python/object/new:os.system ['touch RAN']\n",
    "class": "study: !!python/object:pathlib.Path {}\n",
    "name": "study: !!python/name:os.system ''\n",
    "module": "study: !!python/module:os ''\n",
    "tuple": "study: !!python/tuple [1, 2]\n",
    "laughs": "a: &a [x]\n"
    + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "circle": "study: &a [*a]\n",
    "merge": "base: &b {<<: *b}\n",
    "two documents": "study: memory\n---\nstudy: other\n",
    "set": "study: !!set {a, b}\n",
    "bytes": "study: !!binary aGVsbG8=\n",
    "deep": "study: " + "{a: " * 3000 + "\n",
    "tab": "study:\n\t- a\n",
    "control": "study: a\x07b\n",
    "alias": "study: *nothing\n",
    "directive": "%TAG ! tag:yaml.org,2002:python/\n---\nstudy: !name:os.system ''\n",
    "path": "study: ../../../etc/passwd\n",
}
PLACES = ("params/studies/memory.yaml", "params/profiles/cpu.yaml")


@pytest.fixture(scope="module")
def foreign(new_project: Callable[..., Project]) -> Project:
    return new_project()


@pytest.mark.parametrize("name", YAML)
def test_yaml(foreign: Project, name: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for path in (foreign.root / place for place in PLACES):
        good = path.read_bytes()
        path.write_text(YAML[name].replace("RAN", str(ran)))
        try:
            code, out, err = foreign.lsai("study", "memory", "--dry-run")
        finally:
            path.write_bytes(good)
        assert code == 2 and len(err.splitlines()) == 1 and err.startswith("error: "), (
            path,
            code,
            out,
            err[:500],
        )
        assert not ran.exists()


# ------------------------------------------------------------------ Hugging Face folders:
# config.json, safetensors, an index

SHAPE = {"n_layers": 2, "d_model": 32, "n_heads": 2, "n_kv_heads": 1, "d_ff": 64, "vocab_size": 320}
CONFIGS: dict[str, str | dict[str, Any]] = {
    "list": "[]",
    "deep": "[" * 100_000,
    "bytes": "\x00\xff\xfe",
    "number": "3",
    "code": {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"},
    "layers as text": {"num_hidden_layers": "2; touch ran"},
    "endless layers": {"num_hidden_layers": 10**9},
    "negative": {"hidden_size": -32},
    "nan": {"rms_norm_eps": float("nan")},
    "infinite": {"rope_theta": float("inf")},
    "list for a number": {"vocab_size": [320]},
    "text for rope": {"rope_parameters": "llama3"},
    **{
        f"context length {value}": {"max_position_embeddings": value}
        for value in (None, "abc", float("inf"), -5, 0, 2.5, True, 10**30)
    },
    "digits": '{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}",
}


def model_folder(folder: Path) -> Path:
    save_hf(build_model(tiny().model, tiny().attention), folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_config_json(name: str, tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model") / "config.json"
    (path.parent / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    change = CONFIGS[name]
    text = change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text, encoding="latin-1")
    refused(lambda: load_hf(path.parent), tmp_path / "ran")


def header(value: Any, data: bytes = b"") -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + data


SAFETENSORS = {
    "empty": b"",
    "too long": struct.pack("<Q", 2**63) + b"{}",
    "longer than the file": struct.pack("<Q", 1000) + b"{}",
    "no JSON": header(b"not json"),
    "deep": header(b"[" * 100_000),
    "no tensors": header({}),
    "type": header({"a": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "beyond": header({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, bytes(4)),
    "overlap": header(
        {k: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for k in "ab"}, bytes(4)
    ),
    "overflow": header({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}),
    "negative": header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
    "pickle": b"",
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors(name: str, tmp_path: Path) -> None:
    folder, ran = model_folder(tmp_path / "model"), tmp_path / "ran"
    data = pickle.dumps(Payload(ran)) if name == "pickle" else SAFETENSORS[name]
    (folder / "model.safetensors").write_bytes(data)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(ran)))
    refused(lambda: load_hf(folder), ran)
    refused(lambda: fill_from(build_model(tiny().model, tiny().attention), folder), ran)


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "../ran.safetensors"}}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": "."}}',
        '{"weight_map": {"a": "b\\nc"}}',
        '{"weight_map": {"a": "\\ud800"}}',
        "[" * 100_000,
    ],
)
def test_an_index_of_weights(index: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    refused(lambda: load_hf(folder), tmp_path / "ran")


NO_WEIGHTS = {
    **{
        str(dtype): lambda tensor, dtype=dtype: tensor.to(dtype)
        for dtype in (
            torch.int64,
            torch.int32,
            torch.int8,
            torch.uint8,
            torch.bool,
            torch.complex64,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        )
    },
    "NaN": lambda tensor: tensor.clone().fill_(float("nan")),
    "one NaN": lambda tensor: tensor.clone().index_fill_(0, torch.tensor([0]), float("nan")),
    "infinite": lambda tensor: tensor.clone().fill_(float("-inf")),
}


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_what_is_no_weight_is_named(name: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for victim in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        save_file(
            tensors | {victim: NO_WEIGHTS[name](tensors[victim])}, folder / "model.safetensors"
        )
        with pytest.raises(UserError, match=victim):
            load_hf(folder)
        refused(lambda: load_hf(folder), tmp_path / "ran")


def test_a_tensor_that_lies_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name in "ab":
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
    )
    with pytest.raises(UserError, match=r"is also in a\.safetensors"):
        load_hf(folder)


# ------------------------------------------------------------------ checkpoints: one file, and
# DCP's folder

Change = Callable[[Path, Path], bytes]


def zipped(folder: Path, pickled: bytes) -> bytes:
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3")
    return stored.getvalue()


def saved(value: Any) -> bytes:
    stored = io.BytesIO()
    torch.save(value, stored)
    return stored.getvalue()


WHOLE: dict[str, Change] = {
    "pickle": lambda path, ran: pickle.dumps(Payload(ran)),
    "torch pickle": lambda path, ran: saved(Payload(ran)),
    "in the model": lambda path, ran: saved(
        {"step": 1, "random": {}, "model": {"a": Payload(ran)}, "optimizer": {}}
    ),
    "zip": lambda path, ran: zipped(path, pickle.dumps(Payload(ran))),
    "empty": lambda path, ran: b"",
    "text": lambda path, ran: b"cos\nsystem\n(S'touch ran'\ntR.",
    "list": lambda path, ran: saved([1, 2]),
    "no model": lambda path, ran: saved({"step": 1}),
    "model is text": lambda path, ran: saved(
        {"step": 1, "random": {}, "model": "x", "optimizer": {}, "train_s": 0.0}
    ),
}


WHOLE |= {
    f"{key} {value}": lambda path, ran, key=key, value=value: saved(torch.load(path) | {key: value})
    for key, value in (
        ("step", -5),
        ("step", "x"),
        ("step", 2),
        ("train_s", float("nan")),
        ("train_s", "3"),
        ("random", []),
    )
}


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", WHOLE)
def test_a_checkpoint_whose_checksum_holds(name: str, tmp_path: Path) -> None:
    store, ran = WholeCheckpoints(tmp_path, keep=1), tmp_path / "ran"
    store.save(1, *parts(), 0.0)
    (path,) = tmp_path.glob("*.pt")
    path.write_bytes(WHOLE[name](path, ran))
    facts = {
        "step": 1,
        "bytes": path.stat().st_size,
        "blake2b": hashlib.blake2b(path.read_bytes()).hexdigest(),
    }
    path.with_suffix(".json").write_text(json.dumps(facts))
    refused(lambda: store.restore(*parts()), ran)


FACTS: dict[str, Any] = {
    "no files": {"files": {}},
    "files are a list": {"files": ["a"]},
    "files are nothing": {"files": None},
    "a file elsewhere": {"files": {".metadata": "", "__0_0.distcp": "", "../x": ""}},
    **{f"step {value}": {"step": value} for value in (-5, "x", 7, 1.0, True, None)},
    **{f"sequences {value}": {"sequences_per_step": value} for value in (0, -8, "8", None)},
    **{f"seconds {value}": {"train_s": value} for value in (-1, "x", float("nan"), float("inf"))},
    **{f"tp {value}": {"tp": value} for value in (0, -1, "x", 1.5, 2**40)},
    "list": "[]",
    "deep": "[" * 100_000,
    "no step": '{"files": {}, "sequences_per_step": 8, "train_s": 0.0}',
    "empty": "",
    "null": "null",
}


@pytest.mark.parametrize("name", FACTS)
def test_what_a_sharded_checkpoint_says_of_itself(name: str, tmp_path: Path) -> None:
    store = ShardedCheckpoints(tmp_path / "run", 1, 8, World())
    store.save(1, *parts(), 0.0)
    store.finish()
    (path,) = tmp_path.glob("run/*/complete.json")
    change = FACTS[name]
    path.write_text(
        change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change)
    )
    refused(lambda: store.restore(*parts()), tmp_path / "ran")


def test_a_flipped_bit_of_a_slice_is_seen_whatever_complete_json_leaves_out(tmp_path: Path) -> None:
    store = ShardedCheckpoints(tmp_path / "run", 1, 8, World())
    store.save(1, *parts(), 0.0)
    store.finish()
    (path,) = tmp_path.glob("run/*/__0_0.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    facts = path.with_name("complete.json")
    told = json.loads(facts.read_text())
    del told["files"][path.name]
    facts.write_text(json.dumps(told))
    refused(lambda: store.restore(*parts()), tmp_path / "ran")


def with_planner(path: Path, value: Any) -> bytes:
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = value
    return pickle.dumps(metadata)


def beyond(path: Path, ran: Path) -> bytes:
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_data = {
        key: replace(info, relative_path="../../../etc/passwd")
        for key, info in metadata.storage_data.items()
    }
    return pickle.dumps(metadata)


DCP: dict[str, Change] = {
    "payload": lambda path, ran: pickle.dumps(Payload(ran)),
    "in the metadata": lambda path, ran: with_planner(path, Payload(ran)),
    "eval": lambda path, ran: f'cbuiltins\neval\n(S\'open("{ran}", "w")\'\ntR.'.encode(),
    "system": lambda path, ran: f"cos\nsystem\n(S'touch {ran}'\ntR.".encode(),
    "torch": lambda path, ran: b"ctorch\nload\n(S'x'\ntR.",
    "partial": lambda path, ran: f"cfunctools\npartial\n(cos\nsystem\nS'touch {ran}'\ntR.".encode(),
    "empty": lambda path, ran: b"",
    "cut": lambda path, ran: path.read_bytes()[:-20],
    "list": lambda path, ran: pickle.dumps([1]),
    "elsewhere": beyond,
}


@pytest.mark.parametrize("name", DCP)
def test_metadata_of_a_sharded_checkpoint_whose_checksums_hold(name: str, tmp_path: Path) -> None:
    store, ran = ShardedCheckpoints(tmp_path / "run", 1, 8, World()), tmp_path / "ran"
    store.save(1, *parts(), 0.0)
    store.finish()
    path = tmp_path / "run" / "sharded-00000001" / ".metadata"
    path.write_bytes(DCP[name](path, ran))
    facts = json.loads((path.parent / "complete.json").read_text())
    facts["files"] = {
        key: hashlib.blake2b((path.parent / key).read_bytes()).hexdigest() for key in facts["files"]
    }
    (path.parent / "complete.json").write_text(json.dumps(facts))
    refused(lambda: store.restore(*parts()), ran)


# ------------------------------------------------------------------ text and what is made of it

TEXT: dict[str, bytes] = {
    "deep.jsonl": b'{"text": ' + b"[" * 100_000 + b"\n",
    "digits.jsonl": b'{"text": ' + b"9" * 5000 + b"}\n",
    "list.jsonl": b'{"text": ["a", "b"]}\n["c"]\n3\n',
    "bomb.jsonl.zst": b"\x28\xb5\x2f\xfd\xa4" + struct.pack("<I", 2**31) + b"\x00" * 9,
    "pickle.parquet": b"PAR1" + pickle.dumps(print) + b"PAR1",
    "utf16.txt": "zażółć gęślą jaźń".encode("utf-16"),
    "nul.txt": bytes(10_000) + b"\xff",
}


@pytest.mark.parametrize("name", TEXT)
def test_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(TEXT[name])
    refused(lambda: quick(tmp_path / name, tmp_path / "root"), tmp_path / "ran")
    assert not list(tmp_path.glob("root/datasets/[!.]*"))


PREPARED = {
    "tokenizer of no JSON": ("tokenizer.json", b"not json"),
    "deep tokenizer": ("tokenizer.json", b"[" * 100_000),
    "tokenizer as a list": ("tokenizer.json", b"[]"),
    "pickled tokenizer": ("tokenizer.json", pickle.dumps(print)),
    "tokenizer of another model": (
        "tokenizer.json",
        b'{"version": "1.0", "model": {"type": "Evil"}}',
    ),
    "meta as a list": ("meta.json", b"[]"),
    "meta of no JSON": ("meta.json", b"\x00"),
    "deep meta": ("meta.json", b"[" * 100_000),
    "meta without files": ("meta.json", b'{"id": "x", "files": 3, "tokenizer": 3, "splits": 3}'),
    "meta that leads out": (
        "meta.json",
        b'{"id": "x", "files": {"../../../etc/passwd": {"bytes": 1, "blake2b": []}}, "tokenizer": '
        b'{}, "splits": {}}',
    ),
}


@pytest.mark.parametrize("name", PREPARED)
def test_prepared_data(name: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(100))
    file, data = PREPARED[name]
    (quick(source, tmp_path / "root").folder / file).write_bytes(data)
    refused(lambda: quick(source, tmp_path / "root").tokenizer(), tmp_path / "ran")


# ------------------------------------------------------------------ notebooks and records, as HTML
# and PDF

EVIL = "<script>document.title='NAME'</script><img src=x onerror=\"document.title='NAME'\">"
OUTPUTS: dict[str, dict[str, Any]] = {
    "html": {"text/html": EVIL},
    "markdown": {"text/markdown": EVIL},
    "raw block": {"text/markdown": f"```{{=html}}\n{EVIL}\n```"},
    "raw inline": {"text/markdown": f"`{EVIL}`{{=html}}"},
    "attribute": {"text/markdown": "[x](https://example.org){onclick=\"document.title='NAME'\"}"},
    "link": {
        "text/markdown": "[x](javascript:document.title='NAME') <javascript:document.title='NAME'>"
    },
    "data link": {"text/markdown": "[x](data:text/html;base64,PHNjcmlwdD4=)"},
    "picture": {
        "text/markdown": "![x](/etc/hostname) ![y](file:///etc/hostname) "
        "![z](http://198.51.100.7/NAME.png)"
    },
    "script": {"application/javascript": "document.title='NAME'", "text/plain": EVIL},
    "widget": {"application/vnd.jupyter.widget-view+json": {"model_id": EVIL}, "text/plain": EVIL},
    "drawing": {
        "image/svg+xml": SVG.replace("<text", "<script>document.title='NAME'</script><text")
    },
    "event in a drawing": {
        "image/svg+xml": SVG.replace("<svg", "<svg onload=\"document.title='NAME'\"")
    },
    "entity": {"image/svg+xml": '<!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/hostname">]>' + SVG},
    "plain": {"text/plain": EVIL},
    "closed box": {"text/markdown": f":::\n\n</div></section>{EVIL}\n\n:::"},
    "raw typst": {
        "text/markdown": '```{=typst}\n#link("javascript:NAME")[x] #read("/etc/hostname") '
        '#panic("typst ran")\n```'
    },
    "inline typst": {
        "text/markdown": '`#panic("typst ran")`{=typst} #panic("typst ran") $#panic("typst ran")$'
    },
    "latex": {"text/latex": "\\href{javascript:document.title='NAME'}{x}", "text/plain": EVIL},
}
RECORDS: dict[str, dict[str, Any]] = {
    "reason": {"reason": EVIL, "outcome": "failed"},
    "result": {"results": {"note": EVIL}},
    "result's name": {"results": {EVIL: 1.0}},
    "setting": {"config": {"data": {"source": EVIL}}},
    "setting's name": {"config": {EVIL: 1}},
    "end of the page's data": {"results": {"note": "</script>" + EVIL}},
    "column of metrics": {"metrics": [{"step": 0, "loss": 1.0, EVIL: 2.0}]},
}


class Active(html.parser.HTMLParser):
    """Collects scripts' text, event attributes, links and sources."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._script = tag == "script" and values.get("type") != "application/json"
        self.found += [
            value or "" for name, value in attrs if name.startswith("on") or name == "srcdoc"
        ]
        addresses = [values.get(name) or "" for name in ("src", "href", "action", "data")]
        self.found += [
            a for a in addresses if re.match(r"(?i)\s*(javascript|data:text|file:|/)", a)
        ]
        self.found += [a for a in addresses[:1] if re.match(r"(?i)\s*https?:", a)]
        self.found += ["document.title"] if tag in ("iframe", "object", "embed", "base") else []

    def handle_endtag(self, tag: str) -> None:
        self._script = self._script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._script:
            self.found.append(data)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One chapter that shows all outputs and the pages of all records, as the pandoc engine makes
    them."""
    root = tmp_path_factory.mktemp("hostile")
    folder = reports(root)
    cells: list[Any] = [new_markdown_cell("# One {#sec-one}")]
    for name, data in OUTPUTS.items():
        named = json.loads(json.dumps(data).replace("NAME", name))
        output = new_output(
            "display_data", named | ({"image/png": PNG} if "image/svg+xml" in data else {})
        )
        cells += [
            new_markdown_cell(f"## Case {name}"),
            new_code_cell("foreign()", outputs=[output]),
        ]
    stream = [
        new_output("stream", name="stdout", text=EVIL),
        new_output("error", ename=EVIL, evalue=EVIL, traceback=[EVIL]),
    ]
    cells.append(new_code_cell(f"# {EVIL}", outputs=stream))
    nbformat.write(new_notebook(cells=cells), root / "executed" / "one.ipynb")
    to_markdown(root / "executed" / "one.ipynb", folder / "one.ipynb")
    for number, (name, changes) in enumerate(RECORDS.items()):
        named = json.loads(json.dumps(changes).replace("NAME", name.replace("'", "")))
        write_run(root / "runs", "memory", f"case{number}", **named)
    write_run_pages(find_runs(root / "runs"), folder)
    assert [path.name for path in render(folder, root / "out", ["html", "pdf"], "pandoc")] == [
        HTML,
        PDF,
    ]
    return root / "out"


@pytest.fixture(scope="module")
def pages(rendered: Path) -> dict[str, str]:
    """The text of each page by its path."""
    return {str(path.relative_to(rendered)): path.read_text() for path in rendered.rglob("*.html")}


def test_the_pdf_runs_and_fetches_nothing(rendered: Path) -> None:
    pdf = PdfReader(rendered / PDF)
    text = "".join(page.extract_text() for page in pdf.pages)
    assert all(f"Case {name}" in text for name in OUTPUTS) and "document.title" in text
    assert (
        hostname := Path("/etc/hostname")
    ).exists() and f" {hostname.read_text().strip()}\n" not in text
    assert not {"/OpenAction", "/AA", "/JavaScript", "/EmbeddedFiles"} & {
        *pdf.trailer["/Root"],
        *pdf.trailer["/Root"].get("/Names", {}),
    }
    actions = [
        note.get_object().get("/A", {}) for page in pdf.pages for note in page.get("/Annots", [])
    ]
    assert {str(action.get("/S")) for action in actions} <= {"/URI", "/GoTo", "None"}
    addresses = [str(action["/URI"]) for action in actions if "/URI" in action]
    assert not [
        address for address in addresses if re.match(r"(?i)\s*(javascript|data|file):", address)
    ]


@pytest.mark.parametrize("name", [*OUTPUTS, *RECORDS])
def test_notebooks_and_records_are_no_markup(pages: dict[str, str], name: str) -> None:
    shown = f"Case {name}" if name in OUTPUTS else f"case{list(RECORDS).index(name)}"
    assert any(shown in text for text in pages.values()), "it is in the report"
    for path, text in pages.items():
        active = [
            part
            for part in Active(text).found
            if "document.title=" in part or part.startswith(("javascript", "data:text"))
        ]
        assert active == [], path
        assert "198.51.100.7" not in re.sub(r"<(pre|code).*?</\1>", "", text, flags=re.S), path
