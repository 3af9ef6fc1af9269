"""Claims: committed verdicts are current; the shipped claims hold, fall or miss data rightly; bad YAML is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from lsai_core.errors import UserError
from lsai_lab.cli import main
from lsai_lab.cli.claims import claims_file, claims_json, recorded_claims
from lsai_lab.report.show import table_markdown
from lsai_lab.runs.claims import ClaimResult, claims_table, evaluate_claims, load_claims
from lsai_lab.runs.records import RunId, Summary, find_runs, recorded_runs, run_key, runs_frame

ROOT = Path(__file__).resolve().parent.parent
#                  tokens/s, peak GiB, perplexity, largest batch
FIGURES = {
    "baseline": (100.0, 20.0, 40.0, 100),
    "bf16": (200.0, 14.0, 40.1, 150),
    "flash_attn": (260.0, 10.0, 40.2, 300),
    "window_512": (255.0, 10.1, 40.1, 300),
    "window_256": (250.0, 10.1, 44.0, 300),
    "grad_checkpoint": (80.0, 9.0, 40.0, 400),
    "bf16_gradcp": (150.0, 7.5, 40.1, 500),
    "flash_gradcp": (190.0, 6.0, 40.1, 800),
}


def write_run(
    root: Path,
    variant: str,
    repeat: int,
    results: dict[str, Any],
    part: str = "train",
    outcome: Any = "ok",
    **more: str,
) -> None:
    """One finished run in the format of the records."""
    day, machine = more.get("day", "01"), more.get("machine", "h200")
    run = RunId("memory", variant, part, repeat, run_key({}, variant, part, str(repeat), day))
    folder = root / "memory" / run.folder
    folder.mkdir(parents=True)
    kind = {"train": "train", "batch": "batch_search"}[part]
    summary = Summary(run, kind, outcome, None, f"2026-01-{day}T00:00:00+00:00", 1.0, "lsai study memory", {}, results)
    summary.write(folder)
    (folder / "env.json").write_text(json.dumps({"machine": machine}))


def train_results(variant: str, repeat: int = 0, **changed: Any) -> dict[str, Any]:
    speed, peak, perplexity, _ = FIGURES[variant]
    facts = {
        "tokens": 16384 * 300,
        "steps": 300,
        "dataset": "polish-docs-0123",
        "parameters": 10,
        "memory_kind": "CUDA",
    }
    figures = {
        "tokens_per_s": speed * (1 + 0.01 * repeat),
        "mem_peak_allocated_gib": peak,
        "validation_perplexity": perplexity,
    }
    return {**facts, **figures, **changed}


def write_study(root: Path, **more: str) -> None:
    for variant, figures in FIGURES.items():
        for repeat in range(3):
            write_run(root, variant, repeat, train_results(variant, repeat), **more)
        write_run(root, variant, 0, {"largest_batch": figures[3], "tries": [{"size": 8}]}, "batch", **more)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the real parameters, the claims about the memory study, and no records."""
    shutil.copytree(ROOT / "params", tmp_path / "params")
    claims = yaml.safe_load((ROOT / "params" / "claims.yaml").read_text())
    of_memory = {name: claim for name, claim in claims.items() if claim["study"] == "memory"}
    (tmp_path / "params" / "claims.yaml").write_text(yaml.safe_dump(of_memory, sort_keys=False))
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("LSAI_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture
def records(checkout: Path) -> Path:
    """The folder of the machine's committed records, without any yet."""
    return checkout / "reports" / "recorded" / "h200"


def lsai(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Exit code of `lsai <words>`."""
    monkeypatch.setattr("sys.argv", ["lsai", *words])
    with pytest.raises(SystemExit) as caught:
        main()
        raise SystemExit(0)
    return int(caught.value.code or 0)


def judged(checkout: Path) -> dict[str, ClaimResult]:
    return {result.name: result for result in recorded_claims(checkout)}


def write_claims(checkout: Path, text: str) -> None:
    (checkout / "params" / "claims.yaml").write_text(text)


WHERE = "study: memory, machine: h200, metric: tokens_per_s"
RATIO = f"c: {{kind: ratio, {WHERE}, of: bf16, over: baseline, at_least: 1, sentence: ''}}"


def test_committed_verdicts_are_current() -> None:
    if not recorded_runs(ROOT / "reports"):
        pytest.skip("no records are committed yet")
    assert json.loads(claims_file(ROOT).read_text()) == claims_json(recorded_claims(ROOT)), "run `lsai claims --write`"


def test_shipped_claims_hold_on_good_records(checkout: Path, records: Path) -> None:
    write_study(records)
    results = judged(checkout)
    assert {result.verdict for result in results.values()} == {"held"}, results
    bf16 = results["bf16_speed"]
    assert bf16.value == 2.0 and bf16.bound == "≥ 1.8" and bf16.machine == "h200"
    assert "2.00 times" in bf16.sentence and "202 against 101 tokens/s" in bf16.sentence  # medians of the three repeats
    assert len(bf16.runs) == 6 and all(run.startswith(("memory/bf16", "memory/baseline")) for run in bf16.runs)
    assert results["least_memory"].value == 0.3 and "flash_gradcp, needs 30%" in results["least_memory"].sentence
    assert results["same_quality"].value == 0.005  # window_256 (44.0) is not among them
    assert len(results["same_quality"].runs) == 21
    assert results["all_variants_ok"].value == 8 and "8 of 8" in results["all_variants_ok"].sentence


def test_spread_pairs_equal_repeats(checkout: Path, records: Path) -> None:
    for repeat, (base, fast) in enumerate([(100, 190), (110, 220), (90, 189)]):
        write_run(records, "baseline", repeat, train_results("baseline", tokens_per_s=base))
        write_run(records, "bf16", repeat, train_results("bf16", tokens_per_s=fast))
    result = judged(checkout)["bf16_speed"]
    assert result.value == 1.9  # median 190 over median 100, not the median of the ratios (2.0)
    assert result.spread == (1.9, 2.1)


def test_fallen_claim_is_shown_and_exits_1(
    checkout: Path, records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FIGURES, "flash_attn", (219.0, 10.0, 40.5, 300))
    write_study(records)
    assert lsai(monkeypatch, "claims", "--json") == 1
    shown = {claim["name"]: claim for claim in json.loads(capsys.readouterr().out)["claims"]}
    assert shown["flash_speed"]["verdict"] == "fallen" and shown["flash_speed"]["value"] == 2.19
    assert shown["same_quality"]["verdict"] == "fallen" and shown["same_quality"]["value"] == 0.0125
    assert shown["bf16_speed"]["verdict"] == "held" and len(shown) == 6


def test_write_and_exit_0(
    checkout: Path, records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(records)
    assert lsai(monkeypatch, "claims", "--write") == 0
    assert "6 held, 0 fallen, 0 no data" in capsys.readouterr().out
    assert json.loads(claims_file(checkout).read_text()) == claims_json(recorded_claims(checkout))


def test_missing_records_are_no_data(
    checkout: Path, records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(records, "baseline", 0, train_results("baseline"))
    write_run(records, "bf16", 0, {}, outcome="oom")
    results = judged(checkout)
    assert results["bf16_speed"].verdict == "no data" and results["bf16_speed"].value is None
    assert results["bf16_speed"].note == "bf16: 0 of 1 runs have tokens_per_s (oom)"
    assert "trains … times" in results["bf16_speed"].sentence
    assert results["flash_speed"].note == "flash_attn: no run"
    assert results["all_variants_ok"].verdict == "fallen" and results["all_variants_ok"].value == 0
    assert results["largest_batch_known"].verdict == "no data"  # no run of that part at all
    write_claims(checkout, RATIO)
    assert lsai(monkeypatch, "claims") == 1  # a headline without evidence must not stand
    assert lsai(monkeypatch, "claims", "--runs", str(records)) == 0  # own runs: merely reported
    assert "no data" in capsys.readouterr().out


def test_one_repeat_out_of_memory_is_not_hidden(checkout: Path, records: Path) -> None:
    write_study(records)
    write_run(records, "bf16", 2, {}, outcome="oom", day="02")  # newer than the good run of the same repeat
    results = judged(checkout)
    assert results["all_variants_ok"].verdict == "fallen" and results["all_variants_ok"].value == 7
    assert results["all_variants_ok"].note == "bf16: 2 of 3 runs ended ok (oom)"
    assert results["bf16_speed"].verdict == "held" and "bf16: 2 of 3" in results["bf16_speed"].note
    assert len(results["bf16_speed"].runs) == 5


def test_a_variant_without_largest_batch_counts_as_missing(checkout: Path, records: Path) -> None:
    write_study(records)
    write_run(records, "bf16", 0, {"largest_batch": None}, "batch", day="02")
    result = judged(checkout)["largest_batch_known"]
    assert (result.value, result.verdict, result.note) == (7, "fallen", "bf16: 0 of 1 runs have largest_batch")


def test_unequal_batches_are_not_compared(checkout: Path, records: Path) -> None:
    write_run(records, "baseline", 0, train_results("baseline"))
    write_run(records, "bf16", 0, train_results("bf16", tokens=2 * 16384 * 300))
    result = judged(checkout)["bf16_speed"]
    assert result.verdict == "no data" and result.runs == ()
    assert result.note == "the runs cannot be compared, their tokens must agree: 4915200, 9830400"


def test_own_runs_are_judged_on_each_machine(checkout: Path, tmp_path: Path) -> None:
    write_study(tmp_path / "a", machine="laptop")
    write_run(tmp_path / "b", "baseline", 0, train_results("baseline"), machine="tower")
    frame = runs_frame([*find_runs(tmp_path / "a"), *find_runs(tmp_path / "b")])
    results = evaluate_claims(load_claims(checkout), frame, ["laptop", "tower"])
    speed = {result.machine: result.verdict for result in results if result.name == "bf16_speed"}
    assert speed == {"laptop": "held", "tower": "no data"}
    assert "on laptop" in results[2].sentence


def test_value_and_largest(checkout: Path, records: Path) -> None:
    write_study(records)
    write_claims(
        checkout,
        f"fastest: {{kind: value, {WHERE}, of: {{largest: all}}, at_most: 250, sentence: '{{best}} {{value:.0f}}'}}\n"
        f"plain: {{kind: value, {WHERE}, of: bf16, at_least: 202, sentence: '{{value:.1f}}'}}\n",
    )
    fastest, plain = recorded_claims(checkout)
    assert (fastest.sentence, fastest.verdict, fastest.bound) == ("flash_attn 263", "fallen", "≤ 250")
    assert (plain.value, plain.verdict, plain.spread) == (202, "held", (200, 204))


def test_results_of_one_run_against_one_another(checkout: Path, records: Path) -> None:
    for repeat, ring in enumerate((90.0, 100.0, 95.0)):
        results = train_results("bf16") | {"ring_tflops": ring, "usp_tflops": 80.0, "alone_tflops": 100.0}
        write_run(records, "bf16", repeat, results)
    rule = "kind: within, study: memory, machine: h200, variant: bf16, of: [usp_tflops, ring_tflops]"
    write_claims(
        checkout,
        f"near: {{{rule}, over: [alone_tflops], at_least: 0.9, sentence: '{{best}} {{value:.2f}} {{of:.0f}} {{over:.0f}}'}}\n"
        f"far: {{{rule}, over: [alone_tflops], at_least: 0.99, sentence: ''}}\n",
    )
    near, far = recorded_claims(checkout)
    assert (near.sentence, near.verdict, near.spread) == ("ring_tflops 0.95 95 100", "held", (0.9, 1.0))
    assert far.verdict == "fallen" and far.note == ""
    write_claims(checkout, f"c: {{{rule}, over: [alone_tflop], at_least: 1, sentence: ''}}\n")
    with pytest.raises(UserError, match="did you mean alone_tflops"):
        recorded_claims(checkout)


def test_report_table_links_to_the_runs(checkout: Path, records: Path) -> None:
    write_study(records)
    table = claims_table(recorded_claims(checkout))
    assert list(table.columns) == ["claim", "value", "over repeats", "bound", "verdict", "runs"] and len(table) == 6
    keys = {run.summary.id.name: run.summary.id.key for run in recorded_runs(checkout / "reports")}
    assert table["runs"][1] == f"[baseline](#run-{keys['baseline']}) ×3, [bf16](#run-{keys['bf16']}) ×3"
    assert table_markdown(table).count("\n") == 7


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("metric: tokens_per_s", "metric: tokens_per_sec", "did you mean tokens_per_s"),
        ("metric: tokens_per_s", "metric: dataset", "'dataset' is not a number"),
        ("sentence:", "same: [token], sentence:", "did you mean tokens"),
        ("of: bf16", "of: bf_16", "has no variant 'bf_16'; did you mean bf16"),
        ("of: bf16", "of: {smallest: all, largest: all}", "either smallest or largest"),
        ("kind: ratio", "name: c, kind: ratio", "a claim is called by its key"),
        ("kind: ratio", "kind: ration", "unknown kind 'ration'; known: value, ratio, spread, within, count"),
        ("study: memory", "study: memry", "unknown study 'memry'"),
        ("study: memory", "study: memory, part: trian", "has no part 'trian'; did you mean train"),
        ("at_least: 1", "at_least: 1, at_most: 2", "either at_least or at_most"),
        ("at_least: 1", "atleast: 1", "did you mean 'at_least'"),
        ("sentence: ''", "sentence: '{valu:.2f}'", "unknown fact 'valu'; did you mean value"),
        ("sentence: ''", "sentence: '{best:.2f}'", "not a valid template"),
        ("c: {", "c: [", "params/claims.yaml: cannot be read"),
    ],
)
def test_mistakes_are_one_clear_line(checkout: Path, records: Path, old: str, new: str, message: str) -> None:
    write_study(records)
    assert old in RATIO
    write_claims(checkout, RATIO.replace(old, new))
    with pytest.raises(UserError) as caught:
        recorded_claims(checkout)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_command_line_mistakes_exit_2(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lsai(monkeypatch, "claims", "--runs", str(tmp_path / "nowhere")) == 2
    assert lsai(monkeypatch, "claims", "--runs", str(tmp_path)) == 2
    assert lsai(monkeypatch, "claims", "--write", "--runs", str(tmp_path)) == 2
    assert "no such folder" in (shown := capsys.readouterr().err) and "no finished runs" in shown and "--write" in shown
