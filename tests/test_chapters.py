"""Chapters as texts and programs: words in Markdown, numbers that are checked, short cells; and the
numbers themselves, executed on the committed records."""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from conftest import CHECKOUT, Project

from lsai_lab.report.numbers import _LINK
from lsai_lab.runs.chapters import read_chapters

CHAPTERS = list(read_chapters(CHECKOUT).values())
OWN = "65-yours.ipynb"  # the one that shows the reader's runs
MOST_LINES = 2200  # of code, in all chapters


def cells(path: Path, kind: str) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def program(source: str) -> str:
    """A cell without its options, which hold captions."""
    return re.sub(r"(?m)^#\|.*\n?", "", source).strip()


def programs(path: Path) -> list[str]:
    return [program(source) for source in cells(path, "code")]


def nodes(path: Path) -> Iterator[ast.AST]:
    for source in programs(path):
        yield from ast.walk(ast.parse(source))


def text(path: Path) -> str:
    return "\n\n".join(cells(path, "markdown"))


each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


@each_chapter
def test_cells_are_short(path: Path) -> None:
    for source in programs(path):
        lines = source.splitlines()
        assert len(lines) <= 15, f"{len(lines)} lines:\n{source}"
        assert max(map(len, lines), default=0) <= 100, source


@each_chapter
def test_a_column_of_the_pdf_holds_every_string_and_remark_of_a_program(path: Path) -> None:
    shown = [each for each in cells(path, "code") if "echo: false" not in each]
    for source in map(program, shown):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            indent = len(token.line) - len(token.line.lstrip())
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                # It may stand alone in the next line, further to the right, before a comma.
                assert indent + len(token.string) <= 50, f"print has 55 signs: {token.string}"


def test_labels_of_figures_are_read_in_print() -> None:
    drawings = (CHECKOUT / "lsai_lab" / "report").rglob("*.py")
    texts = [path.read_text(encoding="utf-8") for path in drawings]
    texts += [source for path in CHAPTERS for source in programs(path)]
    sizes = [float(size) for text in texts for size in re.findall(r"fontsize\W+([\d.]+)", text)]
    assert len(sizes) > 20 and min(sizes) >= 8.5, "7 pt on paper (lsai_lab/report/style.py)"


def test_all_programs_together_are_short() -> None:
    lengths = [len(source.splitlines()) for path in CHAPTERS for source in programs(path)]
    assert sum(lengths) <= MOST_LINES
    assert statistics.median(lengths) <= 7


def sentences(path: Path) -> list[str]:
    """Strings of a chapter's programs that read as sentences: more than eight words, or an end of a
    sentence after three."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()
            if len(words) > 8 or (len(words) > 3 and node.value.rstrip().endswith((".", "!", "?"))):
                found.append(node.value)
    return found


@each_chapter
def test_programs_write_no_sentences(path: Path) -> None:
    names = set()
    for source in programs(path):
        for node in ast.walk(ast.parse(source)):
            names |= {getattr(node, "attr", None)}
            if isinstance(node, ast.FormattedValue):
                assert not any(isinstance(part, ast.IfExp) for part in ast.walk(node)), source
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                for side in (node.left, node.right):
                    is_text = isinstance(side, ast.JoinedStr) or (
                        isinstance(side, ast.Constant) and isinstance(side.value, str)
                    )
                    assert not is_text, source
    assert "say" not in names
    assert not sentences(path)


@each_chapter
def test_a_chapter_tells_the_recorded_runs(path: Path) -> None:
    """Records are in the repository, so nothing depends on whether they are there."""
    if path.name == OWN:
        return
    for source in programs(path):
        tree = ast.parse(source)
        called = {getattr(node, "attr", "") for node in ast.walk(tree)}
        assert not called & {"load", "own_runs", "open_run"}, source
        assert not any(isinstance(node, ast.If) for node in tree.body), source


@each_chapter
def test_numbers_stand_in_the_text_by_name(path: Path) -> None:
    """Each number that a cell defines is read somewhere, and each that is read is defined."""
    defined = set()
    for node in nodes(path):
        called = getattr(getattr(node, "value", None), "func", None)
        if isinstance(node, ast.Assign) and getattr(called, "attr", "") == "number":
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    used = {link["name"] for link in _LINK.finditer(text(path)) if not link["file"]}
    assert used == defined


def ids() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in CHAPTERS:
        found.update(re.findall(r"\{#([\w-]+)", text(path)))
        for source in cells(path, "code"):
            found.update(re.findall(r"(?m)^#\| label: ([\w-]+)", source))
    return found


def test_ids_are_unique_and_every_reference_has_one() -> None:
    there = ids()
    assert there and max(there.values()) == 1, [name for name, n in there.items() if n > 1]
    for path in CHAPTERS:
        whole = "\n".join(cells(path, "markdown") + cells(path, "code"))
        wanted = set(re.findall(r"@((?:sec|fig|tbl|eq)-[\w-]*\w)", whole))
        wanted |= set(re.findall(r"\]\(#((?:sec|fig|tbl)-[\w-]*\w)\)", whole))
        assert wanted <= {*there}, (path.stem, wanted - {*there})


def test_every_figure_and_table_has_a_caption() -> None:
    for path in CHAPTERS:
        for source in cells(path, "code"):
            options = dict(re.findall(r"(?m)^#\| ([\w-]+): (.+)$", source))
            if label := options.get("label"):
                assert options.get("fig-cap" if label.startswith("fig") else "tbl-cap"), label
                assert options.get("fig-alt") or not label.startswith("fig"), label


def test_what_is_cited_is_listed() -> None:
    listed = (CHECKOUT / "reports" / "references.bib").read_text()
    sources = set(re.findall(r"(?m)^@\w+\{(\S+),", listed))
    for path in CHAPTERS:
        cited = set(
            re.findall(r"(?<=[\[ ;])@([a-z]+\d{4}\w+|transformerengine|torchao)", text(path))
        )
        assert cited <= sources, (path.stem, cited - sources)


BEGINS = re.compile(r"# .+\{#sec-[\w-]+\}\n\n\*\*Question\.\*\* [^\n]+\?\n\n\*\*In short\.\*\* ")
ENDS = re.compile(r"\n\n\*\*You can now decide\*\* [^\n]+\.\n\n## Exercises\n")


def test_every_chapter_begins_with_its_question_and_ends_with_what_can_be_decided() -> None:
    for path in CHAPTERS[1:-1]:  # the front page and the appendix are of another kind
        whole = text(path)
        assert BEGINS.match(whole), path.stem
        assert path.name == OWN or ENDS.search(whole), path.stem
        assert path.name == OWN or "> **Answer.**" in whole, path.stem


PLAIN = re.compile(r"(?m)^(```.*?^```|\$\$.*?\$\$)|\$[^$\n]+\$|`[^`\n]+`|\{[^}\n]*\}", re.S)
FRONTED = (
    "With|In|On|At|From|Below|Under|By|For|Without|Timed|Rounded|Compiled|Of|Beside|Against|Where|"
    "Because|If|When|As|Out of|Only|Before|After|Within|To|Near|Among|Above|Even|Then|Here|Indeed|"
    "Moreover|Left|Right|Further|There|Over"
)


def prose(path: Path) -> list[str]:
    """The sentences of a chapter's text, without formulas, code, tables and headings."""
    whole = PLAIN.sub(" X ", text(path))
    whole = re.sub(r"\]\([^)]*\)", "", whole).replace("[", "").replace("]", "")
    found = []
    for block in re.split(r"\n\s*\n|\n(?=[-*>\d] ?)", whole):
        if not block.lstrip().startswith(("#", "|")):
            words = " ".join(re.sub(r"^[\s>*-]+|\*\*", "", block).split())
            found += re.split(r"(?<=[.!?:;])\s+(?=[*_]*[A-Z“(@])", words)
    return [sentence for sentence in found if len(sentence.split()) >= 3]


@each_chapter
def test_prose_is_plain(path: Path) -> None:
    said = prose(path)
    words = sum(len(sentence.split()) for sentence in said)
    counted = re.sub(r"@[\w-]+", "", " ".join(said))
    numbers = len(re.findall(r"(?<![\w-])[+−-]?\d[\d,.]*(?:x|%)?", counted))
    fronted = [each for each in said if re.match(rf"(?:{FRONTED})\b", each)]
    assert not [each for each in said if len(each.split()) > 30]
    assert len(fronted) <= 0.1 * len(said) + 1, fronted
    assert 100 * numbers <= 6 * words, f"{100 * numbers / words:.1f} numbers in 100 words"


def test_the_numbers_of_the_texts_are_those_of_the_records(tmp_path: Path) -> None:
    project = Project(CHECKOUT, {"LSAI_RUNS": str(tmp_path), "LSAI_DATA": str(tmp_path)})
    code, out, err = project.lsai("numbers")
    assert code == 0, (out, err)
    assert re.search(r"\d+ numbers of \d+ chapters", out)
