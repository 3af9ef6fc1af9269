"""Public models' `config.json`: which are predicted, with how many parameters, and why others are
refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_shapes import SHAPES, found_for

from lsai_core.base.errors import UserError

SERVED = [name for name, shape in SHAPES.items() if not shape.refused]
REFUSED = [name for name, shape in SHAPES.items() if shape.refused]


@pytest.mark.parametrize("name", SERVED)
def test_parameters_are_those_of_the_published_weights(name: str, tmp_path: Path) -> None:
    assert found_for(name, tmp_path)["parameters"] == SHAPES[name].parameters


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_its_reason_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=SHAPES[name].refused) as error:
        found_for(name, tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_nearly_all_public_shapes_are_served() -> None:
    assert len(SHAPES) >= 37 and len(SERVED) >= 32


FEW = ("Llama 3.2 1B", "Qwen2.5 0.5B", "Pythia 160M")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in SERVED]
)
def test_a_step_of_two_layers_is_predicted(name: str, tmp_path: Path) -> None:
    found = found_for(name, tmp_path, layers=2)
    assert found["allocated_gib"] > 8 * found["parameters"] / 2**30  # bf16: weights to moments
