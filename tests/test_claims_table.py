"""The table of claims that the book ends with: one notation, every range, dates."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHECKOUT

import lsai_lab as lab


def test_the_table_of_claims_has_one_notation_and_shows_every_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    found = lab.judged()
    words = lab.claims_table().set_index("name")
    valued = ~found["verdict"].isin(["withdrawn", "no data"])
    assert len(words) == len(found) and (found["value"].notna() == valued).all()
    assert words["claim"].str.len().between(8, 46).all()
    assert words.loc["hopper_fp8_gain", "bound":"measured"].tolist() == [
        "≥ 1.3x",
        "1.43x (1.43 to 1.44, n = 3)",
    ]
    assert (
        words.loc["hopper_bf16_titan", "measured"] == "1.061x (1.060 to 1.063, n = 3)"
    )  # three digits would hide the range
    assert words.loc["hopper_bf16_memory", "bound":"measured"].tolist() == [
        "≤ 100%",
        "90.5% (n = 3)",
    ]  # of equal repeats
    assert words.loc["sharded_loss", "bound":"measured"].tolist() == [
        "≤ 0.01%, late",
        "0.000067% (n = 1)",
    ]
    assert words.loc["states_bf16_loss", "bound":"verdict"].tolist() == [
        "≤ 0.02",
        "+0.155 ± 0.007 (n = 5)",
        "failed",
    ]
    for row in found[found["low"] < found["high"]].itertuples():
        assert re.search(
            r" \([\d.,]+ to [\d.,]+, n = \d\)$|^[+−][\d.]+%? ± [\d.]+%? \(n = \d\)$",
            words.loc[row.Index, "measured"],
        ), row.Index


def test_the_table_of_all_claims_is_made_of_records_each_read_once(tmp_path: Path) -> None:
    source = f"""
from pathlib import Path
from lsai_core.base import disk_cache
disk_cache.FOLDER = Path({str(tmp_path)!r})  # nothing is known yet
from lsai_lab.runs import schema, records
read = []
kept = schema.read_rows
def counted(path, *rest, **named):
    read.append(path)
    return kept(path, *rest, **named)
records.read_rows = counted
import lsai_lab as lab
table = lab.claims_table()
again = len(read)
lab.claims_table()
print(len(table), max(map(read.count, set(read))), len(read) - again)
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=200, cwd=CHECKOUT
    )
    assert done.returncode == 0, done.stderr
    claims, most, more = done.stdout.splitlines()[-1].split()
    assert int(claims) > 50 and int(most) <= 3 and more == "0", (
        "with the record, for its losses, for its curve"
    )


def test_how_long_after_its_bound_a_run_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    rows = lab.all_claims(lab.judged())
    rows = rows.set_index("name")
    assert rows.loc["overlap_bf16", "bound set":"first run"].tolist() == ["Nov 28", "14 min"]
    assert rows.loc["states_bf16_loss_1b", "first run"] == "44 s"
    assert rows.loc["weak_scaling", "first run"] == "3 days"
    assert rows.loc["two_gpus_fp8_titan", "first run"] == "–"
    begun = rows["first run"] != "–"
    late = rows["bound"].str.endswith("late")
    assert (rows["first run"].str.startswith("−") == late)[begun].all() and late[begun].any()


def test_claims_on_predicted_memory_stand_with_the_chapter_that_tells_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    sections = lab.all_claims(lab.judged()).set_index("name")["section"]
    assert (sections[["memory_estimators", "memory_rivals"]] == "sec-prediction").all()
    assert sections["bf16_speed"] == "sec-attention"
