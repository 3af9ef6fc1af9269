"""The README's tables are the committed records' figures, however its prose is worded; no record
names a folder of its machine."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest

import lsai_lab as lab
from lsai_lab.project.files import repo_root

# What a column's head says -> the result that it shows and in which unit.
COLUMNS = {
    "MFU": ("mfu", 100),
    "peak memory": ("mem_peak_allocated_gib", 1),
    "perplexity": ("validation_perplexity", 1),
}
METRICS = (
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "mem_peak_allocated_gib",
    "validation_perplexity",
    "largest_batch",
)


def tables() -> list[pd.DataFrame]:
    """The README's tables that show speeds."""
    text = (repo_root() / "README.md").read_text()
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    cells = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        for block in blocks
    ]
    frames = [pd.DataFrame(rows[2:], columns=rows[0]) for rows in cells]
    return [frame for frame in frames if any("tokens/s" in head for head in frame)]


def number(cell: str) -> float:
    return float(re.sub(r"[^\d.]", "", cell.split("(")[0]))


@pytest.fixture(scope="module")
def recorded() -> pd.DataFrame:
    runs = lab.load()
    runs = runs[~runs["own"].astype(bool)]
    return lab.summarize(runs, METRICS, ("machine", "study", "part", "variant"))


def test_every_row_of_a_table_of_speeds_is_a_record(recorded: pd.DataFrame) -> None:
    for table in tables():
        speed = next(head for head in table if "tokens/s" in head)
        metric = "tokens_per_s_per_gpu" if "per GPU" in speed else "tokens_per_s"
        for row in table.to_dict("records"):
            same = recorded[recorded[metric].round() == number(row[speed])]
            for words, (result, unit) in COLUMNS.items():
                for head in (head for head in table if words in head):
                    digits = len(row[head].split("(")[0].strip(" %").partition(".")[2])
                    same = same[(same[result] * unit).round(digits) == number(row[head])]
            assert len(same), row
            if batch := row.get("largest batch"):
                searched = recorded[
                    recorded["variant"].isin(same["variant"])
                    & recorded["study"].isin(same["study"])
                ]
                assert number(batch) in searched["largest_batch"].tolist(), row


def test_the_picture_shows_the_recorded_changes(recorded: pd.DataFrame) -> None:
    """Each ratio in the picture is that of a recorded change to the eager step, in speed or in
    memory."""
    drawn = re.findall(
        r"\((\d\.\d\d)x\)", (repo_root() / "reports/recorded/summary.svg").read_text()
    )
    levers = recorded.query(
        "machine == 'h100' and study == 'speed' and part == 'levers'"
    ).set_index("variant")
    ratios = (
        levers[["tokens_per_s", "mem_peak_allocated_gib"]]
        / levers.iloc[0][["tokens_per_s", "mem_peak_allocated_gib"]]
    ).stack()
    assert len(drawn) == 12 and set(drawn) <= {f"{ratio:.2f}" for ratio in ratios}


def test_every_ratio_in_a_table_is_that_of_two_of_its_speeds() -> None:
    found = 0
    for table in tables():
        speeds = table[next(head for head in table if "tokens/s" in head)].map(number)
        for column in table:
            for cell, speed in zip(table[column], speeds, strict=True):
                if ratio := re.fullmatch(r"([\d.]+)x", cell):
                    possible = {f"{speed / other:.2f}" for other in speeds} | {
                        f"{other / speed:.2f}" for other in speeds
                    }
                    assert ratio[1] in possible, (column, cell)
                    found += 1
    assert found


def test_records_name_no_folder_of_the_machine_they_ran_on() -> None:
    for path in (repo_root() / "reports" / "recorded").glob("*/*/*/notebook.ipynb"):
        parameters = json.loads(path.read_text())["metadata"]["papermill"]["parameters"]
        assert (
            parameters["folder"].startswith("runs/")
            and parameters.get("data_root", "data") == "data"
        ), path
