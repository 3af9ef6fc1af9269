"""Claims: every headline statement, recomputed from the records.

`params/claims.yaml` holds each statement once: which runs it is about, how one number follows from their results, the
bound that this number must keep, and the sentence, a template that the computed numbers fill, so that none is typed by
hand.

    bf16_speed:
      kind: ratio              # ratio, value, spread or count: see the four classes of claim_kinds.py
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

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from lsai_core.errors import UserError, hint
from lsai_core.strict import validated
from lsai_lab.files import load_yaml
from lsai_lab.runs.claim_kinds import KINDS_OF_CLAIM, Claim, Finding, NoData
from lsai_lab.runs.study import Profile, Study, load_study

Verdict = Literal["held", "fallen", "no data"]
_DIGITS = 6  # of the numbers in a result; far finer than any bound, and the same on every platform
_LINKS = 2  # variants named in the report's table; `lsai claims` and claims.json name all runs


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
        if kind not in KINDS_OF_CLAIM:
            raise UserError(f"{where}: unknown kind {kind!r}; known: {', '.join(KINDS_OF_CLAIM)}")
        if not isinstance(study_name, str):
            raise UserError(f"{where}: study: expected the name of a study, got {study_name!r}")
        study = load_study(
            root, study_name, Profile(profile="none", description="the study as it is written", gpu=None)
        )
        claim = validated(KINDS_OF_CLAIM[kind], {**_without_all(data, list(study.variants)), "name": str(name)}, where)
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
    for part in claim.parts:
        if part not in study.parts:
            raise UserError(f"{where}: study {study.study} has no part {part!r}{hint(part, study.parts)}")
    for name in claim.variants:
        if name not in study.variants:
            raise UserError(f"{where}: study {study.study} has no variant {name!r}{hint(name, study.variants)}")


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

    Columns: claim, value, over repeats (the spread), bound, verdict, runs (links to the first run of the first variants behind the value, and how many more there are).
    """
    columns = ["claim", "value", "over repeats", "bound", "verdict", "runs"]
    return pd.DataFrame([_cells(result) for result in results], columns=columns)


def show_value(result: ClaimResult) -> str:
    """The value with three significant digits, or an en dash."""
    return "–" if result.value is None else _short(result.value)


def show_spread(result: ClaimResult) -> str:
    """The smallest and the largest value over the repeats (one number if they read the same), or an en dash."""
    return "–" if result.spread is None else " to ".join(dict.fromkeys(map(_short, result.spread)))


def _short(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cells(result: ClaimResult) -> list[str]:
    claim = result.sentence + (f" ({result.note})" if result.note else "")
    verdict = result.verdict if result.verdict == "held" else f"**{result.verdict}**"
    bound = re.sub(r"\d{5,}", lambda match: f"{int(match[0]):,}", result.bound)
    return [claim, show_value(result), show_spread(result), bound, verdict, _links(result.runs)]


def _links(runs: Iterable[str]) -> str:
    from lsai_lab.report.show import run_link  # brings matplotlib, which only a report needs

    keys: dict[str, list[str]] = {}  # of each variant's runs
    for run in runs:
        name, _, key = run.rpartition("/")[2].rpartition("-")
        keys.setdefault(name.partition(".")[0], []).append(key)
    shown = [
        run_link(variant, mine[0]) + (f" ×{len(mine)}" if len(mine) > 1 else "")
        for variant, mine in list(keys.items())[:_LINKS]
    ]
    return ", ".join(shown) + (f" and {len(keys) - _LINKS} more" if len(keys) > _LINKS else "")


def _newest(frame: pd.DataFrame, claim: Claim, machine: str) -> pd.DataFrame:
    """The rows of the claim's study and part on `machine`, the newest one for each variant and repeat."""
    if frame.empty:
        return frame
    here = (frame["machine"] == machine) & (frame["study"] == claim.study) & frame["part"].isin(claim.parts)
    rows = frame[here].sort_values("started", kind="stable").drop_duplicates(["variant", "repeat"], keep="last")
    # Columns of other studies and kinds of run go, so that a wrong name is noticed and numbers are numbers.
    return rows.sort_values(["variant", "repeat"]).dropna(axis="columns", how="all").infer_objects()


def _check_metrics(claim: Claim, rows: pd.DataFrame) -> None:
    if rows.empty or not (rows["outcome"] == "ok").any():
        return
    for metric in [*claim.metrics, *claim.same]:
        if metric not in rows:
            raise UserError(
                f"claim {claim.name}: no {' or '.join(claim.parts)} run of study {claim.study} on {claim.machine} has a result "
                f"{metric!r}{hint(metric, map(str, rows.columns))}"
            )


def _judge(claim: Claim, machine: str, rows: pd.DataFrame) -> ClaimResult:
    try:
        finding = _find(claim, machine, rows)
    except NoData as reason:
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


def _find(claim: Claim, machine: str, rows: pd.DataFrame) -> Finding:
    """The claim's finding, if its runs exist, its metric is a number and its runs can be compared."""
    if rows.empty:
        raise NoData(f"no {' or '.join(claim.parts)} runs of study {claim.study} on {machine}")
    for metric in claim.metrics:
        if metric in rows and not pd.api.types.is_numeric_dtype(rows[metric]):
            raise UserError(f"claim {claim.name}: the result {metric!r} is not a number")
    finding = claim.find(rows)
    good = finding.rows[finding.rows["outcome"] == "ok"]
    for name in claim.same:
        found = good[name].unique().tolist() if name in good else [None]
        if len(found) > 1 or pd.isna(found).any():
            shown = ", ".join("missing" if pd.isna(value) else f"{value}" for value in found)
            raise NoData(f"the runs cannot be compared, their {name} must agree: {shown}")
    return finding


class _Blank:
    """Stands in the sentence for a number that there is not."""

    def __format__(self, spec: str) -> str:
        return "…"


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
