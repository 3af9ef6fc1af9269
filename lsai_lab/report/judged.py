"""Claims, judged by the recorded runs, for the chapters that tell them."""

import pandas as pd

from lsai_core.base.errors import UserError, hint
from lsai_lab.claims import words
from lsai_lab.claims.declared import load_claims
from lsai_lab.claims.evaluate import evaluate
from lsai_lab.project.files import reading_root
from lsai_lab.report.load import names_of_studies, recorded, say
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
    repeats, of losses of the interval), `n`, `runs` (their folders). UserError for an unknown
    name.

    >>> lab.judged("flash_speed").loc["flash_speed", "verdict"]
    'held'
    """
    declared = load_claims()
    if unknown := [name for name in names if name not in declared]:
        raise UserError(f"there is no claim {unknown[0]!r}{hint(unknown[0], list(declared))}")
    asked = {name: declared[name] for name in names} or declared
    terms = [each for claim in asked.values() for each in (claim.of, claim.over, claim.beside)]
    wanted = {term.study for term in terms if term is not None} & {*names_of_studies()}
    if len(asked) > _MANY:
        say(f"judging {len(asked)} claims by the recorded runs takes a while")
    found = evaluate(recorded(*sorted(wanted)), asked)
    told = words.claims_table(found, declared)
    found = found.assign(**told[["claim", "measured", "bound"]]).set_index("name")
    folder = reading_root() / "reports" / "recorded"
    found["runs"] = [
        [str(folder / run) for run in runs] if isinstance(runs, (list, tuple)) else []
        for runs in found["runs"]
    ]
    return Frame(found)
