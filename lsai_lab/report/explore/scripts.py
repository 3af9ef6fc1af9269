"""The JavaScript of an explorable, from plain ES modules: as a script for a page, and as a module
for a widget.

A page on disk may load scripts but no modules, and a widget is one module that imports nothing. So
the report's colours, the shared helper (`draw.js`) and the explorable's own module are laid into
one text, without `import` and `export`. Each module exports one function, `draw(el, data, ask)`.
"""

import json
import re
from pathlib import Path
from typing import Any

from lsai_core.base.files import write_text
from lsai_lab.report.colors import COLORS, ON_DARK, PALETTE

# Of a notebook's output: {"name", "title", "data"}, the data as a text of JSON.
MIME = "application/vnd.lsai.explore+json"
FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.js") if path.stem != "draw"))


def stylesheet() -> str:
    """The style of all explorables."""
    return (FOLDER / "explore.css").read_text(encoding="utf-8")


def widget_module(name: str) -> str:
    """The explorable `name` as a module for anywidget."""
    return f"{_joined(name)}\nexport default widget(draw);\n"


def page_script(name: str, data: Any) -> str:
    """The explorable `name` as a script that shows it, with `data` (JSON values), in every element
    of its page with the attribute `data-explore`."""
    # As JSON in a string, which a browser reads faster than an object in the script.
    text = json.dumps(json.dumps(data, separators=(",", ":"), allow_nan=False))
    return f'{{\n{_joined(name)}\nonPage("{name}", draw, JSON.parse({text}));\n}}\n'


def write_page_files(name: str, data: Any, folder: Path) -> None:
    """Write what a page needs to show the explorable `name`, and its data, into `folder`."""
    write_text(folder / f"{name}.js", page_script(name, data))
    write_text(folder / f"{name}.json", json.dumps(data, allow_nan=False) + "\n")
    write_text(folder / "explore.css", stylesheet())


def _joined(name: str) -> str:
    assert name in NAMES, name
    texts = [(FOLDER / file).read_text(encoding="utf-8") for file in ("draw.js", f"{name}.js")]
    without_imports = re.sub(r"(?ms)^(import|export \{).*?;\n", "", "\n".join(texts))
    palette, meanings = map(_css, PALETTE), {name: _css(color) for name, color in COLORS.items()}
    colors = f"const PALETTE = {json.dumps([*palette])}, COLORS = {json.dumps(meanings)};\n"
    return colors + re.sub("(?m)^export ", "", without_imports)


def _css(color: str) -> str:
    """`color` as a page has it, light or dark."""
    return f"light-dark({color}, {ON_DARK[color]})" if color in ON_DARK else color
