"""How objects show themselves: small tables, as HTML in a notebook and as text in a terminal.

Nothing in them is markup, whatever a value holds, and a value takes one line.
"""

from __future__ import annotations

import difflib
import functools
import html
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

LONGEST = 200  # characters of a value
Row = Sequence[Any]


@dataclass(frozen=True)
class Part:
    """A table under a title; without `heads` it has no line of them. `folded`: HTML shows its rows
    when the title is clicked. `note`: a line below."""

    title: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[Row] = field(default_factory=list)
    folded: bool = False
    note: str = ""


class UnknownName(AttributeError):
    """What is asked for behind a dot is not there; a notebook shows the line alone."""

    def _render_traceback_(self) -> list[str]:
        return [f"error: {self}"]


class WrongCall(TypeError):
    """An argument that is not taken, or is missing; a notebook shows the line alone."""

    def _render_traceback_(self) -> list[str]:
        return [f"error: {self}"]


F = TypeVar("F", bound=Callable[..., Any])


def checked_call(function: F, name: str) -> F:
    """The function, called `name` in errors, whose wrong arguments are a `WrongCall`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            signature.bind(*given, **named)
        except TypeError as error:
            raise WrongCall(_wrong_call(signature, name, named, str(error))) from None
        return function(*given, **named)

    return call  # type: ignore[return-value]


def _wrong_call(
    signature: inspect.Signature, name: str, named: Mapping[str, Any], error: str
) -> str:
    """What is wrong with a call, and how it is right."""
    taken = [each for each in signature.parameters.values() if each.name != "self"]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
    known = [each.name for each in taken if each.kind not in variable]
    for unknown in (each for each in named if each not in known):
        near = _near(unknown, known)
        if "overrides" in known and not near.startswith("did you mean"):
            near = f"a setting stands in overrides={{{unknown!r}: {named[unknown]!r:.80}}}; {near}"
        return f"{name} takes no {unknown!r}; {near}"
    plain = [each.replace(annotation=each.empty) for each in taken]
    return f"{name}{inspect.Signature(plain)}: {error}"


def _near(name: str, known: Iterable[str]) -> str:
    """The known names that come near a name, else all."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


class Shown:
    """Base of what shows itself by the tables of `shown()`; wrong arguments of its methods are told
    in one line."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in [*vars(cls).items()]:
            if name[0] != "_" and inspect.isfunction(method):
                setattr(cls, name, checked_call(method, f"{cls.__name__}.{name}"))

    def shown(self) -> Iterable[Part]:
        """The tables, from top to bottom."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """What is not there, with the nearest names. Of what is there, its own error is told."""
        there = [known for known in (*dir(type(self)), *vars(self)) if known[0] != "_"]
        if name in there or name[0] == "_":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        near = _near(name, sorted(there))
        raise UnknownName(f"{type(self).__name__} has no attribute {name!r}; {near}")

    def _repr_html_(self) -> str:
        return as_html(self.shown())

    def __repr__(self) -> str:
        return as_text(self.shown())


def as_html(parts: Iterable[Part]) -> str:
    """The parts as HTML that needs no style sheet."""
    return "\n".join(map(_html, parts))


def as_text(parts: Iterable[Part]) -> str:
    """The parts for a terminal, columns below each other; a blank line in between."""
    return "\n\n".join(text for part in parts if (text := _text(part)))


def value(given: Any) -> str:
    """One value for a reader: numbers with five significant digits and commas, one line."""
    if given is None or (isinstance(given, float) and given != given):
        return "–"
    if isinstance(given, bool) or not isinstance(given, int | float):
        return _line(given)
    if isinstance(given, int):
        return f"{given:,}"
    return f"{given:,.0f}" if abs(given) >= 1e5 else f"{given:.5g}"


def _line(given: Any) -> str:
    text = " ".join(str(given).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _html(part: Part) -> str:
    title, body = html.escape(part.title), _table(part)
    note = f"<p>{html.escape(part.note)}</p>" if part.note else ""
    if part.folded and body:
        return f"<details><summary>{title}</summary>{body}{note}</details>"
    return f"<p><b>{title}</b></p>{body}{note}" if title else body + note


def _table(part: Part) -> str:
    if not part.rows:
        return ""
    head = "".join(f"<th>{html.escape(_line(cell))}</th>" for cell in part.heads)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in part.rows)
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<table>{top}<tbody>{rows}</tbody></table>"


def _cell(given: Any) -> str:
    left = ' style="text-align:left"' if _is_text(given) else ""
    return f"<td{left}>{html.escape(value(given))}</td>"


def _is_text(given: Any) -> bool:
    return isinstance(given, bool) or not isinstance(given, int | float)


def _text(part: Part) -> str:
    heads = [part.heads] if part.heads and part.rows else []
    cells = [[_line(cell) for cell in row] for row in heads]
    cells += [[value(cell) for cell in row] for row in part.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = [all(map(_is_text, column)) for column in zip(*part.rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(row, widths, texts, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([*([part.title] if part.title else []), *lines, *part.note.splitlines()])
