"""Claims in the short notation of a table: `1.43x (1.42 to 1.44, n = 3)`, from the smallest to the
largest repeat, or of losses `+0.13 ± 0.01 (n = 5)`, the mean and half its 95 % interval; when each
bound was set; and what has failed or is not decided."""

import math
from typing import Any

import pandas as pd

from lsai_lab.claims.declared import INTERVALS, Claim

LATE = ", late"  # set after a run that decides it


def claim_value(claim: Claim, value: float, digits: int = 3) -> str:
    """`value` in the claim's unit, a share, a multiple or a number: with so many significant
    digits, 0 for as exact as it is."""
    share = claim.kind == "relative_interval"
    share |= claim.kind in ("ratio", "value", "withdrawn") and claim.limit < 1
    share |= claim.kind == "ratio" and claim.of.metric[0].startswith("mem")
    if claim.kind == "count" or (claim.kind == "value" and not share):
        return f"{value:,.0f}"
    losses = claim.kind in INTERVALS  # seeds scatter too much for a third digit
    value, digits = 100 * value if share else value, min(digits, 2) if losses else digits
    power = math.floor(math.log10(abs(value))) if value else 0  # two losses may be equal
    text = f"{value:.{max(int(share), digits - 1 - power)}f}" if digits else f"{value:g}"
    nats = claim.kind == "interval" or (claim.kind == "curves" and claim.beside is None)
    return text + ("" if nats else "%" if share else "x")


def claims_table(claims: pd.DataFrame, declared: dict[str, Claim]) -> pd.DataFrame:
    """Rows of `evaluate` as name, claim (its short text), bound (`late` where it was set after a
    run that decides it), measured (a dash without a value), verdict, bound_set and first_run (days,
    UTC), and of losses text, how much each run read, and training, the interval of the training
    loss."""
    rows = []
    for row in claims.itertuples():
        claim = declared[row.name]
        late = LATE if row.set_after else ""
        rows.append(
            {
                "name": row.name,
                "claim": claim.short,
                "bound": f"{row.bound[0]} {claim_value(claim, claim.limit, 0)}{late}",
                "measured": _measured(claim, row) if pd.notna(row.value) else "–",
                "verdict": row.verdict,
                "bound_set": _day(row.bound_set),
                "first_run": _day(row.first_run),
                "text": text_words(row.tokens, row.distinct_tokens, row.passes),
                "training": _around(claim, row.training_low, row.training_high),
            }
        )
    columns = [
        "name",
        "claim",
        "bound",
        "measured",
        "verdict",
        "bound_set",
        "first_run",
        "text",
        "training",
    ]
    return pd.DataFrame(rows, columns=columns)


def _day(time: Any) -> str:
    return time[:10] if isinstance(time, str) else "–"


def text_words(tokens: float, distinct: float, passes: float) -> str:
    """How much text a run read: `8.19 M tokens, 1.61 M distinct, 5.1 passes`; empty if not
    known."""
    if pd.isna(passes):
        return ""
    amounts = [f"{amount / 1e6:.3g} M" for amount in (tokens, distinct)]
    return f"{amounts[0]} tokens, {amounts[1]} distinct, {passes:.2g} passes"


def _measured(claim: Claim, row: Any) -> str:
    """A judged claim's value, with its range and the number of runs."""
    if claim.kind in INTERVALS:
        return _interval(claim, row)
    value, repeats = claim_value(claim, row.value), f"n = {row.n}"
    # the fourth digit where three do not tell the repeats apart
    for digits in (3, 4) if pd.notna(row.low) else ():
        low, high = claim_value(claim, row.low, digits), claim_value(claim, row.high, digits)
        if low != high:
            value = claim_value(claim, row.value, digits)
            repeats = f"{low.strip('x%')} to {high.strip('x%')}, {repeats}"
            break
    return f"{value} ({repeats})"


def _interval(claim: Claim, row: Any) -> str:
    if pd.isna(row.low):
        return f"{claim_value(claim, row.value)} (n = {row.n})"
    return f"{_around(claim, row.low, row.high)} (n = {row.n})"


def _around(claim: Claim, low: float, high: float) -> str:
    """An interval as its mean with its sign and half its width, to the same place: two digits of
    the half, one of a half below 0.01; empty without one."""
    if pd.isna(low):
        return ""
    unit, scale = ("%", 100) if claim.kind == "relative_interval" else ("", 1)
    mean, half = scale * (high + low) / 2, scale * (high - low) / 2
    first = math.floor(math.log10(half)) if half > 0 else 0
    places = max(0, int(half == 0 or half >= 0.01) - first)
    sign = "−" if round(mean, places) < 0 else "+"
    return f"{sign}{abs(mean):.{places}f}{unit} ± {half:.{places}f}{unit}"
