"""The table of speeds that comes with the package, which `tests/measured_speeds.py` writes."""

import functools
import json
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("measured.json")


@functools.cache
def measured() -> dict[str, Any]:
    """The rates, the costs, and which runs these were calibrated on."""
    return dict(json.loads(TABLE.read_text(encoding="utf-8")))
