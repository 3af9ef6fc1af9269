"""Numbers in a chapter's text, checked by execution, as doctest checks what a program prints.

A cell defines a number by name, `speed = lab.number(ratio, "{:.2f}x", run)`, and the text writes it
where it is read, as a link to that name: `trains [3.96x](#speed) as fast`. So the source reads well
wherever Markdown does. When the chapter is executed, a last cell (`COLLECT`) keeps what each name
holds. The book shows what was computed, as a link to the run; `lsai numbers` compares it with the
text, and `--write` puts it in. README names the chapter, too:
`[3.96x](notebooks/25-time.ipynb#speed)`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_core.base.errors import hint
from lsai_lab.report.load import folder_of
from lsai_lab.report.values import Format, shown
from lsai_lab.runs.pages import page_names

COLLECT = "from lsai_lab.report.numbers import collect\n\ncollect(globals())"
_MIME = "application/vnd.lsai.numbers+json"
# A name is an identifier; the ids of sections, figures and tables have hyphens.
_LINK = re.compile(r"\[(?P<text>[^][]*)\]\((?P<file>[\w./-]*\.ipynb)?#(?P<name>[A-Za-z_]\w*)\)")


class Number(str):
    """A number as its reader sees it; `run` is the page of the run that it leads to, or "". Of a
    comparison these are two, `before,after`, and it leads to what differs between them."""

    run: str = ""


@dataclass(frozen=True)
class Found:
    """A number of a text: what stands there, what was computed (None: nothing of that name), and
    the sentence around it."""

    name: str
    written: str
    computed: str | None
    sentence: str
    near: str = ""

    def __str__(self) -> str:
        if self.computed is None:
            return f"no cell defines the number {self.name!r}{self.near}, of: {self.sentence}"
        says = f"{self.written!r}, and {self.name} is now {self.computed!r}"
        return f"the text says {says}, in: {self.sentence}"


def number(value: Any, spec: Format | None = None, run: Any = None, over: Any = None) -> Number:
    """`value` by `spec` (`"{:.2f}x"`, a function; default: four significant digits) as a number for
    the text, with a true minus. `run`: a row of `lab.load`, a run or its folder, to which the
    number leads in the book; with `over`, another run that it is compared with, it leads to both
    side by side, as it does by a row of differences, whose `run` is a pair `(before, after)`.
    ValueError for a value that is missing, UserError for what is no run."""
    text = re.sub(r"(?<![\w.])-(?=[\d.])", "−", shown(value, spec))
    if text in ("–", "nan", ""):
        raise ValueError("a number of the text is missing: the value is not there")
    made = Number(text)
    made.run = page_names(tuple(end for each in (over, run) for end in _ends(each)))
    return made


def _ends(run: Any) -> tuple[str | Path, ...]:
    """The folder of a run, of a pair those of both."""
    if isinstance(run, (Mapping, pd.Series)) and "run" in run:
        run = run["run"]
    if run is None or isinstance(run, tuple):
        return run or ()
    return (run if isinstance(run, (str, Path)) else folder_of(run),)


def collect(namespace: Mapping[str, Any]) -> None:
    """Keep the numbers of a notebook in the output of the cell that calls this."""
    from IPython.display import display

    found = {
        name: {"text": str(value), "run": value.run}
        for name, value in namespace.items()
        if isinstance(value, Number) and not name.startswith("_")
    }
    display({_MIME: found, "text/plain": f"{len(found)} numbers"}, raw=True)  # type: ignore[no-untyped-call]


def collected(notebook: Any) -> dict[str, Number]:
    """The numbers that the executed `notebook` holds, by name; none if it did not come so far."""
    found: dict[str, Number] = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            kept = output.get("data", {}).get(_MIME, {})
            for name, entry in kept.items() if isinstance(kept, dict) else ():
                found[str(name)] = Number(entry["text"])
                found[str(name)].run = str(entry["run"])
    return found


def _links(text: str) -> Iterator[re.Match[str]]:
    """The links to numbers in Markdown, which are none within code."""
    plain = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", lambda code: " " * len(code[0]), text)
    yield from _LINK.finditer(plain)


def compared(text: str, numbers: Mapping[str, str], file: str = "") -> list[Found]:
    """The numbers in `text` that link to `file` ("": the same chapter), each beside what was
    computed."""
    found = []
    for link in _links(text):
        if (link["file"] or "") != file:
            continue
        computed = numbers.get(link["name"])
        near = "" if computed is not None else hint(link["name"], list(numbers))
        entry = Found(link["name"], link["text"], computed, _sentence(text, link), near)
        found.append(entry)
    return found


def differing(executed: Path) -> int:
    """How many numbers of the text of an executed notebook are not those that it computed; 0 if it
    cannot be read."""
    import nbformat

    try:
        notebook = nbformat.read(executed, as_version=4)  # type: ignore[no-untyped-call]
    except (OSError, ValueError):
        return 0
    numbers = collected(notebook)
    texts = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    found = [each for text in texts for each in compared(text, numbers)]
    return sum(each.written != each.computed for each in found)


def rewritten(text: str, numbers: Mapping[str, str], file: str = "") -> str:
    """`text` with the computed numbers in place of those that stand there."""
    for link in reversed(list(_links(text))):
        computed = numbers.get(link["name"])
        if (link["file"] or "") == file and computed is not None:
            text = text[: link.start("text")] + computed + text[link.end("text") :]
    return text


def bound(text: str, numbers: Mapping[str, Number]) -> str:
    """`text` as the book has it: each number as it was computed, a link to its run if it has one,
    or to its two runs side by side; as it is written where nothing was computed."""
    for link in reversed(list(_links(text))):
        computed = numbers.get(link["name"], Number(link["text"]))
        if link["file"]:
            continue
        *before, run = computed.run.split(",")
        shown = f"[{computed}]({page_of(run, *before)})" if run else str(computed)
        text = text[: link.start()] + shown + text[link.end() :]
    return text


def page_of(run: str, before: str | None = None) -> str:
    """Where a link to `run` (its `page_name`) leads in the book, or to it beside `before`."""
    return f"runs/index.html#{before},{run}" if before else f"runs/{run}.html"


def _sentence(text: str, link: re.Match[str]) -> str:
    """The sentence around `link`, on one line."""
    before = re.split(r"(?<=[.!?:])\s|\n\s*\n", text[: link.start()])[-1]
    after = re.split(r"(?<=[.!?])\s|\n\s*\n", text[link.end() :])[0]
    return " ".join(f"{before}{link[0]}{after}".split())
