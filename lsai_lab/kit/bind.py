"""An executed chapter made fit for the book: its outputs as Markdown with Quarto's labels, so that both engines read the same text.

Markdown cells and code are the project's own. Outputs may hold text of foreign records: they keep Markdown, pictures and plain text, never
HTML, and close no box. What Markdown itself can carry (raw HTML, `javascript:` links, pictures from elsewhere) is removed by
`reports/book.lua`, which both engines run over the parsed text.
"""

import base64
import re
from pathlib import Path
from typing import Any

import nbformat
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lsai_core.files import write_text
from lsai_lab.kit.strip import KERNEL

LINES, WIDTH = 60, 100  # of a long text
_PICTURES = {"image/svg+xml": ".svg", "image/png": ".png", "image/jpeg": ".jpg"}
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_ACTIVE = re.compile(r"(?i)<script|<foreignobject|<!entity|<iframe|\son\w+\s*=")  # an SVG that has any is not shown
_SKIPPED = {"remove-cell", "parameters", "injected-parameters", "papermill-error-cell-tag"}


def bind(executed: Path, target: Path, problem: str | None = None) -> bool:
    """Write the bound form of the notebook `executed` to `target`, its pictures to `files/` and the data of its figures and tables to `data/`.

    `problem`: why the chapter did not complete, for a box below its title. Returns False if there is one, or if the notebook cannot be read.
    """
    try:
        notebook = nbformat.read(executed, as_version=4)  # type: ignore[no-untyped-call]
    except Exception as error:  # nbformat raises many kinds for a damaged file
        problem = problem or f"It could not be read: {str(error)[:500]}"
        title = executed.stem.lstrip("0123456789-").capitalize()
        notebook = new_notebook(cells=[new_markdown_cell(f"# {title}")])  # type: ignore[no-untyped-call]
    cells: list[Any] = []
    for number, cell in enumerate(notebook.cells):
        if _SKIPPED & set(cell.metadata.get("tags", [])):
            continue
        if cell.cell_type != "code":
            cells.append(new_markdown_cell(cell.source))  # type: ignore[no-untyped-call]
            continue
        asked, code = options(cell.source)
        if code.strip() and asked.get("echo", True):
            cells.append(new_code_cell(code.strip()))  # type: ignore[no-untyped-call]
        if asked.get("output", True) and (
            shown := _outputs(cell.outputs, asked, target.parent, f"{target.stem}-{number}")
        ):
            cells.append(new_markdown_cell("\n\n".join(shown)))  # type: ignore[no-untyped-call]
    if problem:
        cells.insert(1, new_markdown_cell(callout("This chapter did not complete", fenced(problem), "warning")))  # type: ignore[no-untyped-call]
    bound = new_notebook(cells=cells, metadata={"kernelspec": KERNEL})  # type: ignore[no-untyped-call]
    for number, cell in enumerate(bound.cells):
        cell["id"] = f"cell-{number}"  # equal chapters are equal files
    write_text(target, nbformat.writes(bound))  # type: ignore[no-untyped-call]
    return not problem


def options(source: str) -> tuple[dict[str, Any], str]:
    """The cell options (`#| label: ...`) at the head of a cell's source, as Quarto reads them, and the code below them."""
    head = re.match(r"(?:\s*#\|.*(?:\n|$))*", source)
    lines = head[0] if head else ""
    try:
        value = yaml.safe_load(re.sub(r"(?m)^\s*#\| ?", "", lines))
    except yaml.YAMLError:
        value = None
    return value if isinstance(value, dict) else {}, source[len(lines) :]


def callout(title: str, body: str, kind: str) -> str:
    """A box with a title, as Quarto writes it."""
    return f"::: {{.callout-{kind}}}\n## {title}\n\n{body}\n:::"


def fenced(text: str, classes: str = "output") -> str:
    """Terminal output or code as a block: no colour codes, carriage returns applied, long lines broken, long texts cut."""
    text = re.sub(r"(?m)^.*\r(?=.)", "", _ANSI.sub("", text).replace("\r\n", "\n")).rstrip("\r\n ")
    lines = re.sub(rf"(.{{{WIDTH}}})(?=.)", r"\1\n", text).split("\n")
    if len(lines) > LINES + 10 and classes == "output":
        lines = [*lines[: LINES // 2], f"[... {len(lines) - LINES} lines left out ...]", *lines[-LINES // 2 :]]
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return "\n".join([f"{fence}{{.{classes}}}", *lines, fence])


def _outputs(outputs: list[Any], asked: dict[str, Any], folder: Path, name: str) -> list[str]:
    """A cell's outputs as Markdown; the first picture or table of a labelled cell is that figure or table, its data a link below it."""
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    shown = [fenced(printed)] if printed.strip() else []
    label = re.sub(r"[^\w-]", "-", str(asked.get("label", "")))
    wanted = {"fig": "![](", "tbl": "|"}.get(label[:3])
    caption = " ".join(str(asked.get(f"{label[:3]}-cap", "")).split())
    alt = re.sub(r"[\\\"*`{}\[\]$@]", "", str(asked.get("fig-alt") or caption)) or "output of the cell above"
    for number, output in enumerate(output for output in outputs if output.output_type != "stream"):
        text = _markdown(output, folder / "files" / f"{name}-{number}", alt)
        if wanted and text.startswith(wanted):
            text, wanted = f"::: {{#{label}}}\n{text}\n\n{caption}\n:::", None
            if csv := output.metadata.get("lsai", {}).get("csv"):
                write_text(folder / "data" / f"{label}.csv", csv)
                text += f'\n\n[Data (CSV)](data/{label}.csv){{.csv download="{label}.csv"}}'
        shown.append(text)
    return shown


def _markdown(output: Any, picture: Path, alt: str) -> str:
    """One output as Markdown that stays inside its output: it closes no box, opens no header of settings, includes no file."""
    if output.output_type == "error":
        return fenced("\n".join(["This cell failed.", f"{output.ename}: {output.evalue}", "", *output.traceback]))
    data = output.data
    if isinstance(text := data.get("text/markdown"), str):
        box = output.metadata.get("lsai", {}).get("box")
        text = re.sub(r"(?m)^[> \t]*(:{3,})", r"\\\1", text.replace("{{<", "{{ <"))
        text = re.sub(r"\]\([^()\s]*?([^/()\s]+/[^/()\s]+)/notebook\.ipynb\)", r"](runs/\1.html)", text)  # a run's page
        text = re.sub(r"(?m)^(---|\.\.\.)[ \t]*$", "* * *", text).strip()
        return callout(str(box), text, "note") if box else text
    for kind, suffix in _PICTURES.items():
        if kind in data and not (suffix == ".svg" and _ACTIVE.search(data[kind])):
            picture.parent.mkdir(parents=True, exist_ok=True)
            content = data[kind].encode() if suffix == ".svg" else base64.b64decode(data[kind])
            picture.with_suffix(suffix).write_bytes(content)
            return f'![](files/{picture.name}{suffix}){{fig-alt="{alt}"}}'
    return fenced(data["text/plain"]) if str(data.get("text/plain", "")).strip() else ""
