"""Claims: every headline statement, recomputed from the records.

`params/claims.yaml` declares each statement once: which runs it is about, how one number follows
from them, the bound that the number must keep, and the sentence that the numbers fill. Here one
small function per kind of claim turns rows of `lab.load` into that number:

    value    the figure of `of`
    ratio    the figure of `of` over that of `over`; `beside`: over another one, for the sentence
    spread   (largest - smallest) / smallest of the variants `of`
    interval how far a variant of `of` may be from `over`: the largest end, without its sign, of the
    95 % intervals (Student's t) of the
             mean difference of a metric, seed by seed; at least `repeats` seeds
    count    how many of the variants `of` have at least `repeats` runs, all of which ended ok (and
             have `metric`)
    estimators   our predictions' median error over that of the best of others' formulas

A figure is taken over a variant's good repeats (`analysis.over_repeats`); of several variants or
metrics it is the best one: the largest, and as `of` of a claim with `at_most` the smallest. A claim
is held if its value and each single repeat keep the bound and there are at least `repeats` of them:
one bad repeat makes it fall, and with a missing one it is incomplete. Where runs are not
comparable, or there are none, there is no value, and the note says why.
"""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_core.base.errors import hint
from lsai_lab.analysis.summary import STUDENT, half_width, over_repeats, spread
from lsai_lab.claims.declared import Claim, Term, load_claims

COLUMNS = (
    "name",
    "machine",
    "sentence",
    "value",
    "low",
    "high",
    "n",
    "bound",
    "held",
    "verdict",
    "note",
    "runs",
)
VERDICTS = ("held", "fallen", "incomplete", "no data")
_IDENTITY = ["study", "variant", "part", "repeat"]


class NoData(Exception):
    """The records cannot answer; the message says why."""


@dataclass
class Found:
    """A rule's number, also by repeat, the rows behind it, facts for the sentence; `note`: what
    outcomes do not say."""

    value: float
    each: list[float]
    rows: pd.DataFrame
    facts: dict[str, Any]
    note: str = ""


def evaluate(frame: pd.DataFrame, claims: dict[str, Claim] | None = None) -> pd.DataFrame:
    """Every claim judged by the rows of `frame` (see `lab.load`) of its machine: one row each,
    `COLUMNS`.

    `value`, `low` and `high` (over the repeats; missing with one run) are rounded after the
    verdict; `n` is the number of independent runs behind each figure, `runs` every run's
    `<machine>/<study>/<folder>`.
    """
    claims = load_claims() if claims is None else claims
    newest = {
        machine: _newest(frame, machine) for machine in {claim.machine for claim in claims.values()}
    }
    found = [_judge(name, claim, newest[claim.machine]) for name, claim in claims.items()]
    return pd.DataFrame(found, columns=list(COLUMNS)).assign(
        held=lambda rows: rows["verdict"] == "held"
    )


def _newest(rows: pd.DataFrame, machine: str) -> pd.DataFrame:
    """Of each of a machine's runs the newest attempt."""
    own = rows[rows["machine"] == machine].sort_values("started", kind="stable")
    return own.drop_duplicates(_IDENTITY, keep="last").sort_values(_IDENTITY)


def _judge(name: str, claim: Claim, rows: pd.DataFrame) -> dict[str, Any]:
    """A claim by the newest runs of its machine."""
    row: dict[str, Any] = {
        "name": name,
        "machine": claim.machine,
        "bound": claim.bound,
        "low": None,
        "high": None,
    }
    try:
        found = _RULES[claim.kind](claim, rows)
        ended_ok = found.rows["outcome"] == "ok"
        for fact in claim.same:
            values = found.rows[ended_ok].get(fact, pd.Series(dtype=object)).unique()
            if len(values) != 1 or pd.isna(values[0]):
                shown = ", ".join(map(str, values)) or "missing"
                raise NoData(f"the runs cannot be compared, their {fact} must agree: {shown}")
    except NoData as reason:
        row["sentence"] = re.sub(r"\{(?!machine\})[^{}]*\}", "…", claim.sentence).format(
            machine=claim.machine
        )
        return row | {"value": None, "n": 0, "verdict": "no data", "note": str(reason), "runs": []}
    facts = {
        "value": found.value,
        "total": claim.total,
        "repeats": claim.repeats,
        "machine": claim.machine,
    }
    n = claim.repeats if claim.kind in ("count", "interval") else max(1, len(found.each))
    row |= {
        "sentence": claim.sentence.format(**facts | found.facts),
        "value": _rounded(found.value),
        "n": n,
    }
    if len(found.each) > 1:
        row |= {"low": _rounded(min(found.each)), "high": _rounded(max(found.each))}
    broken, bad = [value for value in found.each if not claim.holds(value)], found.rows[~ended_ok]
    notes = [claim.void, found.note or "; ".join(bad["variant"] + ": " + bad["outcome"])]
    if broken and claim.holds(found.value):
        worst = _rounded(min(broken) if claim.at_most is None else max(broken))
        notes.append(f"a repeat breaks the bound: {_short(worst)}")
    places = (
        found.rows["machine"]
        + "/"
        + found.rows["study"]
        + "/"
        + found.rows["run"].map(lambda run: Path(run).name)
    )
    notes.append(f"{n} of {claim.repeats} runs" if n < claim.repeats else None)
    kept = claim.void is None and claim.holds(found.value) and not broken
    verdict = "fallen" if not kept else "held" if n >= claim.repeats else "incomplete"
    return row | {
        "verdict": verdict,
        "note": "; ".join(filter(None, notes)),
        "runs": [*dict.fromkeys(places)],
    }


def _figure(claim: Claim, rows: pd.DataFrame) -> Found:
    """A ratio's repeats: r over r, which have equal seeds; a single run over or under each of
    several."""
    name, of, upper, used = _best(rows, claim.of, claim.at_most is not None)
    if claim.over is None:
        return Found(of, list(upper), used, {"best": name})
    _, over, lower, bases = _best(rows, claim.over, False)
    if over == 0:
        raise NoData("the figure that divides is 0")
    facts = {"best": name, "of": of, "over": over}
    if claim.beside is not None:
        facts["beside"] = of / _best(rows, claim.beside, False)[1]
    shared = sorted(set(upper.index) & set(lower.index))
    each = (
        [float(upper[r] / lower[r]) for r in shared]
        if min(len(upper), len(lower)) > 1
        else [of / over]
    )
    return Found(of / over, each, pd.concat([used, bases]), facts)


def _spread(claim: Claim, rows: pd.DataFrame) -> Found:
    (metric,), used = claim.of.metric, _rows(rows, claim.of)
    series = {name: _series(rows, claim.of, name, metric) for name in claim.of.variant}
    figures = pd.Series([over_repeats(metric, values) for values in series.values()])
    each = [spread(row) for _, row in pd.DataFrame(series).dropna().iterrows()]
    return Found(spread(figures), each, used, {"smallest": figures.min(), "largest": figures.max()})


def furthest(claim: Claim, rows: pd.DataFrame) -> pd.Series:
    """By seed, how far the variant of an interval's claim whose 95 % interval reaches furthest (its
    name) lies from the base."""
    assert claim.over is not None
    (metric,), (base,) = claim.of.metric, claim.over.variant
    bases, ends = _series(rows, claim.over, base, metric), []
    for name in claim.of.variant:
        difference = (
            (_series(rows, claim.of, name, metric) - bases).dropna().iloc[: len(STUDENT) + 1]
        )
        if (n := len(difference)) < claim.repeats:
            raise NoData(f"{name}: {n} of {claim.repeats} seeds")
        ends.append(difference.rename(name))
    return max(ends, key=lambda difference: abs(difference.mean()) + half_width(difference))


def _interval(claim: Claim, rows: pd.DataFrame) -> Found:
    assert claim.over is not None
    found, used = furthest(claim, rows), pd.concat([_rows(rows, claim.of), _rows(rows, claim.over)])
    return Found(abs(found.mean()) + half_width(found), [], used, {"best": found.name})


def _count(claim: Claim, rows: pd.DataFrame) -> Found:
    used = _rows(rows, claim.of)
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
    return Found(float(claim.total - len(short)), [], used, {}, "; ".join(short))


def _estimators(claim: Claim, rows: pd.DataFrame) -> Found:
    from lsai_lab.predictions.recorded import beside  # with torch

    value, each, facts = beside()
    return Found(value, each, rows.iloc[:0], facts)


_RULES = {
    "value": _figure,
    "ratio": _figure,
    "spread": _spread,
    "interval": _interval,
    "count": _count,
}
_RULES["estimators"] = _estimators


def _rows(rows: pd.DataFrame, term: Term) -> pd.DataFrame:
    """The rows of the term's variants, whatever became of them."""
    return rows[
        (rows["study"] == term.study)
        & rows["part"].isin(term.part)
        & rows["variant"].isin(term.variant)
    ]


def _series(rows: pd.DataFrame, term: Term, variant: str, metric: str) -> pd.Series:
    """A metric of the good runs of one variant, by repeat. NoData if there is none."""
    runs = _rows(rows, term.model_copy(update={"variant": [variant]}))
    good = runs[runs["outcome"] == "ok"].set_index("repeat")
    values = (
        pd.to_numeric(good[metric], errors="coerce").dropna()
        if metric in good
        else pd.Series(dtype=float)
    )
    if runs.empty:
        raise NoData(f"{variant}: no run")
    if values.empty:
        bad = ", ".join(sorted(set(runs["outcome"]) - {"ok"}))
        raise NoData(
            f"{variant}: no run has {metric}"
            + (f" ({bad})" if bad else hint(metric, map(str, runs.columns)))
        )
    return values.astype(float)


def _best(
    rows: pd.DataFrame, term: Term, smallest: bool
) -> tuple[str, float, pd.Series, pd.DataFrame]:
    """The best variant or metric of a term: its name, its figure, its repeats; and the rows of all
    that were compared."""
    found, missing = {}, []
    for variant, metric in itertools.product(term.variant, term.metric):
        try:
            values = _series(rows, term, variant, metric)
            found[variant if len(term.metric) == 1 else metric] = (
                over_repeats(metric, values),
                values,
            )
        except NoData as reason:
            missing.append(str(reason))
    if not found:
        raise NoData("; ".join(dict.fromkeys(missing)))
    name = (min if smallest else max)(found, key=lambda key: found[key][0])
    return name, *found[name], _rows(rows, term)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")  # far finer than any bound, and the same on every platform


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
