"""`lsai new`: a laboratory in a folder of its own, a chapter of the report."""

import re
from pathlib import Path
from typing import Annotated

import nbformat
import typer
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lsai_core.base.errors import UserError
from lsai_core.base.files import write_text
from lsai_lab.project.files import repo_root
from lsai_lab.project.strip import KERNEL
from lsai_lab.project.template import lay_out
from lsai_lab.runs.chapters import book_settings

app = typer.Typer(no_args_is_help=True)


@app.command(
    "lab",
    help="Lay out notebooks, params, Makefile and reports in a new folder. Example: lsai new lab "
    "mylab",
)
def lab(
    folder: Annotated[Path, typer.Argument(help="The folder; it must not exist, or be empty.")],
) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; choose another folder")
    lay_out(folder)
    print(f"{folder}: notebooks, params, reports. Go on with: cd {folder} && lsai report")


@app.command("chapter", help="Add a chapter to the report. Example: lsai new chapter 70-mine")
def chapter(name: Annotated[str, typer.Argument(help="Two digits, a dash, and the name.")]) -> None:
    root = repo_root()
    path, book = root / "notebooks" / f"{name}.ipynb", root / "reports" / "_quarto.yml"
    if not re.fullmatch(r"[0-9]{2}-[\w-]{1,60}", name):  # which a file can be called
        shown = name if len(name) <= 60 else f"{name[:60]}..."
        raise UserError(
            f"{shown!r} is no name of a chapter: two digits, a dash, up to 60 letters (70-mine)"
        )
    if path.exists():
        raise UserError(f"{path} exists already")
    name_of_last = re.escape(book_settings(book.parent)["chapters"][-1])
    last = re.compile(rf"(?m)^( *- ){name_of_last}$")
    load = (
        'runs = lab.load("memory").query("part == \'train\'")\nrows = lab.summarize(runs, '
        '["tokens_per_s"])'
    )
    drawn = (
        'axes = sns.barplot(rows, x="tokens_per_s", y="label", hue="machine")\n'
        'axes.set(xlabel="tokens/s", xscale="log", ylabel="")\nlab.figure(axes, data=rows)'
    )
    cells = [
        new_markdown_cell(
            f"# {name[3:].replace('-', ' ').capitalize()} {{#sec-{name[3:]}}}\n\nThe question."
        ),  # type: ignore[no-untyped-call]
        new_code_cell(  # type: ignore[no-untyped-call]
            f"import seaborn as sns\n\nimport lsai_lab as lab\n\nlab.style()\n{load}"
        ),
        new_code_cell(
            f'#| label: tbl-{name[3:]}\n#| tbl-cap: "What the table shows."\n'
            'lab.table(rows[["machine", "label", "tokens_per_s", "n", "run"]], link="label")'
        ),  # type: ignore[no-untyped-call]
        new_code_cell(  # type: ignore[no-untyped-call]
            f'#| label: fig-{name[3:]}\n#| fig-cap: "What the figure shows."\n{drawn}'
        ),
    ]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), path)  # type: ignore[no-untyped-call]
    write_text(
        book,
        last.sub(
            lambda found: f"{found[0]}\n{found[1]}{name}.ipynb", book.read_text(encoding="utf-8")
        ),
    )
    print(f"{path} is a chapter now; open it in JupyterLab, and run: lsai report --no-run --watch")
