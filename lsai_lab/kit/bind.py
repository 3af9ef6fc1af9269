"""An executed chapter made fit for a book: what a cell may show is let through, what is foreign or active stays outside.

Quarto and the fallback read the same bound notebook. Markdown cells and code are the project's own; outputs may hold text of foreign
records, so they keep Markdown, pictures and plain text only, never HTML. What Markdown itself can carry (raw HTML, `javascript:` links,
pictures from elsewhere) is removed by `reports/book.lua`, which both engines run over the parsed text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import yaml

from lsai_core.files import write_text

HEAD, TAIL, WIDTH = 30, 20, 100  # lines kept of a long text, and characters of a line
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_NOISE = re.compile(r"(?m)^.*TqdmWarning: IProgress not found.*\n.*\n?")
# Active or fetched parts of an SVG; one that has any is not shown.
_ACTIVE = re.compile(r"(?i)<script|<foreignobject|<!entity|<iframe|\son\w+\s*=|href\s*=\s*[\"'](?!#|data:image/(png|jpeg))|url\((?![\"']?#)|@import")  # fmt: skip
_PICTURES = ("image/svg+xml", "image/png", "image/jpeg")
_OPTION = re.compile(r"^#\|[ ]?(.*)$")


def bind(executed: Path, target: Path) -> bool:
    """Write the bound form of the notebook `executed` to `target`; figures' data go to `data/<label>.csv` beside it.

    Returns False if a cell failed or did not end, or the notebook cannot be read: the chapter then says so in a box.
    """
    try:
        notebook = nbformat.read(executed, as_version=4)  # type: ignore[no-untyped-call]
    except Exception as error:  # nbformat raises many kinds for a damaged file
        what = plain_text(str(error)).split("\n")[0][:200]
        title = f"# {executed.stem.lstrip('0123456789-').replace('-', ' ').capitalize()}\n\n"
        cell = _markdown(title + callout("This chapter could not be read", f"`{what}`".replace("``", "")))
        _write(nbformat.v4.new_notebook(cells=[cell]), target)  # type: ignore[no-untyped-call]
        return False
    cells: list[Any] = []
    unfinished: list[str] = []
    failed = False
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "remove-cell" in tags or "parameters" in str(tags) or any(tag.startswith("papermill-error") for tag in tags):
            continue
        status = cell.metadata.get("papermill", {}).get("status", "")
        cell.metadata = {"tags": tags} if tags else {}
        cells.append(cell)
        if cell.cell_type != "code":
            continue
        failed |= any(output.output_type == "error" for output in cell.outputs)
        label, tables = options(cell.source).get("label", ""), [_csv(output) for output in cell.outputs]
        cell.outputs = [safe for output in _joined(cell.outputs) if (safe := _safe(output)) is not None]
        cell.execution_count = None
        if csv := next(filter(None, tables), ""):
            name = re.sub(r"[^\w-]", "-", str(label))
            if name.startswith("fig-"):
                write_if_changed(target.parent / "data" / f"{name}.csv", csv)
                cells.append(_markdown(f'[Data of this figure (CSV)](data/{name}.csv){{.csv download="{name}.csv"}}'))
        if status in ("running", "pending"):
            unfinished.append(status)
            if len(unfinished) == 1:
                cells.append(_markdown(callout("Did not finish", "This cell did not end; what follows did not run.")))
    notebook.cells = cells
    notebook.metadata = {key: notebook.metadata[key] for key in ("kernelspec",) if key in notebook.metadata}
    _write(notebook, target)
    return not (unfinished or failed)


def options(source: str) -> dict[str, Any]:
    """The cell options (`#| label: ...`) at the head of a cell's source, as Quarto reads them."""
    lines = []
    for line in source.lstrip().split("\n"):
        if (match := _OPTION.match(line)) is None:
            break
        lines.append(match[1])
    try:
        value = yaml.safe_load("\n".join(lines))
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}


def callout(title: str, body: str) -> str:
    """A box with a title, as Quarto writes it."""
    return f"::: {{.callout-warning}}\n## {title}\n\n{body}\n:::"


def plain_text(text: str) -> str:
    """Terminal output as a reader should see it: no colour codes, carriage returns applied, long lines and texts cut."""
    lines = _NOISE.sub("", _ANSI.sub("", text)).replace("\r\n", "\n").rstrip("\n").split("\n")
    lines = [([part for part in line.split("\r") if part.strip()] or [""])[-1].rstrip() for line in lines]
    if len(lines) > HEAD + TAIL + 10:
        lines = [*lines[:HEAD], f"[... {len(lines) - HEAD - TAIL} lines left out ...]", *lines[-TAIL:]]
    return "\n".join(line[i : i + WIDTH] for line in lines for i in range(0, min(len(line), 20 * WIDTH) or 1, WIDTH))


def _safe(output: Any) -> Any | None:
    """The output with what a book may show, or None if nothing is left."""
    if output.output_type == "stream":
        text = plain_text(output.text)
        return nbformat.v4.new_output("stream", name=output.name, text=text) if text.strip() else None  # type: ignore[no-untyped-call]
    if output.output_type == "error":
        trace = plain_text("\n".join(output.traceback)).split("\n")[-TAIL:]
        text = "\n".join(["This cell failed.", f"{output.ename}: {plain_text(output.evalue)}", "", *trace])
        return nbformat.v4.new_output("stream", name="stderr", text=text)  # type: ignore[no-untyped-call]
    data, kept = output.data, {}
    if isinstance(data.get("text/markdown"), str):
        kept = {"text/markdown": _markdown_output(data["text/markdown"])}
    else:
        kept = {kind: data[kind] for kind in _PICTURES if kind in data}
        if _ACTIVE.search(kept.get("image/svg+xml", "")):
            del kept["image/svg+xml"]
        if not kept and str(data.get("text/plain", "")).strip():
            kept = {"text/plain": plain_text(data["text/plain"])}
    metadata = {kind: output.metadata[kind] for kind in _PICTURES if kind in output.metadata}
    return nbformat.v4.new_output("display_data", kept, metadata=metadata) if kept else None  # type: ignore[no-untyped-call]


def _markdown_output(text: str) -> str:
    """Computed Markdown that stays inside its output: it closes no box, opens no header of settings, includes no file."""
    text = re.sub(r"(?m)^[ \t]*(:{3,})", r"\\\1", text.replace("{{<", "{{ <"))
    return re.sub(r"(?m)^(---|\.\.\.)[ \t]*$", "* * *", text)


def _csv(output: Any) -> str:
    facts = output.get("metadata", {}).get("lsai", {})
    return facts.get("csv", "") if isinstance(facts, dict) else ""


def _joined(outputs: list[Any]) -> list[Any]:
    """Outputs with neighbouring pieces of one stream put together, so that progress bars can be collapsed."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if output.output_type == "stream" and last is not None and last.get("name") == output.name:
            joined[-1] = nbformat.v4.new_output("stream", name=output.name, text=last.text + output.text)  # type: ignore[no-untyped-call]
        else:
            joined.append(output)
    return joined


def _markdown(text: str) -> Any:
    return nbformat.v4.new_markdown_cell(text)  # type: ignore[no-untyped-call]


def _write(notebook: Any, target: Path) -> None:
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # equal chapters are equal files
    write_if_changed(target, nbformat.writes(notebook))  # type: ignore[no-untyped-call]


def write_if_changed(path: Path, text: str) -> None:
    """Write a text file unless it holds exactly that."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
