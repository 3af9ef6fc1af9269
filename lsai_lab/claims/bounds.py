"""When each bound was set: the date of the first commit whose `params/claims.yaml` has the claim
with that bound.

`reports/recorded/bounds.json` keeps the dates, for copies without the history; `lsai claims
--write` computes them where the history is whole. A bound without a date counts as set after its
runs.
"""

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from lsai_core.base.errors import UserError
from lsai_core.base.files import write_json
from lsai_lab.claims.declared import Claim

FILE = "params/claims.yaml"


class BoundSet(BaseModel):
    """A bound, as tables show it, and when and by which commit it was set (UTC)."""

    bound: str
    set: datetime
    commit: str


def bounds_file(root: Path) -> Path:
    """The committed dates of a checkout."""
    return root / "reports" / "recorded" / "bounds.json"


def read_bounds(root: Path) -> dict[str, BoundSet]:
    """The committed dates by claim; none without the file. UserError if it is damaged."""
    path = bounds_file(root)
    try:
        return TypeAdapter(dict[str, BoundSet]).validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValidationError:
        again = "delete it, and `lsai claims --write` makes it again"
        raise UserError(f"{path}: damaged; {again}") from None


def date_of_bound(known: dict[str, BoundSet], name: str, claim: Claim) -> datetime | None:
    """When this bound of this claim was set; None if it has no date, or another bound has it."""
    found = known.get(name)
    return found.set if found is not None and found.bound == claim.bound else None


def bounds_by_history(root: Path, claims: dict[str, Claim]) -> dict[str, BoundSet] | None:
    """The same by git's history of `root`; None where there is none, or not all of it. A claim
    whose bound is not committed yet is left out."""
    if _git(root, "rev-parse", "--is-shallow-repository").strip() != "false":
        return None
    found: dict[str, BoundSet] = {}
    log = _git(root, "log", "--reverse", "--format=%H %cI", "--", FILE)
    for commit, date in (line.split() for line in log.splitlines()):
        then = _declared(_git(root, "show", f"{commit}:./{FILE}"))
        when = datetime.fromisoformat(date).astimezone(UTC)
        for name, claim in claims.items():
            earlier = found.get(name)
            if _has_bound(then.get(name), claim) and (earlier is None or when < earlier.set):
                found[name] = BoundSet(bound=claim.bound, set=when, commit=commit[:7])
    return found


def write_bounds(root: Path, found: dict[str, BoundSet]) -> None:
    """Keep the dates in the checkout's file."""
    rows = {name: row.model_dump() for name, row in found.items()}
    dated = {name: row | {"set": row["set"].isoformat()} for name, row in rows.items()}
    write_json(bounds_file(root), dated)


def _has_bound(entry: Any, claim: Claim) -> bool:
    """Whether an entry of an earlier file has the claim's limits; or counts as many variants, of
    which the first versions of the file named none where they counted all."""
    if not isinstance(entry, dict):
        return False
    if claim.kind == "count":
        counted = entry.get("of", claim.of.variant)
        counted = counted.get("variant") if isinstance(counted, dict) else counted
        total = len(counted) if isinstance(counted, list) else 1
        return entry.get("kind") == "count" and total == claim.total
    return (entry.get("at_least"), entry.get("at_most")) == (claim.at_least, claim.at_most)


def _declared(text: str) -> dict[str, Any]:
    """The claims of an earlier version of the file; none if it cannot be read."""
    try:
        found = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _git(root: Path, *arguments: str) -> str:
    """What git prints in `root`; nothing where it fails, or is not installed."""
    try:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
