"""Claims: committed verdicts and dates are current; rules, repeats, intervals and missing data; bad
YAML is one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import pandas as pd
import pytest
import yaml
from conftest import write_run

import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_lab.claims.bounds import BoundSet, bounds_by_history, read_bounds
from lsai_lab.claims.declared import load_claims
from lsai_lab.claims.evaluate import evaluate
from lsai_lab.claims.words import claims_table
from lsai_lab.cli.claims import as_records, claims_file

ROOT = Path(__file__).resolve().parent.parent


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
    told = found["value"].notna() == ~found["verdict"].isin(["withdrawn", "no data"])
    assert found[~found["held"]]["note"].str.len().sum() > 0 and told.all()


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
    assert low["verdict"] == "failed"
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


def test_value_and_count(checkout: Path) -> None:
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
    count = judge(
        checkout,
        runs,
        "kind: count, of: [baseline, bf16], repeats: 2, sentence: '{value:.0f} of {total}'",
    )
    assert count["sentence"] == "1 of 2" and not count["held"]


INTERVAL = (
    "kind: interval, of: bf16, over: baseline, repeats: 5, at_most: 2.5, "
    "sentence: '{confidence}: {best} {value:.2f}'"
)
SEEDS = [10.0, 20, 30, 40, 50]  # what the seed decides cancels out


def apart(*differences: float) -> list[float | None]:
    return [seed + difference for seed, difference in zip(SEEDS, differences, strict=True)]


def test_an_interval_is_over_equal_seeds_and_decides_in_three_ways(checkout: Path) -> None:
    runs = rows(baseline=[*SEEDS], bf16=apart(2, 1, 2, 1, 2))
    half = 2.776445 * 0.3**0.5 / 5**0.5
    claim = judge(checkout, runs, INTERVAL)
    assert claim["value"] == pytest.approx(1.6 + half, rel=1e-5)
    assert claim["sentence"] == f"With 95 % confidence: bf16 {1.6 + half:.2f}"
    assert claim["verdict"] == "held" and claim["n"] == 5
    assert (claim["low"], claim["high"]) == pytest.approx((1.6 - half, 1.6 + half), rel=1e-5)
    told = claims_table(claim.to_frame().T, load_claims(checkout))["measured"][0]
    assert told == "+1.60 ± 0.68 (n = 5)"
    over = judge(checkout, runs, INTERVAL.replace("2.5", "2.2"))
    assert over["verdict"] == "undecided" and not over["held"]
    assert judge(checkout, runs, INTERVAL.replace("2.5", "0.9"))["verdict"] == "failed"
    below = rows(baseline=[*SEEDS], bf16=apart(-2, -1, -2, -1, -2))
    assert judge(checkout, below, INTERVAL)["verdict"] == "held"
    assert judge(checkout, below, INTERVAL.replace("2.5", "0.9"))["verdict"] == "failed"


def test_a_rise_is_held_by_the_lower_end(checkout: Path) -> None:
    runs = rows(baseline=[*SEEDS], bf16=apart(2, 1, 2, 1, 2))
    half = 2.776445 * 0.3**0.5 / 5**0.5
    for bound, verdict in (("0.9", "held"), ("1.5", "undecided"), ("2.5", "failed")):
        claim = judge(checkout, runs, INTERVAL.replace("at_most: 2.5", f"at_least: {bound}"))
        assert claim["verdict"] == verdict and claim["value"] == pytest.approx(1.6 - half, rel=1e-5)
    below = rows(baseline=[*SEEDS], bf16=apart(-2, -1, -2, -1, -2))
    rises = INTERVAL.replace("at_most: 2.5", "at_least: 0.9")
    assert judge(checkout, below, rises)["verdict"] == "failed"


def test_too_few_seeds_decide_nothing_and_one_has_no_interval(checkout: Path) -> None:
    runs = rows(baseline=[*SEEDS], bf16=apart(2, 1, 2, 1, 2))
    few = judge(checkout, runs[runs["repeat"] < 4], INTERVAL)
    assert few["verdict"] == "incomplete" and few["note"] == "4 of 5 runs" and few["low"] < 1.5
    one = judge(checkout, runs[runs["repeat"] < 1], INTERVAL)
    assert one["verdict"] == "incomplete" and one["value"] == 2 and one["low"] is None
    assert one["sentence"] == "By one seed, which has no interval: bf16 2.00"
    missing = judge(checkout, runs[runs["variant"] == "bf16"], INTERVAL)
    assert missing["verdict"] == "no data" and "baseline: no run" in missing["note"]


def test_a_count_without_a_run_has_no_data(checkout: Path) -> None:
    count = "kind: count, of: [baseline, bf16], sentence: '{value:.0f} of {total}'"
    none = judge(checkout, rows(other=[1.0]), count)
    assert none["verdict"] == "no data" and none["value"] is None


def test_the_intervals_of_several_settings_hold_together(checkout: Path) -> None:
    runs = rows(baseline=[*SEEDS], bf16=apart(2, 1, 2, 1, 2), flash_attn=[*SEEDS])
    both = judge(checkout, runs, INTERVAL.replace("of: bf16", "of: [bf16, flash_attn]"))
    # Student's t of four degrees of freedom at 1 - 0.05 / 4
    assert both["value"] == pytest.approx(1.6 + 3.495406 * 0.06**0.5, rel=1e-5)
    assert both["verdict"] == "held" and "bf16" in both["sentence"]


def test_a_relative_interval_is_of_shares_of_the_base(checkout: Path) -> None:
    runs = rows(
        baseline=[*SEEDS],
        bf16=[
            seed * share for seed, share in zip(SEEDS, (1.02, 1.01, 1.02, 1.01, 1.02), strict=True)
        ],
    )
    relative = INTERVAL.replace("interval", "relative_interval", 1).replace("2.5", "0.025")
    claim = judge(checkout, runs, relative)
    assert claim["value"] == pytest.approx(0.016 + 2.776445 * 0.00006**0.5 / 10**0.5, rel=1e-4)
    told = claims_table(claim.to_frame().T, load_claims(checkout)).iloc[0]
    assert told["measured"] == "+1.60% ± 0.68% (n = 5)" and told["bound"] == "≤ 2.5%, late"


CURVES = "kind: curves, of: [bf16, flash_attn], over: baseline, sentence: '{value:.2f}'"


def curves(folder: Path, **losses: list[list[float]]) -> pd.DataFrame:
    """Rows of runs with these losses of each step, a list a repeat."""
    found = rows(**{variant: [1.0] * len(each) for variant, each in losses.items()})
    for run in found.itertuples():
        each = enumerate(losses[str(run.variant)][int(run.repeat)])
        of_all = {"tokens_in_step": 5, "step_ms": 1.0}
        steps = [{"step": step, "loss": loss, **of_all} for step, loss in each]
        made = write_run(folder, "memory", str(run.variant), repeat=run.repeat, metrics=steps)
        found.loc[run.Index, "run"] = str(made)
    return found


def test_curves_are_compared_step_by_step_with_the_furthest_setting(
    checkout: Path, tmp_path: Path
) -> None:
    runs = curves(
        tmp_path / "runs",
        baseline=[[5, 4, 3], [5, 4, 3]],
        bf16=[[5, 4.5, 2.5], [5, 4, 3.6]],
        flash_attn=[[5, 4, 3], [5, 4.3, 2.4]],
        window_512=[[5, 4.1, 3.1], [5, 4.1, 3]],
    )
    claim = judge(checkout, runs, f"{CURVES}, at_most: 0.4")
    assert (claim["low"], claim["high"]) == pytest.approx((0.3, 1 / 3), rel=1e-5)
    assert claim["value"] == pytest.approx(0.95 / 3, rel=1e-5) and claim["held"] and claim["n"] == 2
    first = judge(checkout, runs, f"{CURVES}, at_most: 0, steps: 1")
    assert first["value"] == 0 and first["held"]
    told = claims_table(claim.to_frame().T, load_claims(checkout)).iloc[0]
    assert told["bound"] == "≤ 0, late"
    beside = judge(checkout, runs, f"{CURVES}, at_most: 9.5, beside: window_512")
    assert (beside["low"], beside["high"]) == pytest.approx((5, 9), rel=1e-5) and beside["held"]
    told = claims_table(beside.to_frame().T, load_claims(checkout)).iloc[0]
    assert (told["bound"], told["measured"]) == ("≤ 9.5x, late", "7.00x (5.00 to 9.00, n = 2)")
    assert len(beside["runs"]) == 8
    assert judge(checkout, runs, f"{CURVES}, at_most: 8, beside: window_512")["verdict"] == "failed"


def test_curves_without_all_their_steps_are_no_data(checkout: Path, tmp_path: Path) -> None:
    runs = curves(
        tmp_path / "runs", baseline=[[5, 4, 3]], bf16=[[5, float("nan"), 3]], flash_attn=[[5, 4, 3]]
    )
    claim = judge(checkout, runs, f"{CURVES}, at_most: 1")
    assert claim["verdict"] == "no data" and "bf16: a run has not the losses" in claim["note"]
    assert judge(checkout, runs, f"{CURVES}, at_most: 1, steps: 1")["value"] == 0
    assert "a run has not" in judge(checkout, runs, f"{CURVES}, at_most: 1, steps: 4")["note"]
    none = judge(checkout, runs, f"{CURVES}, at_most: 1, steps: 1, beside: window_512")
    assert none["note"] == "window_512: no run"
    same = judge(checkout, runs, f"{CURVES}, at_most: 1, steps: 1, beside: flash_attn")
    assert same["note"] == "flash_attn: the same losses as baseline"


def test_a_withdrawn_claim_is_listed_and_judged_by_nothing(checkout: Path) -> None:
    claim = "kind: withdrawn, of: gone, at_least: 2, reason: no time, sentence: '{value}'"
    judged = judge(checkout, rows(baseline=[100]), claim)
    assert (judged["verdict"], judged["note"], judged["value"]) == ("withdrawn", "no time", None)
    told = claims_table(judged.to_frame().T, load_claims(checkout)).iloc[0]
    assert (told["measured"], told["verdict"]) == ("–", "withdrawn")


def test_runs_that_cannot_be_made_again_are_judged_by_their_records(checkout: Path) -> None:
    claim = "kind: ratio, of: removed, over: baseline, at_least: 1.1, sentence: '{value}'"
    runs = rows(baseline=[100], removed=[90])
    with pytest.raises(UserError, match="study memory has no variant 'removed'"):
        judge(checkout, runs, claim)
    judged = judge(checkout, runs, f"{claim}, gone: 1a2b3c4d")
    assert (judged["verdict"], judged["value"]) == ("failed", 0.9)


# When a bound was set, beside when its runs began.


def test_a_bound_counts_as_set_first_only_if_a_commit_shows_it(checkout: Path) -> None:
    runs = rows(baseline=[100], bf16=[190]).assign(started="2026-11-22T10:00:00+00:00")
    (checkout / "params" / "claims.yaml").write_text(
        f"c: {{study: memory, metric: tokens_per_s, {RATIO}}}\n"
    )
    declared = load_claims(checkout)

    def late(bound: str, when: str) -> bool:
        known = BoundSet(bound=bound, set=datetime.fromisoformat(when), commit="1234567")
        return bool(evaluate(runs, declared, {"c": known}).iloc[0]["set_after"])

    assert not late("≥ 1.8", "2026-11-22T10:30:00+01:00")
    assert late("≥ 1.8", "2026-11-22T10:30:00+00:00")
    assert late("≥ 1.7", "2026-11-21T10:00:00+00:00")  # the number was changed since
    assert evaluate(runs, declared, {}).iloc[0]["set_after"]
    undated = evaluate(runs.assign(started="?"), declared, {}).iloc[0]
    assert undated["set_after"] and undated["first_run"] is None
    assert not evaluate(runs[:0], declared, {}).iloc[0]["set_after"]  # there is no run yet


def test_the_committed_dates_of_bounds_are_those_of_git(found: pd.DataFrame) -> None:
    declared, kept = load_claims(ROOT), read_bounds(ROOT)
    dated = bounds_by_history(ROOT, declared)
    if dated is None:
        pytest.skip("this copy lacks git's history")
    for row in found.itertuples():
        if row.verdict != "no data":  # a claim before its runs may be dated with them
            assert kept[row.name] == dated[row.name], (row.name, "run `lsai claims --write`")
            assert row.bound_set == dated[row.name].set.isoformat(), row.name
    assert not kept.keys() - declared.keys()


def test_damaged_dates_are_one_clear_line(checkout: Path) -> None:
    path = checkout / "reports" / "recorded" / "bounds.json"
    assert read_bounds(checkout) == {}
    path.parent.mkdir(parents=True)
    for damaged in ("", "[]", '{"c": {"bound": "= 8", "set": "yesterday", "commit": "1"}}'):
        path.write_text(damaged)
        with pytest.raises(UserError, match=r"bounds\.json: damaged; delete it") as caught:
            read_bounds(checkout)
        assert "\n" not in str(caught.value)


def test_a_bound_is_as_old_as_its_first_commit(checkout: Path) -> None:
    def commit(text: str, day: int) -> None:
        (checkout / "params" / "claims.yaml").write_text(text)
        date = f"2026-01-{day:02}T12:00:00+02:00"
        identity = {
            f"GIT_{who}_{what}": "a@b.c"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        environment = {**os.environ, **identity, "GIT_COMMITTER_DATE": date}
        for command in (["add", "."], ["commit", "-q", "-m", "m"]):
            subprocess.run(["git", "-C", checkout, *command], check=True, env=environment)

    subprocess.run(["git", "init", "-q", checkout], check=True)
    first = f"c: {{study: memory, metric: tokens_per_s, {RATIO}}}\n"
    commit(first.replace("1.8", "1.7"), 1)
    commit(first, 2)
    commit("c: [", 3)
    commit(first.replace("sentence: '", "sentence: 'now "), 4)
    dated = bounds_by_history(checkout, load_claims(checkout))
    assert dated and dated["c"].set == datetime.fromisoformat("2026-01-02T10:00:00+00:00")
    (checkout / "params" / "claims.yaml").write_text(first.replace("1.8", "1.9"))
    assert bounds_by_history(checkout, load_claims(checkout)) == {}  # not committed
    shallow = checkout.with_name("shallow")
    clone = ["git", "clone", "-q", "--depth", "1", f"file://{checkout}", shallow]
    subprocess.run(clone, check=True)
    assert bounds_by_history(shallow, load_claims(shallow)) is None
    shutil.rmtree(shallow / ".git")
    assert bounds_by_history(shallow, load_claims(shallow)) is None


def test_every_loss_says_how_much_text_it_read(found: pd.DataFrame) -> None:
    losses = found[found["name"].str.contains("loss|quality") & found["value"].notna()]
    assert len(losses) >= 18 and losses["passes"].notna().all()
    long = losses.set_index("name").loc["states_bf16_long_loss"]
    assert (long["tokens"], long["distinct_tokens"]) == (8_192_000, 1_612_800)
    assert long["passes"] == pytest.approx(5.08, abs=0.01)
    assert 0.69 < long["training_low"] < long["training_high"] < 0.74  # beside 0.13 of validation
    runs = lab.load()
    runs = runs[~runs["own"].astype(bool) & runs["validation_loss"].notna()]
    assert lab.text_read(runs).notna().all(axis=None)


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
        ("kind: ratio", "kind: curves", "curves have at_most"),
        ("of: bf16", "of: bf_16", "has no variant 'bf_16'; did you mean bf16"),
        ("of: bf16", "of: {part: trian, variant: bf16}", "has no part 'trian'"),
        ("kind: ratio", "kind: ration", "'relative_interval', 'curves', 'count' or 'withdrawn'"),
        ("kind: ratio", "kind: interval", "an interval has repeats of at least 2"),
        ("kind: ratio", "kind: withdrawn", "a withdrawn claim has a `reason`"),
        ("over: baseline, ", "", "a ratio, curves and an interval have `over`"),
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
