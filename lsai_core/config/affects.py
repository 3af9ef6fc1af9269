"""What a field of a config affects, stated where the field is defined: `steps: Annotated[int,
Affects("result")]`.

    memory   what one training step takes, on the device and on the host
    speed    how long a step lasts
    result   what is learned, up to the rounding of another order of sums

A field without this annotation affects everything, so that a new field is never left out silently;
`Affects()` means that it affects nothing. Searches, predictions and peers select the fields that
matter to them with `affecting`, never with lists of names.
"""

from typing import Any, Literal

from pydantic import BaseModel

What = Literal["memory", "speed", "result"]


class Affects:
    """An annotation of a field: all that the field affects."""

    def __init__(self, *what: What) -> None:
        self.what = frozenset(what)


class Later:
    """An annotation of a field that came when there were records already.

    At its default it stays out of `key_values`, so that a run key is what it was before.
    """


# The usual annotations: what is learned, how a step is computed, nothing at all; and a field that
# came later.
RESULT, STEP, NOTHING = Affects("result"), Affects("memory", "speed"), Affects()
LATER = Later()


def key_values(config: BaseModel) -> dict[str, Any]:
    """The values of `config` that a run key is made of, resolved, as plain JSON values."""
    values = config.model_dump(mode="json")
    for name, field in type(config).model_fields.items():
        inner = getattr(config, name)
        if isinstance(inner, BaseModel):
            values[name] = key_values(inner)
        later = any(isinstance(note, Later) for note in field.metadata)
        if later and inner == field.get_default(call_default_factory=True):
            del values[name]
    return values


def affects(cls: type[BaseModel], name: str, what: What) -> bool:
    """Whether the field `name` of `cls` affects `what`; a field that is a config affects what any
    of its fields does."""
    if (
        found := [note for note in cls.model_fields[name].metadata if isinstance(note, Affects)]
    ) != []:
        return what in found[0].what
    inner = _config(cls, name)
    return inner is None or any(affects(inner, other, what) for other in inner.model_fields)


def _config(cls: type[BaseModel], name: str) -> type[BaseModel] | None:
    inner = cls.model_fields[name].annotation
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def names_that_affect(cls: type[BaseModel], what: What) -> list[str]:
    """The fields of `cls` that affect `what`, those of a field that is a config by dotted names."""
    names: list[str] = []
    for name in (name for name in cls.model_fields if affects(cls, name, what)):
        inner = _config(cls, name)
        names += (
            [name]
            if inner is None
            else [f"{name}.{other}" for other in names_that_affect(inner, what)]
        )
    return names


def affecting(config: BaseModel, what: What) -> dict[str, Any]:
    """The fields of `config` that affect `what`, resolved, as plain JSON values; the others keep
    their defaults."""
    values = config.model_dump(mode="json")
    kept: dict[str, Any] = {}
    for name in type(config).model_fields:
        if affects(type(config), name, what):
            inner = getattr(config, name)
            kept[name] = affecting(inner, what) if isinstance(inner, BaseModel) else values[name]
    return kept
