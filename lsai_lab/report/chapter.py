"""One executed notebook as report Markdown: a chapter, or a run's own page.

Markdown cells pass through, code is folded away (and absent from the PDF), outputs follow their cell. What papermill leaves
in a notebook is understood: its parameter cells, its error notes, and cells that were running when the kernel died.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from lsai_core.errors import UserError
from lsai_lab.report.outputs import FileStore, output_markdown
from lsai_lab.report.pandoc import callout, code_block, only, raw_html

_HEADING = re.compile(r"^( {0,3})(#{1,6})(\s+.*?)(\s*\{[^{}]*\}|\s*<!-- #[\w-]+ -->)?\s*$")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
_MATH_ENVIRONMENT = re.compile(r"(?ms)^\\begin\{(align|equation|gather)(\*?)\}.*?^\\end\{\1\2\}[ \t]*$")
_CODE_OR_AT = re.compile(r"(?P<code>(`+)(?!`).*?(?<!`)\2(?!`))|(?<![\w\\])@(?=\w)(?!(?:fig|tbl|sec)-)", re.DOTALL)
_IMAGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<target>[^)\s]+)(?P<title>[^)]*)\)(?P<attributes>\{[^}]*\})?")


@dataclass(frozen=True)
class Chapter:
    """A converted notebook. `complete` is False if a cell failed or did not finish."""

    path: Path
    markdown: str
    complete: bool


def read_notebook(path: Path) -> Any:
    """The notebook at `path`; UserError if it is missing or is no notebook."""
    try:
        return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    except FileNotFoundError:
        raise UserError(f"no such notebook: {path}") from None
    except Exception as error:  # nbformat raises many kinds for a damaged file
        raise UserError(f"{path}: cannot be read as a notebook: {' '.join(str(error).split())[:200]}") from None


def convert_notebook(path: Path, files: Path, *, slug: str, numbered: bool = True) -> Chapter:
    """Read the executed notebook `path`; its pictures go to the folder `files`, with names that begin with `slug`."""
    notebook, store = read_notebook(path), FileStore(files, slug)
    cells = [cell for cell in notebook.cells if not _is_papermill_note(cell)]
    for cell in cells:
        _take_cell_options(cell)
    injected = any("injected-parameters" in _tags(cell) for cell in cells)
    unfinished = [cell for cell in cells if _status(cell) in ("running", "pending")]
    parts: list[tuple[str, str]] = []  # what a part is (text, code or output), and its Markdown
    complete = not unfinished
    for number, cell in enumerate(cells):
        tags = _tags(cell)
        if "remove-cell" in tags or ("parameters" in tags and injected):
            continue
        if cell.cell_type == "markdown":
            parts.append(("text", _markdown_cell(cell, store, path, number)))
        elif cell.cell_type == "code":
            if cell.source.strip() and "remove-input" not in tags:
                parts.append(("code", folded_code(cell.source, "Parameters" if "parameters" in str(tags) else "Code")))
            if "remove-output" not in tags:
                parts += [
                    ("output", output_markdown(output, store, f"c{number}o{index}"))
                    for index, output in enumerate(_joined(cell.outputs))
                ]
            complete = complete and not any(output.output_type == "error" for output in cell.outputs)
            if unfinished and cell is unfinished[0]:
                parts.append(("output", _did_not_finish(len(unfinished) - 1, _status(cell))))
    title = path.stem.lstrip("0123456789-_ ").replace("-", " ").replace("_", " ").capitalize() or path.stem
    kept = _without_empty_sections([part for part in parts if part[1].strip()])
    text = "\n\n".join(part.strip("\n") for _, part in kept)
    return Chapter(path, fit_headings(literal_at_signs(text), title, numbered=numbered) + "\n", complete)


def _take_cell_options(cell: Any) -> None:
    """Quarto's `#| label`, `fig-cap`, `tbl-cap` and `echo: false` of a cell: taken from its source, given to its figure or table."""
    if cell.cell_type != "code":
        return
    options = dict(re.findall(r"^#\| ([\w-]+): (.*)$", cell.source, re.M))
    cell.source = re.sub(r"^#\| .*\n?", "", cell.source, flags=re.M)
    if options.get("echo") == "false":
        cell.metadata["tags"] = [*_tags(cell), "remove-input"]
    for output in cell.outputs:
        facts = output.get("metadata", {}).get("lsai", {})
        if "kind" in facts and "label" not in facts:
            caption = options.get("fig-cap") or options.get("tbl-cap") or ""
            output.metadata["lsai"] = {
                **facts,
                "label": options.get("label", f"fig-{cell.get('id')}"),
                "caption": caption,
            }


def folded_code(source: str, title: str) -> str:
    """Python source behind a fold in HTML; nothing in the PDF."""
    opening = raw_html(f'<details class="code"><summary>{title}</summary>')
    block = code_block(source.strip("\n"), ".python")
    return only("html", f"{opening}\n{block}\n{raw_html('</details>')}")


def literal_at_signs(text: str) -> str:
    """Escape each `@word` that is no reference and stands in no code: Markdown would read a citation into `@torch.compile`."""
    return _CODE_OR_AT.sub(lambda match: match[0] if match["code"] else r"\@", text)


def fit_headings(text: str, title: str, *, numbered: bool = True) -> str:
    """Make `text` one chapter: exactly one level-1 heading, which stands first.

    A second level-1 heading, and everything after it, moves one level down; without any, `title` becomes the heading.
    `numbered=False` marks every heading as unnumbered.
    """
    lines, fence, headings = text.split("\n"), "", []
    for index, line in enumerate(lines):
        mark = _FENCE.match(line)
        if mark and (not fence or (mark[1].startswith(fence) and line.strip() == mark[1])):
            fence = "" if fence else mark[1]
        elif not fence and _HEADING.match(line):
            headings.append(index)
    tops = 0
    for index in headings:
        match = _HEADING.match(lines[index])
        assert match is not None
        tops += match[2] == "#"
        depth = min(6, len(match[2]) + (tops > 1))
        # A label stands in a comment, so that a notebook does not show it; pandoc wants braces.
        attributes = re.sub(r"^<!-- (#[\w-]+) -->$", r"{\1}", (match[4] or "").strip())
        if not numbered:
            attributes = f"{attributes[:-1]} .unnumbered}}" if attributes else "{.unnumbered}"
        lines[index] = f"\n{'#' * depth}{match[3]} {attributes}".rstrip() + "\n"
    body = "\n".join(lines)
    return body if tops else f"# {title}{'' if numbered else ' {.unnumbered}'}\n\n{body}"


def _without_empty_sections(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """`parts` less each heading under which only code without output stands, and that code: a study without records yet.

    A heading with a label stays, because a reference may lead to it.
    """
    kept: list[tuple[str, str]] = []
    while parts:
        heading, rest = _HEADING.match(parts[0][1].strip()), parts[1:]
        while rest and rest[0][0] == "code":
            rest = rest[1:]
        following = _HEADING.match(rest[0][1].lstrip().split("\n")[0]) if rest and rest[0][0] == "text" else None
        ends = not rest or (following is not None and heading is not None and len(following[2]) <= len(heading[2]))
        if parts[0][0] == "text" and heading and not heading[4] and len(heading[2]) > 1 and ends:
            parts = rest
        else:
            kept, parts = [*kept, parts[0]], parts[1:]
    return kept


def _markdown_cell(cell: Any, store: FileStore, path: Path, number: int) -> str:
    def replace(match: re.Match[str]) -> str:
        target = match["target"]
        if target.startswith(("http://", "https://")):
            raise UserError(
                f"{path.name}: picture {target} is on the network; save it beside the notebook and refer to it"
            )
        if target.startswith("attachment:"):
            name = target.removeprefix("attachment:")
            if name not in cell.get("attachments", {}):
                raise UserError(f"{path.name}: a cell shows attachment {name!r} but does not carry it")
            data = base64.b64decode(next(iter(cell.attachments[name].values())))
        elif target.startswith("data:"):
            return match[0]
        else:
            name = Path(target).name
            try:
                data = (path.parent / target).read_bytes()
            except OSError:
                raise UserError(f"{path.name}: no such picture: {target} (looked beside the notebook)") from None
        stored = store.put(f"c{number}-{re.sub('[^A-Za-z0-9.]+', '-', name)}", data)
        if match["attributes"]:
            return f"![{match['alt']}]({stored}{match['title']}){match['attributes']}"
        # The text stays what a screen reader says; as a caption it would be a numbered figure for Quarto.
        return f'![]({stored}{match["title"]}){{fig-alt="{match["alt"].replace(chr(34), "")}"}}'

    text = _IMAGE.sub(replace, cell.source)
    # Jupyter shows a bare LaTeX environment as maths; pandoc wants the dollars.
    return _MATH_ENVIRONMENT.sub(lambda match: f"$$\n{match[0]}\n$$", text)


def _joined(outputs: list[Any]) -> list[Any]:
    """Outputs with neighbouring pieces of the same stream put together, so that progress bars can be collapsed."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if output.output_type == "stream" and last is not None and last.get("name") == output.name:
            joined[-1] = nbformat.v4.new_output("stream", name=output.name, text=last.text + output.text)  # type: ignore[no-untyped-call]
        else:
            joined.append(output)
    return joined


def _tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def _status(cell: Any) -> str:
    return cell.metadata.get("papermill", {}).get("status") or "" if cell.cell_type == "code" else ""


def _is_papermill_note(cell: Any) -> bool:
    return any(tag.startswith("papermill-error-cell") for tag in _tags(cell))


def _did_not_finish(after: int, status: str) -> str:
    what = "was running when the notebook ended" if status == "running" else "was never started"
    rest = f" {after} code cell{'s' if after > 1 else ''} after it did not run." if after else ""
    return callout("warning", "Did not finish", f"This cell {what}.{rest}")
