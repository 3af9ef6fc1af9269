"""Other people's programs, predicted on a simulated GPU before they ran on one (`tests/anybody.py`,
`tests/anybody_more.py`): what was said of them beside what was measured."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_lab.project.files import reading_root

SETS = ("anybody", "anybody_more")


def program_errors(root: Path | None = None) -> pd.DataFrame:
    """One row per program that ran on an H100: `name`, the `set` that was predicted together, the
    GiB of active memory that were `measured`, the errors of `active` and `reserved` memory, what
    they are with today's code (`active_now`), where that was predicted once more, and whether an
    H200 has the same peak to the byte (`same_on_h200`)."""
    again, h200 = _kept("anybody.in_sample", root), _kept("anybody.h200.measured", root)
    rows = [
        {
            "name": name,
            "set": place,
            "measured": measured["active"],
            "active": said[name]["allocated"] / measured["active"] - 1,
            "reserved": said[name]["reserved"] / measured["reserved"] - 1,
            "active_now": again.get(name, said[name])["allocated"] / measured["active"] - 1,
            "same_on_h200": h200[name].get("active") == measured["active"],
        }
        for place in SETS
        for said in [_kept(place, root)]
        for name, measured in _kept(f"{place}.measured", root).items()
        if "error" not in measured
    ]
    return pd.DataFrame(rows)


def compiled_program_errors(root: Path | None = None) -> pd.DataFrame:
    """One row per program whose whole model was compiled (`tests/anybody_compiled.py`) and that the
    simulation followed: `name`, the GiB of active memory that were `measured` on an H200, the error
    of what was said before of `active` and `reserved` memory, and of `active` memory with today's
    code (`active_now`)."""
    said, again = _kept("anybody_compiled", root), _kept("anybody_compiled.in_sample", root)
    rows = [
        {
            "name": name,
            "measured": measured["active"],
            "active": said[name]["allocated"] / measured["active"] - 1,
            "reserved": said[name]["reserved"] / measured["reserved"] - 1,
            "active_now": again[name]["allocated"] / measured["active"] - 1,
        }
        for name, measured in _kept("anybody_compiled.h200.measured", root).items()
        if "error" not in measured | said[name]
    ]
    return pd.DataFrame(rows)


def _kept(name: str, root: Path | None) -> dict[str, Any]:
    path = (root or reading_root()) / "reports" / "predictions" / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))
