"""One output of one notebook cell as Markdown for the report.

A display made by `show` becomes a labelled figure or table. Everything else a cell can print is made presentable: terminal
colours are removed, progress bars are reduced to their last state, long text keeps its head and tail, a traceback becomes a
clear box. HTML that is not a table is left out in favour of its plain-text form: it could fetch things or break the PDF.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsai_core.files import atomic_writer
from lsai_lab.report.pandoc import callout, code_block, code_span, escape, pandoc

WIDTH = 100  # characters of preformatted text that fit a line of the printed page
HEAD, TAIL = 30, 20  # lines kept of a long text
SVG_LIMIT = 1_500_000  # bytes; a heavier figure is taken as PNG
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# What tqdm says in a notebook where ipywidgets is not installed, on every import.
_NOISE = re.compile(r"(?m)^.*TqdmWarning: IProgress not found.*\n.*\n?")
_IMAGES = {"image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpg"}


@dataclass(frozen=True)
class FileStore:
    """The folder beside the report that holds its pictures, for one notebook: names start with the notebook's `slug`."""

    folder: Path
    slug: str

    def put(self, name: str, data: bytes) -> str:
        """Write `data`; returns the path that the report uses."""
        with atomic_writer(self.folder / f"{self.slug}-{name}") as file:
            file.write(data)
        return f"{self.folder.name}/{self.slug}-{name}"


def plain_text(text: str) -> str:
    """Terminal output as a reader should see it: no colour codes, carriage returns applied, long lines and texts cut."""
    lines = [
        _after_carriage_returns(line) for line in _NOISE.sub("", _ANSI.sub("", text)).replace("\r\n", "\n").split("\n")
    ]
    while lines and not lines[-1]:
        lines.pop()
    if len(lines) > HEAD + TAIL + 10:
        left_out = len(lines) - HEAD - TAIL
        lines = [*lines[:HEAD], f"[... {left_out} lines left out; the notebook holds them all ...]", *lines[-TAIL:]]
    wrapped = [line[i : i + WIDTH] for line in lines for i in range(0, min(len(line), 20 * WIDTH) or 1, WIDTH)]
    return "\n".join(wrapped)


def _after_carriage_returns(line: str) -> str:
    kept = [part for part in line.split("\r") if part.strip()]
    return kept[-1].rstrip() if kept else ""


def output_markdown(output: Any, store: FileStore, name: str) -> str:
    """Markdown of one output (an nbformat output node). `name` is unique in its notebook and names its files."""
    if output.output_type == "stream":
        text = plain_text(output.text)
        return code_block(text, f".output .{output.name}") if text.strip() else ""
    if output.output_type == "error":
        return error_markdown(output)
    facts = output.metadata.get("lsai", {})
    data = output.data
    match facts.get("kind"):
        case "caption":
            return ""
        case "figure":
            image = _image(data, store, facts["label"], facts["caption"])
            return _labelled(image, facts)
        case "table":
            return _labelled(data["text/markdown"], facts) if facts["caption"] else data["text/markdown"] + "\n"
    if "text/markdown" in data:
        return data["text/markdown"] + "\n"
    if any(kind in data for kind in _IMAGES):
        return _image(data, store, name, "") + "\n"
    if "<table" in data.get("text/html", ""):
        html = re.sub(r"(?is)<(style|script)\b.*?</\1>", "", data["text/html"])
        return pandoc("--from", "html-native_divs-native_spans", "--to", "markdown-raw_html", text=html)
    text = plain_text(data.get("text/plain", ""))
    return code_block(text, ".output") if text.strip() else ""


def error_markdown(output: Any) -> str:
    """A box with the exception's name and message and the end of its traceback."""
    message = plain_text(output.evalue).split("\n")[0]
    trace = plain_text("\n".join(output.traceback)).split("\n")
    body = f"{code_span(output.ename)}: {escape(message)}\n\n" if message else f"{code_span(output.ename)}\n\n"
    return callout("important", "This cell failed", body + code_block("\n".join(trace[-TAIL:]), ".output .traceback"))


def _labelled(content: str, facts: Any) -> str:
    """A figure or table as Quarto's cross-reference div: the content, then the caption as its last paragraph."""
    caption = " ".join(facts["caption"].split())
    return f"::::: {{#{facts['label']}}}\n\n{content.strip()}\n\n{caption}\n\n:::::\n"


def _image(data: Any, store: FileStore, name: str, caption: str) -> str:
    svg = data.get("image/svg+xml")
    kinds = [kind for kind in _IMAGES if kind in data]
    if svg and len(svg) > SVG_LIMIT and len(kinds) > 1:
        kinds.remove("image/svg+xml")
    content = data[kinds[0]]
    raw = content.encode() if kinds[0] == "image/svg+xml" else base64.b64decode(content)
    path = store.put(f"{name}.{_IMAGES[kinds[0]]}", raw)
    alt = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(caption.split()))
    alt = re.sub(r'[\\"*`{}\[\]$@]', "", alt) or "output of the cell above"
    return f'![]({path}){{fig-alt="{alt}"}}\n'
