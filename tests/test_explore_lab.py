"""Every explorable as a widget in a real JupyterLab: one line opens it, its controls work, and
Python answers what no table has."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Project
from test_book import browser  # noqa: F401
from test_jupyterlab import SHOTS, folder, run_all_cells, server  # noqa: F401

from lsai_lab.report.explore.scripts import NAMES

pytest.importorskip("anywidget", reason="anywidget is not installed (the extra 'lab')")


@pytest.mark.slow
def test_explorables_open_and_answer_in_jupyterlab(
    folder: Project,  # noqa: F811
    server: str,  # noqa: F811
    browser: Any,  # noqa: F811
) -> None:
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook

    cells = [new_code_cell(f'import lsai_lab as lab\nlab.explore("{name}")') for name in NAMES]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    path = folder.root / "notebooks" / "explore.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata=kernel), path)
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    run_all_cells(page, f"{server}/lab/tree/notebooks/explore.ipynb?reset")
    for number, name in enumerate(NAMES):
        cell = page.locator(".jp-CodeCell").nth(number)
        cell.scroll_into_view_if_needed()
        cell.locator(".explore .answer").first.wait_for(timeout=120_000)
        assert cell.locator(".explore .answer").first.inner_text(), name
        assert cell.locator(".explore svg, .explore .bar").count(), name
        if SHOTS:
            page.screenshot(path=f"{SHOTS}/explore-{name}.png")
    memory = page.locator(".jp-CodeCell").nth(NAMES.index("memory"))
    memory.locator("[name=model]").select_option("llama3.2-1b")
    memory.locator("[name=tokens]").fill("12.25")
    assert "between predictions" in memory.locator(".answer").inner_text()
    memory.get_by_text("(predicted)").wait_for(timeout=120_000)
    fits = page.locator(".jp-CodeCell").nth(NAMES.index("fits"))
    fits.locator("[name=model]").select_option("a model of your own")
    for field, value in (("n_layers", 4), ("d_model", 512), ("d_ff", 1024), ("vocab_size", 4096)):
        fits.locator(f"[name={field}]").fill(str(value))
    for field in ("n_heads", "n_kv_heads"):
        fits.locator(f"[name={field}]").fill("8")
    fits.get_by_role("button", name="Predict this exactly").click()
    fits.get_by_text("lsai predict: the peak is").wait_for(timeout=120_000)
    page.close()
    assert complaints == []
