"""What `params/claims.yaml` declares: each headline statement once, with the runs that it is about,
its bound and its sentence. How it is judged: `lsai_lab.claims.evaluate`."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lsai_core.base.errors import UserError, hint
from lsai_core.config.strict import Strict, validated
from lsai_lab.project.files import load_yaml, repo_root
from lsai_lab.runs.study import Study, load_study

# Facts that a sentence may use, with values to try it on.
_FACTS: dict[str, Any] = dict.fromkeys(("value", "of", "over", "beside", "mean", "half"), 1.0)
_FACTS |= {"total": 8, "repeats": 3, "best": "bf16", "machine": "h200"}
_FACTS |= {"confidence": "With 95 % confidence", "kernels": "fa4 against eager"}
INTERVALS = ("interval", "relative_interval")
COMPARING = ("ratio", "curves", *INTERVALS)
Names = Annotated[
    list[str], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
]


class Term(Strict):
    """Whose figure: variants and metrics of one part of a study; what is not given is the claim's
    own."""

    study: str
    part: Names = ["train"]
    variant: Names = []
    metric: Names = []


class Claim(Strict):
    """One entry of `params/claims.yaml`."""

    kind: Literal[
        "estimators",
        "rivals",
        "value",
        "ratio",
        "interval",
        "relative_interval",
        "curves",
        "count",
        "withdrawn",
    ]
    study: str
    machine: str = Field(
        "h200", description="folder in reports/recorded whose runs the claim is about"
    )
    part: Names = ["train"]
    metric: Names = []
    of: Term
    over: Term | None = None
    beside: Term | None = None
    at_least: float | None = None
    at_most: float | None = None
    repeats: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1, description="curves: the first so many steps, not all")
    same: list[str] = Field(
        [], description="results or settings that must agree among all its runs"
    )
    void: str | None = Field(
        None, description="why the records cannot carry the claim: it counts as failed"
    )
    reason: str | None = Field(None, description="why a withdrawn claim was withdrawn")
    gone: str | None = Field(
        None, description="the last commit whose study has its runs: what they need was removed"
    )
    # what is measured, for a table that has its value and bound beside
    short: str = Field("", max_length=46)
    sentence: str

    @property
    def limit(self) -> float:
        """The number of the bound."""
        return next(
            limit for limit in (self.at_least, self.at_most, self.total) if limit is not None
        )

    @model_validator(mode="before")
    @classmethod
    def _terms_are_whole(cls, data: dict[str, Any]) -> dict[str, Any]:
        given = {key: data[key] for key in ("of", "over", "beside") if data.get(key) is not None}
        own = {key: data[key] for key in ("study", "part", "metric") if key in data}
        terms = {
            key: term if isinstance(term, dict) else {"variant": term}
            for key, term in given.items()
        }
        return data | {key: own | term for key, term in terms.items()}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        bounds = [bound for bound in (self.at_least, self.at_most) if bound is not None]
        if len(bounds) != (self.kind != "count"):
            raise ValueError("a count has no bound, every other claim either at_least or at_most")
        if (self.kind == "withdrawn") != (self.reason is not None):
            raise ValueError("a withdrawn claim has a `reason`, and only it")
        if self.kind != "withdrawn" and (self.kind in COMPARING) != (self.over is not None):
            raise ValueError("a ratio, curves and an interval have `over`, and only they")
        if self.kind == "curves" and self.at_most is None:
            raise ValueError("curves have at_most")
        if self.kind in INTERVALS and self.repeats < 2:
            raise ValueError("an interval has repeats of at least 2")
        try:
            self.sentence.format(**_FACTS)
        except KeyError as error:
            raise ValueError(
                f"sentence: unknown fact {error}{hint(str(error.args[0]), _FACTS)}"
            ) from None
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            raise ValueError(f"sentence: not a valid template: {error}") from None
        return self

    @property
    def total(self) -> int:
        return len(self.of.variant)

    @property
    def bound(self) -> str:
        if self.kind == "count":
            return f"= {self.total}"
        return f"≥ {self.at_least:,g}" if self.at_least is not None else f"≤ {self.at_most:,g}"

    def holds(self, value: float) -> bool:
        low = self.total if self.kind == "count" else self.at_least
        return (low is None or value >= low) and (self.at_most is None or value <= self.at_most)


def load_claims(root: Path | None = None) -> dict[str, Claim]:
    """`params/claims.yaml` of a checkout, in its order. UserError names the claim and what is wrong
    with it."""
    root, claims = root or repo_root(), {}
    studies = functools.cache(lambda name: load_study(root, name))  # each is read once
    for name, data in load_yaml(root / "params" / "claims.yaml").items():
        where = f"params/claims.yaml, claim {name}"
        if not isinstance(data, dict):
            raise UserError(f"{where}: expected a mapping of keys to values")
        claims[str(name)] = validated(Claim, data, where)
        _check_names(claims[str(name)], studies, where)
    return claims


def _check_names(claim: Claim, studies: Callable[[str], Study], where: str) -> None:
    if claim.kind == "withdrawn" or claim.gone is not None:  # of runs that cannot be made
        return
    for term in filter(None, (claim.of, claim.over, claim.beside)):
        study = studies(term.study)
        for what, names, known in [
            ("part", term.part, [*study.parts]),
            ("variant", term.variant, [*study.variants]),
        ]:
            if unknown := [name for name in names if name not in known]:
                raise UserError(
                    f"{where}: study {study.study} has no {what} "
                    f"{unknown[0]!r}{hint(unknown[0], known)}"
                )
