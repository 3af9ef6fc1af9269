"""axe finds nothing on any kind of page: chapters of both engines, runs, the calculator, every
explorable; in light and dark, on a phone, a tablet and a desk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_book import book, browser  # noqa: F401
from test_calculator import fits_page  # noqa: F401
from test_explore import pages as explorables  # noqa: F401

pytestmark = pytest.mark.slow
WIDTHS = (390, 1024, 1400)


def violations(browser: Any, files: list[Path], width: int, scheme: str) -> list[str]:  # noqa: F811
    """What axe says of each page: the page, the rule, and the first element that breaks it."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    # axe is a script of its own, which the policy of the pages refuses
    size = {"width": width, "height": 900}
    context = browser.new_context(viewport=size, color_scheme=scheme, bypass_csp=True)
    page, said = context.new_page(), []
    for file in files:
        page.goto(file.as_uri())
        page.wait_for_function("document.readyState === 'complete'")
        for found in axe.run(page).response["violations"]:
            said.append(f"{file.name}: {found['id']}: {found['nodes'][0]['html'][:200]}")
    context.close()
    return said


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_of_the_book(book: Path, browser: Any, width: int, scheme: str) -> None:  # noqa: F811
    files = [*sorted(book.glob("*.html")), *sorted((book / "runs").rglob("*.html"))]
    assert len(files) >= 5 and violations(browser, files, width, scheme) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_calculator_and_every_explorable(
    fits_page: Path,  # noqa: F811
    explorables: Path,  # noqa: F811
    browser: Any,  # noqa: F811
    width: int,
    scheme: str,
) -> None:
    files = [fits_page, *sorted(explorables.glob("*.html"))]
    assert len(files) == 8 and violations(browser, files, width, scheme) == []
