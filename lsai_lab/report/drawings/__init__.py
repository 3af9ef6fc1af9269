"""Drawings that explain a mechanism and hold no data, a module a chapter; `draw("fsdp_step")` shows
the one of that name."""

import importlib
import pkgutil
from collections.abc import Callable

from matplotlib.figure import Figure

from lsai_core.base.errors import UserError, hint
from lsai_lab.report.show import figure


def draw(name: str) -> None:
    """Show the drawing `name`; UserError if there is none."""
    found: dict[str, Callable[[], Figure]] = {}
    for module in pkgutil.iter_modules(__path__):
        drawings = importlib.import_module(f"{__name__}.{module.name}").DRAWINGS
        found |= {function.__name__: function for function in drawings}
    if name not in found:
        raise UserError(f"there is no drawing {name!r}{hint(name, list(found))}")
    figure(found[name]())
