"""What a study describes by name, its variants and parts, as a table."""

from typing import Any

from lsai_core.base import tables
from lsai_core.base.errors import Known
from lsai_core.base.files import flatten


class Described(Known):
    """A mapping that shows itself as a table, a column for each field that any of its values
    sets."""

    def shown(self) -> tables.Part:
        """The table."""
        told = [one.model_dump(exclude_defaults=True) for one in self.values()]
        heads = list(dict.fromkeys(field for row in told for field in row))
        cells = [
            [name, *(_cell(getattr(one, head)) for head in heads)] for name, one in self.items()
        ]
        return tables.Part("", ["name", *heads], cells)

    def __repr__(self) -> str:
        return tables.as_text([self.shown()])

    def _repr_html_(self) -> str:
        return tables.as_html([self.shown()])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def words(config: dict[str, Any]) -> str:
    """Settings in a line: `precision=bf16, optim.lr=0.001`."""
    return ", ".join(f"{key}={value}" for key, value in flatten(config).items())


def _cell(given: Any) -> Any:
    """A field in words."""
    return words(given) if isinstance(given, dict) else given
