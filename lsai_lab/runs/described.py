"""Mappings that show themselves as tables: what a study describes by name, facts of a machine."""

from typing import Any

from lsai_core.base import tables
from lsai_core.base.errors import Known, UnknownName, hint
from lsai_core.config.strict import flatten


class _Tabled(Known):
    """A mapping that shows itself as the table of `_part()`."""

    def _part(self) -> tables.Part:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name[0] == "_":
            raise AttributeError(name)
        said = f'it is ["{name}"]' if name in self else hint(name, self).removeprefix("; ")
        raise UnknownName(f"there is no attribute {name!r}; {said}")

    def __repr__(self) -> str:
        return tables.as_text([self._part()])

    def _repr_html_(self) -> str:
        return tables.as_html([self._part()])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


class Facts(_Tabled):
    """Facts by name; what is not known, and the versions of packages, are there but not shown."""

    def _part(self) -> tables.Part:
        shown = {name: fact for name, fact in self.items() if name != "packages"}
        there = {name: fact for name, fact in flatten(shown).items() if fact not in (None, "", [])}
        rows = [(name, tables.value(fact)) for name, fact in there.items()]
        return tables.Part("", ("fact", "value"), rows)


class Described(_Tabled):
    """What a study describes, a column for each field that any of the values sets."""

    def _part(self) -> tables.Part:
        told = [one.model_dump(exclude_defaults=True) for one in self.values()]
        heads = list(dict.fromkeys(field for row in told for field in row))
        cells = [
            [name, *(_cell(getattr(one, head)) for head in heads)] for name, one in self.items()
        ]
        return tables.Part("", ["name", *heads], cells)


def words(config: dict[str, Any]) -> str:
    """Settings in a line: `precision=bf16, optim.lr=0.001`."""
    return ", ".join(f"{key}={value}" for key, value in flatten(config).items())


def _cell(given: Any) -> Any:
    """A field in words."""
    return words(given) if isinstance(given, dict) else given
