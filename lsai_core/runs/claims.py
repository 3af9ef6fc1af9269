"""Claims: every headline statement, recomputed from the records.

`params/claims.yaml` holds each statement once: which runs it is about, how one number follows from their results, the
bound that this number must keep, and the sentence, a template that the computed numbers fill, so that none is typed by
hand.

    bf16_speed:
      kind: ratio              # ratio, value, spread or count: see the four classes below
      study: memory
      machine: h200
      metric: tokens_per_s     # any name in the `results` of a run
      of: bf16
      over: baseline
      at_least: 1.8
      same: [tokens, steps]    # results that must agree among all these runs, or they cannot be compared
      sentence: "bf16 trains {value:.2f} times as fast as the baseline"

A variant's figure is taken over its repeats that ended `ok` (`records.over_repeats`: the median, for losses and perplexities
the mean); of several runs of the same repeat the newest counts.
The spread is the smallest and largest value that the same rule gives repeat by repeat (repeat r against repeat r, which
have equal seeds). A claim is `held` or `fallen`; where runs are missing or not comparable it is `no data`, and a note
says why.
"""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import pandas as pd
from pydantic import Field, model_validator

from lsai_core.config import Strict, validated
from lsai_core.errors import UserError
from lsai_core.files import load_yaml
from lsai_core.runs.records import over_repeats
from lsai_core.runs.study import Profile, Study, load_study

Verdict = Literal["held", "fallen", "no data"]
Variants = Annotated[list[str], Field(min_length=1)]  # `all` in the YAML is filled in by `load_claims`
_DIGITS = 6  # of the numbers in a result; far finer than any bound, and the same on every platform
_LINKS = 2  # runs named in the report's table; `lsai claims` and claims.json name them all


@dataclass(frozen=True)
class ClaimResult:
    """What became of one claim on one machine.

    `value` and `spread` (smallest and largest over the repeats; None with fewer than two) are rounded to six digits,
    after the verdict. `runs`: `<study>/<run folder>` of every run behind the value. `note`: what is missing, or "".
    """

    name: str
    sentence: str
    value: float | None
    spread: tuple[float, float] | None
    bound: str
    verdict: Verdict
    machine: str
    note: str
    runs: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The result as plain lists, strings and numbers."""
        return {**asdict(self), "spread": self.spread and list(self.spread), "runs": list(self.runs)}


class _NoData(Exception):
    """The records cannot answer; the message says why."""


@dataclass(frozen=True)
class _Finding:
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
    part: str = "train"
    same: list[str] = Field([], description="results that must agree among the runs of the claim")
    sentence: str

    @model_validator(mode="after")
    def _sentence_can_be_filled(self) -> Self:
        known = {"value": 1.0, "machine": "h200", **self.FACTS}
        try:
            self.sentence.format(**known)
        except KeyError as error:
            raise ValueError(f"sentence: unknown fact {error}{_hint(str(error.args[0]), known)}") from None
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            raise ValueError(f"sentence: not a valid template: {error}") from None
        return self

    @property
    @abstractmethod
    def variants(self) -> list[str]:
        """The variants that the claim is about."""

    @property
    @abstractmethod
    def bound(self) -> str:
        """The bound as it is shown, for example `≥ 1.8`."""

    @abstractmethod
    def holds(self, value: float) -> bool:
        """Whether `value` keeps the bound."""

    @abstractmethod
    def find(self, rows: pd.DataFrame) -> _Finding:
        """Apply the rule to the newest rows of this study, part and machine; `_NoData` if they cannot answer."""


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


class _Measured(Claim):
    """A claim on a metric: choose variants by their figures, then reduce one figure for each of them to one number."""

    metric: str
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

    def find(self, rows: pd.DataFrame) -> _Finding:
        good = _usable(rows, self.variants, self.metric)
        short = {name: _shortfall(rows, good, name, self.metric) for name in self.variants}
        present = set(good["variant"])
        if not present or not present.issuperset(self.required()):
            raise _NoData("; ".join(text for name, text in short.items() if name not in present))
        by_variant = {str(name): group.set_index("repeat")[self.metric] for name, group in good.groupby("variant")}
        figures = {name: over_repeats(self.metric, values) for name, values in by_variant.items()}
        chosen = self.choose(figures)
        shared = set.intersection(*(set(by_variant[name].index) for name in chosen))
        try:
            value = self.reduce([figures[name] for name in chosen])
            each = [self.reduce([float(by_variant[name][repeat]) for name in chosen]) for repeat in sorted(shared)]
        except ZeroDivisionError:
            raise _NoData(f"{self.metric} is 0 where it divides") from None
        spread = (min(each), max(each)) if len(each) > 1 else None
        return _Finding(value, spread, self.facts(chosen, figures), good, "; ".join(filter(None, short.values())))


class Value(_Measured):
    """The figure of one variant; `of` may be the best of several."""

    FACTS = {"best": "bf16"}
    kind: Literal["value"]
    of: str | Pick

    @property
    def variants(self) -> list[str]:
        return _candidates(self.of)

    def required(self) -> list[str]:
        return [self.of] if isinstance(self.of, str) else []

    def choose(self, figures: Mapping[str, float]) -> list[str]:
        return [_chosen(self.of, figures, self.metric)]

    def reduce(self, figures: Sequence[float]) -> float:
        return figures[0]

    def facts(self, chosen: list[str], figures: Mapping[str, float]) -> dict[str, Any]:
        return {"best": chosen[0]}


class Ratio(_Measured):
    """The figure of one variant over that of another; `of` may be the best of several."""

    FACTS = {"best": "bf16", "of": 1.0, "over": 1.0}
    kind: Literal["ratio"]
    of: str | Pick
    over: str

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys([*_candidates(self.of), self.over]))

    def required(self) -> list[str]:
        return [self.of, self.over] if isinstance(self.of, str) else [self.over]

    def choose(self, figures: Mapping[str, float]) -> list[str]:
        return [_chosen(self.of, figures, self.metric), self.over]

    def reduce(self, figures: Sequence[float]) -> float:
        return figures[0] / figures[1]

    def facts(self, chosen: list[str], figures: Mapping[str, float]) -> dict[str, Any]:
        return {"best": chosen[0], "of": figures[chosen[0]], "over": figures[chosen[1]]}


class Spread(_Measured):
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
    def bound(self) -> str:
        return f"= {len(self.among)}"

    def holds(self, value: float) -> bool:
        return value == len(self.among)

    def find(self, rows: pd.DataFrame) -> _Finding:
        good = _usable(rows, self.among, self.metric)
        missing = [text for name in self.among if (text := _shortfall(rows, good, name, self.metric, self.repeats))]
        facts = {"total": len(self.among), "repeats": self.repeats}
        used = rows[rows["variant"].isin(self.among)]
        return _Finding(len(self.among) - len(missing), None, facts, used, "; ".join(missing))


_KINDS: dict[str, type[Claim]] = {"value": Value, "ratio": Ratio, "spread": Spread, "count": Count}


def load_claims(root: Path) -> list[Claim]:
    """Read `params/claims.yaml` of the checkout `root`, in its order.

    UserError names the claim and what is wrong: an unknown key, kind, study, part, variant or fact of the sentence.
    """
    claims: list[Claim] = []
    for name, data in load_yaml(root / "params" / "claims.yaml").items():
        where = f"params/claims.yaml, claim {name}"
        if not isinstance(data, dict):
            raise UserError(f"{where}: expected a mapping of keys to values")
        if "name" in data:
            raise UserError(f"{where}: unknown key 'name'; a claim is called by its key")
        kind, study_name = data.get("kind"), data.get("study")
        if kind not in _KINDS:
            raise UserError(f"{where}: unknown kind {kind!r}; known: {', '.join(_KINDS)}")
        if not isinstance(study_name, str):
            raise UserError(f"{where}: study: expected the name of a study, got {study_name!r}")
        study = load_study(
            root, study_name, Profile(profile="none", description="the study as it is written", gpu=None)
        )
        claim = validated(_KINDS[kind], {**_without_all(data, list(study.variants)), "name": str(name)}, where)
        _check_names(claim, study, where)
        claims.append(claim)
    return claims


def _without_all(data: dict[str, Any], variants: list[str]) -> dict[str, Any]:
    """`data` with `all`, where variants are listed, replaced by the study's variants."""
    return {
        key: _without_all(value, variants)
        if isinstance(value, dict)
        else variants
        if key in ("among", "smallest", "largest") and value == "all"
        else value
        for key, value in data.items()
    }


def _check_names(claim: Claim, study: Study, where: str) -> None:
    if claim.part not in study.parts:
        raise UserError(f"{where}: study {study.study} has no part {claim.part!r}{_hint(claim.part, study.parts)}")
    for name in claim.variants:
        if name not in study.variants:
            raise UserError(f"{where}: study {study.study} has no variant {name!r}{_hint(name, study.variants)}")


def evaluate_claims(
    claims: Iterable[Claim], frame: pd.DataFrame, machines: Sequence[str] | None = None
) -> list[ClaimResult]:
    """Judge every claim by the rows of `frame` (see `records.runs_frame`), in order.

    Without `machines` each claim is judged on its own machine, as the committed records demand, and a metric that no
    run of that study and part has is a UserError with the names that come close. With `machines` each claim is judged
    on each of those instead, and such a metric is missing data, because other people's runs may well measure less.
    """
    results = []
    for claim in claims:
        for machine in [claim.machine] if machines is None else machines:
            rows = _newest(frame, claim, machine)
            if machines is None:
                _check_metrics(claim, rows)
            results.append(_judge(claim, machine, rows))
    return results


def claims_table(results: Iterable[ClaimResult]) -> pd.DataFrame:
    """One row per result, as Markdown strings for `report.show.show_table`.

    Columns: claim, value, repeats (the spread), bound, verdict, runs (links to the first runs behind the value and how many more there are).
    """
    columns = ["claim", "value", "repeats", "bound", "verdict", "runs"]
    return pd.DataFrame([_cells(result) for result in results], columns=columns)


def show_value(result: ClaimResult) -> str:
    """The value with three significant digits, or an en dash."""
    return "–" if result.value is None else f"{result.value:.3g}"


def show_spread(result: ClaimResult) -> str:
    """The smallest and the largest value over the repeats, or an en dash."""
    return "–" if result.spread is None else f"{result.spread[0]:.3g} to {result.spread[1]:.3g}"


def _cells(result: ClaimResult) -> list[str]:
    claim = result.sentence + (f" ({result.note})" if result.note else "")
    verdict = result.verdict if result.verdict == "held" else f"**{result.verdict}**"
    return [claim, show_value(result), show_spread(result), result.bound, verdict, _links(result.runs)]


def _links(runs: Iterable[str]) -> str:
    from lsai_core.report.show import run_link  # brings matplotlib, which only a report needs

    names = [run.rpartition("/")[2].rpartition("-") for run in runs]
    shown = [run_link(name, key) for name, _, key in names[:_LINKS]]
    return ", ".join(shown) + (f" and {len(names) - _LINKS} more" if len(names) > _LINKS else "")


def _newest(frame: pd.DataFrame, claim: Claim, machine: str) -> pd.DataFrame:
    """The rows of the claim's study and part on `machine`, the newest one for each variant and repeat."""
    if frame.empty:
        return frame
    here = (frame["machine"] == machine) & (frame["study"] == claim.study) & (frame["part"] == claim.part)
    rows = frame[here].sort_values("started", kind="stable").drop_duplicates(["variant", "repeat"], keep="last")
    # Columns of other studies and kinds of run go, so that a wrong name is noticed and numbers are numbers.
    return rows.sort_values(["variant", "repeat"]).dropna(axis="columns", how="all").infer_objects()


def _metrics(claim: Claim) -> list[str]:
    metric: str | None = getattr(claim, "metric", None)
    return [] if metric is None else [metric]


def _check_metrics(claim: Claim, rows: pd.DataFrame) -> None:
    if rows.empty or not (rows["outcome"] == "ok").any():
        return
    for metric in [*_metrics(claim), *claim.same]:
        if metric not in rows:
            raise UserError(
                f"claim {claim.name}: no {claim.part} run of study {claim.study} on {claim.machine} has a result "
                f"{metric!r}{_hint(metric, map(str, rows.columns))}"
            )


def _judge(claim: Claim, machine: str, rows: pd.DataFrame) -> ClaimResult:
    try:
        finding = _find(claim, machine, rows)
    except _NoData as reason:
        blanks = dict.fromkeys(("value", *claim.FACTS), _Blank())
        sentence = claim.sentence.format(**{**blanks, "machine": machine})
        return ClaimResult(claim.name, sentence, None, None, claim.bound, "no data", machine, str(reason), ())
    return ClaimResult(
        claim.name,
        claim.sentence.format(**{"value": finding.value, "machine": machine, **finding.facts}),
        _rounded(finding.value),
        finding.spread and (_rounded(finding.spread[0]), _rounded(finding.spread[1])),
        claim.bound,
        "held" if claim.holds(finding.value) else "fallen",
        machine,
        finding.note,
        tuple(f"{claim.study}/{Path(path).name}" for path in finding.rows["path"]),
    )


def _find(claim: Claim, machine: str, rows: pd.DataFrame) -> _Finding:
    """The claim's finding, if its runs exist, its metric is a number and its runs can be compared."""
    if rows.empty:
        raise _NoData(f"no {claim.part} runs of study {claim.study} on {machine}")
    for metric in _metrics(claim):
        if metric in rows and not pd.api.types.is_numeric_dtype(rows[metric]):
            raise UserError(f"claim {claim.name}: the result {metric!r} is not a number")
    finding = claim.find(rows)
    good = finding.rows[finding.rows["outcome"] == "ok"]
    for name in claim.same:
        found = good[name].unique().tolist() if name in good else [None]
        if len(found) > 1 or pd.isna(found).any():
            shown = ", ".join("missing" if pd.isna(value) else f"{value}" for value in found)
            raise _NoData(f"the runs cannot be compared, their {name} must agree: {shown}")
    return finding


def _usable(rows: pd.DataFrame, variants: list[str], metric: str | None) -> pd.DataFrame:
    """The rows of these variants that ended `ok` and have the metric."""
    good = rows[(rows["outcome"] == "ok") & rows["variant"].isin(variants)]
    if metric is None:
        return good
    return good[good[metric].notna()] if metric in good else good.iloc[:0]


def _shortfall(rows: pd.DataFrame, good: pd.DataFrame, variant: str, metric: str | None, repeats: int = 1) -> str:
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


class _Blank:
    """Stands in the sentence for a number that there is not."""

    def __format__(self, spec: str) -> str:
        return "…"


def _candidates(of: str | Pick) -> list[str]:
    return [of] if isinstance(of, str) else of.among


def _chosen(of: str | Pick, figures: Mapping[str, float], metric: str) -> str:
    if isinstance(of, str):
        return of
    if not any(name in figures for name in of.among):
        raise _NoData(f"no run of {', '.join(of.among)} has {metric}")
    return of.best(figures)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _hint(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known: {', '.join(names)}"
