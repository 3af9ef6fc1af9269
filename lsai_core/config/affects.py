"""What a field of a config decides, said where the field is defined: `steps: Annotated[int,
Decides("result")]`.

    memory   what one training step takes, on the device and on the host
    speed    how long a step lasts
    result   what is learned, up to the rounding of another order of sums

A field without the mark decides everything, so that a new field is never left out silently;
`Decides()` decides nothing. Searches, predictions and peers keep the fields that matter to them by
`deciding`, never by lists of names.
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
    """Whether the field `name` of `cls` decides `what`; a field that is a config decides what any
    of its fields does."""
    if (
        marks := [mark for mark in cls.model_fields[name].metadata if isinstance(mark, Decides)]
    ) != []:
        return what in marks[0].what
    inner = _config(cls, name)
    return inner is None or any(decides(inner, other, what) for other in inner.model_fields)


def _config(cls: type[BaseModel], name: str) -> type[BaseModel] | None:
    inner = cls.model_fields[name].annotation
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def names_that_decide(cls: type[BaseModel], what: What) -> list[str]:
    """The fields of `cls` that decide `what`, those of a field that is a config by dotted names."""
    names: list[str] = []
    for name in (name for name in cls.model_fields if decides(cls, name, what)):
        inner = _config(cls, name)
        names += (
            [name]
            if inner is None
            else [f"{name}.{other}" for other in names_that_decide(inner, what)]
        )
    return names


def deciding(config: BaseModel, what: What) -> dict[str, Any]:
    """The fields of `config` that decide `what`, resolved, as plain JSON values; the others keep
    their defaults."""
    values = config.model_dump(mode="json")
    kept: dict[str, Any] = {}
    for name in type(config).model_fields:
        if decides(type(config), name, what):
            inner = getattr(config, name)
            kept[name] = deciding(inner, what) if isinstance(inner, BaseModel) else values[name]
    return kept
