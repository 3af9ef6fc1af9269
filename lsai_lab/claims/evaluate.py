"""Claims: every headline statement, recomputed from the records.

`params/claims.yaml` declares each statement once: which runs it is about, how one number follows
from them, the bound that the number must keep, and the sentence that the numbers fill. Here one
small function per kind of claim turns rows of `lab.load` into that number:

    value    the figure of `of`
    ratio    the figure of `of` over that of `over`; `beside`: over another one, for the sentence
    interval how far a variant of `of` may be from `over`: the largest end, without its sign, of the
             joint 95 % intervals of the differences seed by seed (`lsai_lab.claims.intervals`);
             with `at_least`, how far it is at least above it: the smallest lower end
    relative_interval    the same of differences over the base's value, seed by seed
    curves   how far the training losses of `of` lie from those of `over`, the mean over steps
             without the sign; `beside`: as a multiple of that setting's (`lsai_lab.claims.curves`)
    count    how many of the variants `of` have at least `repeats` runs, all of which ended ok (and
             have `metric`)
    estimators   our predictions' median error over that of the best of others' formulas
    rivals   the largest ratio of our predictions' median error to that of a program of others, over
             the runs of a sample that the program speaks of
    withdrawn    none: the claim was given up before its runs, and is listed

A figure is taken over a variant's good repeats (`analysis.over_repeats`); of several variants or
metrics it is the best one: the largest, and as `of` of a claim with `at_most` the smallest. A claim
is held if its value and each single repeat keep the bound and there are at least `repeats` of them:
one bad repeat makes it fall, and with a missing one it is incomplete. Losses are judged by their
intervals alone, never by a gap of means or a single seed. Where runs are not comparable, or there
are none, there is no value, and the note says why.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_lab.analysis.losses import text_read
from lsai_lab.claims.bounds import BoundSet, date_of_bound, read_bounds
from lsai_lab.claims.curves import curve_gaps
from lsai_lab.claims.declared import INTERVALS, Claim, load_claims
from lsai_lab.claims.intervals import (
    claim_interval,
    decisive_end,
    interval_verdict,
    training_interval,
)
from lsai_lab.claims.terms import NoData, best_of, first_runs, rows_of
from lsai_lab.project.files import reading_root

READ = ("tokens", "distinct_tokens", "passes")
TRAINING = ("training_low", "training_high")  # ends of the training loss's interval
COLUMNS = (
    "name",
    "machine",
    "sentence",
    "value",
    "low",
    "high",
    "n",
    "bound",
    "bound_set",
    "first_run",
    "set_after",
    "gpu_sets",
    "held",
    "verdict",
    "note",
    *READ,
    *TRAINING,
    "runs",
    "pair",
)
VERDICTS = ("held", "failed", "undecided", "incomplete", "no data", "withdrawn")
_IDENTITY = ["study", "variant", "part", "repeat"]


@dataclass
class Found:
    """A rule's number, the ends of its range, the number of independent runs behind each figure,
    whether it and each repeat keep the bound, the rows behind it, facts for the sentence; `note`:
    what outcomes do not say; `pair`: the folders of the first runs that it compares."""

    value: float
    ends: tuple[float, float] | None
    n: int
    verdict: str
    rows: pd.DataFrame
    facts: dict[str, Any]
    note: str = ""
    pair: list[str] = field(default_factory=list)


def evaluate(
    frame: pd.DataFrame,
    claims: dict[str, Claim] | None = None,
    bounds: dict[str, BoundSet] | None = None,
) -> pd.DataFrame:
    """Every claim judged by the rows of `frame` (see `lab.load`) of its machine: one row each,
    `COLUMNS`.

    `value`, `low` and `high` (over the repeats, missing with one run; of losses the ends of the
    interval) are rounded after the verdict; `n` is the number of independent runs behind each
    figure, `runs` every run's `<machine>/<study>/<folder>`, `pair` the folders of the first two
    that it compares (what it is over, the run), or of a plain value the first one. `bound_set` is
    when the bound was committed, `first_run` when the first of those runs began, `set_after`
    whether it did so before the bound was set, or nothing shows that it did not. `gpu_sets`: on how
    many sets of GPUs the runs were made, by UUID; missing where one has none. Of losses, `READ`
    says how much text a run read, and `TRAINING` from where to where the training loss of the last
    steps differs, of the setting whose validation loss is furthest off. `bounds`: the dates, if not
    the committed ones.
    """
    claims = load_claims() if claims is None else claims
    bounds = read_bounds(reading_root()) if bounds is None else bounds
    plain = _in_few_blocks(frame)
    newest = {
        machine: _newest(plain, machine) for machine in {claim.machine for claim in claims.values()}
    }
    found = []
    for name, claim in claims.items():
        judged, used = _judge(name, claim, newest[claim.machine])
        dates = _dates(date_of_bound(bounds, name, claim), used, judged["value"] is not None)
        found.append(judged | dates | _read(claim, used) | {"gpu_sets": _gpu_sets(used)})
    return pd.DataFrame(found, columns=list(COLUMNS)).assign(
        held=lambda rows: rows["verdict"] == "held"
    )


def _in_few_blocks(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame, its columns of one kind side by side in memory: pandas copies block by block each
    time rows are chosen, and hundreds of columns of text are hundreds of blocks."""
    texts = [name for name in frame if isinstance(frame[name].dtype, pd.StringDtype)]
    objects = pd.DataFrame(frame).astype(dict.fromkeys(texts, object))
    return pd.DataFrame(dict(objects.items()), copy=True)


def _newest(rows: pd.DataFrame, machine: str) -> pd.DataFrame:
    """Of each of a machine's runs the newest attempt."""
    own = rows[rows["machine"] == machine].sort_values("started", kind="stable")
    return own.drop_duplicates(_IDENTITY, keep="last").sort_values(_IDENTITY)


def _judge(name: str, claim: Claim, rows: pd.DataFrame) -> tuple[dict[str, Any], pd.DataFrame]:
    """A claim by the newest runs of its machine, and the rows that it rests on."""
    row: dict[str, Any] = {
        "name": name,
        "machine": claim.machine,
        "bound": claim.bound,
        "low": None,
        "high": None,
    }
    try:
        if claim.kind == "withdrawn":
            raise NoData(str(claim.reason))
        found = _RULES[claim.kind](claim, rows)
        _require_equal(claim, found.rows)
    except NoData as reason:
        unfilled = re.sub(r"\{(?!machine\})[^{}]*\}", "…", claim.sentence)
        row["sentence"] = unfilled.format(machine=claim.machine)
        verdict = "withdrawn" if claim.kind == "withdrawn" else "no data"
        row |= {"value": None, "n": 0, "verdict": verdict, "note": str(reason)}
        return row | {"runs": [], "pair": []}, rows.iloc[:0]
    facts = {
        "value": found.value,
        "total": claim.total,
        "repeats": claim.repeats,
        "machine": claim.machine,
    }
    row |= {
        "sentence": claim.sentence.format(**facts | found.facts),
        "value": _rounded(found.value),
        "n": found.n,
    }
    if found.ends is not None:
        row |= {"low": _rounded(found.ends[0]), "high": _rounded(found.ends[1])}
    places = (
        found.rows["machine"]
        + "/"
        + found.rows["study"]
        + "/"
        + found.rows["run"].map(lambda run: Path(run).name)
    )
    bad = found.rows[found.rows["outcome"] != "ok"]
    notes = [claim.void, found.note or "; ".join(bad["variant"] + ": " + bad["outcome"])]
    notes.append(f"{found.n} of {claim.repeats} runs" if found.n < claim.repeats else None)
    verdict = "failed" if claim.void is not None else found.verdict
    note = "; ".join(filter(None, notes))
    row |= {"verdict": verdict, "note": note, "pair": found.pair}
    return row | {"runs": [*dict.fromkeys(places)]}, found.rows


def _require_equal(claim: Claim, rows: pd.DataFrame) -> None:
    """NoData if what must agree among the claim's runs does not."""
    ended_ok = rows["outcome"] == "ok"
    for fact in claim.same:
        values = rows[ended_ok].get(fact, pd.Series(dtype=object)).unique()
        if len(values) != 1 or pd.isna(values[0]):
            shown = ", ".join(map(str, values)) or "missing"
            raise NoData(f"the runs cannot be compared, their {fact} must agree: {shown}")


def _dates(bound_set: Any, rows: pd.DataFrame, has_value: bool) -> dict[str, Any]:
    """When the bound was set and its first run began, UTC, and whether it was set after it."""
    started = pd.to_datetime(rows["started"], format="ISO8601", errors="coerce", utc=True)
    first = started.min() if len(rows) and not started.isna().any() else None
    before = bound_set is not None and first is not None and bound_set <= first
    return {
        "bound_set": None if bound_set is None else bound_set.isoformat(),
        "first_run": None if first is None else first.isoformat(),
        "set_after": has_value and not before,
    }


def _gpu_sets(rows: pd.DataFrame) -> int | None:
    known = rows.get("env.gpu_uuids", pd.Series(index=rows.index, dtype=object))
    return None if rows.empty or known.isna().any() else known.astype(str).nunique()


def _read(claim: Claim, rows: pd.DataFrame) -> dict[str, Any]:
    """Of a claim on losses how much text each of its runs read, the most, if they differ; and the
    training loss beside it."""
    if claim.kind not in (*INTERVALS, "curves") or rows.empty:
        return dict.fromkeys((*READ, *TRAINING))
    most, found = text_read(rows).max(), None
    if claim.kind in INTERVALS:
        found = training_interval(claim, rows, claim_interval(claim, rows).variant)
    ends = (None, None) if found is None or found.n < 2 else map(_rounded, found.ends)
    read = {name: None if pd.isna(most[name]) else _rounded(most[name]) for name in READ}
    return read | dict(zip(TRAINING, ends, strict=True))


def _repeated(claim: Claim, value: float, each: list[float], *rest: Any) -> Found:
    """A figure whose repeats must all keep the bound."""
    broken = [one for one in each if not claim.holds(one)]
    n = max(1, len(each))
    found = Found(value, None, n, "failed", *rest)
    if len(each) > 1:
        found.ends = min(each), max(each)
    if claim.holds(value) and not broken:
        found.verdict = "held" if n >= claim.repeats else "incomplete"
    elif claim.holds(value):
        worst = _rounded(min(broken) if claim.at_most is None else max(broken))
        bad = found.rows[found.rows["outcome"] != "ok"]
        notes = [*(bad["variant"] + ": " + bad["outcome"])]
        found.note = "; ".join([*notes, f"a repeat breaks the bound: {_short(worst)}"])
    return found


def _figure(claim: Claim, rows: pd.DataFrame) -> Found:
    """A ratio's repeats: r over r, which have equal seeds; a single run over or under each of
    several."""
    name, of, upper, used = best_of(rows, claim.of, claim.at_most is not None)
    if claim.over is None:
        found = _repeated(claim, of, list(upper), used, {"best": name})
        found.pair = first_runs(rows, (claim.of, name))
        return found
    base, over, lower, bases = best_of(rows, claim.over, False)
    if over == 0:
        raise NoData("the figure that divides is 0")
    kernels = " against ".join(map(_attention_kernels, (used, bases)))
    facts = {"best": name, "of": of, "over": over, "kernels": kernels}
    if claim.beside is not None:
        facts["beside"] = of / best_of(rows, claim.beside, False)[1]
    shared = sorted(set(upper.index) & set(lower.index))
    each = (
        [float(upper[r] / lower[r]) for r in shared]
        if min(len(upper), len(lower)) > 1
        else [of / over]
    )
    found = _repeated(claim, of / over, each, pd.concat([used, bases]), facts)
    found.pair = first_runs(rows, (claim.over, base), (claim.of, name))
    return found


def _attention_kernels(rows: pd.DataFrame) -> str:
    """The attention kernels that these runs say they had."""
    known = rows.get("attention_kernel", pd.Series(dtype=object)).dropna().unique()
    return ", ".join(map(str, known)) or "not known"


def _interval(claim: Claim, rows: pd.DataFrame) -> Found:
    assert claim.over is not None
    found, verdict = claim_interval(claim, rows), interval_verdict(claim, rows)
    used = pd.concat([rows_of(rows, claim.of), rows_of(rows, claim.over)])
    sure = "With 95 % confidence" if found.n > 1 else "By one seed, which has no interval"
    facts = {"best": found.variant, "mean": found.mean, "half": found.half, "confidence": sure}
    ends = found.ends if found.n > 1 else None
    pair = first_runs(rows, (claim.over, claim.over.variant[0]), (claim.of, found.variant))
    return Found(decisive_end(claim, found), ends, found.n, verdict, used, facts, "", pair)


def _curves(claim: Claim, rows: pd.DataFrame) -> Found:
    assert claim.over is not None
    gaps = curve_gaps(claim, rows)
    terms = filter(None, (claim.of, claim.over, claim.beside))
    used = pd.concat([rows_of(rows, term) for term in terms])
    found = _repeated(claim, float(gaps.median()), [*gaps], used, {})
    sides = ((term, term.variant[0]) for term in (claim.over, claim.of))
    found.pair = first_runs(rows, *sides)
    return found


def _count(claim: Claim, rows: pd.DataFrame) -> Found:
    used = rows_of(rows, claim.of)
    if used.empty:
        raise NoData(f"no run of part {claim.of.part} of study {claim.of.study}")
    good = used[used["outcome"] == "ok"].reindex(
        columns=[*used.columns.union(claim.of.metric, sort=False)]
    )
    have, runs = (
        good.dropna(subset=claim.of.metric)["variant"].value_counts(),
        used["variant"].value_counts(),
    )
    need = {name: max(claim.repeats, runs.get(name, 0)) for name in claim.of.variant}
    short = [
        f"{name}: {have.get(name, 0)} of {n} runs complete"
        for name, n in need.items()
        if have.get(name, 0) < n
    ]
    value = float(claim.total - len(short))
    verdict = "held" if claim.holds(value) else "failed"
    pair = [str(used["run"].iloc[0])]
    return Found(value, None, claim.repeats, verdict, used, {}, "; ".join(short), pair)


def _estimators(claim: Claim, rows: pd.DataFrame) -> Found:
    from lsai_lab.predictions.recorded import beside  # with torch

    value, each, facts = beside()
    return _repeated(claim, value, each, rows.iloc[:0], facts)


def _rivals(claim: Claim, rows: pd.DataFrame) -> Found:
    from lsai_lab.predictions.rivals import worst  # with torch

    value, each, facts = worst()
    return _repeated(claim, value, each, rows.iloc[:0], facts)


_RULES = {
    "value": _figure,
    "ratio": _figure,
    "interval": _interval,
    "relative_interval": _interval,
    "curves": _curves,
    "count": _count,
    "estimators": _estimators,
    "rivals": _rivals,
}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")  # far finer than any bound, and the same on every platform


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
