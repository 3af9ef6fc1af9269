"""How objects show themselves, by small tables, and what they say of a wrong name behind a dot or a
wrong argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from lsai_core.base.errors import BelowCell, UnknownName, did_you_mean
from lsai_core.base.tables import Part, as_html, as_text


class WrongCall(BelowCell, TypeError):
    """An argument that is not taken, or is missing; a notebook shows the line alone."""


F = TypeVar("F", bound=Callable[..., Any])


def checked_call(function: F, name: str) -> F:
    """The function, called `name` in errors, whose wrong arguments are a `WrongCall`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            bound = signature.bind(*given, **named)
        except TypeError as error:
            raise WrongCall(_wrong_call(signature, name, named, str(error))) from None
        for parameter, argument in bound.arguments.items():
            _require_text(signature.parameters[parameter], argument, name)
        return function(*given, **named)

    return call  # type: ignore[return-value]


def _require_text(parameter: inspect.Parameter, argument: Any, name: str) -> None:
    """`WrongCall` for anything else where a parameter is declared to be a text, or texts."""
    if parameter.annotation not in (str, "str", "str | None"):
        return
    is_several = parameter.kind is inspect.Parameter.VAR_POSITIONAL
    for given in argument if is_several else (argument,):
        if isinstance(given, str) or (given is None and parameter.annotation == "str | None"):
            continue
        texts = [each for each in given if isinstance(each, str)] if _is_listed(given) else []
        cure = f", which stand one by one: {name}({', '.join(map(repr, texts))})" if texts else ""
        what = f"takes names{cure}" if is_several else f"takes a text as {parameter.name!r}"
        raise WrongCall(f"{name} {what}, not {' '.join(repr(given).split()):.80}")


def _is_listed(given: Any) -> bool:
    return isinstance(given, list | tuple | set)


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
    return did_you_mean(name, names) or f"known: {', '.join(names)}"


class _Method:
    """A method that shows itself as its call; Python's own would show the whole object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, owner: Any, _cls: type | None = None) -> Any:
        return self._function if owner is None else _Bound(self._function, owner)


class _Bound:
    """A method of an object."""

    def __init__(self, function: Callable[..., Any], owner: Any) -> None:
        functools.update_wrapper(self, function)
        self.__self__ = owner

    @property
    def __signature__(self) -> inspect.Signature:
        whole = inspect.signature(self.__wrapped__)  # type: ignore[attr-defined]
        return whole.replace(parameters=[*whole.parameters.values()][1:])

    def __get__(self, _owner: Any, _cls: type | None = None) -> _Bound:
        """It is bound already; with this `help` takes it for a method."""
        return self

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.__wrapped__(self.__self__, *given, **named)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        taken = [
            each.replace(annotation=each.empty) for each in self.__signature__.parameters.values()
        ]
        call = f"{type(self.__self__).__name__}.{self.__name__}{inspect.Signature(taken)}"  # type: ignore[attr-defined]
        told = (inspect.getdoc(self) or "").partition("\n\n")[0]
        return "\n".join([f"to be called: {call}", *told.splitlines()])


class Shown:
    """Base of what shows itself by the tables of `_parts()`; wrong arguments of its methods are
    told in one line."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in [*vars(cls).items()]:
            if name[0] != "_" and inspect.isfunction(method):
                setattr(cls, name, _Method(checked_call(method, f"{cls.__name__}.{name}")))

    def _parts(self) -> Iterable[Part]:
        """The tables, from top to bottom."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """What is not there, with the nearest names. Of what is there, its own error is told."""
        there = [known for known in (*dir(type(self)), *vars(self)) if known[0] != "_"]
        if name in there or name[0] == "_":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        near = self._elsewhere(name) or _near(name, sorted(there))
        raise UnknownName(f"{type(self).__name__} has no attribute {name!r}; {near}")

    def _elsewhere(self, name: str) -> str:
        """Where a thing of this name is that the object itself does not have; else nothing."""
        return ""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(type(self), name, None), property):
            raise UnknownName(f"{type(self).__name__}.{name} can only be read")
        super().__setattr__(name, value)

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def __repr__(self) -> str:
        return as_text([part for part in self._parts() if not part.folded])
