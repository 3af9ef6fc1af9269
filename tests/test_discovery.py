"""Whether a person who knows only `lab.` finds what there is: labels, names, and hints at what was
meant."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKOUT, Project, write_run
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import lsai_core
import lsai_lab as lab
from lsai_core.base.errors import UnknownName, UserError
from lsai_core.base.shown import WrongCall
from lsai_lab.report.load import session
from lsai_lab.runs.records import recorded_runs


def test_every_label_of_a_machine_is_explained(empty: Path) -> None:
    found = lab.machines().set_index("machine")
    assert {*found.index} == {run.machine for run in recorded_runs(CHECKOUT / "reports")}
    assert found.loc["h200-d", "gpu"] == "H200" and "speeds do not count" in repr(found)
    assert found["about"].str.len().min() > 0 and "..." not in repr(found)
    runs = lab.recorded("memory")
    assert lab.machines(runs)["runs"].sum() == len(runs)
    assert lab.machines(runs.head(0)).empty
    write_run(empty, "memory", "bf16")
    own = lab.machines(lab.load("memory", mine=True))
    assert "(own)" in own["machine"][0] and own["about"][0] == ""


def test_any_step_is_predicted_from_lab() -> None:
    model = torch.nn.Linear(256, 256)
    with pytest.raises(UserError, match=r"with lab\.simulated_gpu"):
        lab.predict(model)
    with lab.simulated_gpu("24GiB") as gpu:
        torch.nn.Linear(256, 256, device="cuda")(torch.ones(2, 256, device="cuda")).sum().backward()
    assert gpu.peak_allocated_gib > 256 * 256 * 4 / 2**30
    with pytest.raises(WrongCall, match=r"lab\.simulated_gpu takes no 'gpus'; did you"):
        lab.simulated_gpu(gpus="h100")


@pytest.mark.parametrize(
    "called, said",
    [
        ("runs", "lab.runs is no function; did you mean load?"),
        ("claims", "lab.claims is no function; did you mean claims_table?"),
        ("report", "lab.report is no function; !lsai report makes the pages"),
        ("data", "lab.data is no function; !lsai data is a command"),
        ("delete", "'delete'; !lsai runs delete removes a run"),
    ],
)
def test_a_folder_of_the_package_that_is_called_says_what_was_meant(called: str, said: str) -> None:
    for name in ("runs.records", "claims.declared", "report.load", "data.dataset"):
        importlib.import_module(f"lsai_lab.{name}")
    with pytest.raises(UnknownName) as error:
        getattr(lab, called)()
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["find_batch", "largest_batch"])
def test_the_largest_batch_is_measured_as_the_hint_and_the_help_say(empty: Path, name: str) -> None:
    with pytest.raises(UnknownName) as error:
        getattr(lab, name)
    measured = re.search(r"lab(\.open_run\(.*?\))\.execute\(\)", str(error.value))
    assert measured and measured[0] in str(lab.__doc__)
    assert eval(f"lab{measured[1]}").kind == "batch_search"


def test_a_comparison_calls_its_lines_as_a_frame_of_runs_calls_its_columns(empty: Path) -> None:
    runs = lab.recorded("memory").query("part == 'train' and machine == 'h100'")
    one = runs.query("variant == 'bf16'").iloc[0]
    other = runs.query("variant == 'flash_gradcp'").iloc[0]
    both = lab.compare(one, other)
    for frame in (both.settings, both.results, both.repeats):
        named = frame.set_index("what")
        assert len(named) and {*named.index} <= {*runs.columns}, {*named.index} - {*runs.columns}
    results = both.results.set_index("what")
    for name in ("tokens_per_s", "mfu", "mem_peak_allocated_gib", "validation_loss"):
        assert (results["first"][name], results["second"][name]) == (one[name], other[name])
    write_run(empty, "memory", "bf16", config={"steps": 4}, results={"steps": 3})
    own = write_run(empty, "memory", "baseline", config={"steps": 5}, results={"steps": 3})
    settings = lab.compare("memory.bf16", own).settings.set_index("what")
    assert settings.loc["config.steps", ["first", "second"]].tolist() == [4, 5]


def test_the_tab_key_offers_the_names_of_users_alone() -> None:
    shell = InteractiveShell.instance()
    lab._offer_names()
    for package, cell in ((lab, "import lsai_lab as lab\nlab."), (lsai_core, "lsai_core.")):
        with provisionalcompleter():
            found = [one.text for one in shell.Completer.completions(cell, len(cell))]
        assert sorted(found) == sorted(package.__all__)
    assert {"load", "compare", "predict", "simulated_gpu"} <= {*lab.__all__}
    for name in ("loss_chart", "with_cost", "say", "panels", "number", "PALETTE"):
        assert name not in dir(lab) and f"lab.{name}(" not in str(lab.__doc__)
        assert getattr(lab, name) and re.search(rf"\b{name}\b", str(lab.chapters.__doc__))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda: lab.find_run("h100/memory"), "there are h100/memory.baseline, h100/memory.bf16, "),
        (lambda: lab.find_run("h100"), "; there are h100/ablation, "),
        (lambda: lab.compare("h100/memory.bf16", "h200/memory"), "h200/memory.window_512"),
        (lambda: lab.predict("lab-tiny", 24e9), "its memory is a number of GiB: 24 or 24GiB"),
        (lambda: lab.predict("lab-tiny", "24e9"), "its memory is a number of GiB: 24 or 24GiB"),
        (lambda: lab.predict("lab-tiny", -1), "its memory is a number of GiB: 24 or 24GiB"),
        (lambda: lab.curves(lab.recorded("memory")), "choose some, as lab.curves(runs.query("),
    ],
)
def test_a_hint_says_what_can_be_asked_for_instead(empty: Path, wrong: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        wrong()
    assert said in str(error.value) and "\n" not in str(error.value)


def test_what_a_frame_is_asked_about_itself_leads_on(empty: Path) -> None:
    shell = InteractiveShell.instance()
    shell.user_ns["runs"] = lab.recorded("memory")
    told = shell.object_inspect_mime("runs", detail_level=0)["text/plain"]
    for name in ("lab.find_run(", "lab.summarize", "notebooks/README.md", "query"):
        assert name in told


def test_one_bad_file_takes_no_other_study_away(
    new_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = new_project()
    (project.root / "params/studies/typo.yaml").write_text("study: typo\ntitle: t\n")
    for key, value in project.env.items():
        monkeypatch.setenv(key, value)
    session.cache_clear()
    titles = lab.studies().set_index("study")["title"]
    session.cache_clear()
    assert (
        titles["typo"].startswith("cannot be read: ") and "parts: Field required" in titles["typo"]
    )
    assert len(titles) > 1 and titles.str.startswith("cannot").sum() == 1


def test_the_studies_say_what_they_are_and_how_many_runs_are_recorded(empty: Path) -> None:
    rows = lab.studies()
    assert [*rows] == ["study", "title", "recorded"] and rows["study"].is_unique
    for name in ("memory", "gemm"):
        one = rows.set_index("study").loc[name]
        assert one["title"] == lab.study(name).title
        assert one["recorded"] == len(lab.recorded(name)) > 0
    assert "Memory-efficient training" in repr(rows)
