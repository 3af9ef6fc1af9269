"""Claims in the short notation of a table: `1.43x (1.42 to 1.44, n = 3)`, from the smallest to the
largest repeat, or for gaps of losses `0.3% (worst seed 0.91%, n = 3)`, the largest; and what has
fallen."""

import math

import pandas as pd

from lsai_lab.claims.declared import Claim, load_claims
from lsai_lab.claims.evaluate import evaluate


def claim_value(claim: Claim, value: float, digits: int = 3) -> str:
    """`value` in the claim's unit, a share, a multiple or a number: with so many significant
    digits, 0 for as exact as it is."""
    share = claim.kind == "spread" or (claim.kind in ("ratio", "value") and claim.limit < 1)
    share |= claim.kind == "ratio" and claim.of.metric[0].startswith("mem")
    if claim.kind == "count" or (claim.kind == "value" and not share):
        return f"{value:,.0f}"
    losses = claim.kind in ("interval", "spread")  # seeds scatter too much for a third digit
    value, digits = 100 * value if share else value, min(digits, 2) if losses else digits
    power = math.floor(math.log10(abs(value))) if value else 0  # two losses may be equal
    text = f"{value:.{max(int(share), digits - 1 - power)}f}" if digits else f"{value:g}"
    return text + ("" if claim.kind == "interval" else "%" if share else "x")


def claims_table(claims: pd.DataFrame, declared: dict[str, Claim]) -> pd.DataFrame:
    """Rows of `evaluate` that have a value as name, claim (its short text), bound, measured,
    verdict (bold where not held)."""
    rows = []
    for row in claims.itertuples():
        claim, value = declared[row.name], claim_value(declared[row.name], row.value)
        repeats = f"n = {row.n}"
        # the fourth where three do not tell the repeats apart
        for digits in (3, 4) if pd.notna(row.low) else ():
            low, high = claim_value(claim, row.low, digits), claim_value(claim, row.high, digits)
            if low != high:  # of losses the value is the gap of the means, which no single seed has
                span = (
                    f"worst seed {high}"
                    if claim.kind == "spread"
                    else f"{low.strip('x%')} to {high.strip('x%')}"
                )
                value, repeats = claim_value(claim, row.value, digits), f"{span}, {repeats}"
                break
        verdict = row.verdict if row.held else f"**{row.verdict}**"
        bound = f"{row.bound[0]} {claim_value(claim, claim.limit, 0)}"
        rows.append([row.name, claim.short, bound, f"{value} ({repeats})", verdict])
    return pd.DataFrame(rows, columns=["name", "claim", "bound", "measured", "verdict"])


def fallen_claims(runs: pd.DataFrame, *studies: str) -> str:
    """Which claims about `studies` have fallen by the committed `runs` (rows of `lab.load`), as a
    sentence; empty if none has."""
    declared = {name: claim for name, claim in load_claims().items() if claim.study in studies}
    judged = evaluate(runs[~runs["own"].astype(bool)], declared)
    rows = claims_table(judged[judged["verdict"] == "fallen"], declared)
    told = "; ".join(
        f"{row.claim}: {row.measured}, claimed {row.bound}" for row in rows.itertuples()
    )
    sentence = (
        f"{len(rows)} of the chapter's {len(judged)} claims **fell**, in the value or in a "
        f"single repeat (@tbl-claims). {told}."
    )
    return sentence * bool(told)
