"""The README's numbers are the committed records' numbers."""

from __future__ import annotations

import json

from lsai_core.files import repo_root
from lsai_core.report.memory.analysis import readme_table, speed_spread
from lsai_core.report.memory.table import machine_results
from lsai_core.runs.records import Run, recorded_runs
from lsai_core.runs.session import Session


def test_headline_table_is_what_the_records_say() -> None:
    session = Session("h200")
    runs = [run for run in recorded_runs(session.root / "reports") if run.summary.id.study == "memory"]
    (results,) = machine_results(session.study("memory"), runs)
    readme = (repo_root() / "README.md").read_text()
    assert readme_table(results) in readme
    assert f"differ by at most {speed_spread(results):.1%}" in readme
    assert f"{results.ok['parameters'].max() / 1e6:.1f} M" in readme


def test_the_table_beside_torchtitan_is_what_the_records_say() -> None:
    runs = {run.summary.id.variant: run for run in recorded_runs(repo_root() / "reports") if is_peer(run)}
    rows = [
        ("bf16, sequence 4096, batch 2", "ours_bf16", "titan_compiled"),
        ("fp8, sequence 4096, batch 2", "ours_fp8", "titan_fp8"),
        ("bf16, sequence 2048, batch 4", "ours_2048", None),
        ("bf16, sequence 4096, batch 1", "ours_batch1", None),
    ]
    readme = (repo_root() / "README.md").read_text()
    for label, name, peer in rows:
        ours = runs[name].summary.results
        cells = [label, f"{ours['tokens_per_s']:,.0f}", f"{ours['mfu']:.1%}", f"{ours['mem_peak_allocated_gib']:.1f}"]
        if peer is None:
            cells += ["–"] * 3
        else:
            theirs = runs[peer].summary.results
            ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
            cells += [
                f"{theirs['tokens_per_s']:,.0f}", f"{theirs['mem_peak_allocated_gib']:.1f}", f"{ratio:.2f}x"
            ]  # fmt: skip
        assert "| " + " | ".join(cells) + " |" in readme
        assert {runs[n].config["steps"] for n in (name, peer) if n} == {64}


def is_peer(run: Run) -> bool:
    return run.machine == "h200" and run.summary.id.study == "peers"


def test_the_difference_of_fp8_is_what_the_records_say() -> None:
    losses: dict[str, list[float]] = {"bf16": [], "fused": []}
    for run in recorded_runs(repo_root() / "reports"):
        if run.machine == "h200" and run.summary.id.study == "fp8" and run.summary.id.part == "loss":
            losses[run.summary.id.variant].append(run.summary.results["validation_loss"])
    assert [len(values) for values in losses.values()] == [3, 3]
    difference = abs(sum(losses["fused"]) / sum(losses["bf16"]) - 1)
    assert f"differ by {difference:.1%}" in (repo_root() / "README.md").read_text()


def test_records_name_no_folder_of_the_machine_they_ran_on() -> None:
    for path in (repo_root() / "reports" / "recorded").glob("*/*/*/notebook.ipynb"):
        parameters = json.loads(path.read_text())["metadata"]["papermill"]["parameters"]
        assert parameters["folder"].startswith("runs/") and parameters["data_root"] == "data", path
