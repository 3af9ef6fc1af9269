"""JupyterLab in a real browser, as a person uses it: open a notebook, run all cells, watch the
progress, save; git sees no change."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from conftest import CHECKOUT, Project, write_run
from test_book import browser  # noqa: F401

pytest.importorskip("jupyterlab", reason="JupyterLab is not installed (the extra 'lab')")
CELLS = """() => jupyterapp.shell.currentWidget.content.widgets
  .filter(cell => cell.model.type === 'code')
  .map(cell => ({count: cell.model.executionCount,
    state: cell.model.sharedModel.executionState, outputs: cell.model.outputs.toJSON()}))"""
# What `make lab` opens.
(START,) = re.findall(r"(?m)^start = (\S+)$", (CHECKOUT / "Makefile").read_text())
SHOTS = os.environ.get("LSAI_SCREENSHOTS")  # a folder, for whoever wants to look


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ceilings: dict[str, Any]) -> Project:
    """A laboratory under git, with the filter that `make setup` installs."""
    root = tmp_path_factory.mktemp("lab") / "mine"
    assert Project(CHECKOUT).lsai("new", "lab", root)[0] == 0
    project = Project(root)
    write_run(project.runs, "machine", "machine", "ceilings", kind="ceilings", results=ceilings)
    (root / ".gitattributes").write_bytes((CHECKOUT / ".gitattributes").read_bytes())
    (root / ".gitignore").write_text(".ipynb_checkpoints/\n__pycache__/\n")
    for command in (
        ["init", "-q"],
        [
            "config",
            "filter.without-outputs.clean",
            f"PYTHONPATH={CHECKOUT} {sys.executable} -m lsai_lab.project.strip",
        ],
        ["add", "notebooks", ".gitattributes", ".gitignore"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "begin"],
    ):
        subprocess.run(["git", *command], cwd=root, check=True)
    return project


@pytest.fixture(scope="module")
def server(folder: Project) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    words = [
        "--no-browser",
        "--allow-root",
        f"--port={url.rpartition(':')[2]}",
        "--expose-app-in-browser",
        "--notebook-dir=.",
    ]
    quiet = [
        "--IdentityProvider.token=",
        "--ServerApp.password=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        f"--LabApp.default_url={START}",
        "--LabApp.app_settings_dir=envs/jupyterlab",
        "--ContentsManager.pre_save_hook=lsai_lab.project.strip.before_saving",
        "--ContentsManager.post_save_hook=lsai_lab.project.strip.saved",
    ]
    environment = {
        **os.environ,
        **folder.env,
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]),
        "JUPYTER_CONFIG_DIR": str(folder.root / "runs"),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *words, *quiet],
        cwd=folder.root,
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{url}/api", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(120)


def wait_for_kernel(page: Any) -> None:
    """Until the open notebook's kernel is idle, and what opening it asks of the server is answered.

    A server that is terminated while it answers never ends: its loop stops, and the threads that
    read files for it are waited for (https://github.com/jupyterlab/jupyterlab/issues/10442).
    """
    page.wait_for_function(
        "() => jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
        timeout=120_000,
    )


def run_all_cells(page: Any, url: str) -> None:
    """Open a notebook, wait for its kernel, and run it from top to bottom."""
    page.goto(url)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)
    wait_for_kernel(page)
    page.evaluate("() => { jupyterapp.commands.execute('notebook:run-all-cells'); }")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (CHECKOUT / "notebooks").glob("*.ipynb"))
)
def test_a_notebook_runs_in_the_browser(
    folder: Project,
    server: str,
    browser: Any,  # noqa: F811
    name: str,
) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    complaints: list[str] = []
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    run_all_cells(page, f"{server}/lab/tree/notebooks/{name}.ipynb?reset")
    texts, pictures, deadline = set(), set(), time.monotonic() + 400
    while time.monotonic() < deadline:
        cells = page.evaluate(CELLS)
        texts |= {str(output.get("text", "")) for cell in cells for output in cell["outputs"]}
        pictures |= {str(output.get("data")) for cell in cells for output in cell["outputs"]}
        if all(cell["count"] and cell["state"] == "idle" for cell in cells):
            break
        page.wait_for_timeout(500)
        if SHOTS and "%|" in str(texts):
            page.screenshot(path=f"{SHOTS}/{name}-during.png")
    if name in (
        "run-training",
        "run-attention",
        "run-batch-search",
        "run-context",
    ):  # the others end too soon to be seen
        assert any("%|" in text for text in texts), "no progress was shown"
        assert name != "run-training" or any("tokens/s" in text for text in texts)
        assert name != "run-training" or any("loss and speed so far" in text for text in pictures)
    outputs = [output for cell in page.evaluate(CELLS) for output in cell["outputs"]]
    assert all(cell["count"] for cell in page.evaluate(CELLS))
    assert not [output for output in outputs if output["output_type"] == "error"]
    if SHOTS:
        for number in range(8):
            page.evaluate(
                f"() => document.querySelector('.jp-WindowedPanel-outer').scrollTo(0, "
                f"{900 * number})"
            )
            page.wait_for_timeout(700)
            page.screenshot(path=f"{SHOTS}/{name}-{number}.png")
    wide = (
        "() => [...document.querySelectorAll('.jp-RenderedMarkdown table')].filter(t => "
        "t.scrollWidth > t.parentElement.clientWidth + 1 && "
        "getComputedStyle(t.parentElement).overflowX === 'visible').length"
    )
    assert page.evaluate(wide) == 0, "a table runs out of its cell"
    links = re.findall(r"\]\(([^)\s]+/notebook\.ipynb)\)", str(outputs))
    assert links or name != "20-activations"
    assert all((folder.root / "notebooks" / unquote(link)).exists() for link in links), (
        "a link to a run leads nowhere"
    )
    page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function(
        "() => !jupyterapp.shell.currentWidget.context.model.dirty", timeout=30_000
    )
    page.close()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "notebooks"],
        cwd=folder.root,
        capture_output=True,
        text=True,
    )
    assert changed.stdout == ""
    assert (
        Path(folder.root / "notebooks" / f"{name}.ipynb").stat().st_size
        > (CHECKOUT / "notebooks" / f"{name}.ipynb").stat().st_size
    )
    assert complaints == []


@pytest.mark.slow
def test_it_opens_at_the_page_that_explains_the_notebooks(
    server: str,
    browser: Any,  # noqa: F811
) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.goto(f"{server}/")
    heading = page.wait_for_selector(".jp-MarkdownViewer h1", timeout=120_000)
    assert "Exploring by hand" in heading.inner_text()
    page.click(".jp-MarkdownViewer a:has-text('playground.ipynb')")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell .cm-lineWrapping:visible", timeout=120_000)
    wait_for_kernel(page)
    page.close()
