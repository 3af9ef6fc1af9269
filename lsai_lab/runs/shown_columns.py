"""Which columns of a frame are shown, and what is said of the others."""

import shutil
from collections.abc import Callable
from typing import Any

import pandas as pd

from lsai_core.base.tables import value

WIDE = 20  # columns; with more, the first ones are shown
TERMINAL = 160  # columns, where there is no terminal that says its own
JUDGED = ("claim", "machine", "measured", "bound", "verdict", "note")  # of claims
# of a summary, told where it is otherwise
USUAL = {"outcome": "ok", "disturbed": 0, "differs": ""}
ENDS = ("_low", "_high")
# What a terminal without room for all does without, the first first.
_LESS = (
    *("label", "step_ms", "largest_size", "points_ok", "matmul_bf16_tflops", "note", "repeat"),
    "backward_tflops",
    *("training", "text", "first_run", "bound_set"),
)
# What a bench says of a point beside its figures: quartiles, bounds, a value for each process.
_BESIDE = ("_p25", "_p75", "bound_", "rank_", "first_call_s", "took_s", "repeats", "timeline")
_KEPT, _ROUNDED_MS = 25, 0.5  # kernels of older records; what their times are rounded to
_PAGE = 115  # characters of a row in a notebook
_LONGEST = 80  # characters of the names that are not shown


def chosen_columns(frame: pd.DataFrame) -> list[str]:
    """Of a wide frame of runs the columns that people look for first, as far as they say anything:
    those before `run`, its folder. Of what `lab.summarize` gives who is meant and the figures, of
    points which they are and what was measured. All of another frame."""
    names = list(frame.columns)
    if "what" in names:  # a comparison
        return [name for name in names if not str(name).endswith(ENDS)]
    if is_judged(frame):
        return [name for name in JUDGED if not is_empty(frame[name])]
    if "run" not in names:
        return names
    if is_summary(frame):
        hidden = {f"{name}{end}" for name in names for end in ENDS} | {"reason", "run"}
        hidden |= {name for name in USUAL if name in frame and (frame[name] == USUAL[name]).all()}
        return [name for name in names if name not in hidden]
    if is_of_points(frame):
        return _of_points(frame)
    if len(names) <= WIDE:
        return names
    return [name for name in names[: names.index("run")] if not is_empty(frame[name])]


def is_summary(frame: pd.DataFrame) -> bool:
    """Whether this is what `lab.summarize` gives."""
    ends = any(str(name).endswith("_low") for name in frame.columns)
    return ends and {"n", "outcome", "reason", "run"} <= {*frame.columns}


def is_of_points(frame: pd.DataFrame) -> bool:
    """Whether these are points that benches measured, as `lab.points` gives them."""
    return {"machine", "own", "repeat", "run"} <= {*frame} and "study" not in frame


def is_judged(frame: pd.DataFrame) -> bool:
    """Whether these are claims, as `lab.judged` gives them."""
    return {*JUDGED, "sentence", "runs"} <= {*frame.columns}


def is_empty(column: pd.Series) -> bool:
    """Whether a column says nothing."""
    return bool((column.isna() | (column.astype(object) == "")).all())


def _of_points(frame: pd.DataFrame) -> list[str]:
    """Which point it is (texts and whole numbers), then rates, then other figures, how it ended;
    as many as a row has room for."""
    own = [name for name in frame if name not in ("own", "run", "reason", "step", "outcome")]
    own = [name for name in own if not any(word in name for word in _BESIDE)]
    there = [name for name in own if not is_empty(frame[name])]
    which = [name for name in there if _says_which(frame[name])]
    figures = [name for name in there if name not in which]
    figures.sort(key=lambda name: not name.endswith(("tflops", "per_s")))
    ended = ["outcome"] if "outcome" in frame and (frame["outcome"] != "ok").any() else []
    return [*which, *figures, *ended][: WIDE // 2 + 2]


def _says_which(column: pd.Series) -> bool:
    there = column.dropna()
    if not there.map(pd.api.types.is_scalar).all():
        return False
    texts = bool(there.map(type).eq(str).all())
    return texts or bool((pd.to_numeric(there, errors="coerce") % 1 == 0).all())


def hidden_words(frame: pd.DataFrame, shown: list[str], gone: list[str]) -> str:
    """What is not shown, in words; nothing if all is. `gone`: for which there was no room."""
    number, there = len(shown), len(frame.columns)
    if number == there:
        return ""
    if is_summary(frame):
        hidden = [name for name in (*USUAL, "reason", "run") if name in frame and name not in shown]
        what, more = "row", ", ".join(["<metric>_low", "<metric>_high", *hidden])
    elif "what" in frame:
        what, more = "result", "first_low, first_high, second_low, second_high"
    elif is_judged(frame):
        what, more = "claim", "sentence, value, low, high, n, runs, bound_set, first_run"
    elif is_of_points(frame):
        hidden = [name for name in frame if name not in (*shown, *gone)]
        what, more = "point", _in_short(hidden)
    elif "run" not in frame:
        what, more = "row", ""
    else:
        what, more = "run", "results by name, settings with dots (optim.lr), env.*"
    many = f"1 {what}" if len(frame) == 1 else f"{len(frame):,} {what}s"
    if set(frame) == {*shown, *gone}:
        more = ", ".join(gone)
    elif gone:
        more = f"{', '.join(gone)}; {more}"
    return f"{many}; {number} of {there} columns are shown. The others: {more}"


def kept_words(kernels: pd.DataFrame, busy_ms: Any) -> str:
    """That an older record has not all kernels; empty where it has."""
    total = kernels["ms"].sum()
    if len(kernels) != _KEPT or not isinstance(busy_ms, float) or total >= busy_ms - _ROUNDED_MS:
        return ""
    left = f"the {_KEPT} with the most time are recorded, {value(total)} of {value(busy_ms)} ms"
    return f"{left} a step; the others' {value(busy_ms - total)} ms are in results alone"


def _in_short(names: list[str]) -> str:
    """As many of the names as a line has room for."""
    while len(text := ", ".join(names)) > _LONGEST:
        names = [*names[:-2], "…"]
    return text


def fitted(
    frame: pd.DataFrame, texts: pd.DataFrame, is_too_wide: Callable[[pd.DataFrame], bool]
) -> tuple[pd.DataFrame, str, list[str]]:
    """The `texts` of a frame without columns for which a terminal has no room: first those that
    have one value in all rows, which a line says, then what is needed least, by name; never a
    figure with its range, which was asked for."""
    said = ""
    if len(frame) > 1 and is_too_wide(texts):
        equal = [name for name in texts if _is_same(frame[name])][: len(texts.columns) - 1]
        told = [f"{name} {texts[name].iloc[0]}" for name in equal if texts[name].iloc[0]]
        texts = texts.drop(columns=equal)
        said = f"All rows: {', '.join(told)}" if told else ""
    gone: list[str] = []
    asked = [name for name in texts if {f"{name}{end}" for end in ENDS} <= {*frame}]
    for name in (name for name in _LESS if name in texts and name not in asked):
        if is_too_wide(texts):
            texts, gone = texts.drop(columns=name), [*gone, name]
    return texts, said, gone


def is_too_wide_for_a_page(texts: pd.DataFrame) -> bool:
    """Whether a notebook would hide columns of these texts behind a scrollbar."""
    widths = (max(len(str(name)), texts[name].str.len().max()) for name in texts)
    return sum(width + 2 for width in widths) > _PAGE


def _is_same(column: pd.Series) -> bool:
    if pd.api.types.is_float_dtype(column):
        return False
    return column.map(str).nunique() == 1


def terminal_width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((TERMINAL, 24)).columns
