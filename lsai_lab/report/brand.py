"""The colours of `reports/_brand.yml`, which Quarto reads itself, for all other pages."""

import re
from pathlib import Path
from typing import Any

from lsai_core.base.errors import UserError
from lsai_core.base.files import write_text
from lsai_lab.project.files import load_yaml

_VARIABLES = {"foreground": "text", "background": "page", "primary": "accent"}


def brand_colors(reports: Path) -> dict[str, dict[str, str]]:
    """Each colour of `_brand.yml` by its name, `light` and `dark`, as `#rrggbb`. UserError where
    one is missing or written otherwise."""
    path = reports / "_brand.yml"
    given = load_yaml(path).get("color")
    colors: dict[str, Any] = given if isinstance(given, dict) else {}
    for name in _VARIABLES:
        value = colors.get(name)
        shades = [value.get(key) if isinstance(value, dict) else None for key in ("light", "dark")]
        if not all(re.fullmatch("#[0-9a-fA-F]{6}", str(shade)) for shade in shades):
            example = f'{name}: {{ light: "#0b57a4", dark: "#7db8f0" }}'
            raise UserError(f"{path}: color.{name} is to be written as in {example}")
    return {name: colors[name] for name in _VARIABLES}


def write_colors(reports: Path) -> None:
    """Write `colors.css`: the colours as variables, of which the page's `color-scheme` chooses."""
    lines = [
        f"  --{_VARIABLES[name]}: light-dark({shades['light']}, {shades['dark']});"
        for name, shades in brand_colors(reports).items()
    ]
    write_text(reports / "colors.css", "\n".join([":root {", *lines, "}", ""]))
