"""The runs of a claim: which rows of `lab.load` a term speaks of, and its figure in them."""

import itertools

import pandas as pd

from lsai_core.base.errors import hint
from lsai_lab.analysis.summary import over_repeats
from lsai_lab.claims.declared import Term


class NoData(Exception):
    """The records cannot answer; the message says why."""


def rows_of(rows: pd.DataFrame, term: Term) -> pd.DataFrame:
    """The rows of the term's variants, whatever became of them."""
    return rows[
        (rows["study"] == term.study)
        & rows["part"].isin(term.part)
        & rows["variant"].isin(term.variant)
    ]


def series_of(rows: pd.DataFrame, term: Term, variant: str, metric: str) -> pd.Series:
    """A metric of the good runs of one variant, by repeat. NoData if there is none."""
    runs = rows_of(rows, term.model_copy(update={"variant": [variant]}))
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


def best_of(
    rows: pd.DataFrame, term: Term, smallest: bool
) -> tuple[str, float, pd.Series, pd.DataFrame]:
    """The best variant or metric of a term: its name, its figure, its repeats; and the rows of all
    that were compared."""
    found, missing = {}, []
    for variant, metric in itertools.product(term.variant, term.metric):
        try:
            values = series_of(rows, term, variant, metric)
            found[variant if len(term.metric) == 1 else metric] = (
                over_repeats(metric, values),
                values,
            )
        except NoData as reason:
            missing.append(str(reason))
    if not found:
        raise NoData("; ".join(dict.fromkeys(missing)))
    name = (min if smallest else max)(found, key=lambda key: found[key][0])
    return name, *found[name], rows_of(rows, term)


def first_runs(rows: pd.DataFrame, *sides: tuple[Term, str]) -> list[str]:
    """Of each side of a figure, a term and its best variant or metric, the folder of the first good
    run, of one repeat if all sides have it; one that stands on several sides once."""
    found = []
    for term, best in sides:
        variant = best if best in term.variant else term.variant[0]
        runs = rows_of(rows, term.model_copy(update={"variant": [variant]}))
        found.append(runs[runs["outcome"] == "ok"].set_index("repeat")["run"].sort_index())
    shared = [repeat for repeat in found[0].index if all(repeat in runs.index for runs in found)]
    firsts = [runs[shared[:1]].iloc[0] if shared else runs.iloc[0] for runs in found]
    return [*dict.fromkeys(map(str, firsts))]
