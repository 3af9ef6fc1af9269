"""Claims, judged by the recorded runs, for the chapters that tell them."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from lsai_core.base.disk_cache import cached_on_disk
from lsai_core.base.errors import UserError, hint
from lsai_lab.claims import words
from lsai_lab.claims.declared import Claim, load_claims
from lsai_lab.claims.evaluate import COLUMNS, evaluate
from lsai_lab.project.files import reading_root
from lsai_lab.report.load import names_of_studies, recorded
from lsai_lab.report.unchanged import files_state
from lsai_lab.runs.find import say
from lsai_lab.runs.frames import Frame

_MANY = 20  # claims: so many take a while


def claims_table(*names: str) -> pd.DataFrame:
    """The claims `names` (none: all) as the book's last table has them: name, claim, bound,
    measured, verdict, days, and of losses the text. UserError for an unknown name.

    >>> lab.claims_table("flash_speed")["measured"].item()
    '3.96x (3.85 to 4.14, n = 3)'
    """
    return Frame(words.claims_table(judged(*names).reset_index(), load_claims()))


def judged(*names: str) -> pd.DataFrame:
    """The claims `names` (none: all) by name: `claim`, `measured` and `bound` in words with their
    unit, `verdict` ("held", "failed", ...), `sentence`, `value`, `low`, `high` (the ends of the
    repeats, of losses of the interval), `n`, `runs` (their folders), `run` (of a comparison the
    pair of first runs, what it is over and the run, of a value the first one; None without one).
    UserError for an unknown name.

    >>> lab.judged("flash_speed").loc["flash_speed", "verdict"]
    'held'
    """
    declared = load_claims()
    if unknown := [name for name in names if name not in declared]:
        raise UserError(f"there is no claim {unknown[0]!r}{hint(unknown[0], list(declared))}")
    asked = {name: declared[name] for name in names} or declared
    found = _evaluated(asked)
    told = words.claims_table(found, declared)
    found = found.assign(**told[["claim", "measured", "bound"]]).set_index("name")
    folder = reading_root() / "reports" / "recorded"
    found["runs"] = [
        [str(folder / run) for run in runs] if isinstance(runs, (list, tuple)) else []
        for runs in found["runs"]
    ]
    found["run"] = [_first_of(pair) for pair in found.pop("pair")]
    return Frame(found)


def _first_of(pair: Any) -> str | tuple[str, ...] | None:
    """The first runs of a claim as the column `run` of a table has them."""
    ends = tuple(pair) if isinstance(pair, (list, tuple)) else ()
    return ends if len(ends) > 1 else next(iter(ends), None)


def _evaluated(asked: Mapping[str, Claim]) -> pd.DataFrame:
    """What `evaluate` finds by the committed runs; from the disk while no file of them, of `params`
    and of the code is another."""
    reports, params = (reading_root() / name for name in ("reports/recorded", "params"))
    files = [path for folder in (reports, params) for path in folder.rglob("*")]
    question = files_state(files, *asked)

    def answer() -> dict[str, Any]:
        terms = [each for claim in asked.values() for each in (claim.of, claim.over, claim.beside)]
        wanted = {term.study for term in terms if term is not None} & {*names_of_studies()}
        if len(asked) > _MANY:
            say(f"judging {len(asked)} claims by the recorded runs takes a while, once")
        rows = evaluate(recorded(*sorted(wanted)), dict(asked)).to_dict("records")
        return {"rows": [{key: _plain(each) for key, each in row.items()} for row in rows]}

    rows = cached_on_disk(evaluate.__module__, question, answer)["rows"]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _plain(value: Any) -> Any:
    """A value as JSON has it; what is missing is null."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value
