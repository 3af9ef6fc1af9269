"""Claims: committed verdicts are current and follow from raw rows; rules, repeats and missing data;
bad YAML is one line."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_lab.claims.declared import load_claims
from lsai_lab.claims.evaluate import evaluate
from lsai_lab.claims.words import claims_table
from lsai_lab.cli.claims import as_records, claims_file

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "reports" / "recorded"


@pytest.fixture(scope="module")
def found() -> pd.DataFrame:
    """The shipped claims on the committed records."""
    runs = lab.load()
    return evaluate(runs[~runs["own"].astype(bool)], load_claims(ROOT))


def test_committed_verdicts_are_current(found: pd.DataFrame) -> None:
    assert json.loads(claims_file(ROOT).read_text()) == as_records(found), (
        "run `lsai claims --write`"
    )


def test_a_claim_stands_only_if_its_worst_repeat_does(found: pd.DataFrame) -> None:
    declared = yaml.safe_load((ROOT / "params" / "claims.yaml").read_text())
    for row in found[found["held"]].itertuples():
        claim = declared[row.name]
        for value in [row.value] + ([] if pd.isna(row.low) else [row.low, row.high]):
            assert value >= claim.get("at_least", value) and value <= claim.get("at_most", value), (
                row.name
            )
    assert found[~found["held"]]["note"].str.len().sum() > 0 and found["value"].notna().all()


# The recomputation knows of the claims only what params/claims.yaml says, and of the runs only what
# each step wrote.


def raw_rows(
    machine: str, study: str, parts: str | list[str], variant: str
) -> dict[int, list[dict[str, Any]]]:
    """repeat -> the rows of its newest run, from `metrics.jsonl`."""
    parts = [parts] if isinstance(parts, str) else parts
    runs: dict[int, tuple[str, list[dict[str, Any]]]] = {}
    for folder in (RECORDED / machine / study).glob(f"{variant}[.-]*"):
        summary = json.loads((folder / "summary.json").read_text())
        name = summary["id"]
        if name["variant"] == variant and name["part"] in parts and summary["outcome"] == "ok":
            rows = [
                json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
            ]
            runs[name["repeat"]] = max(
                runs.get(name["repeat"], ("", [])), (summary["started"], rows)
            )
    return {repeat: rows for repeat, (_, rows) in runs.items()}


def from_rows(metric: str, rows: list[dict[str, Any]], gpus: int) -> float:
    """NaN for a point of a bench that a run had no time for."""
    if metric.startswith("tokens_per_s"):
        # older records: all but the first ten
        timed = [row for row in rows if row.get("steady", row["step"] >= 10)]
        rate = 1e3 * timed[0]["tokens_in_step"] / statistics.median(row["step_ms"] for row in timed)
        return rate / gpus if metric.endswith("per_gpu") else rate
    if metric.startswith("validation"):
        loss = [row["validation_loss"] for row in rows if row.get("validation_loss") is not None][
            -1
        ]
        return math.exp(loss) if metric.endswith("perplexity") else loss
    words = metric.removesuffix("_tflops").split("_")  # causal_8192_fa4, ulysses_8192
    (row,) = [
        row
        for row in rows
        if row["measure"] == "time"
        and row["length"] == int(words[1])
        and (
            row["method"] == words[0]
            if len(words) == 2
            else (row["mask"], row["backend"]) == (words[0], words[2])
        )
    ]
    if (row["outcome"], str(row["reason"])[-9:]) == ("skipped", "were over"):
        return math.nan
    assert row["outcome"] == "ok"
    return row["training_tflops"]


def figure(claim: dict[str, Any], term: Any, choose: Any) -> float:
    term = {**claim, **(term if isinstance(term, dict) else {"variant": term})}
    figures = []
    for variant in [term["variant"]] if isinstance(term["variant"], str) else term["variant"]:
        runs = raw_rows(
            term.get("machine", "h200"), term["study"], term.get("part", "train"), variant
        )
        for metric in [term["metric"]] if isinstance(term["metric"], str) else term["metric"]:
            gpus = int(next((word for word in variant.split("_") if word in ("1", "2", "4")), 1))
            values = [
                value
                for rows in runs.values()
                if not math.isnan(value := from_rows(metric, rows, gpus))
            ]
            average = statistics.mean if metric.startswith("validation") else statistics.median
            figures += [average(values)] if values else []
    return choose(figures)


def seeds_from_the_baseline(claim: dict[str, Any], variant: str) -> float:
    part = claim.get("part", "train")
    runs, bases = (
        raw_rows(claim["machine"], claim["study"], part, name) for name in (variant, claim["over"])
    )
    differences = [
        from_rows(claim["metric"], runs[n], 1) - from_rows(claim["metric"], bases[n], 1)
        for n in runs
    ]
    assert runs.keys() == bases.keys() == set(range(claim["repeats"]))
    # 97.5 % of four or seven degrees of freedom
    students_t = {5: 2.776, 8: 2.365}[len(differences)]
    return (
        abs(statistics.mean(differences))
        + students_t * statistics.stdev(differences) / len(differences) ** 0.5
    )


def test_every_speed_and_loss_follows_from_the_raw_rows(found: pd.DataFrame) -> None:
    values, checked = found.set_index("name")["value"], 0
    for name, claim in yaml.safe_load((ROOT / "params" / "claims.yaml").read_text()).items():
        metrics = (
            [claim["metric"]] if isinstance(claim.get("metric"), str) else claim.get("metric", [])
        )
        if claim["kind"] in ("count", "estimators") or not all(
            metric.startswith(("tokens_per_s", "validation")) or metric.endswith("_tflops")
            for metric in metrics
        ):
            continue  # memory, sizes and single steps of a search have no rows of their own
        if claim["kind"] == "spread":
            figures = [figure(claim, variant, max) for variant in claim["of"]]
            value = (max(figures) - min(figures)) / min(figures)
        elif claim["kind"] == "interval":
            variants = [claim["of"]] if isinstance(claim["of"], str) else claim["of"]
            value = max(seeds_from_the_baseline(claim, variant) for variant in variants)
        else:
            value = figure(claim, claim["of"], max)
            value /= figure(claim, claim["over"], max) if claim["kind"] == "ratio" else 1
        # TFLOP/s have four digits
        assert math.isclose(values[name], value, rel_tol=2e-4, abs_tol=1e-6), name
        checked += 1
    assert checked >= 28


# Rules, on rows of the kind that `lab.load` gives.


def rows(**speeds: list[float | None]) -> pd.DataFrame:
    """One row a repeat of each variant with `tokens_per_s`; None: it ran out of memory."""
    found = [
        {
            "machine": "h200",
            "study": "memory",
            "part": "train",
            "variant": variant,
            "repeat": repeat,
            "started": "1",
            "outcome": "oom" if value is None else "ok",
            "tokens_per_s": value,
            "tokens": 10,
            "run": f"/{variant}.r{repeat}",
        }
        for variant, values in speeds.items()
        for repeat, value in enumerate(values)
    ]
    return pd.DataFrame(found)


def judge(checkout: Path, runs: pd.DataFrame, claim: str) -> pd.Series:
    (checkout / "params" / "claims.yaml").write_text(
        f"c: {{study: memory, metric: tokens_per_s, {claim}}}\n"
    )
    return evaluate(runs, load_claims(checkout)).iloc[0]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "params", tmp_path / "params")
    return tmp_path


RATIO = (
    "kind: ratio, of: bf16, over: baseline, at_least: 1.8, same: [tokens], sentence: "
    "'{value:.2f} {of:.0f}'"
)


def test_ratio_of_medians_and_of_equal_repeats(checkout: Path) -> None:
    claim = judge(checkout, rows(baseline=[100, 110, 90], bf16=[190, 220, 189]), RATIO)
    assert (claim["value"], claim["low"], claim["high"], claim["n"]) == (
        1.9,
        1.9,
        2.1,
        3,
    ) and claim["held"]
    assert (
        claim["sentence"] == "1.90 190"
        and "h200/memory/bf16.r0" in claim["runs"]
        and len(claim["runs"]) == 6
    )


def test_one_bad_repeat_fells_a_claim_and_one_run_says_so(checkout: Path) -> None:
    claim = judge(checkout, rows(baseline=[100, 100, 100], bf16=[190, 200, 170]), RATIO)
    assert claim["value"] == 1.9 and not claim["held"] and "1.7" in claim["note"]
    single = judge(checkout, rows(baseline=[100], bf16=[190]), RATIO)
    assert (
        single["held"]
        and claims_table(single.to_frame().T, load_claims(checkout))["measured"][0]
        == "1.90x (n = 1)"
    )
    few = judge(
        checkout, rows(baseline=[100], bf16=[190]), RATIO.replace("same:", "repeats: 3, same:")
    )
    assert not few["held"] and few["verdict"] == "incomplete" and few["note"] == "1 of 3 runs"
    low = judge(
        checkout, rows(baseline=[100], bf16=[170]), RATIO.replace("same:", "repeats: 3, same:")
    )
    assert low["verdict"] == "fallen"
    void = judge(
        checkout, rows(baseline=[100], bf16=[190]), RATIO.replace("same:", "void: no base, same:")
    )
    assert not void["held"] and void["value"] == 1.9 and void["note"] == "no base"


def test_missing_and_unequal_runs_are_no_data(checkout: Path) -> None:
    missing = judge(checkout, rows(baseline=[100], bf16=[None]), RATIO)
    assert (
        missing["value"] is None
        and not missing["held"]
        and "oom" in missing["note"]
        and "…" in missing["sentence"]
    )
    unequal = rows(baseline=[100], bf16=[190]).assign(tokens=[10, 20])
    assert "tokens must agree: 20, 10" in judge(checkout, unequal, RATIO)["note"]
    assert (
        "no run"
        in judge(checkout, rows(baseline=[100], bf16=[190]), f"machine: laptop, {RATIO}")["note"]
    )


def test_the_newest_run_of_a_repeat_counts(checkout: Path) -> None:
    again = rows(bf16=[300]).assign(started="2")
    claim = judge(
        checkout, pd.concat([rows(baseline=[100], bf16=[190]), again], ignore_index=True), RATIO
    )
    assert claim["value"] == 3.0


def test_value_spread_and_count(checkout: Path) -> None:
    runs = rows(baseline=[100, 101], bf16=[200, None])
    best = judge(
        checkout, runs, "kind: value, of: [baseline, bf16], at_least: 150, sentence: '{best}'"
    )
    assert (
        (best["value"], best["sentence"]) == (200, "bf16")
        and best["held"]
        and "oom" in best["note"]
    )
    least = judge(
        checkout, runs, "kind: value, of: [baseline, bf16], at_most: 150, sentence: '{best}'"
    )
    assert (least["value"], least["sentence"]) == (100.5, "baseline")
    apart = judge(
        checkout, runs, "kind: spread, of: [baseline, bf16], at_most: 2, sentence: '{smallest:.1f}'"
    )
    assert apart["value"] == pytest.approx(99.5 / 100.5, rel=1e-5) and apart["sentence"] == "100.5"
    alike = judge(
        checkout,
        rows(baseline=[100, 100], bf16=[100, 100]),
        "kind: spread, of: [baseline, bf16], at_most: 0.01, sentence: s",
    )
    assert (
        alike["held"]
        and claims_table(alike.to_frame().T, load_claims(checkout))["measured"][0] == "0.0% (n = 2)"
    )
    count = judge(
        checkout,
        runs,
        "kind: count, of: [baseline, bf16], repeats: 2, sentence: '{value:.0f} of {total}'",
    )
    assert count["sentence"] == "1 of 2" and not count["held"]


def test_an_interval_is_over_equal_seeds_and_needs_enough_of_them(checkout: Path) -> None:
    interval = (
        "kind: interval, of: [bf16, flash_attn], over: baseline, repeats: 5, at_most: 2.5, "
        "sentence: '{best} {value:.2f}'"
    )
    shared = [10.0, 20, 30, 40, 50]  # what the seed decides cancels out
    runs = rows(baseline=shared, flash_attn=shared, bf16=[12.0, 21, 32, 41, 52])
    half = 2.776 * 0.3**0.5 / 5**0.5  # differences 2, 1, 2, 1, 2
    claim = judge(checkout, runs, interval)
    assert (
        claim["value"] == pytest.approx(1.6 + half, rel=1e-5)
        and claim["sentence"] == f"bf16 {1.6 + half:.2f}"
    )
    assert claim["held"] and claim["n"] == 5
    few = judge(checkout, runs[runs["repeat"] < 4], interval)
    assert few["value"] is None and not few["held"] and "4 of 5 seeds" in few["note"]
    assert not judge(checkout, runs, interval.replace("2.5", "2.2"))["held"]


def test_a_new_variant_fells_no_claim(found: pd.DataFrame) -> None:
    runs = lab.load("memory")
    runs = runs[~runs["own"].astype(bool)]
    slow = runs[runs["variant"] == "bf16"].assign(
        variant="new", tokens_per_s=1.0, validation_perplexity=1e6, outcome="oom"
    )
    judged = evaluate(
        pd.concat([runs, slow]), {k: v for k, v in load_claims(ROOT).items() if v.study == "memory"}
    )
    before = found[found["name"].isin(judged["name"])]
    assert (
        judged["value"].tolist() == before["value"].tolist()
        and judged["held"].tolist() == before["held"].tolist()
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("of: bf16", "of: bf_16", "has no variant 'bf_16'; did you mean bf16"),
        ("of: bf16", "of: {part: trian, variant: bf16}", "has no part 'trian'"),
        ("kind: ratio", "kind: ration", "'ratio', 'spread', 'interval' or 'count'"),
        ("over: baseline, ", "", "a ratio and an interval have `over`"),
        ("at_least: 1.8", "at_least: 1, at_most: 2", "either at_least or at_most"),
        ("at_least: 1.8", "atleast: 1", "did you mean 'at_least'"),
        ("{value:.2f}", "{valu:.2f}", "unknown fact 'valu'; did you mean value"),
        ("{value:.2f}", "{best:.2f}", "not a valid template"),
        ("kind: ratio", "[", "params/claims.yaml: cannot be read"),
    ],
)
def test_mistakes_are_one_clear_line(checkout: Path, old: str, new: str, message: str) -> None:
    assert old in RATIO
    with pytest.raises(UserError) as caught:
        judge(checkout, rows(baseline=[100], bf16=[190]), RATIO.replace(old, new))
    assert message in str(caught.value) and "\n" not in str(caught.value)
