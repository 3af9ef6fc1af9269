"""Renders the bound report to `index.html` and `lab-report.pdf`, with Quarto or, where it is not installed, without it.

Both engines read the same `report.qmd`. The document itself names the engine that made it. Output is made in a temporary
folder and moved into place when all of it is complete, so that a failing render leaves the last good report as it was.
The fallback needs nothing but the Python packages `pypandoc_binary` and `typst`: pandoc writes the HTML (maths as MathML,
pictures inside the file) and the typst source, typst sets the PDF in the fonts that it carries.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from lsai_core.errors import UserError
from lsai_lab.files import repo_root
from lsai_lab.report.pandoc import DATA, READER, pandoc, pandoc_version

Engine = Literal["auto", "quarto", "pandoc"]
HTML, PDF = "index.html", "lab-report.pdf"
FILTERS = ("--lua-filter", DATA / "tables.lua", "--lua-filter", DATA / "crossref.lua")
# What Quarto's project shares with the other engine; `reports/_quarto.yml` names them.
SHARED = ("layout.typ", "tables.lua", "report.js")


@dataclass(frozen=True)
class RenderResult:
    """What was rendered: by what, where to, and in how many seconds. A format that was not asked for is None."""

    engine: str
    engine_version: str
    html: Path | None
    pdf: Path | None
    seconds: float

    def __str__(self) -> str:
        files = ", ".join(str(path) for path in (self.html, self.pdf) if path)
        return f"{files}: rendered by {self.engine_version} in {self.seconds:.1f} s"


def render(source: Path, out: Path, formats: Sequence[str] = ("html", "pdf"), engine: Engine = "auto") -> RenderResult:
    """Render `source` (from `bind`) into the folder `out`.

    `engine="auto"` takes Quarto if `quarto` is on PATH. Raises UserError for an unknown format or engine and for `quarto`
    where there is none, RuntimeError with the engine's message when rendering fails.
    """
    unknown = sorted(set(formats) - {"html", "pdf"})
    if unknown or not formats:
        raise UserError(f"unknown report format {unknown or ''}; use html, pdf or both")
    if engine not in ("auto", "quarto", "pandoc"):
        raise UserError(f"unknown report engine {engine!r}; use auto, quarto or pandoc")
    quarto = shutil.which("quarto")
    if engine == "quarto" and not quarto:
        raise UserError("no `quarto` on PATH; install Quarto 1.9 or newer, or use the engine pandoc")
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    # Not a hidden folder: Quarto does not see a project in those.
    with tempfile.TemporaryDirectory(dir=out, prefix="rendering-") as scratch:
        if quarto and engine != "pandoc":
            used, version = "quarto", f"Quarto {_version(quarto)}"
            made = _with_quarto(quarto, version, source, Path(scratch), formats)
        else:
            used, version = "pandoc", f"pandoc {pandoc_version()} and typst {_typst_version()}"
            why = "" if quarto else " (Quarto was not found)"
            made = _with_pandoc(version + why, source, Path(scratch), formats)
        for name, path in made.items():
            os.replace(path, out / name)
    paths = {name: out / name if name in made else None for name in (HTML, PDF)}
    return RenderResult(used, version, paths[HTML], paths[PDF], time.monotonic() - started)


def html_page(source: Path, target: Path, variables: dict[str, str]) -> None:
    """pandoc: the Markdown file `source` as one self-contained HTML5 page at `target`."""
    settings = [part for name, value in variables.items() for part in ("--metadata", f"{name}={value}")]
    pandoc(
        "--from", READER, "--to", "html5", "--standalone", "--embed-resources", "--mathml", "--number-sections",
        "--table-of-contents", "--toc-depth=3", *FILTERS, "--template", DATA / "template.html",
        "--css", DATA / "style.css", "--variable", f"script={DATA / 'report.js'}", "--syntax-highlighting=pygments",
        "--resource-path", source.parent, *settings, "--output", target, source,
    )  # fmt: skip


def _with_pandoc(version: str, source: Path, scratch: Path, formats: Sequence[str]) -> dict[str, Path]:
    rendered_by = f"Rendered by {version}"
    made: dict[str, Path] = {}
    if "html" in formats:
        made[HTML] = scratch / HTML
        html_page(source, made[HTML], {"rendered-by": rendered_by, **({"pdf": PDF} if "pdf" in formats else {})})
    if "pdf" in formats:
        import typst

        made[PDF] = scratch / PDF
        document = scratch / "report.typ"
        pandoc(
            "--from", READER, "--to", "typst", "--standalone", *FILTERS, "--template", DATA / "template.typ",
            "--syntax-highlighting=none", "--metadata", f"rendered-by={rendered_by}",
            "--output", document, source,
        )  # fmt: skip
        shutil.copytree(source.parent / "files", scratch / "files")
        try:
            typst.compile(document, output=made[PDF], root=scratch, ignore_system_fonts=True)
        except RuntimeError as error:
            kept = shutil.copy(document, source.parent / "report.typ")
            raise RuntimeError(f"typst failed on {kept}: {getattr(error, 'diagnostic', error)}") from error
    return made


def _with_quarto(quarto: str, version: str, source: Path, scratch: Path, formats: Sequence[str]) -> dict[str, Path]:
    """`quarto render` in a copy of the Quarto project (`reports/_quarto.yml` and the bound report)."""
    reports = repo_root() / "reports"
    for path in (reports / "_quarto.yml", reports / "report.css", *(DATA / name for name in SHARED)):
        shutil.copy(path, scratch)
    _, header, body = source.read_text(encoding="utf-8").split("---\n", 2)
    facts = yaml.safe_load(header)
    # Quarto's title block has no place for the engine's name and the PDF but the subtitle.
    subtitle = " · ".join([*filter(None, [facts.get("subtitle")]), f"Rendered by {version}"])
    link = f" · [PDF]({PDF})" if "pdf" in formats else ""
    shutil.copytree(source.parent / "files", scratch / "files")
    made: dict[str, Path] = {}
    for name, target, produced in ((HTML, "html", "report.html"), (PDF, "typst", "report.pdf")):
        if ("html" if target == "html" else "pdf") not in formats:
            continue
        facts["subtitle"] = subtitle + (link if target == "html" else "")
        (scratch / "report.qmd").write_text(f"---\n{yaml.safe_dump(facts, allow_unicode=True)}---\n{body}")
        command = [quarto, "render", "report.qmd", "--to", target]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        path = scratch / produced
        if done.returncode or not path.exists():
            message = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr + done.stdout).strip()
            raise RuntimeError(f"quarto render --to {target} failed ({done.returncode}): {message[-3000:]}")
        for warning in re.findall(r"(?m)^.*\bWARN(?:ING)?\b.*$", re.sub(r"\x1b\[[0-9;]*m", "", done.stderr)):
            print("report: quarto:", warning.strip())
        made[name] = path
    return made


def _version(quarto: str) -> str:
    return subprocess.run([quarto, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def _typst_version() -> str:
    from importlib.metadata import version

    return version("typst")
