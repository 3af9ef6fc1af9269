"""Plain text from HTML pages and manual pages: the words in reading order, one block element or paragraph a line.

Enough for training text, not a renderer. HTML: the standard library's parser; the page's frame (navigation, scripts,
header, footer) is dropped. Roff: the man(7) macros and escapes that manual pages use (groff_man(7), groff(7)).
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

SKIPPED = {"head", "script", "style", "nav", "header", "footer", "aside", "button", "noscript", "svg"}
BLOCKS = {"p", "div", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "pre", "br"} | {f"h{n}" for n in range(1, 7)}


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipping = self.literal = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.skipping += tag in SKIPPED
        self.literal += tag == "pre"
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in SKIPPED:
            self.skipping = max(0, self.skipping - 1)
        if tag == "pre":
            self.literal = max(0, self.literal - 1)
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data if self.literal else data.replace("\n", " "))

    def _break(self, tag: str) -> None:
        if not self.skipping and tag in BLOCKS:
            self.parts.append("\n")
        elif not self.skipping and tag in ("td", "th"):
            self.parts.append(" ")


def html_to_text(html: str) -> str:
    """The visible text of an HTML page, one block a line."""
    parser = _Text()
    parser.feed(html)
    parser.close()
    return _tidy("".join(parser.parts))


# Escapes in the order in which they are resolved.
ESCAPES = [
    (re.compile(r"\\[\"#].*"), ""),  # comment
    (re.compile(r"\\f(?:\[[^\]]*\]|\(..|.)"), ""),  # font
    (re.compile(r"\\s(?:[+-]?\d|\[[^\]]*\]|\([+-]?\d\d)"), ""),  # size
    (re.compile(r"\\[mMF](?:\[[^\]]*\]|\(..|.)"), ""),  # colour, font family
    (re.compile(r"\\[hvwlLobDXAZCNxHSR]'[^']*'"), ""),  # motions, drawing, numbered glyphs
    (re.compile(r"\\[nkgV](?:\[[^\]]*\]|\(..|.)"), ""),  # registers
    (re.compile(r"\\[|^&%/,:{}dru)!?acptz]"), ""),  # no visible glyph
]
GLYPHS = {
    'co': '©', 'rg': '®', 'tm': '™', 'bu': '•', 'em': '—', 'en': '–', 'hy': '-', 'mi': '−', 'aq': "'", 'dq': '"',
    'lq': '“', 'rq': '”', 'oq': '‘', 'cq': '’', 'Fo': '«', 'Fc': '»', 'Bq': '„', 'ga': '`', 'aa': '´', 'ha': '^',
    'ti': '~', 'rs': '\\', 'sl': '/', 'ba': '|', 'or': '|', 'at': '@', 'sh': '#', 'Do': '$', 'Eu': '€', 'lB': '[',
    'rB': ']', 'lC': '{', 'rC': '}', 'la': '⟨', 'ra': '⟩', '<=': '≤', '>=': '≥', '!=': '≠', '->': '→', '<-': '←',
    '+-': '±', 'mu': '×', 'di': '÷', 'de': '°', 'if': '∞', 'sq': '□', '*a': 'α', '*b': 'β', '*p': 'π', '*m': 'μ',
    '12': '½', '14': '¼', '34': '¾', 'ss': 'ß', 'sc': '§', 'pl': '+', 'eq': '=', '**': '∗', 'ul': '_', 'u00A0': ' ',
}  # fmt: skip
GLYPH = re.compile(r"\\(?:\[([^\]]+)\]|\((..)|\*(?:\[([^\]]+)\]|\((..)|(.)))")
# Macros whose arguments are text that goes on in the same paragraph; each begins a line of input.
INLINE = {"B", "I", "BR", "BI", "IB", "IR", "RB", "RI", "SM", "SB", "UR", "MT", "ME", "UE", "R", "OP", "MR"}
HEADINGS = {"SH", "SS"}
ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|((?:\\ |\S)+)')
# These end the paragraph; all other requests (hyphenation, tabs, conditions, ...) have no text.
BREAKS = {"PP", "P", "LP", "TP", "IP", "HP", "TQ", "RS", "RE", "br", "sp", "nf", "fi", "EX", "EE", "TH", "SY", "YS"}
DEFINITIONS = {"de", "ig", "am"}  # the lines up to `..` are no text


def roff_to_text(roff: str) -> str:
    """The text of a manual page written with the man(7) macros; paragraphs and literal lines on their own lines."""
    lines: list[str] = [""]
    literal = defining = False
    for line in roff.splitlines():
        if defining:
            defining = not line.startswith("..")
            continue
        if line[:1] not in (".", "'"):
            _append(lines, _unescape(line), new=literal or not line.strip() or line[0] == " ")
            continue
        request, _, rest = line[1:].strip().partition(" ")
        arguments = [a.replace('""', '"') or b for a, b in ARGUMENT.findall(rest.strip())]
        if request in DEFINITIONS:
            defining = True
        elif request in HEADINGS:
            lines += ["", _unescape(" ".join(arguments)), ""]
        elif request in INLINE:
            joint = "" if len(request) == 2 and request not in ("SM", "SB", "UR", "MT", "OP") else " "
            _append(lines, _unescape(joint.join(arguments)), new=literal)
        elif request in BREAKS:
            literal = request in ("nf", "EX") or (literal and request not in ("fi", "EE"))
            lines.append(_unescape(arguments[0]) + " " if request == "IP" and arguments else "")
            if request in ("TH", "SY") and arguments:
                lines[-1] = _unescape(arguments[0])
    return _tidy("\n".join(lines))


def _append(lines: list[str], text: str, new: bool) -> None:
    """Continue the last paragraph, or begin a new line."""
    if new:
        lines.append(text)
    else:
        lines[-1] += f" {text}"


def _unescape(text: str) -> str:
    text = text.replace("\\e", "\\[rs]").replace("\\-", "-").replace("\\.", ".").replace("\\'", "´").replace("\\`", "`")
    text = text.replace("\\ ", " ").replace("\\~", " ").replace("\\0", " ").replace("\\(aq", "'")
    for pattern, replacement in ESCAPES:
        text = pattern.sub(replacement, text)
    return GLYPH.sub(_glyph, text).rstrip("\\")


def _glyph(match: re.Match[str]) -> str:
    name = next(group for group in match.groups() if group)
    if re.fullmatch(r"u[0-9A-F]{4,5}", name):
        return chr(int(name[1:], 16))
    return GLYPHS.get(name, "")


def _tidy(text: str) -> str:
    """Single spaces, no space before punctuation at joints, at most one blank line in a row."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
