"""The bundled pandoc (from `pypandoc_binary`), called as a program, and the Markdown helpers that go with it.

pandoc reads the bound report and every table that a notebook shows, so that a table in JupyterLab, in the HTML report and
in the PDF comes from one and the same Markdown text.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pypandoc

DATA = Path(__file__).parent / "data"
# Jupyter's Markdown (CommonMark) lets lists, quotes and headings follow a paragraph without an empty line; pandoc's does
# not by default. `reports/_quarto.yml` states the same reader.
# A picture is a numbered figure only if it is labelled.
READER = (
    "markdown+lists_without_preceding_blankline-blank_before_blockquote-blank_before_header"
    "-implicit_figures+autolink_bare_uris"
)


def pandoc(*arguments: str | Path, text: str | None = None, cwd: Path | None = None) -> str:
    """Run pandoc and return what it prints.

    Raises RuntimeError with pandoc's message when it fails; warnings (maths that it cannot convert, files that it cannot
    find) go to stdout, each on one line.
    """
    command = [pypandoc.get_pandoc_path(), *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, encoding="utf-8", cwd=cwd, check=False)
    if done.returncode:
        raise RuntimeError(f"pandoc failed ({done.returncode}): {done.stderr.strip()}")
    for warning in re.split(r"\n(?=\[)", done.stderr.strip()):
        if warning:
            print("report: pandoc:", " ".join(warning.split()))
    return done.stdout


@cache
def pandoc_version() -> str:
    return str(pypandoc.get_pandoc_version())


def escape(text: str) -> str:
    """Plain text as Markdown that shows exactly that text."""
    return re.sub(r"([\\`*_{}\[\]<>$@|~^#])", r"\\\1", " ".join(text.split()))


_TYPST_MARKUP = re.compile(r"(=+|[-+/]|\d+\.)(\s|$)")


def cell_text(text: str) -> str:
    """Markdown text made fit for a cell of a pipe table: one line, no bare pipe, no HTML tag by accident.

    pandoc passes the beginning of a cell to typst as it is, where "= 8" would be a heading and "1. a" a list: an invisible
    word joiner before them keeps them text.
    """
    text = re.sub(r"(?<!\\)([|<])", r"\\\1", " ".join(text.split()))
    return "\u2060" + text if _TYPST_MARKUP.match(text) else text


def code_span(text: str) -> str:
    """`text` as inline code, whatever backticks it holds."""
    text = " ".join(text.split())
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def code_block(text: str, classes: str) -> str:
    """`text` as a fenced block with the given classes (`.python`, `.output`), whatever fences it holds."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{{{classes}}}\n{text}\n{fence}\n"


def raw_html(html: str) -> str:
    """HTML that appears in the HTML report and nowhere else."""
    return f"```{{=html}}\n{html}\n```\n"


def only(format_name: str, markdown: str) -> str:
    """`markdown` for one kind of output: `html`, or `pdf` for everything that is not HTML (Quarto's conditional content)."""
    condition = 'when-format="html"' if format_name == "html" else 'unless-format="html"'
    return f"::::::: {{.content-visible {condition}}}\n\n{markdown.strip()}\n\n:::::::\n"


def callout(kind: str, title: str, body: str) -> str:
    """A box with a title (`kind`: note, warning, important), as Quarto writes it."""
    title = title.replace("\\", "").replace('"', "'")
    return f':::::: {{.callout-{kind} title="{title}"}}\n\n{body.strip()}\n\n::::::\n'
