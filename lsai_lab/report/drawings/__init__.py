"""Drawings that explain a mechanism and hold no data, a module a chapter; `draw("fsdp_step")` shows
the one of that name."""

import importlib
import pkgutil
from collections.abc import Callable

from matplotlib.figure import Figure

from lsai_core.base.errors import UserError, hint
from lsai_lab.report.show import figure


def drawings() -> dict[str, Callable[[], Figure]]:
    """Every drawing by its name."""
    modules = [module.name for module in pkgutil.iter_modules(__path__)]
    declared = [importlib.import_module(f"{__name__}.{name}").DRAWINGS for name in modules]
    return {function.__name__: function for each in declared for function in each}


def draw(name: str) -> None:
    """Show the drawing `name`; UserError if there is none.

    >>> lab.draw("fusing")
    figure
    """
    found = drawings()
    if name not in found:
        raise UserError(f"there is no drawing {name!r}{hint(name, list(found))}")
    figure(found[name]())
