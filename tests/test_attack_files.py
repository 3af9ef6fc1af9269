"""Random files end in settings that follow them, or in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attack_files import Result, hf_configs, titan_files


@pytest.mark.parametrize("attack", [titan_files, hf_configs])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_files_survive(attack: Callable[[int], Result], seed: int) -> None:
    survived, total, failures = attack(seed)
    assert survived == total == 60, failures
