"""Notebooks as git and Jupyter have them: a recorded run's page is not changed by looking at it,
and code that the report does not show is folded."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import CHECKOUT

from lsai_lab.project.strip import stripped

pytest.importorskip("jupyter_server", reason="JupyterLab is not installed")
from jupyter_server.services.contents.largefilemanager import LargeFileManager
from tornado.web import HTTPError

PAGE = next(CHECKOUT.glob("reports/recorded/h100/memory/bf16-*/notebook.ipynb"))


@pytest.fixture
def jupyter(tmp_path: Path) -> LargeFileManager:
    """What reads and writes Jupyter's files, set as `make lab` sets it."""
    (tmp_path / PAGE.relative_to(CHECKOUT)).parent.mkdir(parents=True)
    shutil.copy(PAGE, tmp_path / PAGE.relative_to(CHECKOUT))
    made = (CHECKOUT / "Makefile").read_text()
    hooks = dict(re.findall(r"--ContentsManager\.(\w+_save_hook)=([\w.]+)", made))
    return LargeFileManager(root_dir=str(tmp_path), **hooks)


def test_a_recorded_page_that_was_opened_stays_as_it_is(jupyter: LargeFileManager) -> None:
    """JupyterLab puts what its kernel says into the metadata, and saves."""
    path = str(PAGE.relative_to(CHECKOUT))
    model = jupyter.get(path)
    model["content"]["metadata"]["language_info"] = {"name": "python", "version": "3.99"}
    model["content"]["metadata"]["kernelspec"] = {"name": "other", "display_name": "Other"}
    jupyter.save(model, path)
    assert (Path(jupyter.root_dir) / path).read_bytes() == PAGE.read_bytes()
    model["content"]["cells"][0]["source"] = "edited"
    with pytest.raises(HTTPError, match="stays as it was recorded: save it under another name"):
        jupyter.save(model, path)
    jupyter.save(model, "mine.ipynb")
    assert "edited" in (Path(jupyter.root_dir) / "mine.ipynb").read_text()


def test_code_that_the_report_does_not_show_is_folded() -> None:
    def cell(kind: str, source: str) -> dict[str, object]:
        return {"cell_type": kind, "source": [source], "metadata": {"tags": ["a"], "x": 1}}

    cells = [cell("code", "#| echo: false\n1"), cell("code", "1"), cell("markdown", "#| echo: no")]
    found = json.loads(stripped(json.dumps({"cells": cells, "metadata": {}})))["cells"]
    assert [one["metadata"] for one in found] == [
        {"tags": ["a"], "jupyter": {"source_hidden": True}},
        {"tags": ["a"]},
        {"tags": ["a"]},
    ]
