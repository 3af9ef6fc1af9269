"""Injections into the report: text of a record that wants to be markup, settings, code or a formula
of a spreadsheet.

A small book shows the records of a study in every way that chapters do: tables, sentences, boxes,
links, lists, figures, and the pages of runs. It is made once with a harmless word in a foreign
record, and again with each text in its place. The pages must be the same, character by character,
but for that word: the text stands where the word stood, and nothing else moved.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import html.parser
import io
import json
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lsai_lab.project.files import PAGE_FOLDER

CHECKOUT = Path(__file__).resolve().parent.parent
WORD, FOREIGN = "Harmless", "foreign"
LIMIT_S = 60.0
# What each program that reads a chapter could take for its own; `EVIL` becomes a title, an address,
# an author.
TEXTS = [
    "---\r\ntitle: EVIL\r\nauthor: EVIL\r\ncss: http://evil.example/x.css\r\n---\r\n",
    "a\r\n\r\n---\r\ntitle: EVIL\r\n---\r\n\r\n",
    "---\rtitle: EVIL\r---\r",
    "\n\n---\nbibliography: /etc/passwd\n...\n\n",
    "\u2028---\u2028title: EVIL\u2028---\u2028",
    "---",
    "...",
    "\x85---\x85title: EVIL\x85---\x85",
    "\x0b---\x0btitle: EVIL\x0b---",
    "% EVIL\n% EVIL",
    "---\x0c\ntitle: EVIL\n---",
    r"\renewcommand{\times}{+}",
    r"\renewcommand{\frac}[2]{#2/#1}",
    r"$\renewcommand{\times}{+}$",
    r"\newcommand{\a}{\a x}\a",
    r"\def\a{\a\a}\a",
    r"$\def\a{\a\a}\a$",
    r"\let\frac\over",
    r"\begin{equation}x",
    r"\(x\) \[y\]",
    "$",
    "$$",
    "$x$",
    "\\",
    "\\\\\\",
    "[" * 20,
    "[" * 5000,
    "[" * 18 + "]" * 18,
    "`" * 5000,
    "*" * 5000,
    "_" * 5000,
    "<" * 5000,
    "![" * 500,
    "(" * 5000,
    "{" * 5000,
    '"' * 999,
    "'" * 999,
    "~" * 999,
    "^" * 999,
    "&" * 999,
    "**__" * 500,
    "[](" * 500,
    "[^" * 300,
    "<a>" * 300,
    "@" * 300,
    ">" * 300,
    "<script>document.title='EVIL'</script>",
    "<img src=x onerror=alert(1)>",
    "<!--",
    "-->",
    "</td></tr></table>",
    "<style>*{}</style>",
    "```{=html}\n<script>EVIL</script>\n```",
    "`<b>`{=html}",
    "`#panic()`{=typst}",
    "```\nx",
    "~~~",
    "    code",
    "\tcode",
    "[x](javascript:EVIL)",
    "![x](/etc/hostname)",
    "![x](http://evil.example/p.png)",
    "[x]: http://evil.example",
    "<http://evil.example>",
    "http://evil.example/",
    "www.evil.example",
    "[^1]",
    "[^1]: note",
    "^[note]",
    "[x][y]",
    "[x]{.csv}",
    '[x]{onclick="EVIL"}',
    "a@evil.example",
    "| a | b |\n|---|---|\n| c | d |",
    "a | b",
    "|",
    "\\|",
    "+---+\n| a |\n+---+",
    "# EVIL {#sec-one}",
    "EVIL\n====",
    "EVIL\n----",
    "* a\n* b",
    "1. a",
    "(1) a",
    "a) b",
    "#. a",
    "(@) a",
    "- a",
    "+ a",
    "> **Answer.** EVIL",
    "Term\n: definition",
    "Table: EVIL",
    ": EVIL",
    ":::",
    "::: {#fig-one}",
    "\n:::\n\n# EVIL\n",
    "@fig-one",
    "[@dao2022flashattention]",
    "-@sec-one",
    "@nobody2000",
    "{{< include /etc/hostname >}}",
    "{{< meta title >}}",
    "#| label: fig-one",
    "*[HTML]: EVIL",
    "**",
    "*a",
    "_",
    "__a",
    "~~",
    "H~2",
    "x^2",
    "'a \"b",
    "a's 5\" b's",
    "a -- b --- c",
    "...and",
    "&lt;script&gt;",
    "&#60;script&#62;",
    "&amp;",
    "&",
    "\u202eEVIL",
    "\u200b\u2066x",
    "\x1b[31mred\x1b]0;EVIL\x07",
    "a\x00b\x08",
    "\ufffe",
    '=HYPERLINK("http://evil.example")',
    "+1+cmd|' /C calc'!A0",
    "@SUM(1)",
    "-1+2",
    "-1.5",
    "\t=1",
    "=",
    "x" * 15_000,
    "ż" * 3_000,
    "𝕏😀",
    "](http://evil.example)",
    ")",
    "a]",
    "{",
    "}}",
    "#",
    '#import "x"',
    '#link("x")[y]',
    "<label>",
    '$#panic("x")$',
    "\\u{0}",
    "%s %d {0}",
    "<%= 1 %>",
]
MARKS = "\\`*_{}[]()<>#+-.!|$@^~&'\":=%/ ab1\n\r\t\u2028"


def _random_text(chance: random.Random) -> str:
    return "".join(chance.choice(MARKS) for _ in range(chance.randint(1, 60)))


FIELDS = (
    "reason",
    "results.disturbed",
    "results.device",
    "results.attention_kernel",
    "config.data.source",
    "config.precision",
    "env.gpu",
    "env.cpu",
    "env.host",
    "env.torch",
    "metrics.backend",
    "metrics.reason",
    "kernels.name",
    "kernels.class",
    "summary.command",
    "run.note",
    "run.tags",
)


def write_record(root: Path, machine: str, variant: str, field: str, text: str) -> None:
    """A failed attention run of `machine` with `text` in one field and words in all others."""
    from lsai_lab.runs.records import RunId, Summary

    said = {name: text if name == field else f"plain {name.rpartition('.')[2]}" for name in FIELDS}
    run = RunId("memory", variant, key="abc")
    folder = root / "reports" / "recorded" / machine / "memory" / run.folder
    folder.mkdir(parents=True)
    results = {
        name: said[f"results.{name}"] for name in ("disturbed", "device", "attention_kernel")
    }
    started = "2026-01-01T00:00:00+00:00"
    Summary(
        run,
        "attention",
        "failed",
        said["reason"],
        started,
        1.0,
        said["summary.command"],
        {},
        results,
    ).write(folder)
    row = {
        "step": 0,
        "measure": "time",
        "outcome": "failed",
        "mask": "full",
        "window": None,
        "length": 5,
        "tflops": 1.0,
    }
    files: dict[str, Any] = {
        "config.json": {
            "data": {"source": said["config.data.source"]},
            "precision": said["config.precision"],
        },
        "env.json": {name: said[f"env.{name}"] for name in ("gpu", "cpu", "host", "torch")},
        "run.json": {"note": said["run.note"], "tags": [said["run.tags"]]},
        "metrics.jsonl": row
        | {"backend": said["metrics.backend"], "reason": said["metrics.reason"]},
        "kernels.json": {
            "per": "step",
            "kernels": [
                {
                    "name": said["kernels.name"],
                    "class": said["kernels.class"],
                    "ms": 1.0,
                    "calls": 2.0,
                }
            ],
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value) + "\n")


class Book:
    """A report of one chapter over two records, one of them foreign."""

    def __init__(self, folder: Path) -> None:
        self.root, self.folder = folder / "project", folder
        for name in ("params", "notebooks"):
            shutil.copytree(CHECKOUT / name, self.root / name)
        reports = self.root / "reports"
        reports.mkdir()
        for path in (CHECKOUT / "reports").iterdir():
            if path.is_file():
                shutil.copy(path, reports)
        settings = yaml.safe_load((reports / "_quarto.yml").read_text())
        settings["book"]["chapters"] = ["one.ipynb"]
        (reports / "_quarto.yml").write_text(yaml.safe_dump(settings, sort_keys=False))
        (folder / "runs").mkdir()
        places = {
            "LSAI_ROOT": self.root,
            "LSAI_RUNS": folder / "runs",
            "LSAI_DATA": folder / "data",
            PAGE_FOLDER: self.root / "notebooks",  # as a chapter that is executed for the report
        }
        os.environ |= {name: str(path) for name, path in places.items()}
        write_record(self.root, "ours", "baseline", "", "")

    def made(self, field: str, text: str, formats: tuple[str, ...] = ("html",)) -> dict[str, str]:
        """The files of the report with `text` in the foreign record's `field`, by their path."""
        from lsai_lab.report import load
        from lsai_lab.report.engines import HTML, PDF
        from lsai_lab.report.render import render
        from lsai_lab.report.runpages import write_run_pages
        from lsai_lab.report.to_markdown import to_markdown
        from lsai_lab.runs.records import recorded_runs

        shutil.rmtree(self.root / "reports" / "recorded" / FOREIGN, ignore_errors=True)
        write_record(self.root, FOREIGN, "bf16", field, text)
        load._committed.cache_clear()
        reports, out = self.root / "reports", self.folder / "out"
        for old in (out, reports / "files", reports / "data", reports / "runs"):
            shutil.rmtree(old, ignore_errors=True)
        nbformat.write(chapter(), self.folder / "one.ipynb")
        if problem := to_markdown(self.folder / "one.ipynb", reports / "one.ipynb"):
            raise AssertionError(problem)
        write_run_pages(recorded_runs(reports), reports)
        with contextlib.redirect_stdout(said := io.StringIO()):
            names = [path.name for path in render(reports, out, formats, "pandoc")]
        if names != [{"html": HTML, "pdf": PDF}[name] for name in sorted(formats)]:
            raise AssertionError(f"only {names} were made: {said.getvalue()[-300:]}")
        paths = [path for path in out.rglob("*") if path.suffix in (".html", ".csv", ".svg")]
        return {str(path.relative_to(out)): path.read_text() for path in sorted(paths)}


def chapter() -> Any:
    """An executed chapter that says and shows everything of the records; its own words, formulas
    and references stand between."""
    import matplotlib

    matplotlib.use("agg")
    cells = [
        new_markdown_cell(
            "# One {#sec-one}\n\nIn the beginning, $6 \\times N$ and $\\frac{a}{b}$; see @tbl-one "
            "and [@dao2022flashattention]."
        )
    ]
    for number, (source, outputs) in enumerate(_shown()):
        shown = [new_output("display_data", data, metadata=metadata) for data, metadata in outputs]
        cells += [
            new_code_cell(source, outputs=shown),
            new_markdown_cell(f"Between {number}: *a* 'b' $x^2$ \"c\" [d](#sec-one) `e` -- f."),
        ]
    cells.append(
        new_markdown_cell(
            "## The end {#sec-end}\n\n| a | b |\n|---|---|\n| $\\frac{a}{b}$ | **c** |\n\n> "
            "**Answer.** $7 \\times 8$"
        )
    )
    return new_notebook(cells=cells)


def _shown() -> Iterator[tuple[str, list[tuple[dict[str, Any], dict[str, Any]]]]]:
    """Cells of a chapter: their options, and what they displayed."""
    import matplotlib.pyplot as plt
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    import lsai_lab as lab

    InteractiveShell.instance()
    runs = lab.load("memory")
    points = lab.points(runs)
    kernels = [lab.kernels(row).assign(machine=row["machine"]) for row in runs.to_dict("records")]
    words = [
        name
        for name in runs
        if runs[name].map(lambda value: isinstance(value, str)).any()
        and name not in ("run", "started")
    ]
    tables = {
        "one": runs[[*words, "run"]],
        "points": points[["machine", "backend", "reason", "run"]],
        "kernels": kernels[1],
        "first": runs[["reason", "env.gpu", "run"]],
    }
    for name, frame in tables.items():
        made = lab.table(frame)
        yield (
            f'#| label: tbl-{name}\n#| tbl-cap: "All {name}."\nlab.table()',
            [({"text/markdown": made.data}, {"text/markdown": made.metadata})],
        )
    sentences = []
    for row in runs.to_dict("records"):
        for name in words:
            sentences += [
                f"*{row['label']}* on {row['machine']} has **{name}**: {row[name]}.",
                f"{row[name]}",
            ]
    with capture_output() as said:
        for sentence in sentences:
            lab.say(sentence)
        lab.say("\n\n".join(sentences), box="A box")
        lab.say(
            "\n".join(f"- {row['machine']}: {row['reason']}" for row in runs.to_dict("records"))
        )
        lab.say(
            ", ".join(lab.run_link(row["reason"], row["run"]) for row in runs.to_dict("records"))
        )
        lab.say("A note.^[" + " and ".join(runs["reason"]) + "]")
    yield "lab.say()", [(output.data, output.metadata) for output in said.outputs]
    with capture_output() as drawn:
        fig, axes = plt.subplots()
        for _, rows in points.groupby("backend"):
            axes.plot([1, 2, 3], [*rows["tflops"], 2.0, 3.0][:3], "o-", label="a line")
        axes.set(xlabel="length", ylabel="TFLOP/s", title="All of them")
        lab.figure(fig, runs[[*words, "run"]])
    yield (
        '#| label: fig-one\n#| fig-cap: "A figure."\nlab.figure()',
        [(_as_saved(output.data), output.metadata) for output in drawn.outputs],
    )


def _as_saved(data: dict[str, Any]) -> dict[str, Any]:
    """A displayed bundle as a notebook keeps it: bytes in base64."""
    return {
        kind: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for kind, value in data.items()
    }


class Parts(html.parser.HTMLParser):
    """A page as its tags, with their attributes, and its words, `text` in the place of `WORD`."""

    def __init__(self, page: str, text: str = WORD) -> None:
        super().__init__()
        self.found: list[str] = []
        self._instead, self._text = text, ""
        self.feed(page)
        self._end_text()

    def _end_text(self) -> None:
        words, self._text = _spaced(self._text.replace(WORD, self._instead)), ""
        self.found += [words] if words else []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._end_text()
        given = {name: _spaced((value or "").replace(WORD, self._instead)) for name, value in attrs}
        if "data-tip" in given:
            given["data-tip"] = given["data-tip"][:100]  # it is cut
        self.found.append(
            f"\0<{tag} {' '.join(f'{name}={given[name]}' for name in sorted(given))}>"
        )

    def handle_endtag(self, tag: str) -> None:
        self._end_text()
        self.found.append(f"\0</{tag}>")

    def handle_comment(self, data: str) -> None:
        self.found.append(f"\0<!--{data}-->")

    def handle_data(self, data: str) -> None:
        self._text += data


def _spaced(text: str) -> str:
    return " ".join(text.replace("\xa0", " ").split())


def difference(before: dict[str, str], after: dict[str, str], text: str) -> str | None:
    """The first place where the report is another one than with the harmless word; None if there is
    none."""
    from lsai_lab.project.files import one_line

    if before.keys() != after.keys():
        return f"other files: {sorted(before.keys() ^ after.keys())}"
    for name in before:
        if name.endswith(".csv"):
            problem = _other_cells(before[name], after[name], one_line(text))
        elif name.endswith(".svg"):
            problem = (
                None if before[name].count("<") == after[name].count("<") else "another drawing"
            )
        else:
            problem = _other_parts(
                before[name],
                after[name],
                one_line(text),
                f"/{FOREIGN}/" in name or ("index" in name and "runs" in name),
            )
        if problem:
            return f"{name}: {problem}"
    return None


def _other_parts(before: str, after: str, text: str, of_a_run: bool) -> str | None:
    one, other = Parts(before, text).found, Parts(after).found
    # these show the text as it is, on one line, in tables and data: the tags are compared
    if of_a_run:
        one, other = (
            [part.split("=")[0] for part in parts if part.startswith("\0")]
            for parts in (Parts(before).found, other)
        )
    for number, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            return f"{first[:200]!r} is {second[:200]!r} after {one[number - 1][:80]!r}"
    return None if len(one) == len(other) else f"{len(one)} parts are {len(other)}"


def _other_cells(before: str, after: str, text: str) -> str | None:
    for row, other in zip(
        csv.reader(io.StringIO(before)), csv.reader(io.StringIO(after)), strict=True
    ):
        for cell, now in zip(row, other, strict=True):
            if cell != now and (
                WORD not in cell
                or (now[:1] in "=@" and now)
                or _spaced(now) not in (text, f"'{text}")
            ):
                return f"{cell!r} is {now!r}"
            if now[:1] in ("+", "-") and not re.fullmatch(r"[-+]?[\d.]+\D{0,6}", now):
                return f"{now!r} is a formula"
    return None


def survived(
    book: Book, before: dict[str, str], field: str, text: str, formats: tuple[str, ...] = ("html",)
) -> str | None:
    """What changed, or why there is no report, with `text` in `field`; None if all is well."""
    begun = time.monotonic()
    try:
        after = book.made(field, text, formats)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    if time.monotonic() - begun > LIMIT_S:
        return f"it took {time.monotonic() - begun:.0f} s"
    return difference(before, after, text)


def attempts(chance: random.Random, number: int, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Each text in a field by chance, then texts of random marks; every tenth report is made as a
    PDF, too."""
    book = Book(folder)
    before = {field: book.made(field, WORD) for field in FIELDS}
    texts = chance.sample(TEXTS, min(number, len(TEXTS)))
    texts += [_random_text(chance) for _ in range(number - len(texts))]
    for at, text in enumerate(texts):
        field = FIELDS[chance.randrange(len(FIELDS))]
        formats = ("html", "pdf") if at % 10 == 0 else ("html",)
        yield f"{field} = {text[:60]!r}", survived(book, before[field], field, text, formats)
