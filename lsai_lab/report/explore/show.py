"""`lab.explore`: an explorable in a notebook. In JupyterLab it is a widget, if anywidget is
installed; in the report the same module is part of the page; everywhere else it is a picture."""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lsai_core.base.errors import UserError, hint
from lsai_lab.report.explore.scripts import MIME, NAMES, stylesheet, widget_module

MISSING = "To play with it, install anywidget (`pip install 'lsai[lab]'`) and restart JupyterLab."


def explore(name: str) -> None:
    """Show the explorable `name`: `memory` (of a training step), `ring` (attention over several
    GPUs), `roofline`, `step` (built change by change), `rounding` (of bf16 weights), `numbers` (of
    fp8 formats), or `fits` (which technique fits which GPU, for any model).

    In JupyterLab its controls work, and `memory` and `fits` predict what no table has; without the
    package anywidget it is a picture. Raises UserError for an unknown name.

    >>> lab.explore("rounding")
    A weight in bf16: what rounding keeps
    """
    from IPython.display import display

    module = module_of(name)
    data = module.data()
    picture = _drawn(module.picture(data))
    kept = json.dumps(data, allow_nan=False)  # as a text: notebooks sort the keys of a mapping
    bundle = {MIME: {"name": name, "title": module.TITLE, "data": kept}, **picture}
    widget = _widget(name, data, getattr(module, "answer", None))
    if widget is not None:
        bundle |= widget._repr_mimebundle_()[0]
    bundle["text/plain"] = module.TITLE
    display(bundle, raw=True)  # type: ignore[no-untyped-call]
    if widget is None:
        print(MISSING, file=sys.stderr)  # which the book leaves out


def module_of(name: str) -> Any:
    """The Python module of an explorable. UserError if there is none of that name."""
    if name not in NAMES:
        raise UserError(f"there is no explorable {name!r}{hint(name, NAMES)}")
    return importlib.import_module(f"lsai_lab.report.explore.{name}")


def _drawn(figure: Any) -> dict[str, Any]:
    svg, png = io.StringIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=150)
    return {"image/svg+xml": svg.getvalue(), "image/png": png.getvalue()}


def _widget(
    name: str, data: Mapping[str, Any], answer: Callable[[Mapping[str, Any]], Any] | None
) -> Any:
    """The explorable as a widget whose questions `answer` answers; None without anywidget."""
    try:
        import anywidget
        import traitlets
    except ImportError:
        return None

    class Explorable(anywidget.AnyWidget):  # type: ignore[misc]
        _esm = widget_module(name)
        _css = stylesheet()
        data = traitlets.Dict().tag(sync=True)

    widget = Explorable(data=dict(data))

    def asked(_: Any, message: Mapping[str, Any], buffers: Any) -> None:
        found = answer(message["question"]) if answer else {}
        widget.send({"number": message["number"], "answer": found})

    widget.on_msg(asked)
    return widget
