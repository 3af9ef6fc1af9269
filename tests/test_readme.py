"""README's numbers lead to the chapters that compute them (`lsai numbers` compares them), and its
picture shows the records; no record names a folder of its machine."""

from __future__ import annotations

import json
import re

import lsai_lab as lab
from lsai_lab.project.files import repo_root

SETTINGS = {"8", "8 B", "95%", "96%"}  # of the text, beside the numbers that lead to a chapter


def test_numbers_of_what_was_found_lead_to_a_chapter() -> None:
    text = (repo_root() / "README.md").read_text()
    found = text.partition("## What was found")[2].partition("\n## ")[0]
    assert len(re.findall(r"\]\(notebooks/[\w-]+\.ipynb#\w+\)", found)) >= 8
    plain = re.sub(r"\[[^]]*\]\([^)]*\)", "", found)
    left = set(re.findall(r"(?<![\w])\d[\d.,]*%?", re.sub(r"[HB]\d00s?|bf16|fp8", "", plain)))
    assert {number.rstrip(".,") for number in left} <= SETTINGS
    assert len(text.splitlines()) <= 90


def test_the_picture_shows_the_recorded_changes() -> None:
    """Each ratio in the picture is that of a recorded change to the eager step, in speed or in
    reserved memory."""
    picture = (repo_root() / "reports/recorded/summary.svg").read_text()
    drawn = re.findall(r"\((\d\.\d\d)x\)", picture)
    steps = lab.recorded("speed").query("machine == 'h100' and part in ('levers', 'rounding')")
    metrics = ["tokens_per_s", "mem_peak_reserved_gib"]
    medians = steps.groupby("variant")[metrics].median()
    ratios = (medians / medians.loc["eager"]).stack()
    assert len(drawn) == 12 and set(drawn) <= {f"{ratio:.2f}" for ratio in ratios}


def test_records_name_no_folder_of_the_machine_they_ran_on() -> None:
    for path in (repo_root() / "reports" / "recorded").glob("*/*/*/notebook.ipynb"):
        parameters = json.loads(path.read_text())["metadata"]["papermill"]["parameters"]
        assert (
            parameters["folder"].startswith("runs/")
            and parameters.get("data_root", "data") == "data"
        ), path
