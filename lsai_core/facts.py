"""What a field of a config decides, said where the field is defined: `steps: Annotated[int, Decides("result")]`.

    memory   what one training step takes, on the device and on the host
    speed    how long a step lasts
    result   what is learned, up to the rounding of another order of sums

A field without the mark decides everything, so that a new field is never left out silently; `Decides()` decides nothing.
Searches, predictions and peers keep the fields that matter to them by `deciding`, never by lists of names.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

What = Literal["memory", "speed", "result"]


class Decides:
    """The mark: all that a field decides."""

    def __init__(self, *what: What) -> None:
        self.what = frozenset(what)


def decides(cls: type[BaseModel], name: str, what: What) -> bool:
    """Whether the field `name` of `cls` decides `what`; a field that is a config decides what any of its fields does."""
    field = cls.model_fields[name]
    if (marks := [mark for mark in field.metadata if isinstance(mark, Decides)]) != []:
        return what in marks[0].what
    inner = field.annotation
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return any(decides(inner, other, what) for other in inner.model_fields)
    return True


def deciding(config: BaseModel, what: What) -> dict[str, Any]:
    """The fields of `config` that decide `what`, resolved, as plain JSON values; the others keep their defaults."""
    values = config.model_dump(mode="json")
    kept: dict[str, Any] = {}
    for name in type(config).model_fields:
        if decides(type(config), name, what):
            inner = getattr(config, name)
            kept[name] = deciding(inner, what) if isinstance(inner, BaseModel) else values[name]
    return kept
