"""Random files end in settings that follow them, or in one line; `make attack` tries them, too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from attack import CLASSES


@pytest.mark.parametrize("name", ["trainer files", "model configs"])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_files_survive(name: str, seed: int, tmp_path: Path) -> None:
    found = dict(CLASSES[name].attempts(random.Random(seed), 60, tmp_path))
    assert len(found) == 60
    assert {attempt: fault for attempt, fault in found.items() if fault is not None} == {}
