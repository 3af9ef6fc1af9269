"""What of rows compares poorly or not at all, in a line: disturbed speeds, losses of several
texts."""

import pandas as pd

from lsai_lab.project.files import some_of
from lsai_lab.runs.find import say
from lsai_lab.runs.result_names import is_quality, is_timed

TEXTS = "texts"  # in a frame's attributes: by `run`, of what text its losses are


def say_disturbed(rows: pd.DataFrame, metric: str) -> None:
    """Print of which rows (runs, or what `summarize` gives) a speed or time is of disturbed repeats
    alone, where `rows` say it."""
    if not is_timed(metric) or "disturbed" not in rows or not len(rows):
        return
    told = rows["disturbed"]
    only = told.map(lambda each: isinstance(each, str) and each != "")
    if "n" in rows:
        only |= (rows["n"] > 0) & (pd.to_numeric(told, errors="coerce") >= rows["n"])
    who = next((name for name in ("variant", "label") if name in rows), None)
    names = list(dict.fromkeys(rows[only & rows[metric].notna()][who].map(str))) if who else []
    if names:
        which = "all repeats" if "n" in rows else "runs"
        said = f"{which} of {some_of(names)} were disturbed"
        say(f"{metric} compares poorly: {said}")


def say_several_texts(rows: pd.DataFrame, metric: str) -> None:
    """Print that losses or perplexities of these rows (runs, or what `summarize` gives) do not
    compare, where they are of several texts."""
    if not is_quality(metric) or "run" not in rows:
        return
    there = rows[rows[metric].notna()]
    of = rows.attrs.get(TEXTS, {})
    texts = there["dataset"] if "dataset" in there else there["run"].map(of)
    if texts.nunique() > 1:
        say_texts(there, texts)


def say_texts(rows: pd.DataFrame, texts: pd.Series) -> None:
    """Print which texts losses are of, with the machines of each where that tells them apart."""
    words = []
    for text, own in rows.groupby(texts, sort=False):
        machines = dict.fromkeys(own["machine"].dropna()) if "machine" in own else {}
        words.append(f"{text} ({', '.join(machines)})" if machines else str(text))
    told = ", ".join(words)
    say(f"losses of several texts do not compare, for each is per token of its own: {told}")
