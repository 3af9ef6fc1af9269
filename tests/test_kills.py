"""Kills at random times cost time only. LSAI_TEST_KILLS sets how many (`make attack` makes 100)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from attack import CLASSES

KILLS = int(os.environ.get("LSAI_TEST_KILLS", "20"))


@pytest.mark.slow
@pytest.mark.timeout(600 + 15 * KILLS)
def test_kills_at_random_times_cost_time_only(tmp_path: Path) -> None:
    found = list(CLASSES["kills"].attempts(random.Random(23), KILLS, tmp_path))
    assert len(found) == KILLS
    assert [attempt for attempt in found if attempt[1] is not None] == []
