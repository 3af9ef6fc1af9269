"""Which pictures of a notebook go into the book: those that every reader of it can read, and that
do nothing else.

A picture that acts, leads elsewhere or is damaged costs itself, never the page or the PDF.
"""

import base64
import binascii
import io
import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

_DEEPEST = 100  # levels of an SVG
_ACTIVE = {
    "script",
    "foreignobject",
    "iframe",
    "handler",
    "set",
    "animate",
    "animatemotion",
    "animatetransform",
}
# as matplotlib has them
_EMBEDDED = re.compile(r"data:image/(png|jpe?g|gif);base64,[\w+/=\s]*", re.ASCII)
_BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_OUTSIDE = re.compile(r"(?i)@import|\\|url\((?!\s*[\"']?\s*#)")


def safe_svg(drawing: str) -> bytes:
    """`drawing` as UTF-8 if it is a whole SVG without scripts, events, entities, and references to
    anything outside it; else nothing."""
    if not drawing or re.search(r"(?i)<!entity|<\?xml-stylesheet", drawing):
        return b""
    content = drawing.encode(errors="replace")
    try:
        root = ElementTree.fromstring(content)  # entities, the danger of XML, are refused above
    except (ElementTree.ParseError, ValueError, LookupError):
        return b""
    is_safe = _name(root.tag) == "svg" and all(
        _is_safe(element, depth) for element, depth in _walk(root)
    )
    return content if is_safe else b""


def readable_png(encoded: str) -> bytes:
    """The PNG in base64, if it is one from beginning to end; else nothing."""
    from PIL import Image  # with a figure only

    try:
        content = base64.b64decode(encoded)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
            picture.load()
    except (
        binascii.Error,
        OSError,
        SyntaxError,
        ValueError,
        TypeError,
        Image.DecompressionBombError,
    ):
        return b""
    return content


def below_each_other(drawings: str) -> str:
    """SVGs, one after the other, as one, for programs that read a file of it."""
    boxes = [tuple(map(float, each)) for each in _BOX.findall(drawings)]
    wide, high = max(width for width, _ in boxes), sum(height for _, height in boxes)
    places = itertools.accumulate((height for _, height in boxes), initial=0.0)
    below = zip(boxes, places, strict=False)
    sizes = (f'<svg y="{y:g}" width="{box[0]:g}" height="{box[1]:g}"' for box, y in below)
    inner = re.sub("<svg", lambda _: next(sizes), drawings.replace(' width="100%"', ""))
    size = f'width="{wide:g}" height="{high:g}" viewBox="0 0 {wide:g} {high:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{inner}</svg>\n'


def _walk(root: ElementTree.Element) -> Iterator[tuple[ElementTree.Element, int]]:
    waiting = [(root, 0)]
    while waiting:
        element, depth = waiting.pop()
        yield element, depth
        waiting += [(child, depth + 1) for child in element]


def _name(tag: object) -> str:
    """The name of an element or attribute without its namespace."""
    return str(tag).rpartition("}")[2].lower()


def _is_safe(element: ElementTree.Element, depth: int) -> bool:
    tag = _name(element.tag)
    if (
        depth > _DEEPEST
        or tag in _ACTIVE
        or (tag == "style" and _OUTSIDE.search(element.text or ""))
    ):
        return False
    for key, value in element.attrib.items():
        name, target = _name(key), value.strip()
        if name.startswith("on") or _OUTSIDE.search(value):
            return False
        if name in ("href", "src", "base") and not (
            target.startswith("#") or _EMBEDDED.fullmatch(target)
        ):
            return False
    return True
