"""Claims about losses: how far settings may lie from their base, by 95 % intervals of the
differences seed by seed, joint for all settings of the claim.

A claim with `at_most` bounds the change to both sides, one with `at_least` says that it is a rise
of so much or more. It is *held* if every interval keeps the bound, *failed* if one lies wholly
beyond it, and else *undecided*: more seeds would tell. With fewer seeds than it asks for it is
incomplete, and one seed has no interval at all.
"""

from dataclasses import dataclass

import pandas as pd

from lsai_lab.analysis.intervals import half_width
from lsai_lab.analysis.losses import training_loss
from lsai_lab.claims.declared import Claim
from lsai_lab.claims.terms import NoData, rows_of, series_of

_READ = ["study", "part", "variant", "repeat", "outcome", "run"]  # columns, beside the losses


@dataclass(frozen=True)
class Interval:
    """How far `variant` lies from the base: `mean` of the differences of `n` seeds, and `half` of
    the joint interval, missing with one seed. In the metric's unit, or for a claim of kind
    `relative_interval` as shares of the base's value."""

    variant: str
    mean: float
    half: float
    n: int

    @property
    def ends(self) -> tuple[float, float]:
        """From where to where; with one seed the difference itself."""
        half = 0.0 if pd.isna(self.half) else self.half
        return self.mean - half, self.mean + half

    @property
    def reach(self) -> float:
        """The end that is furthest from 0, without its sign."""
        return max(abs(end) for end in self.ends)


def claim_interval(claim: Claim, rows: pd.DataFrame) -> Interval:
    """Of the settings of a claim on losses the one whose interval speaks most against it. `rows`:
    of `lab.load`, the newest run of each repeat on the claim's machine. NoData if runs are missing.
    """
    intervals = _intervals(claim, rows)
    if claim.at_least is not None:
        return min(intervals, key=lambda found: found.ends[0])
    return max(intervals, key=lambda found: found.reach)


def decisive_end(claim: Claim, interval: Interval) -> float:
    """The number that is held against the claim's bound: the lower end, or the reach."""
    return interval.ends[0] if claim.at_least is not None else interval.reach


def interval_verdict(claim: Claim, rows: pd.DataFrame) -> str:
    """`held`, `failed`, `undecided` or `incomplete`, whatever else stands against the claim."""
    found = _intervals(claim, rows)
    if any(interval.n < claim.repeats for interval in found):
        return "incomplete"
    if all(claim.holds(decisive_end(claim, interval)) for interval in found):
        return "held"
    ends = [interval.ends for interval in found]
    clear = [high if claim.at_least is not None else max(low, -high) for low, high in ends]
    return "failed" if any(not claim.holds(end) for end in clear) else "undecided"


def training_interval(claim: Claim, rows: pd.DataFrame, variant: str) -> Interval | None:
    """How far the training loss of one setting of a claim on validation losses lies from the
    base's, by the means of the last steps, seed by seed; None where the records do not say."""
    assert claim.over is not None
    (metric,), name = claim.of.metric, "last_training_loss"
    if not metric.startswith("validation_"):
        return None
    used = pd.concat([rows_of(rows, term)[_READ] for term in (claim.of, claim.over)])
    rows = used[used["variant"].isin([variant, *claim.over.variant]) & (used["outcome"] == "ok")]
    rows = rows.assign(**{name: training_loss(rows)})
    try:
        found = _intervals(claim, rows, name, [variant])
    except NoData:
        return None
    return found[0]


def _intervals(
    claim: Claim, rows: pd.DataFrame, metric: str | None = None, variants: list[str] | None = None
) -> list[Interval]:
    found = _differences(claim, rows, metric or claim.of.metric[0], variants or claim.of.variant)
    return [
        Interval(
            str(apart.name),
            float(apart.mean()),
            half_width(apart, claim.total),
            int(apart.count()),
        )
        for apart in found
    ]


def _differences(
    claim: Claim, rows: pd.DataFrame, metric: str, variants: list[str]
) -> list[pd.Series]:
    """Of each setting, in the order given, the differences of the seeds that it shares with the
    base."""
    assert claim.over is not None
    (base,) = claim.over.variant
    bases, found = series_of(rows, claim.over, base, metric), []
    for name in variants:
        values = series_of(rows, claim.of, name, metric)
        apart = values / bases - 1 if claim.kind == "relative_interval" else values - bases
        if apart.dropna().empty:
            raise NoData(f"{name}: no seed that {base} has, too")
        found.append(apart.dropna().rename(name))
    return found
