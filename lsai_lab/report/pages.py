"""The book without Quarto as a page a chapter: what pandoc split, made whole.

pandoc names its pages by the ids of their first headings. Here they get the names that Quarto gives
them, those of the notebooks; the first becomes the front page, and each gets the contents of the
book, its own sections among them, and a search that works on a file, too.
"""

import json
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

from lsai_core.base.files import write_text

_FRONT = "index.html"
# The title of a part would end the page before it; the contents have it.
_PART = r'(?s)<div class="quarto-book-part">.*?</div>\n?'
# A term is bold, its abbreviation in brackets behind it.
_TERM = r'(?s)<strong>.*?</strong>(?: \([^)]{1,20}\))?|(?<=data-explore=")\w+'
_WITHIN = r"</?(?:a|b|cite|code|em|i|q|span|strong|sub|sup)\b[^>]*>"  # no space stands for these
_NO_TEXT = r"(?s)<(script|style|nav|math|svg|pre|details)\b.*?</\1>|<[^>]+>"


def finish_pages(folder: Path, names: list[str], parts: dict[str, str], title: str) -> None:
    """Finish the pages that pandoc wrote into `folder`. `names`: of the chapters' notebooks, in
    their order; `parts`: the title of the part that begins with a notebook; `title`: HTML that
    stands above the front page's text."""
    sitemap = json.loads((folder / "sitemap.json").read_text(encoding="utf-8"))
    chapters = sitemap["subsections"]
    paths = [chapter["section"]["path"].partition("#")[0] for chapter in chapters]
    wanted = [name.replace(".ipynb", ".html") for name in names]
    # what no notebook wrote is the list of references
    wanted += ["references.html"] * (len(paths) - len(wanted))
    if len(wanted) != len(paths):  # a chapter without a heading is part of the page before it
        wanted = paths
    renamed = dict(zip(paths, wanted, strict=True))
    begun = {name.replace(".ipynb", ".html"): part for name, part in parts.items()}
    pages = {renamed[path]: (folder / path).read_text(encoding="utf-8") for path in paths}
    if _FRONT not in pages:
        pages = {_FRONT: (folder / _FRONT).read_text(encoding="utf-8"), **pages}
    for path in [*paths, _FRONT, "sitemap.json"]:
        (folder / path).unlink(missing_ok=True)

    places = {place: name for name, page in pages.items() for place in _places(page)}
    index: list[dict[str, str]] = []
    for name, page in pages.items():
        if name == _FRONT:
            page = re.sub(r'<a rel="prev".*?</a>', "", page, count=1)
        page = re.sub(_PART, "", page)
        index += _sections(page, name)
        contents = _contents(dict(zip(wanted, chapters, strict=True)), begun, name)
        page = page.replace("<!--contents-->", contents, 1)
        page = page.replace("<!--title-->", title if name == _FRONT else "", 1)
        write_text(folder / name, _relinked(page, renamed, places))
    words = json.dumps(index, ensure_ascii=False).replace("<", "\\u003c")
    write_text(folder / "search.js", f"window.searchIndex = {words};\n")


def _contents(chapters: dict[str, dict[str, Any]], parts: dict[str, str], here: str) -> str:
    """The list of chapters, by the names of their pages, under their parts; of the one that is
    `here`, its sections, too."""
    lines = ["<details open><summary>Contents</summary>", "<ul>"]
    for name, chapter in chapters.items():
        if name in parts:
            lines.append(f'<li class="part">{escape(parts[name])}</li>')
        lines.append(f"<li>{_entry(chapter['section'], name == here)}")
        if name == here and chapter["subsections"]:
            sections = [f"<li>{_entry(each['section'])}</li>" for each in chapter["subsections"]]
            lines += ["<ul>", *sections, "</ul>"]
        lines.append("</li>")
    return "\n".join([*lines, "</ul>", "</details>"])


def _entry(section: dict[str, Any], is_here: bool = False) -> str:
    current = ' aria-current="page"' if is_here else ""
    words = " ".join(filter(None, [section["number"], section["title"]]))
    return f'<a href="{escape(section["path"])}"{current}>{escape(words)}</a>'


def _places(page: str) -> list[str]:
    return re.findall(r'\bid="([^"]+)"', page)


def _relinked(page: str, renamed: dict[str, str], places: dict[str, str]) -> str:
    """`page` with links that lead to the pages as they are called in the end; those to a chapter as
    a whole lead to its beginning. pandoc takes what lies deep in another page, as a table in a
    figure, to be on this one: `places` says on which page each is."""
    own = {"", *_places(page)}

    def link(found: re.Match[str]) -> str:
        return f'href="{renamed.get(found[1], found[1])}{found[2] or ""}"'

    def elsewhere(found: re.Match[str]) -> str:
        return found[0] if found[1] in own else f'href="{places.get(found[1], "")}#{found[1]}"'

    page = re.sub(r'href="#([^"]*)"', elsewhere, page)
    return re.sub(r'href="([\w.-]+\.html)(#[^"]*)?"', link, page)


def _sections(page: str, name: str) -> list[dict[str, str]]:
    """What the search finds on a page: each section's title, text and place, and its `terms`: those
    that it explains, in bold letters, and the names of its explorables."""
    found = []
    main = page.partition("<main")[2].partition("</main>")[0]
    for part in re.split(r'(?=<section id=")', main)[1:]:
        place = re.match(r'<section id="([^"]*)"', part)
        title = re.search(r"(?s)<h[1-6][^>]*>(.*?)</h[1-6]>", part)
        if place and title:
            words = {"title": _text(title[1]), "text": _text(part[title.end() :])}
            words["terms"] = _text(" ".join(re.findall(_TERM, part)))
            found.append({"href": f"{name}#{place[1]}", **words})
    return found


def _text(html: str) -> str:
    return " ".join(unescape(re.sub(_NO_TEXT, " ", re.sub(_WITHIN, "", html))).split())
