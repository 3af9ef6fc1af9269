"""Claims about curves: how far the training losses of settings lie from their base's, step by step.

The gap of two runs is the mean over steps of the difference without its sign, in nats. Of a repeat
it is that of the setting that lies furthest off. With `beside` it is divided by the gap of those
settings from the same base, so that 1 is as far as, say, another attention kernel moves a loss.
"""

import pandas as pd

from lsai_lab.analysis.losses import step_losses
from lsai_lab.claims.declared import Claim, Term
from lsai_lab.claims.terms import NoData, rows_of


def curve_gaps(claim: Claim, rows: pd.DataFrame) -> pd.Series:
    """The gap of each repeat that all settings of a claim have, by repeat. `rows`: of `lab.load`,
    the newest run of each repeat on the claim's machine. NoData if runs or steps are missing."""
    assert claim.over is not None
    (base,) = claim.over.variant
    bases = _losses(rows, claim.over, base, claim.steps)

    def gaps(term: Term) -> pd.DataFrame:
        found = {name: _losses(rows, term, name, claim.steps) for name in term.variant}
        each = {name: losses.sub(bases).abs().mean() for name, losses in found.items()}
        return pd.DataFrame(each).dropna()

    furthest = gaps(claim.of).max(axis=1)
    if claim.beside is not None:
        unit = gaps(claim.beside).max(axis=1)
        if not unit.all():
            raise NoData(f"{', '.join(claim.beside.variant)}: the same losses as {base}")
        furthest = (furthest / unit).dropna()
    if furthest.empty:
        raise NoData(f"no repeat that all have whose losses are to be compared with {base}'s")
    return furthest


def _losses(rows: pd.DataFrame, term: Term, variant: str, steps: int | None) -> pd.DataFrame:
    """The losses of a variant's good runs: a row a step, a column a repeat."""
    runs = rows_of(rows, term.model_copy(update={"variant": [variant]}))
    good = runs[runs["outcome"] == "ok"].set_index("repeat")
    found = {repeat: step_losses(run).iloc[:steps] for repeat, run in good["run"].items()}
    if not found:
        raise NoData(f"{variant}: " + ("no run" if runs.empty else "no run ended ok"))
    for losses in found.values():
        if losses.isna().any() or len(losses) < (steps or 1):
            raise NoData(f"{variant}: a run has not the losses of all steps")
    return pd.DataFrame(found)
