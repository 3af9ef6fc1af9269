"""How words of a notebook become a plan: overrides as a person or papermill gives them, and which
part of a study is meant where none is named."""

from collections.abc import Mapping, Sequence
from typing import Any

from lsai_core.base.files import deep_merge, flatten, nested
from lsai_lab.project.files import parse_value
from lsai_lab.runs.study import Study, matching


def first_part(study: Study, variants: Sequence[str]) -> str:
    """The first part that measures one of the variants (names or patterns); the first of all, where
    none does."""
    parts = [part for part in study.parts if matching(study.measured(part), variants)]
    return next(iter(parts or study.parts))


def as_mapping(overrides: Any) -> Any:
    """Overrides as papermill gives them on its command line: a text of YAML is read."""
    if isinstance(overrides, str):
        return parse_value(overrides) if overrides else {}
    return {} if overrides is None else overrides


def as_nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides by dotted key as one nested mapping; a text is read as on the command line, for
    papermill reads `1e-3` as YAML 1.1 does, as a text."""
    changes: dict[str, Any] = {}
    for key, value in flatten(dict(overrides)).items():
        read = parse_value(value) if isinstance(value, str) else value
        changes = deep_merge(changes, nested(key, read))
    return changes


def about(name: str | None, tags: Sequence[str], note: str | None) -> dict[str, Any]:
    """What a person calls a run, as far as it was given."""
    told = {"name": name, "tags": [tags] if isinstance(tags, str) else list(tags), "note": note}
    return {key: value for key, value in told.items() if value}
