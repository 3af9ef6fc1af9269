"""Every list of the command line is readable at 100 columns, with the committed records and with
names, notes and reasons that are longer than a line; the summary comes first, `--full` shows the
rest."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict

import pytest
import yaml
from conftest import CHECKOUT, Project, write_run

from lsai_core.base.files import write_json
from lsai_lab.cli.tables import table
from lsai_lab.cluster.jobs import JobRecord
from lsai_lab.cluster.slurm import JobState
from lsai_lab.data import Dataset

COLUMNS = 100
LONG = "words " * 60
# Command and what its first line says.
LISTS = {
    "runs list": r"^\d+ runs: \d+ ok, 1 failed$",
    "runs list course": r"^\d+ runs: \d+ ok$",
    "runs compare memory.baseline memory.flash_attn": (
        r"^first:  memory\.baseline(, seed \d, one of \d repeats)?, h100, ok, 2026-"
    ),
    "study": r"^ablation +Sharded",
    "study memory --dry-run": r"^16 runs: \d+ to run; they are kept in$",
    "study memory --dry-run --only flash_attn --parts train --set fp8.recipe=te_delayed": (
        r"^1 run: 1 unavailable; they are kept in$"
    ),
    "compare memory --recorded": r"^memory, train, on h100$",
    "compare --recorded --machine h200": r"^ablation, train, on h200$",
    "compare --all": r"^course, train, on h100$",
    "attention-table": r"^\d+ shapes; `auto` takes the first kernel",
    "data list": r"^prepared datasets: [1-9][0-9]* in ",
    "jobs": r"^1 job: 1 FAILED$",
    "doctor": r"^This machine: \S+\. (Usable|Not usable)",
}


def lines_at_100(out: str) -> list[str]:
    """The lines of an output, which all fit the screen; the names of folders and commands to copy
    stay whole."""
    lines = out.splitlines()
    wide = [line for line in lines if len(line) > COLUMNS]
    assert not [line for line in wide if not re.match(r"/|  → |prepared datasets: ", line)], wide[0]
    return lines


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, dataset: Dataset) -> Project:
    """The shipped studies and records; as own runs those of an H100, one that failed and said much
    about it, and a job with a long name."""
    root = tmp_path_factory.mktemp("lab")
    shutil.copytree(CHECKOUT / "params", root / "params")
    for name in ("notebooks", "reports"):
        (root / name).symlink_to(CHECKOUT / name)
    project = Project(root, {"LSAI_DATA": str(dataset.folder.parent.parent)})
    for study in ("memory", "course"):
        shutil.copytree(CHECKOUT / "reports/recorded/h100" / study, project.runs / study)
    results = {"tokens_per_s": 1.0, "disturbed": LONG}
    failed = write_run(
        project.runs, "memory", "odd", outcome="failed", reason=LONG, results=results
    )
    plan = {"name": "n" * 80, "tags": ["t" * 30] * 4, "note": LONG}
    write_json(failed / "run.json", plan)
    record = JobRecord(
        job="4711",
        study="s" * 60,
        cluster="alps",
        profile="gh200",
        command="lsai submit",
        submitted="2026-01-01T00:00:00+00:00",
        code={},
        requeue=False,
        log=str(project.runs / "jobs/logs" / f"{'x' * 90}.out"),
        seen=[asdict(JobState("4711", None, "FAILED", "1-02:03:04", "1:0", 0, LONG))],
    )
    (project.runs / "jobs").mkdir()
    record.write(project.runs / "jobs")
    return project


@pytest.mark.parametrize("command", LISTS)
def test_a_list_fits_the_screen_and_begins_with_its_summary(lab: Project, command: str) -> None:
    code, out, err = lab.lsai(*command.split())
    assert code == 0, err
    first = next(line for line in lines_at_100(out) if line)
    assert re.search(LISTS[command], first), out[:300]
    assert "nan" not in out.split() and "None" not in out.split()


def test_a_claim_is_one_line_and_full_has_its_sentence_and_runs(lab: Project) -> None:
    declared = yaml.safe_load((CHECKOUT / "params/claims.yaml").read_text())
    some = {name: declared[name] for name in ("bf16_speed", "same_quality", "largest_batch_known")}
    some["void_one"] = declared["flash_speed"] | {"void": LONG}
    lab.write_yaml("params/claims.yaml", some)

    def claims(*options: str) -> str:
        process = lab.start("claims", *options)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 1, err  # one has failed, one is undecided
        return out

    first, late, _, heading, *lines = lines_at_100(claims())
    found = json.loads((CHECKOUT / "reports/recorded/claims.json").read_text())["claims"]
    found = [row for row in found if row["name"] in some]
    held = sum(row["held"] for row in found)
    assert held == 2 and first == (
        "4 claims: 2 held, 1 failed, 1 undecided (--full: their sentences and runs)"
    )
    assert late == "late: a bound that was set after a run that decides the claim"
    assert heading.split() == ["verdict", "claim", "machine", "measured", "bound"]
    assert [line.split()[0] for line in lines[:3]] == [row["verdict"] for row in found]
    assert [line.split()[1] for line in lines[:3]] == [row["name"] for row in found]
    assert lines[3].split()[:3] == ["failed", "void_one", "h100"]
    assert lines[3].endswith(" ≥ 2.2x, late")  # no commit shows this claim's bound
    speed = next(line for line in lines if "bf16_speed" in line)
    assert re.search(r" h100 +2\.62x \(2\.62 to 2\.63, n = 3\) +≥ 1\.8x$", speed), speed
    full = " ".join(" ".join(lines_at_100(claims("--full"))).split())
    for row in found:
        assert " ".join(row["sentence"].split()) in full and all(run in full for run in row["runs"])
        for name, time in (("bound", row["bound_set"]), ("first run", row["first_run"])):
            assert f"{name} of {time[:16].replace('T', ' ')}" in full
    assert "each run read 6.55 M tokens, 1.61 M distinct, 4.1 passes" in full
    assert "training loss, means of the last 100 steps: " in full


def test_full_shows_what_a_list_leaves_out(lab: Project) -> None:
    short, full = (lab.lsai("runs", "list", *more)[1] for more in ((), ("--full",)))
    full = " ".join(" ".join(lines_at_100(full)).split())
    for words in ("n" * 80, LONG.strip(), " ".join(["t" * 30] * 4)):
        assert words not in short and words in full
    assert re.search(r" memory\.odd +no such var\w*… +failed", short), short
    compared = lab.lsai("compare", "memory", "--all", "--full")[1]
    assert LONG.strip() in " ".join(" ".join(lines_at_100(compared)).split())
    plan = lab.lsai("study", "memory", "--dry-run", "--full")[1]
    place = rf"{re.escape(str(lab.runs))}/memory/bf16-"
    assert re.search(rf"^to run +memory\.bf16\s+(folder, or why not:\s+)?{place}", plan, re.M)


def test_a_full_table_puts_long_texts_below_their_rows_and_goes_on_in_another() -> None:
    rows = [{"name": f"row{n}", "reason": f"why {n} " * 20, "few": "ok"} for n in range(2)]
    rows = [row | {f"number {n}": 123_456 for n in range(12)} for row in rows]
    lines = lines_at_100(table(rows, full=True))
    assert lines[1].split()[:2] == ["row0", "ok"] and lines[2].startswith("    reason: why 0 why 0")
    assert lines[3].startswith("      ") and "why 0" in lines[3]
    head = lines.index("") + 1
    assert re.match(r"name  number \d+  number", lines[head]) and lines[head + 1][:5] == "row0 "
    assert sum(line.count("123456") for line in lines) == 24


def test_two_runs_differ_first_in_settings_then_in_speed_memory_and_loss(lab: Project) -> None:
    words = ("runs", "compare", "memory.baseline", "memory.flash_attn")
    every = {row["what"] for row in json.loads(lab.lsai(*words, "--json")[1])}
    short, full = lab.lsai(*words)[1], lab.lsai(*words, "--full")[1]
    order = ["2 settings differ:", "precision ", "tokens/s ", "peak GiB ", "val loss "]
    places = [short.index(text) for text in order]
    assert places == sorted(places)
    assert re.search(r"^tokens/s +170,944 +676,727 +3\.96x$", short, re.M), short
    assert re.search(r"^MFU % +3\.466 +13\.72 +3\.96x$", short, re.M), short
    assert "env.load_average" in every and "load_average" not in short
    told = re.search(r"^(\d+) other facts differ", short, re.M)
    rows = re.findall(r"^(?:env|code|mem|host|rss|run|started|\w+_)\S* ", full, re.M)
    assert told and "env.load_average" in full and len(rows) >= int(told[1]) / 2
    assert lab.lsai("runs", "compare", words[2], words[2])[1] == "they differ in nothing\n"
