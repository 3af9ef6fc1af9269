"""Wrong arguments of what a person calls, told in one line: what is meant, or what is missing."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from lsai_core.base.errors import UserError, hint

F = TypeVar("F", bound=Callable[..., Any])


def checked_call(function: F, name: str) -> F:
    """The function, called `name` in errors: arguments that it does not take, or that are missing,
    are a UserError instead of a TypeError."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            signature.bind(*given, **named)
        except TypeError as error:
            raise UserError(_told(signature, name, named, str(error))) from None
        return function(*given, **named)

    return call  # type: ignore[return-value]


def _told(signature: inspect.Signature, name: str, named: dict[str, Any], error: str) -> str:
    """What is wrong with a call, and how it is right."""
    known = [each for each in signature.parameters if each != "self"]
    by_name = [
        each.name
        for each in signature.parameters.values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and each.name != "self"
    ]
    for unknown in (each for each in named if each not in by_name):
        near = hint(unknown, by_name) if by_name else ""
        if "overrides" in known and not difflib.get_close_matches(unknown, by_name):
            near = f"; a setting stands in overrides={{{unknown!r}: {named[unknown]!r:.80}}}" + near
        return f"{name} takes no {unknown!r}{near}"
    rest = signature.replace(
        parameters=[
            each.replace(annotation=each.empty)
            for each in signature.parameters.values()
            if each.name != "self"
        ],
        return_annotation=signature.empty,
    )
    return f"{name}{rest}: {error}"
