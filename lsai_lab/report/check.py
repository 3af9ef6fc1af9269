"""Every label once, every reference answered: checked before anything is rendered.

The bound report is read by pandoc and its syntax tree is walked, so that what counts as a reference is what the renderer
will see: `@fig-loss` in prose counts, the same characters in code do not. Both renderings are checked, because content may
be visible in only one of them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lsai_lab.report.pandoc import READER, pandoc

PREFIXES = ("fig-", "tbl-", "sec-")


def reference_errors(source: Path) -> list[str]:
    """One line for each label that stands twice and each reference or internal link without a target, in reading order."""
    tree = json.loads(pandoc("--from", READER, "--to", "json", source))
    errors: dict[str, None] = {}
    for target in ("html", "pdf"):
        labels: dict[str, str] = {}
        references: list[tuple[str, str, str]] = []
        chapter = "the front matter"
        for block in tree["blocks"]:
            if block["t"] == "Header" and block["c"][0] == 1:
                chapter = f"chapter {_text(block['c'][2])!r}"
            for kind, name in _labels_and_references(block, target):
                if kind == "label" and name in labels:
                    errors[f"{chapter}: label {name!r} stands twice (first in {labels[name]})"] = None
                elif kind == "label":
                    labels[name] = chapter
                else:
                    references.append((chapter, kind, name))
        for where, kind, name in references:
            if name not in labels:
                close = difflib.get_close_matches(name, labels, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                text = f"#{name}" if kind == "link" else f"@{name}"
                errors[f"{where}: {text} refers to nothing{hint}"] = None
    return list(errors)


def _labels_and_references(node: Any, target: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, list):
        for item in node:
            yield from _labels_and_references(item, target)
    if not isinstance(node, dict):
        return
    content: Any = node.get("c")
    match node.get("t"):
        case "Header":
            yield "label", content[1][0]
        case "Div" | "Span" | "Figure" | "Table" | "CodeBlock" | "Code":
            identifier, classes, pairs = content[0]
            conditions = dict(pairs)
            hidden = conditions.get("when-format") == "html" if target == "pdf" else "unless-format" in conditions
            if "content-visible" in classes and hidden:
                return
            if identifier:
                yield "label", identifier
        case "Cite":
            for citation in content[0]:
                if citation["citationId"].startswith(PREFIXES):
                    yield "reference", citation["citationId"]
            return
        case "Link":
            if content[2][0].startswith("#"):
                yield "link", content[2][0][1:]
    yield from _labels_and_references(content, target)


def _text(inlines: list[Any]) -> str:
    return "".join(
        part["c"] if part["t"] == "Str" else " " for part in inlines if part["t"] in ("Str", "Space", "SoftBreak")
    )
