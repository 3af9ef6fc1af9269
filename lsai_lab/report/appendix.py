"""The appendix: where every run of the report came from.

Each run has an entry with the anchor `run-<key>`, which the numbers in the tables link to. In HTML an entry is a card with
all provenance and a link to the run's own page. The PDF holds one compact table row per run, so that a report of hundreds
of runs stays readable: what all runs of a study share is said once, above its table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lsai_core.files import flatten
from lsai_lab.report.pandoc import code_span, escape, only, raw_html
from lsai_lab.runs.records import Run

_ABSENT = "–"
# What the compact table shows where it differs within a study; the rest follows from the machine.
_COLUMNS = ("Machine", "GPU", "PyTorch", "Code", "Commit", "Measured as", "Date")


def appendix_markdown(runs: Sequence[Run], pages: dict[str, str]) -> str:
    """The appendix for `runs`; `pages` maps `str(run.folder)` to the address of the run's page, for runs that have one."""
    ordered = sorted(runs, key=lambda run: (run.summary.id.study, run.machine, _natural(run.summary.id.name)))
    distinct = {run.summary.id.key: run for run in ordered}
    failed = sum(run.summary.outcome != "ok" for run in distinct.values())
    copies = len(ordered) - len(distinct)
    repeated = (
        f"{copies} further entries show one of them again, where two studies ask for the same run. " if copies else ""
    )
    parts = [
        "# Appendix: every run {#sec-runs}\n",
        f"{len(distinct)} run{'s stand' if len(distinct) != 1 else ' stands'} behind this report; {f'{failed} of them ended with an outcome other than ok' if failed else 'all ended with outcome ok'}. {repeated}"
        "Every linked number leads to its run here"
        + only_inline(", and from here to the run's own page: its executed notebook.", "."),
    ]
    differences: dict[str, dict[str, Any]] = {}
    for _, alike in groupby(sorted(ordered, key=_kind), key=_kind):
        differences |= config_differences(list(alike))
    seen: set[str] = set()
    for study, group in groupby(ordered, key=lambda run: run.summary.id.study):
        of_study = list(group)
        # A run that two studies share is one run: its first entry owns the anchor.
        anchored = [run.summary.id.key not in seen and not seen.add(run.summary.id.key) for run in of_study]  # type: ignore[func-returns-value]
        parts.append(f"## Study {escape(study)}\n")
        cards = [
            _card(run, pages.get(str(run.folder)), differences[str(run.folder)], anchor)
            for run, anchor in zip(of_study, anchored, strict=True)
        ]
        parts.append(only("html", "\n\n".join(cards)))
        rows = list(zip(of_study, anchored, strict=True))
        tables = [
            _compact_table(list(of_machine), differences)
            for _, of_machine in groupby(rows, key=lambda row: row[0].machine)
        ]
        parts.append(only("pdf", "\n\n".join(tables)))
    return "\n\n".join(parts) + "\n"


def _kind(run: Run) -> tuple[str, str, str]:
    """Runs whose configs can be compared key by key: of one study, on one machine, of one kind."""
    return (run.summary.id.study, run.machine, run.summary.kind)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts `batch-16` after `batch-2`."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def only_inline(html: str, pdf: str) -> str:
    """Inline text for HTML, and other inline text for the rest."""
    return f'[{html}]{{.content-visible when-format="html"}}[{pdf}]{{.content-visible unless-format="html"}}'


def facts(run: Run) -> dict[str, str]:
    """Everything that says where a run came from, as Markdown by name; facts that the record does not hold are left out."""
    env, code, summary = _read(run, "env"), run.summary.code, run.summary
    gpus = f"{env.get('gpu_count')} × " if (env.get("gpu_count") or 0) > 1 else ""
    cpu = " ".join(str(env[key]) for key in ("cpu",) if env.get(key))
    cores = f", {env['cpu_cores']} cores" if env.get("cpu_cores") else ""
    dirty = " (with uncommitted changes)" if code.get("dirty") else ""
    values = {
        "Machine": escape(run.machine),
        "GPU": escape(f"{gpus}{env['gpu']}") if env.get("gpu") else "none" if "gpu" in env else "",
        "CPU": escape(cpu + cores),
        "Memory": f"{env['memory_gib']:.0f} GiB" if isinstance(env.get("memory_gib"), (int, float)) else "",
        "PyTorch": escape(str(env.get("torch") or "")) + (escape(f", CUDA {env['cuda']}") if env.get("cuda") else ""),
        "Python": escape(str(env.get("python") or "")),
        "Code": code_span(str(code.get("hash"))[:12]) if code.get("hash") else "",
        "Commit": (code_span(str(code["commit"])[:10]) + dirty) if code.get("commit") else "",
        "Measured as": escape(summary.measured_as or ""),
        "Command": code_span(summary.command) if summary.command else "",
        "Date": escape(summary.started[:19].replace("T", " ")),
        "Wall time": wall_time(summary.wall_s),
    }
    return {name: value for name, value in values.items() if value.strip()}


def wall_time(seconds: float) -> str:
    """`8.3 s`, `4 min 10 s`, `2 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def config_differences(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """For each run (by folder): the config keys, dotted, that are not the same in all of `runs`, with this run's value."""
    flat = {str(run.folder): flatten(_read(run, "config")) for run in runs}
    keys = dict.fromkeys(key for config in flat.values() for key in config)
    varying = [key for key in keys if len({json.dumps(config.get(key, _ABSENT)) for config in flat.values()}) > 1]
    return {folder: {key: config[key] for key in varying if key in config} for folder, config in flat.items()}


def _read(run: Run, name: str) -> dict[str, Any]:
    try:
        return getattr(run, name)
    except (OSError, ValueError):  # an old or damaged record still gets its entry
        return {}


def _values(differences: dict[str, Any], at_most: int | None = None) -> str:
    shown = [code_span(f"{key}={json.dumps(value)}".replace('"', "")) for key, value in differences.items()]
    rest = len(shown) - at_most if at_most is not None and len(shown) > at_most else 0
    return ", ".join(shown[:at_most]) + (f", and {rest} more" if rest else "")


def _card(run: Run, page: str | None, differences: dict[str, Any], anchor: bool) -> str:
    summary, rows = run.summary, facts(run)
    head = [f"**{escape(summary.id.name)}**", f"[{summary.outcome}]{{.outcome .outcome-{summary.outcome}}}"]
    head += [rows.get("Machine", ""), rows.get("Wall time", ""), f"[run page]({page})" if page else ""]
    table = {
        "Why": escape(summary.reason or ""),
        **rows,
        "Differs in": _values(differences),
        "Key": code_span(summary.id.key),
    }
    lines = ["|   |   |", "|:--|:--|", *(f"| {name} | {_in_cell(value)} |" for name, value in table.items() if value)]
    identity = f"#run-{summary.id.key} " if anchor else ""
    return "\n\n".join(
        [
            f"::::: {{{identity}.run-card}}",
            " · ".join(part for part in head if part),
            *([escape(summary.reason)] if summary.reason else []),
            raw_html('<details class="provenance"><summary>Provenance</summary>').strip(),
            "\n".join(lines),
            raw_html("</details>").strip(),
            ":::::",
        ]
    )


def _compact_table(runs: Sequence[tuple[Run, bool]], differences: dict[str, dict[str, Any]]) -> str:
    """One row per run of one study on one machine; with each run comes whether its row owns the run's anchor."""
    rows = [facts(run) for run, _ in runs]
    names = [
        name for name in dict.fromkeys(name for row in rows for name in row) if name not in ("Command", "Wall time")
    ]
    shared = [name for name in names if len({row.get(name) for row in rows}) == 1]
    columns = [name for name in names if name not in shared and name in _COLUMNS]
    lead = "; ".join(f"{name}: {rows[0][name]}" for name in shared)
    header = ["Run", "Outcome", "Wall time", *columns]
    if any(differences[str(run.folder)] for run, _ in runs):
        header.append("Differs in")
    lines = ["| " + " | ".join(header) + " |", "|" + ":---|" * len(header)]
    for (run, anchor), row in zip(runs, rows, strict=True):
        name, key = escape(run.summary.id.name), run.summary.id.key
        outcome = run.summary.outcome + (f": {escape(run.summary.reason)}" if run.summary.reason else "")
        cells = [f"[{name}]{{#run-{key}}}" if anchor else name, outcome, row.get("Wall time", _ABSENT)]
        cells += [row.get(column, _ABSENT) for column in columns]
        cells.append(_values(differences[str(run.folder)], 8))
        lines.append("| " + " | ".join(map(_in_cell, cells[: len(header)])) + " |")
    return (f"{lead}.\n\n" if lead else "") + "\n".join(lines)


def _in_cell(markdown: str) -> str:
    return markdown.replace("\\|", "|").replace("|", "\\|")
