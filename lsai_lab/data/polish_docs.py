"""`polish-docs`: real Polish text that any Debian or Ubuntu machine can fetch without root.

The help of LibreOffice (HTML) and manual pages (roff: the macros and escapes of groff_man(7) and
groff(7)) become plain text, one block or paragraph a line, without the page's frame. That happens
once: the texts stay in the raw cache.
"""

import gzip
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from filelock import FileLock

from lsai_core.base.errors import UserError
from lsai_core.base.files import atomic_writer
from lsai_lab.data.documents import Corpus, progress_bar
from lsai_lab.data.local import json_texts
from lsai_lab.project.files import content_hash

PACKAGES = ("libreoffice-help-pl", "manpages-pl")
MIN_CHARS = 200  # shorter pages are redirections (".so man1/other.1") and stubs


def open_corpus(raw: Path, progress: bool) -> Corpus:
    """The Polish documentation packages of this machine's distribution."""
    path = raw / "polish-docs" / "documents.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            _fetch(path, progress)
    try:
        packages = sorted({json.loads(line)["meta"]["package"] for line in path.open("rb")})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error!r}); delete it to fetch it again") from None
    description = {"kind": "polish-docs", "packages": packages, "bytes": path.stat().st_size}
    return Corpus(
        content_hash(path).hexdigest(), description, lambda: json_texts(path), download=path
    )


def _fetch(path: Path, progress: bool) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unpack-") as name:
        folder = Path(name)
        _call(
            ["apt-get", "download", *PACKAGES],
            folder,
            "is the network up, and has `apt-get update` been run?",
        )
        packages = sorted(folder.glob("*.deb"))
        count = 0
        with atomic_writer(path) as file:
            for package in packages:
                files = folder / package.stem
                _call(
                    ["dpkg-deb", "-x", package.name, files.name],
                    folder,
                    "the package may be damaged, try again",
                )
                for text in progress_bar(
                    progress, _pages(files), desc=package.name.split("_")[0], unit=" pages"
                ):
                    record = {"text": text, "meta": {"package": package.stem}}
                    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                    count += 1
            if not count:
                raise UserError(
                    f"{', '.join(p.name for p in packages)} hold no HTML or manual pages"
                )


def _pages(folder: Path) -> Iterator[str]:
    """The texts of all distinct pages, sorted by path."""
    seen: set[str] = set()
    for path in sorted(folder.rglob("*")):
        text = ""
        if path.is_file() and not path.is_symlink():
            if path.suffix == ".html":
                text = html_to_text(path.read_text(encoding="utf-8", errors="replace"))
            elif path.suffix == ".gz" and "man" in path.parts:
                text = roff_to_text(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))
        if len(text) >= MIN_CHARS and text not in seen:
            seen.add(text)
            yield text


def _call(command: list[str], folder: Path, hint: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        ways = (
            "use data.source stdlib, file:<path> or speakleash:<name>, or copy data/datasets/ "
            "from a machine with it"
        )
        raise UserError(
            f"polish-docs needs {command[0]}, which this machine lacks; {ways}"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"`{' '.join(command)}` failed: {lines[-1]}; {hint}")


SKIPPED = {
    "head",
    "script",
    "style",
    "nav",
    "header",
    "footer",
    "aside",
    "button",
    "noscript",
    "svg",
}
BLOCKS = {"p", "div", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "pre", "br"} | {
    f"h{n}" for n in range(1, 7)
}


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipping = self.literal = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]], step: int = 1) -> None:
        self.skipping = max(0, self.skipping + step * (tag in SKIPPED))
        self.literal = max(0, self.literal + step * (tag == "pre"))
        if not self.skipping and tag in BLOCKS | {"td", "th"}:
            self.parts.append("\n" if tag in BLOCKS else " ")

    def handle_endtag(self, tag: str) -> None:
        self.handle_starttag(tag, [], -1)

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data if self.literal else data.replace("\n", " "))


def html_to_text(html: str) -> str:
    """The visible text of an HTML page, one block a line."""
    parser = _Text()
    parser.feed(html)
    parser.close()
    return _tidy("".join(parser.parts))


# Escapes without text: comments, fonts and colours and registers, sizes, motions and drawing, no
# visible glyph.
ESCAPES = (
    r"\\[\"#].*",
    r"\\[fmMFnkgV](?:\[[^\]]*\]|\(..|.)",
    r"\\s(?:[+-]?\d|\[[^\]]*\]|\([+-]?\d\d)",
    r"\\[hvwlLobDXAZCNxHSR]'[^']*'",
    r"\\[|^&%/,:{}dru)!?acptz]",
)
GLYPHS = {
    "co": "©",
    "rg": "®",
    "tm": "™",
    "bu": "•",
    "em": "—",
    "en": "–",
    "hy": "-",
    "mi": "−",
    "aq": "'",
    "dq": '"',
    "lq": "“",
    "rq": "”",
    "oq": "‘",
    "cq": "’",
    "Fo": "«",
    "Fc": "»",
    "Bq": "„",
    "ga": "`",
    "aa": "´",
    "ha": "^",
    "ti": "~",
    "rs": "\\",
    "sl": "/",
    "ba": "|",
    "or": "|",
    "at": "@",
    "sh": "#",
    "Do": "$",
    "Eu": "€",
    "lB": "[",
    "rB": "]",
    "lC": "{",
    "rC": "}",
    "la": "⟨",
    "ra": "⟩",
    "<=": "≤",
    ">=": "≥",
    "!=": "≠",
    "->": "→",
    "<-": "←",
    "+-": "±",
    "mu": "×",
    "di": "÷",
    "de": "°",
    "if": "∞",
    "sq": "□",
    "*a": "α",
    "*b": "β",
    "*p": "π",
    "*m": "μ",
    "12": "½",
    "14": "¼",
    "34": "¾",
    "ss": "ß",
    "sc": "§",
    "pl": "+",
    "eq": "=",
    "**": "∗",
    "ul": "_",
    "u00A0": " ",
}
GLYPH = re.compile(r"\\(?:\[([^\]]+)\]|\((..)|\*(?:\[([^\]]+)\]|\((..)|(.)))")
# Macros whose arguments are text that goes on in the same paragraph; each begins a line of input.
JOINED = {"BR", "BI", "IB", "IR", "RB", "RI", "ME", "UE", "MR"}
INLINE = JOINED | {"B", "I", "R", "SM", "SB", "UR", "MT", "OP"}
ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|((?:\\ |\S)+)')
# These end the paragraph; all other requests (hyphenation, tabs, conditions, ...) have no text.
BREAKS = {
    "PP",
    "P",
    "LP",
    "TP",
    "IP",
    "HP",
    "TQ",
    "RS",
    "RE",
    "br",
    "sp",
    "nf",
    "fi",
    "EX",
    "EE",
    "TH",
    "SY",
    "YS",
}


def roff_to_text(roff: str) -> str:
    """The text of a manual page written with the man(7) macros; paragraphs and literal lines on
    their own lines."""
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
        if request in ("de", "ig", "am"):  # the lines up to `..` are no text
            defining = True
        elif request in ("SH", "SS"):
            lines += ["", _unescape(" ".join(arguments)), ""]
        elif request in INLINE:
            _append(
                lines, _unescape(("" if request in JOINED else " ").join(arguments)), new=literal
            )
        elif request in BREAKS:
            literal = request in ("nf", "EX") or (literal and request not in ("fi", "EE"))
            lines.append(_unescape(arguments[0]) + " " if request == "IP" and arguments else "")
            if request in ("TH", "SY") and arguments:
                lines[-1] = _unescape(arguments[0])
    return _tidy("\n".join(lines))


def _append(lines: list[str], text: str, new: bool) -> None:
    """Continue the last paragraph, or begin a new line."""
    lines[-1:] = [lines[-1], text] if new else [f"{lines[-1]} {text}"]


def _unescape(text: str) -> str:
    text = (
        text.replace("\\e", "\\[rs]")
        .replace("\\-", "-")
        .replace("\\.", ".")
        .replace("\\'", "´")
        .replace("\\`", "`")
    )
    text = text.replace("\\ ", " ").replace("\\~", " ").replace("\\0", " ").replace("\\(aq", "'")
    for pattern in ESCAPES:
        text = re.sub(pattern, "", text)
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
