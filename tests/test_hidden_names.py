"""A program that the book shows says which of its names come from cells that it does not show."""

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lsai_lab.report.hidden_names import HIDDEN, HiddenNames
from lsai_lab.report.to_markdown import to_markdown

SETUP = "#| echo: false\nimport numpy as np\nfrom torch.nn import Linear\nsize, sum_of = 3, min"


def bound(tmp_path: Path, *sources: str) -> str:
    """The text of a chapter with these cells."""
    cells = [new_markdown_cell("# One"), *map(new_code_cell, sources)]
    nbformat.write(new_notebook(cells=cells), tmp_path / "executed.ipynb")
    (tmp_path / "made").mkdir(exist_ok=True)
    assert to_markdown(tmp_path / "executed.ipynb", tmp_path / "made" / "one.ipynb") is None
    made = nbformat.read(tmp_path / "made" / "one.ipynb", as_version=4)
    return "\n".join(cell.source for cell in made.cells)


def test_a_program_is_told_with_what_it_uses_of_hidden_cells(tmp_path: Path) -> None:
    shown = "def doubled(array):\n    return 2 * np.array(array)\n\n\nprint(doubled([size]))"
    text = bound(tmp_path, SETUP, shown)
    above, _, rest = text.partition("\ndef doubled")
    assert above.endswith("import numpy as np\n" + HIDDEN.format("size")) and rest
    assert "Linear" not in text and "sum_of" not in text, "what it does not use"


def test_a_name_is_told_once(tmp_path: Path) -> None:
    text = bound(tmp_path, SETUP, "first = np.ones(size)", "second = np.ones(size) + first")
    assert text.count("import numpy") == text.count(HIDDEN.format("size")) == 1


def test_what_a_cell_sets_itself_is_not_hidden() -> None:
    names = HiddenNames()
    names.hide("def helper(value):\n    tile = value\n    return tile\n\n\nsize = 3")
    assert names.shown("size = 4\nprint(size, [value for value in range(size)])").startswith("size")
    assert names.shown("print(size)") == "print(size)", "a shown cell has set it since"
    assert names.shown("%matplotlib inline") == "%matplotlib inline"
    assert names.shown("helper(1)").startswith(HIDDEN.format("helper"))
