"""One bad record is shown as bad, and everything else goes on: one fault of each kind, read by all
that reads records.

`make attack` tries them by the hundred, in runs of every kind (`attack_records.py`).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attack_records import FAULTS, FOREIGN, IDENTITY, Fault, World, survived
from conftest import Project, write_run

import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_lab.report import load
from lsai_lab.runs.records import Summary, find_runs, read_run
from lsai_lab.runs.schema import read_rows


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    before = dict(os.environ)
    load.session.cache_clear()
    yield World(tmp_path_factory.mktemp("faults"), ("attention", "batch_search", "peer"))
    os.environ.clear()
    os.environ |= before
    load.session.cache_clear()
    load._committed.cache_clear()


@pytest.mark.parametrize("fault", dict.fromkeys(FAULTS), ids=lambda fault: fault.__name__)
def test_all_other_records_go_on(world: World, fault: Fault) -> None:
    assert survived(world, fault, "5")[1] is None


def test_a_result_cannot_say_which_run_it_is(world: World) -> None:
    """Each name by itself; with all of them a failed run was shown as the fastest of another
    machine."""
    study, (folder, _) = read_run(world.chosen[0]).summary.id.study, world.copies(world.chosen[0])
    good = json.loads((folder / "summary.json").read_bytes())
    try:
        for name, value in IDENTITY.items():
            spoofed = good | {"results": good["results"] | {name: value}}
            (folder / "summary.json").write_text(json.dumps(spoofed))
            run = read_run(folder, FOREIGN)
            assert run.summary.outcome == "damaged" and name in str(run.summary.reason)
        load._committed.cache_clear()
        rows = lab.load(study)
    finally:
        world.clear()
    shown = rows[rows["run"] == str(folder)].iloc[0]
    assert (shown["machine"], shown["outcome"], bool(shown["main"])) == (FOREIGN, "damaged", False)
    assert len(rows) > 1


@pytest.mark.parametrize(
    ("results", "what"),
    [
        ({"tokens_per_s": "1e9"}, "tokens_per_s"),
        ({"tokens_per_s": -1.0}, "tokens_per_s"),
        ({"step_ms": 0.0}, "step_ms"),
        ({"loss": 10**400}, "loss"),
        ({"mem_peak_active_gib": [1.0]}, "mem_peak_active_gib"),
        ({"note": {"a": 1}}, "note"),
        ({"note": [{"a": {"b": 1}}]}, "note"),
        ({"note": "x" * 30_000}, "note"),
        ({"a.b": 1}, "a.b"),
    ],
)
def test_results_are_numbers_words_or_rows_of_them(
    tmp_path: Path, results: dict[str, Any], what: str
) -> None:
    write_run(tmp_path, "memory", "bad", results=results)
    good = write_run(
        tmp_path,
        "memory",
        "good",
        results={"tokens_per_s": 5.0, "tries": [{"size": 1, "note": None}]},
    )
    bad, read = find_runs(tmp_path)
    assert bad.summary.outcome == "damaged" and what in str(bad.summary.reason)
    assert (read.folder, read.summary.outcome) == (good, "ok")


ROWS = {
    "binary": b"\xff\xfe\x00\x01",
    "deep": b'{"step": 0, "a": ' + b"[" * 100_000 + b"\n",
    "no object": b"[1]\n",
    "text for a number": b'{"step": 0, "loss": 1.0, "step_ms": "fast", "tokens_in_step": 1}\n',
    "no step_ms": b'{"step": 0, "loss": 1.0, "tokens_in_step": 1}\n',
    "a mapping": b'{"step": 0, "loss": {"a": 1}, "step_ms": 1.0, "tokens_in_step": 1}\n',
    "a broken line": b'{"step": 0, "lo\n{"step": 1, "loss": 1.0, "step_ms": 1.0, "tokens_in_step": '
    b"1}\n",
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_none_are_a_damaged_record(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path, "memory", "bad")
    (folder / "metrics.jsonl").write_bytes(ROWS[name])
    run = read_run(folder)
    assert run.summary.outcome == "damaged" and "metrics.jsonl" in str(run.summary.reason)
    assert run.metrics.empty and run.kernels.empty and lab.steps(folder).empty
    with pytest.raises(UserError):
        read_rows(folder / "metrics.jsonl", "train", may_be_cut=False)


def test_a_loss_may_be_nan_and_the_last_line_torn(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "memory", "diverged", outcome="failed", reason="the loss is NaN")
    row = '{"step": %d, "loss": %s, "step_ms": 1.0, "tokens_in_step": 8}\n'
    (folder / "metrics.jsonl").write_text(
        row % (0, 1.5) + row % (1, "NaN") + row % (2, "Infinity") + '{"step": 3, "lo'
    )
    assert read_run(folder).summary.outcome == "failed"
    assert lab.steps(folder)["loss"].isna().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"metadata": null}', '{"metadata": {"papermill": []}}', "[" * 100_000, "\xff"],
)
def test_a_damaged_notebook_is_told_and_the_others_are_recorded(
    new_project: Callable[..., Project], text: str
) -> None:
    project = new_project()
    for variant in ("a", "b"):
        write_run(project.runs, "memory", variant)
    (next((project.runs / "memory").glob("a-*")) / "notebook.ipynb").write_text(
        text, encoding="latin-1"
    )
    code, out, err = project.lsai("record", "memory", "--machine", "box")
    kept = [
        run.summary.id.variant for run in find_runs(project.root / "reports" / "recorded" / "box")
    ]
    assert code == 0 and kept == ["b"], err
    assert len([line for line in out.splitlines() if line.startswith("not recorded: ")]) == 1, out


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, "memory", "good", results={"tokens_per_s": 5.0, "device": "cpu", "capped": False}
    )
    assert Summary.read(folder).results == {"tokens_per_s": 5.0, "device": "cpu", "capped": False}


def test_the_same_fault_follows_from_the_same_seed(world: World) -> None:
    faults = [random.Random("1").choice(FAULTS) for _ in range(3)]
    assert len({fault.__name__ for fault in faults}) == 1


def test_a_row_leads_to_its_run_whatever_bytes_name_the_folder(
    new_project: Callable[..., Project],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    project = new_project()
    request.addfinalizer(load.session.cache_clear)
    folder = write_run(project.root / "reports" / "recorded" / "box", "memory", "good")
    os.rename(folder, os.fsencode(folder.parent) + b"/\xff\xfe-1")
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("LSAI_ROOT", str(project.root))
    load.session.cache_clear()
    row = lab.load("memory").query("machine == 'box'").iloc[0]
    assert row["run"].isprintable() and lab.find_run(row["run"]).folder.name == "\udcff\udcfe-1"
