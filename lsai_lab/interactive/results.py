"""The results of a run as a mapping that shows itself: ten that people look for first, the rest
folded."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lsai_core.base.errors import UnknownName, UserError, hint
from lsai_core.base.tables import Part, as_html, as_text, value
from lsai_lab.runs.difference import RESULTS, above_peak
from lsai_lab.runs.records import Summary

# What people look for first, of every kind of run, in this order; so many are shown.
HEADLINES = (
    "tokens_per_s",
    "step_ms",
    "mfu",
    "train_loss",
    "validation_loss",
    "validation_perplexity",
    "mem_peak_allocated_gib",
    "mem_peak_reserved_gib",
    "largest_batch",
    "largest_size",
    "points_ok",
    "matmul_bf16_tflops",
    "copy_gb_per_s",
    "attention_kernel",
    "parameters",
    "steps",
    "train_s",
    "disturbed",
)
SHOWN = 10


class Results(dict[str, Any]):
    """Results by name, and `outcome`, `reason`, `started` and `wall_s`; of a run that did not end
    well also those of its steps `so_far`. A table is a list of mappings, `results.tokens_per_s` is
    `results["tokens_per_s"]`. UserError for an unknown name."""

    def __init__(self, summary: Summary, so_far: Mapping[str, Any] | None = None) -> None:
        end = {name: getattr(summary, name) for name in ("outcome", "reason", "started", "wall_s")}
        super().__init__({**end, **summary.results, **(so_far or {})})

    def __missing__(self, name: str) -> Any:
        raise UserError(f"the run has no result {name!r}{hint(str(name), self)}")

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise UnknownName(f"the run has no result {name!r}{hint(name, self)}")

    def __dir__(self) -> list[str]:
        return [name for name in self if name.isidentifier()]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def _parts(self) -> Iterable[Part]:
        """How it ended, if not well; the headlines; the tables; the rest."""
        if self["outcome"] != "ok":
            how = "was stopped" if self["outcome"] == "preempted" else f"ended as {self['outcome']}"
            yield Part(f"This run {how}", note=str(self["reason"] or ""))
        single = {k: v for k, v in self.items() if not isinstance(v, list) and v is not None}
        first = [name for name in HEADLINES if name in single][:SHOWN]
        more = [name for name in single if name not in (*HEADLINES, "outcome", "reason")]
        first += more[: SHOWN - len(first)]
        rows = [(name, single[name]) for name in first]
        note = above_peak(self) if "mfu" in first else ""
        yield Part("", ("result", "value"), rows, note=note, by_row=True)
        rest = [(name, value) for name, value in single.items() if name not in first]
        if rest:
            yield Part(f"{len(rest)} more", ("result", "value"), rest, folded=True, by_row=True)
        for name, rows in self.items():
            if isinstance(rows, list) and rows and isinstance(rows[0], dict):
                heads = list(dict.fromkeys(key for row in rows for key in row))
                cells = [[row.get(head) for head in heads] for row in rows]
                yield Part(name, heads, cells, folded=len(rows) > SHOWN)

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def _repr_markdown_(self) -> str:
        return unfolded(self._parts())

    def __repr__(self) -> str:
        parts = list(self._parts())
        folded = ", ".join(part.title for part in parts if part.folded)
        note = [Part(f"not shown: {folded}; list(results) has all names")] if folded else []
        return as_text([part for part in parts if not part.folded] + note)


def in_short(results: Mapping[str, Any], names: Iterable[str]) -> str:
    """Those of the named results that there are, in a line."""
    there = [(name, results.get(name)) for name in names]
    return ", ".join(f"{value(found)} {RESULTS[name]}" for name, found in there if found)


class Ended(Summary):
    """How a run ended: its `Summary`, shown as the table of its results."""

    def _repr_html_(self) -> str:
        return Results(self)._repr_html_()

    def __repr__(self) -> str:
        return repr(Results(self))


def unfolded(parts: Iterable[Part]) -> str:
    """The parts as Markdown, for readers without HTML; nothing in them is markup."""
    return "\n\n".join(filter(None, map(_markdown, parts))) + "\n"


def _markdown(part: Part) -> str:
    title = f"**{_text(part.title)}**" if part.title else ""
    heads = part.heads or [""] * max(map(len, part.rows), default=0)
    lines = [heads, ["---"] * len(heads)] if part.rows else []
    cells = [[_text(cell) if cell != "---" else cell for cell in line] for line in lines]
    cells += [[_text(value(cell)) for cell in row] for row in part.rows]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in cells)
    return "\n\n".join(filter(None, (title, rows, _text(part.note))))


def _text(given: Any) -> str:
    """One cell of a Markdown table; nothing in it is markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|$@~^])", r"\\\1", " ".join(str(given).split())[:200])
