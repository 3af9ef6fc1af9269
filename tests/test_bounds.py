"""Numbers beyond any machine are refused where they are given, by the config of every kind of
run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lsai_core.base.errors import UserError
from lsai_core.config.model import LARGEST_FACTOR
from lsai_core.training.combinations import checked
from lsai_lab.runs.kinds import KINDS, get_kind

UPPER = {"maximum", "exclusiveMaximum"}


def numbers(schema: dict[str, Any], whole: dict[str, Any], path: str = "") -> Iterator[Any]:
    """Every number in a JSON schema, with the dotted name of the setting that it is in."""
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    if schema.get("type") in ("integer", "number"):
        yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from numbers(inner, whole, f"{path}.{name}".strip("."))
    for inner in [*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]:
        yield from numbers(inner, whole, path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_count_and_every_time_of_a_config_has_an_end(kind: str) -> None:
    schema = get_kind(kind).config_class().model_json_schema()
    found = dict(numbers(schema, schema))
    counted = {
        path: number
        for path, number in found.items()
        if number["type"] == "integer" or path.endswith(("_s", "_ms", "_gib"))
    }
    assert counted
    assert [path for path, number in counted.items() if not UPPER & number.keys()] == []


def search(**settings: Any) -> Any:
    model = {"preset": "lab-tiny", "vocab_size": 320}
    train = {"model": model, "data": {"vocab_size": 320}}
    data = {"train": train, "measure": "load", **settings}
    return checked(get_kind("model_search").config_class(), data, "here")


def test_every_size_that_a_search_may_try_has_a_shape() -> None:
    for grow in ("all", "n_layers"):
        config = search(grow=grow)
        assert config.sized(config.max_size).model.n_layers == 10_000
    with pytest.raises(UserError, match=f"a scaling factor is at most {LARGEST_FACTOR}"):
        search(grow="all", max_size=LARGEST_FACTOR + 1)
