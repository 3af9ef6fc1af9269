"""Where in a cell the quotes stand in which the cursor is: an argument of a call, a key in
brackets, one side of a comparison. The cell up to the cursor is closed and read as Python."""

import ast
import re
import textwrap
from dataclasses import dataclass
from typing import Any

_MARK = "\ue000"  # stands where the cursor is, in no text that a person writes
_NAME = "name_that_the_cursor_is_in"
_BEHIND_A_DOT = re.compile(r"[\w\])]\.(\w*)$")
_MOST_LINES = 60  # of a cell, before the cursor
# A comment, a string that ends or does not, a bracket.
_PIECE = re.compile(
    r"""(?s)\#[^\n]*|('{3}|"{3}|'|")(?:\\.|(?!\1).)*?(?:\1|(?P<open>\Z))|[\[({]|[\])}]"""
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_AROUND = (ast.Dict, ast.List, ast.Tuple, ast.Starred, ast.keyword)


@dataclass(frozen=True)
class Place:
    """Quotes with `word` in them so far, in `around`: a call (`argument`: its number, or its name),
    brackets behind a value, or a comparison. In a mapping they are its key, or the value of `key`;
    `listed`: they are one of several."""

    word: str
    around: ast.Call | ast.Subscript | ast.Compare
    argument: int | str = 0
    is_key: bool = False
    key: str | None = None
    listed: bool = False


def place_of(text: str) -> Place | None:
    """The place at the end of `text`; None outside of quotes, or where no call, brackets or
    comparison are around them."""
    tree = _read(text)
    if tree is None:
        return None
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    inner = next(filter(_marked_text, above), None)
    if inner is None:
        return None
    found: dict[str, Any] = {}  # of a Place
    node: ast.AST = inner
    while isinstance(outer := above.get(node), _AROUND):
        if isinstance(outer, ast.Dict):
            found |= _in_mapping(outer, node)
        elif isinstance(outer, ast.keyword):
            found["argument"] = outer.arg or ""
        else:
            found["listed"] = True
        node = outer
    if isinstance(outer, ast.Call) and node in outer.args:
        found["argument"] = outer.args.index(node)
    if not isinstance(outer, ast.Call | ast.Subscript | ast.Compare) or node in _own(outer):
        return None
    return Place(_marked_text(inner).removesuffix(_MARK), outer, **found)


def before_dot(text: str) -> tuple[ast.expr, str] | None:
    """What stands before a dot at the end of `text`, and the name that is begun behind it; None if
    there is none."""
    begun = _BEHIND_A_DOT.search(text)
    if begun is None or (tree := _read(text[: begun.start(1)], _NAME, in_quotes=False)) is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == _NAME:
            return node.value, begun[1]
    return None


def _own(outer: ast.AST) -> list[ast.AST]:
    """What is called, and what brackets stand behind."""
    return [each for name in ("func", "value") if (each := getattr(outer, name, None)) is not None]


def _in_mapping(mapping: ast.Dict, node: ast.AST) -> dict[str, Any]:
    """Of a place: whether a part of a mapping is its key, or of which key it is the value."""
    if node in mapping.keys:
        return {"is_key": True}
    (key,) = (key for key, each in zip(mapping.keys, mapping.values, strict=True) if each is node)
    return {"key": key.value if isinstance(key, ast.Constant) else ""}


def _read(text: str, mark: str = _MARK, in_quotes: bool = True) -> ast.AST | None:
    """The cell up to the cursor, then the mark, closed, as a tree; None if the cursor is in no
    quotes (or in some), or the lines before it are no Python."""
    brackets: list[str] = []
    quotes = ""
    for found in _PIECE.finditer(text):
        if found[0] in _CLOSING:
            brackets.append(_CLOSING[found[0]])
        elif found[0] in (")", "]", "}"):
            brackets = brackets[:-1]
        elif found["open"] is not None:
            quotes = found[1]
    if in_quotes is not bool(quotes):
        return None
    lines = (text + mark + quotes).split("\n")[-_MOST_LINES:]
    return _first_that_parses(lines, "".join(reversed(brackets)))


def _first_that_parses(lines: list[str], closing: str) -> ast.AST | None:
    """The tree of as many of the last lines as are Python; the quotes may be the key of a mapping,
    the line the head of a statement."""
    ends = [before + closing + after for before in (": 0", "") for after in ("", ": pass")]
    for begin in range(len(lines)):
        source = textwrap.dedent("\n".join(lines[begin:]))
        for end in ends if closing[:1] == "}" else ends[2:]:
            try:
                return ast.parse(source + end)
            except SyntaxError:
                continue
    return None


def _marked_text(node: ast.AST) -> str:
    """The text with the mark, if it is one; else nothing."""
    text = node.value if isinstance(node, ast.Constant) else None
    return text if isinstance(text, str) and text.endswith(_MARK) else ""
