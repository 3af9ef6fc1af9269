"""Makes the book, or says that it is unchanged.

What makes it takes seconds to import, so it is imported only where something changed.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from lsai_core.base.files import write_text
from lsai_lab.report.engines import RESULTS, Engine, find_quarto
from lsai_lab.report.unchanged import book_state, is_as
from lsai_lab.runs.session import Session


def update_book(
    session: Session, out: Path, formats: list[str], engine: Engine, only: Sequence[str] = ()
) -> bool:
    """Execute what changed, of the chapters `only` these, if any are named, and render. False if a
    chapter did not complete or a format could not be made."""
    results = {name: out / RESULTS[name] for name in sorted(formats)}
    stamps = {name: session.root / "reports" / "_build" / f"made.{name}" for name in results}
    quarto, pandoc = find_quarto(engine), importlib.util.find_spec("pypandoc")
    engines = (quarto, quarto and os.stat(quarto).st_mtime_ns, pandoc and pandoc.origin)
    state = book_state(session, out.resolve(), *engines)
    if only:
        for stamp in stamps.values():
            stamp.unlink(missing_ok=True)  # other chapters may be older, or without content
    elif all(is_as(stamps[name], state, [result]) for name, result in results.items()):
        for result in results.values():
            print(f"report: {result} (unchanged)", flush=True)
        return True
    from lsai_lab.report.render import execute_and_render

    good = execute_and_render(session, out, formats, quarto, only)
    if good and not only:
        for stamp in stamps.values():
            write_text(stamp, state)
    return good
