"""The README's numbers are the committed records' numbers."""

from __future__ import annotations

from lsai_core.files import repo_root
from lsai_core.report.memory.analysis import readme_table, speed_spread
from lsai_core.report.memory.table import machine_results
from lsai_core.runs.records import recorded_runs
from lsai_core.runs.session import Session


def test_headline_table_is_what_the_records_say() -> None:
    session = Session("h200")
    runs = [run for run in recorded_runs(session.root / "reports") if run.summary.id.study == "memory"]
    (results,) = machine_results(session.study("memory"), runs)
    readme = (repo_root() / "README.md").read_text()
    assert readme_table(results) in readme
    assert f"differ by at most {speed_spread(results):.1%}" in readme
    assert f"{results.ok['parameters'].max() / 1e6:.1f} M" in readme
