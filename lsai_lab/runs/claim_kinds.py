"""The kinds of claim: how one number follows from the rows of a study, and what its sentence may say.

A kind is a strict config (one entry of `params/claims.yaml`) with a rule, `find`. Value, ratio and spread reduce figures of a
metric, one a variant; count counts complete variants. `claims.py` reads the file and judges what a rule has found.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import pandas as pd
from pydantic import Field, model_validator

from lsai_core.errors import hint
from lsai_core.strict import Strict
from lsai_lab.runs.records import over_repeats

Names = Annotated[list[str], Field(min_length=1)]
Variants = Names  # `all` in the YAML is filled in by `load_claims`


class NoData(Exception):
    """The records cannot answer; the message says why."""


@dataclass(frozen=True)
class Finding:
    """What a claim's rule found: the value, its limits over the repeats, facts for the sentence, the rows used."""

    value: float
    spread: tuple[float, float] | None
    facts: dict[str, Any]
    rows: pd.DataFrame
    note: str


class Claim(Strict):
    """What all kinds of claim share. Instances come from `load_claims`."""

    FACTS: ClassVar[dict[str, Any]] = {}  # what the sentence may use beside `value` and `machine`, with an example each
    name: str
    kind: str
    study: str
    machine: str = Field(description="folder in reports/recorded whose runs the claim is about")
    part: str | list[str] = Field("train", description="the part of the study whose runs answer, or several")
    same: list[str] = Field([], description="results that must agree among the runs of the claim")
    sentence: str

    @model_validator(mode="after")
    def _sentence_can_be_filled(self) -> Self:
        known = {"value": 1.0, "machine": "h200", **self.FACTS}
        try:
            self.sentence.format(**known)
        except KeyError as error:
            raise ValueError(f"sentence: unknown fact {error}{hint(str(error.args[0]), known)}") from None
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            raise ValueError(f"sentence: not a valid template: {error}") from None
        return self

    @property
    def parts(self) -> list[str]:
        """The parts of the study whose runs answer."""
        return [self.part] if isinstance(self.part, str) else self.part

    @property
    @abstractmethod
    def variants(self) -> list[str]:
        """The variants that the claim is about."""

    @property
    def metrics(self) -> list[str]:
        """The results that runs must have to answer."""
        return []

    @property
    @abstractmethod
    def bound(self) -> str:
        """The bound as it is shown, for example `≥ 1.8`."""

    @abstractmethod
    def holds(self, value: float) -> bool:
        """Whether `value` keeps the bound."""

    @abstractmethod
    def find(self, rows: pd.DataFrame) -> Finding:
        """Apply the rule to the newest rows of this study, part and machine; `NoData` if they cannot answer."""


class Pick(Strict):
    """The variant with the smallest (or largest) figure of the metric."""

    smallest: Variants | None = None
    largest: Variants | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.smallest is None) == (self.largest is None):
            raise ValueError("give either smallest or largest, with `all` or a list of variants")
        return self

    @property
    def among(self) -> list[str]:
        return self.smallest or self.largest or []

    def best(self, figures: Mapping[str, float]) -> str:
        """The best of the variants that have a figure; at least one must."""
        choose = min if self.smallest else max
        return choose((name for name in self.among if name in figures), key=lambda name: figures[name])


class Bounded(Claim):
    """A claim whose number has one bound."""

    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give either at_least or at_most")
        return self

    @property
    def bound(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"

    def holds(self, value: float) -> bool:
        low, high = self.at_least, self.at_most
        return (low is None or value >= low) and (high is None or value <= high)


class Measured(Bounded):
    """A claim on a metric: choose variants by their figures, then reduce one figure for each of them to one number."""

    metric: str

    @property
    def metrics(self) -> list[str]:
        return [self.metric]

    def required(self) -> list[str]:
        """The variants without which there is no answer."""
        return self.variants

    @abstractmethod
    def choose(self, figures: Mapping[str, float]) -> list[str]:
        """The variants whose figures `reduce` gets, in its order."""

    @abstractmethod
    def reduce(self, figures: Sequence[float]) -> float:
        """The claim's number."""

    @abstractmethod
    def facts(self, chosen: list[str], figures: Mapping[str, float]) -> dict[str, Any]:
        """What the sentence may use, by the names in FACTS."""

    def find(self, rows: pd.DataFrame) -> Finding:
        good = usable(rows, self.variants, self.metric)
        short = {name: shortfall(rows, good, name, self.metric) for name in self.variants}
        present = set(good["variant"])
        if not present or not present.issuperset(self.required()):
            raise NoData("; ".join(text for name, text in short.items() if name not in present))
        by_variant = {str(name): group.set_index("repeat")[self.metric] for name, group in good.groupby("variant")}
        figures = {name: over_repeats(self.metric, values) for name, values in by_variant.items()}
        chosen = self.choose(figures)
        shared = set.intersection(*(set(by_variant[name].index) for name in chosen))
        try:
            value = self.reduce([figures[name] for name in chosen])
            each = [self.reduce([float(by_variant[name][repeat]) for name in chosen]) for repeat in sorted(shared)]
        except ZeroDivisionError:
            raise NoData(f"{self.metric} is 0 where it divides") from None
        spread = (min(each), max(each)) if len(each) > 1 else None
        return Finding(value, spread, self.facts(chosen, figures), good, "; ".join(filter(None, short.values())))


class Value(Measured):
    """The figure of one variant; `of` may be the best of several."""

    FACTS = {"best": "bf16"}
    kind: Literal["value"]
    of: str | Pick

    @property
    def variants(self) -> list[str]:
        return candidates(self.of)

    def required(self) -> list[str]:
        return [self.of] if isinstance(self.of, str) else []

    def choose(self, figures: Mapping[str, float]) -> list[str]:
        return [chosen_of(self.of, figures, self.metric)]

    def reduce(self, figures: Sequence[float]) -> float:
        return figures[0]

    def facts(self, chosen: list[str], figures: Mapping[str, float]) -> dict[str, Any]:
        return {"best": chosen[0]}


class Ratio(Measured):
    """The figure of one variant over that of another; `of` may be the best of several."""

    FACTS = {"best": "bf16", "of": 1.0, "over": 1.0}
    kind: Literal["ratio"]
    of: str | Pick
    over: str

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys([*candidates(self.of), self.over]))

    def required(self) -> list[str]:
        return [self.of, self.over] if isinstance(self.of, str) else [self.over]

    def choose(self, figures: Mapping[str, float]) -> list[str]:
        return [chosen_of(self.of, figures, self.metric), self.over]

    def reduce(self, figures: Sequence[float]) -> float:
        return figures[0] / figures[1]

    def facts(self, chosen: list[str], figures: Mapping[str, float]) -> dict[str, Any]:
        return {"best": chosen[0], "of": figures[chosen[0]], "over": figures[chosen[1]]}


class Spread(Measured):
    """How far several variants lie apart: (largest - smallest) / smallest of their figures."""

    FACTS = {"smallest": 1.0, "largest": 1.0, "total": 8}
    kind: Literal["spread"]
    among: Variants

    @property
    def variants(self) -> list[str]:
        return self.among

    def choose(self, figures: Mapping[str, float]) -> list[str]:
        return self.among

    def reduce(self, figures: Sequence[float]) -> float:
        return (max(figures) - min(figures)) / min(figures)

    def facts(self, chosen: list[str], figures: Mapping[str, float]) -> dict[str, Any]:
        chosen_figures = [figures[name] for name in chosen]
        return {"smallest": min(chosen_figures), "largest": max(chosen_figures), "total": len(chosen)}


class Within(Bounded):
    """Inside of the runs of one variant: the largest of some results over the largest of others."""

    FACTS = {"best": "ulysses_32768_tflops", "of": 1.0, "over": 1.0}
    kind: Literal["within"]
    variant: str
    of: Names
    over: Names

    @property
    def variants(self) -> list[str]:
        return [self.variant]

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys([*self.of, *self.over]))

    def find(self, rows: pd.DataFrame) -> Finding:
        good = usable(rows, self.variants, None).dropna(subset=[name for name in self.metrics if name in rows])
        if good.empty:
            raise NoData(shortfall(rows, good, self.variant, None))
        figures = {name: over_repeats(name, good[name]) for name in self.metrics}
        best, other = (max(names, key=lambda name: figures[name]) for names in (self.of, self.over))
        each = good[self.of].max(axis=1) / good[self.over].max(axis=1)
        spread = (float(each.min()), float(each.max())) if len(each) > 1 else None
        facts = {"best": best, "of": figures[best], "over": figures[other]}
        return Finding(figures[best] / figures[other], spread, facts, good, "")


class Count(Claim):
    """How many variants are complete; the bound is all of them.

    Complete means: at least `repeats` runs, every one of them `ok` and with the result `metric`, if one is named.
    """

    FACTS = {"total": 8, "repeats": 3}
    kind: Literal["count"]
    among: Variants
    metric: str | None = None
    repeats: int = Field(1, ge=1)

    @property
    def variants(self) -> list[str]:
        return self.among

    @property
    def metrics(self) -> list[str]:
        return [] if self.metric is None else [self.metric]

    @property
    def bound(self) -> str:
        return f"= {len(self.among)}"

    def holds(self, value: float) -> bool:
        return value == len(self.among)

    def find(self, rows: pd.DataFrame) -> Finding:
        good = usable(rows, self.among, self.metric)
        missing = [text for name in self.among if (text := shortfall(rows, good, name, self.metric, self.repeats))]
        facts = {"total": len(self.among), "repeats": self.repeats}
        used = rows[rows["variant"].isin(self.among)]
        return Finding(len(self.among) - len(missing), None, facts, used, "; ".join(missing))


KINDS_OF_CLAIM: dict[str, type[Claim]] = {
    "value": Value,
    "ratio": Ratio,
    "spread": Spread,
    "within": Within,
    "count": Count,
}


def usable(rows: pd.DataFrame, variants: list[str], metric: str | None) -> pd.DataFrame:
    """The rows of these variants that ended `ok` and have the metric."""
    good = rows[(rows["outcome"] == "ok") & rows["variant"].isin(variants)]
    if metric is None:
        return good
    return good[good[metric].notna()] if metric in good else good.iloc[:0]


def shortfall(rows: pd.DataFrame, good: pd.DataFrame, variant: str, metric: str | None, repeats: int = 1) -> str:
    """What keeps a variant from being complete, or an empty string."""
    outcomes = rows.loc[rows["variant"] == variant, "outcome"]
    usable, needed = int((good["variant"] == variant).sum()), max(repeats, len(outcomes))
    if usable == needed:
        return ""
    if outcomes.empty:
        return f"{variant}: no run"
    bad = sorted(set(outcomes) - {"ok"})
    what = "ended ok" if metric is None else f"have {metric}"
    return f"{variant}: {usable} of {needed} runs {what}" + (f" ({', '.join(bad)})" if bad else "")


def candidates(of: str | Pick) -> list[str]:
    return [of] if isinstance(of, str) else of.among


def chosen_of(of: str | Pick, figures: Mapping[str, float], metric: str) -> str:
    if isinstance(of, str):
        return of
    if not any(name in figures for name in of.among):
        raise NoData(f"no run of {', '.join(of.among)} has {metric}")
    return of.best(figures)
