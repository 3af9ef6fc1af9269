"""The base of every config, and its errors in words: which file, which key, what is wrong, what may
have been meant; settings as nested mappings and by keys with dots."""

from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from lsai_core.base.errors import UnknownName, UserError, nearest
from lsai_core.base.tables import Part, as_html, as_text


class Strict(BaseModel):
    """Base of all configs: unknown keys and silent type conversions are errors; instances are
    immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def __init__(self, **settings: Any) -> None:
        """As pydantic's, a wrong setting being a UserError in one line."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _in_one_line(type(self), error, type(self).__name__) from None

    def __getattr__(self, name: str) -> Any:
        """What is no setting, with the nearest names in one line."""
        if name[0] == "_" or name in dir(self):  # the error of a property is its own
            return super().__getattr__(name)  # type: ignore[misc]
        raise UnknownName(_no_setting(type(self), name))

    def __setattr__(self, name: str, value: Any) -> None:
        """Refused in one line: settings stay as they are."""
        if name[0] == "_":
            return super().__setattr__(name, value)
        if name not in dir(self):
            raise UnknownName(_no_setting(type(self), name))
        raise UnknownName(
            f"{type(self).__name__} stays as it is; where a run is planned or predicted, "
            f"overrides={{...}} changes settings"
        )

    # So pydantic knows that it is its own: settings that are read from files do not come here.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __dir__(self) -> list[str]:
        """The fields and what this package adds to them, without pydantic's own names."""
        own = [name for cls in type(self).__mro__ if _is_ours(cls) for name in vars(cls)]
        return sorted(
            {*type(self).model_fields, *(name for name in own if name[0] != "_")} - {"model_config"}
        )

    def _parts(self) -> list[Part]:
        """The settings by dotted key, those that differ from their defaults first."""
        changed = flatten(self.model_dump(mode="json", exclude_defaults=True))
        rest = flatten(self.model_dump(mode="json"))
        usual = [item for item in rest.items() if item[0] not in changed]
        name = type(self).__name__
        named = [f"{key}={value}" for key, value in usual if "." not in key]
        more = f", … ({len(usual)} in all)" if len(usual) > len(named) else ""
        note = f"at their defaults: {', '.join(named)}{more}" if usual else ""
        heads, rows = ("setting", "value"), list(changed.items())
        first = Part(name, heads, rows, note=note, by_row=True)
        return [first, Part(f"{len(usual)} defaults", heads, usual, folded=True, by_row=True)]

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def __str__(self) -> str:
        return as_text([part for part in self._parts() if not part.folded])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows in a terminal."""
        printer.text(str(self))


def _no_setting(cls: type[BaseModel], name: str) -> str:
    return f"{cls.__name__} has no attribute {name!r}{_did_you_mean(cls, (name,))}"


def _is_ours(cls: type) -> bool:
    return issubclass(cls, Strict) and cls is not Strict


T = TypeVar("T", bound=BaseModel)


def validated(cls: type[T], data: dict[str, Any], where: str) -> T:
    """Build `cls` from plain data; a bad key becomes one `UserError` line that names `where` and
    the key."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise _in_one_line(cls, error, where) from None


def _in_one_line(cls: type[BaseModel], error: ValidationError, where: str) -> UserError:
    return UserError(f"{where}: " + "; ".join(_explain(cls, item) for item in error.errors()))


def _explain(cls: type[BaseModel], item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "config"
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r}" + _did_you_mean(cls, item["loc"])
    if item["type"] == "missing":
        return f"{key}: {item['msg']}"
    message = item["msg"].removeprefix("Value error, ")
    return (
        f"{key}: {message}"
        if item["type"] == "value_error"
        else f"{key}: {message}, got {item['input']!r}"
    )


def dotted(cls: type[BaseModel], before: str = "") -> list[str]:
    """The keys of all settings below `cls`, with their dots."""
    keys = []
    for name, field in cls.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += dotted(inner, f"{before}{name}.")
        else:
            keys.append(f"{before}{name}")
    return keys


def _did_you_mean(cls: type[BaseModel], loc: tuple[Any, ...]) -> str:
    current: Any = cls
    for part in loc[:-1]:
        field = getattr(current, "model_fields", {}).get(part)
        # What is no field is a place in a list or a key of a mapping: the items' type is the last
        # argument of its own.
        current = field.annotation if field is not None else next(reversed(get_args(current)), None)
    names = list(getattr(current, "model_fields", {}))
    place = "".join(f"{part}." for part in loc[:-1])
    inner = dotted(cls) if len(loc) == 1 else []  # perhaps a setting of a part, without its name
    if close := nearest(loc[-1], [*names, *inner]):
        return f" (did you mean {' or '.join(repr(f'{place}{name}') for name in close)}?)"
    return f" (known: {', '.join(names)})" if names else ""


def changed_settings(before: Strict, after: Strict) -> dict[str, Any]:
    """The settings by dotted key in which `after` is another than `before`, as JSON values."""
    first, second = (flatten(each.model_dump(mode="json")) for each in (before, after))
    return {key: value for key, value in second.items() if first.get(key) != value}


def nested(path: str, value: Any) -> dict[str, Any]:
    """`value` at a path with dots: `("optim.lr", 1)` is `{"optim": {"lr": 1}}`."""
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, its keys with dots: the reverse of `nested`."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= (
            flatten(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
        )
    return flat


def deep_merge(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """`override` laid over `base`, mapping by mapping; neither argument is changed."""
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        merged[key] = (
            deep_merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged
