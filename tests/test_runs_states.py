"""What a run says of itself in each of its states, how runs are opened, and what tells them apart
in legends and in the column `differs`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import write_run

import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_lab.interactive.prediction import predict
from lsai_lab.runs.records import find_runs

STEP = {"step": 1, "loss": 5.0, "step_ms": 2.0, "tokens_in_step": 8, "tokens_per_s": 4000.0}
UNMEASURED = {"outcome": "failed", "reason": "no such kernel"}


def copied(folder: Path, key: str, **config: Any) -> Path:
    """A run like that in `folder`, under another key and with other settings."""
    target = folder.with_name(f"{folder.name.rpartition('-')[0]}-{key}")
    shutil.copytree(folder, target)
    (target / "config.json").write_text(json.dumps(config))
    summary = (folder / "summary.json").read_text()
    (target / "summary.json").write_text(summary.replace(folder.name.rpartition("-")[2], key))
    return target


def legend(fig: Any) -> list[str]:
    below = [*fig.legends, *(axes.get_legend() for axes in fig.axes)]
    return [text.get_text() for text in next(filter(None, below)).get_texts()]


def test_a_legend_says_what_was_swept(empty: Path) -> None:
    one = write_run(empty, "memory", "bf16", config={"optim": {"lr": 0.1}}, metrics=[STEP])
    two = copied(one, "0123456789ab", optim={"lr": 0.2}, seed=3)
    assert legend(lab.curves(one, two)) == ["bf16 (optim.lr=0.1)", "bf16 (optim.lr=0.2)"]
    repeats = lab.recorded("memory").query(
        "variant == 'bf16' and machine == 'h100' and repeat < 2 and part == 'train'"
    )
    assert legend(lab.curves(repeats)) == ["bf16 autocast (seed 0)", "bf16 autocast (seed 1)"]
    machines = lab.curves("h100/memory.bf16", "h200/memory.bf16")
    assert legend(machines) == ["bf16 autocast (h100)", "bf16 autocast (h200)"]


def test_differs_is_from_what_the_study_plans_whatever_other_runs_there_are(empty: Path) -> None:
    planned = {"steps": lab.study("memory").base["steps"], "optim": {"name": "adamw"}, "seed": 3}
    one = write_run(empty, "memory", "bf16", config=planned)
    changed = planned | {"steps": 7, "optim": {"name": "lion"}, "gone_setting": 1}

    def differs() -> dict[str, str]:
        runs = lab.load("memory", mine=True)
        return dict(zip(runs["run"], runs["differs"], strict=True))

    short = [copied(one, f"00000000000{number}", **changed) for number in range(3)]
    told = "steps=7, optim.name='lion'"
    assert differs() == {str(one): "", **dict.fromkeys(map(str, short), told)}
    shutil.rmtree(one)
    assert differs() == dict.fromkeys(map(str, short), told), "no other run changes it"
    gone = write_run(empty, "memory", "no_such_variant", config=planned)
    assert differs()[str(gone)] == "no such variant now"


def test_a_source_and_its_data_are_one_text(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"data": {"source": "stdlib"}}
    results = {"dataset": "stdlib-3a78db1f7dd0"}
    ended = write_run(empty, "memory", "bf16", config=data, results=results, metrics=[STEP])
    stopped = {"outcome": "preempted", "config": data, "metrics": [STEP]}
    lab.curves(ended, write_run(empty, "memory", "baseline", **stopped))
    assert "several texts" not in capsys.readouterr().out
    data["data"]["source"] = "stories"
    lab.curves(ended, write_run(empty, "memory", "window_256", **stopped))
    assert "losses of several texts do not compare" in capsys.readouterr().out


def test_advice_is_of_the_state_that_the_run_is_in(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = lab.find_run(write_run(empty, "memory", "bf16", **UNMEASURED))
    with pytest.raises(UserError, match=r"measured no memory: failed \(no such kernel\); 0 steps"):
        _ = failed.phases
    ended = lab.find_run(write_run(empty, "memory", "baseline"))
    with pytest.raises(UserError, match=r"set profile\.memory_steps above 0"):
        _ = ended.phases
    assert failed.plot() is None, "no empty picture"
    assert "has taken no step; failed (no such kernel)" in capsys.readouterr().out
    assert "loss" in failed.steps.columns and failed.steps.empty
    with pytest.raises(UserError, match="no run has such steps"):
        lab.curves(lab.load("memory", mine=True).query("outcome == 'failed'"))
    half = write_run(
        empty, "memory", "window_256", **UNMEASURED, config={"steps": 9}, metrics=[STEP]
    )
    row = lab.load("memory", mine=True).set_index("run").loc[str(half)]
    assert (row["steps"], row["config.steps"]) == (1, 9), "those done, and those planned"
    planned = lab.open_run("memory", "bf16")
    with pytest.raises(UserError, match="has no results yet: planned, not yet executed"):
        _ = planned.results
    (planned.folder / "env.json").write_text("{}")
    with pytest.raises(UserError) as error:
        _ = planned.results
    assert "does the work" not in str(error.value) and "0 of " in str(error.value)


def test_one_word_opens_a_run_and_a_config_becomes_one(empty: Path) -> None:
    assert lab.open_run("memory.bf16").folder == lab.open_run("memory", "bf16").folder
    with pytest.raises(UserError, match=r"which variant of memory.* one of baseline, bf16"):
        lab.open_run("memory")
    config = predict("lab-tiny", 24, overrides={"seq_len": 64}).config
    assert lab.open_run("memory.bf16", overrides=config).config == config
    with pytest.raises(UserError, match=r"lab.open_run\(.memory., .bf16., overrides=config\)"):
        lab.open_run(config)
    one = lab.recorded("memory").query("part == 'train'").head(1)
    assert str(lab.find_run(one).folder) == one.iloc[0]["run"]
    with pytest.raises(UserError, match="one run is wanted, and the frame has 2 rows"):
        lab.find_run(lab.recorded("memory").head(2))
    assert [axes.get_ylabel() for axes in lab.find_run(one).plot(y="loss").axes] == [
        "loss (nats per token)"
    ]


def test_a_stopped_run_says_how_far_it_is_and_its_loss(empty: Path) -> None:
    metrics = [STEP | {"loss": loss} for loss in (6.0, 5.5, 5.25)]
    config = {"steps": 9}
    folder = write_run(
        empty, "memory", "bf16", outcome="preempted", config=config, metrics=metrics, results={}
    )
    for text in (repr(lab.find_run(folder)), lab.find_run(folder)._repr_html_()):
        assert "stopped: 3 of 9 steps are done, the last one" in text and "loss is 5.25" in text
    row = lab.load("memory", mine=True).iloc[0]
    assert (row["steps"], row["train_loss"]) == (3, pytest.approx(sum((6.0, 5.5, 5.25)) / 3))
    assert row["outcome"] == "preempted"


def test_a_record_is_read_again_once_a_file_of_it_changed(empty: Path) -> None:
    folder = write_run(empty, "memory", "bf16", results={"tokens_per_s": 5.0}, metrics=[STEP])
    seen = [lab.load("memory", mine=True).loc[0, "tokens_per_s"] for _ in range(2)]
    summary = folder / "summary.json"
    summary.write_text(summary.read_text().replace("5.0", "7.0"))
    seen.append(lab.load("memory", mine=True).loc[0, "tokens_per_s"])
    assert seen == [5.0, 5.0, 7.0]
    (first,) = (run for run in find_runs(empty) if run.folder == folder)
    first.machine, first.profile = "elsewhere", "another"
    (second,) = find_runs(empty)
    assert second.machine != "elsewhere" and second.profile is None, "each has its own"
    (folder / "metrics.jsonl").write_text("no rows\n")
    assert lab.load("memory", mine=True).loc[0, "outcome"] == "damaged"


def test_a_machine_has_one_name_wherever_it_is_shown(empty: Path) -> None:
    folder = write_run(empty, "memory", "bf16", results={"tokens_per_s": 5.0})
    other = write_run(empty, "memory", "baseline", results={"tokens_per_s": 5.0})
    (name,) = lab.load("memory", mine=True)["machine"].unique()
    told = repr(lab.compare(folder, other))
    assert told.count(name) == 2 and "own" in name
    assert "h100 " in repr(lab.compare(folder, "h100/memory.bf16"))


def test_a_run_of_another_trainer_has_the_peak_of_its_whole_step(empty: Path) -> None:
    peer = lab.find_run("h200-f/fsdp.titan_4_selective.titan")
    peak = peer.results["mem_peak_allocated_gib"]
    assert peer.phases.to_dict("records") == [{"phase": "whole step", "peak_gib": peak}]


def test_a_stopped_run_says_what_its_steps_came_to(empty: Path) -> None:
    """Its loss and speed so far, under the names that a finished one has, and that it was
    stopped."""
    steps = [STEP | {"step": n, "loss": 6.0 - n, "steady": n > 0} for n in range(3)]
    reason, config = "stopped after step 3 of 9", {"steps": 9}
    ended = {"outcome": "preempted", "reason": reason, "config": config, "metrics": steps}
    run = lab.find_run(write_run(empty, "memory", "bf16", **ended))
    assert run.results.train_loss == 5.0 and run.results.step_ms == 2.0
    assert run.results.tokens_per_s == 4000.0
    assert "4,000 tokens/s" in repr(run) and "This run was stopped" in repr(run.results)
    good = {"tokens_per_s": 5000.0, "step_ms": 1.6, "train_loss": 4.5}
    other = write_run(empty, "memory", "baseline", results=good)
    rows = lab.compare(run, other).results.set_index("what")
    assert rows.loc["tokens_per_s", "second / first"] == 1.25


def test_a_recorded_run_says_its_machine_and_which_repeat_it_is(empty: Path) -> None:
    run = lab.find_run("h100/memory.bf16")
    for text in (repr(run), run._repr_html_()):
        assert "h100/memory.bf16, seed 0, one of 3 repeats" in text
    own = lab.find_run(write_run(empty, "memory", "bf16"))
    assert repr(own).startswith("memory.bf16 (")


def test_the_run_of_a_name_that_started_last_is_meant_however_often_one_looks(empty: Path) -> None:
    first, last = (write_run(empty, "memory", "bf16", repeat=number) for number in range(2))
    for folder in (last, first):  # written the other way round
        (folder / "run.json").write_text(json.dumps({"name": "twice"}))
    assert lab.find_run("twice").folder == last
    lab.find_run(first).annotate(tags="seen", name="twice")
    assert lab.find_run("twice").folder == last
