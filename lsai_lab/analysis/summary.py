"""Tested analysis that several chapters share, from frames to frames or numbers: how repeats become
one figure, when two variants are equal, what "best" means. Nothing here displays.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from lsai_core.base.errors import UserError, hint, no_column
from lsai_core.config.affects import names_that_affect
from lsai_core.config.train import TrainConfig
from lsai_lab.analysis.poorly import TEXTS, say_disturbed, say_texts
from lsai_lab.project.files import listed
from lsai_lab.runs.frames import Frame
from lsai_lab.runs.result_names import (
    OF_A_TEXT,
    is_quality,
    is_timed,
    more_is_better,
    require_known,
)

# Speeds of one session that are closer than this are called equal. It is what two H200s differed by
# at the 8 B model's eager work (`ours_eager` of h200-a and h200). Between sessions equal work of
# that study lies 0.4 to 4.1 % apart (`lab.session_differences`): comparing them needs more.
SESSION_SPREAD = 0.017
_SAME_COST = 0.01  # a share by which costs differ that count as one
ENDS = ("", "_low", "_high")
CALM = "undisturbed"  # in a frame's attributes: by `run`, where these are fewer than `n`
VARIANT = ("machine", "variant", "label")
_FACTS = ("outcome", "reason", "run")  # of a row's first run
_APART = ("study", "part")  # runs of two of these are no repeats of each other


def over_repeats(metric: str, values: pd.Series) -> float:
    """One figure from repeats: of losses and perplexities the mean, what to expect over seeds; of
    everything else the median, which one disturbed repeat must not move."""
    if not isinstance(values, pd.Series):
        raise UserError("lab.over_repeats(metric, values): values is a column, rows[metric]")
    return float(values.mean() if metric.endswith(OF_A_TEXT) else values.median())


def summarize(
    runs: pd.DataFrame, metrics: str | Sequence[str], by: str | Sequence[str] = VARIANT
) -> pd.DataFrame:
    """One row per variant and machine, in the order of `runs`: `by`, `n` (good repeats with a
    value, the most of any metric), `outcome` (ok if any ended so), `reason`, `run` (the folder of
    the first run with a value of the first metric that any has), `disturbed` (how many of the
    variant's good repeats, also of those that lack the metrics and do not count in `n`, shared
    their machine or spread far, so that their speeds compare poorly), and for each metric its
    figure over the good repeats, `<metric>_low` and `<metric>_high`; missing where no good run has
    it.

    The figure of losses and perplexities is the mean, of all else the median; speeds and times are
    those of the repeats that were not disturbed, where there are some. Repeats are runs of the same
    settings but for the seed, on one machine; a run counts once, however often it stands there. So
    `study`, `part`, `machine` and `variant` split the rows, too, as columns, where a metric was
    measured in several, and `dataset`, where repeats have losses on several texts; own runs that
    `lab.load(..., mine=True)` or `lab.sweep` gave are split by `differs`. UserError for a metric
    that no run can have or that is no number, a column of `by` that is not there, and rows that are
    summaries already.

    >>> runs = lab.recorded("memory").query("machine == 'h100' and part == 'train'")
    >>> row = lab.summarize(runs, "tokens_per_s").set_index("variant").loc["bf16"]
    >>> print(row["n"], round(row["tokens_per_s"]), round(row["tokens_per_s_low"]))
    3 447956 447806
    """
    metrics, by = listed(metrics), listed(by)
    require_columns(by, runs)
    require_known(metrics, runs.columns)
    if "n" in runs and any(f"{metric}_low" in runs for metric in metrics):
        raise UserError("these rows are summaries already: give runs, as lab.load(...) gives them")
    if not by:
        raise UserError("by needs a column at least; without it each variant has its row")
    runs = _each_once(runs)
    values = pd.DataFrame({name: _measured(runs, name) for name in metrics}, index=runs.index)
    several = (*_APART, "machine", "variant")
    apart = [name for name in several if name in runs and _is_apart(runs[name], values)]
    apart += [name for name in ("differs",) if name in runs]
    groups = [*by, *(name for name in apart if name not in by)]
    if _mixes_texts(runs, values.filter(regex=f"({'|'.join(OF_A_TEXT)})$"), groups):
        runs, groups = runs.assign(dataset=runs["dataset"].fillna("–")), [*groups, "dataset"]
    rows = []
    for names, group in runs.groupby(groups, sort=False):
        row: dict[str, Any] = dict(zip(groups, names, strict=True))
        rows.append(row | _figures(group, values.loc[group.index]))
    found = [f"{metric}{end}" for metric in metrics for end in ENDS]
    frame = Frame(rows, columns=[*groups, "n", *_FACTS, "disturbed", *found])
    frame.attrs |= runs.attrs  # why there are none
    # a part that measures other things adds no row to a variant that another part tells
    told = frame.groupby(by, sort=False)["n"].transform("max") > 0
    found_rows = frame[(frame["n"] > 0) | (frame["outcome"] != "ok") | ~told].reset_index(drop=True)
    some = found_rows[(found_rows["disturbed"] > 0) & (found_rows["disturbed"] < found_rows["n"])]
    if any(map(is_quality, metrics)) and "dataset" in runs:
        found_rows.attrs[TEXTS] = dict(zip(runs["run"], runs["dataset"], strict=True))
    # what a table says of `n` once the column `disturbed` is gone
    found_rows.attrs[CALM] = dict(zip(some["run"], some["n"] - some["disturbed"], strict=True))
    return found_rows


def _each_once(runs: pd.DataFrame) -> pd.DataFrame:
    """The rows with an index of their own, for frames that were put together; of a run that stands
    there several times (copied as a repeat of the same settings, or from two frames) the first."""
    what = ("machine", *_APART, "variant", "key", "outcome")
    same = [name for name in what if name in runs]
    if "key" in runs:
        runs = runs[~runs.duplicated(same) | runs["key"].isna()]
    runs = runs.reset_index(drop=True)
    # recorded runs beside own ones have none, and a group of none would be lost
    return runs.assign(differs=runs["differs"].fillna("")) if "differs" in runs else runs


def _measured(runs: pd.DataFrame, metric: str) -> pd.Series:
    """The values of the runs that ended ok; of all others missing. UserError where they are no
    numbers."""
    if metric not in runs:
        return pd.Series(float("nan"), index=runs.index)
    try:
        return pd.to_numeric(runs[metric].where(runs["outcome"] == "ok"))
    except (TypeError, ValueError):
        raise UserError(f"{metric} is no number, so it has no summary") from None


def _is_apart(names: pd.Series, values: pd.DataFrame) -> bool:
    """Whether any of the metrics was measured under several of these names."""
    return any(names[values[metric].notna()].nunique() > 1 for metric in values)


def _mixes_texts(runs: pd.DataFrame, losses: pd.DataFrame, groups: list[str]) -> bool:
    """Whether any group has losses on several texts; those of several groups are told in a line."""
    if "dataset" not in runs or "dataset" in groups:
        return False
    there = runs[losses.notna().any(axis=1)]
    if there["dataset"].nunique() < 2:
        return False
    if there.groupby(groups, sort=False)["dataset"].nunique().max() > 1:
        return True
    say_texts(there, there["dataset"])
    return False


def _figures(group: pd.DataFrame, values: pd.DataFrame) -> dict[str, Any]:
    """What `summarize` says of runs that are repeats of each other."""
    good, there = group["outcome"] == "ok", values.notna()
    shown = next((there[name] for name in there if there[name].any()), good)
    first = group[shown if shown.any() else ~good].iloc[0]
    row: dict[str, Any] = {"n": int(max(there.sum(), default=good.sum()))}
    row |= {name: first[name] for name in _FACTS}
    row["disturbed"] = (
        int(group.loc[good, "disturbed"].notna().sum()) if "disturbed" in group else 0
    )
    for metric in values:
        found = values[metric].dropna()
        if "disturbed" in group and is_timed(metric):
            calm = found[group.loc[found.index, "disturbed"].isna()]
            found = calm if len(calm) else found
        row[metric] = over_repeats(metric, found) if len(found) else float("nan")
        row[f"{metric}_low"], row[f"{metric}_high"] = found.min(), found.max()
    return row


def with_range(rows: pd.DataFrame, metric: str, over: float, spec: str) -> pd.Series:
    """`metric` of rows of `summarize` over a number, with the range of the repeats in brackets,
    each by the format `spec`, whose unit (`x`, `%`) stands once: `1.43x (1.43 to 1.44)`."""
    value, low, high = ((rows[f"{metric}{end}"] / over).map(spec.format) for end in ENDS)
    return value + " (" + low.str.rstrip("x%") + " to " + high.str.rstrip("x%") + ")"


def relative(rows: pd.DataFrame, metric: str, baseline: str | None) -> pd.Series:
    """Each row's `metric` over that of variant `baseline` on the same machine, of the same study
    and part where the rows say these; missing where there is none. UserError for a column that is
    not there, a name that no row has, and where several rows could be what the others are compared
    with. A line says of which rows all repeats were disturbed: their speeds compare poorly.

    >>> runs = lab.recorded("memory").query("machine == 'h100' and part == 'train'")
    >>> rows = lab.summarize(runs, "tokens_per_s")
    >>> rows["times"] = lab.relative(rows, "tokens_per_s", "baseline")
    >>> print(round(rows.set_index("variant").loc["bf16", "times"], 2))
    2.62
    """
    require_columns([metric, "variant", "machine"], rows)
    if baseline is not None and len(rows) and baseline not in {*rows["variant"]}:
        raise UserError(
            f"no row is the variant {baseline!r}{hint(baseline, rows['variant'].unique())}"
        )
    if len(rows) and not pd.api.types.is_numeric_dtype(rows[metric]):
        raise UserError(f"{metric} is no number, so it has no ratio")
    say_disturbed(rows, metric)
    same = ["machine", *(name for name in _APART if name in rows)]
    there = rows[(rows["variant"] == baseline) & rows[metric].notna()]
    for (machine, *_), several in there.groupby(same):
        if several[metric].nunique() > 1:
            raise UserError(
                f"{len(several)} rows of {machine} are the variant {baseline}; choose one "
                f"with query, or make one of them with lab.summarize(runs, {metric!r})"
            )
    base = there.drop_duplicates(same)[[*same, metric]]
    return rows[metric] / rows[same].merge(base, how="left", on=same)[metric].to_numpy()


def equal_to_best(
    rows: pd.DataFrame,
    metric: str,
    *,
    larger: bool | None = None,
    within: float | None = None,
) -> pd.DataFrame:
    """The rows that nothing beats: the best one and those that cannot be told from it, best first.
    Those of each machine, study and part, where `rows` have several of these in their columns: they
    do not compare.

    `larger`: whether more is better. By default the metric's name says it: less memory, time and
    loss, more speed and size. UserError for other names without it, and for repeats of a variant
    that are no summary.

    Two rows are equal if their repeats overlap (`<metric>_low`, `<metric>_high`), or if their
    figures differ by less than the share `within`: by default 0.017, what sessions of one machine
    differ by; of losses and perplexities nothing.

    >>> runs = lab.recorded("memory").query("machine == 'h100' and part == 'train'")
    >>> rows = lab.summarize(runs, ["tokens_per_s", "mem_peak_allocated_gib"])
    >>> lab.equal_to_best(rows, "tokens_per_s")["variant"].tolist()
    ['window_512', 'flash_attn']
    """
    require_columns([metric], rows)
    larger = _is_larger_better(metric, larger)
    if within is None:
        within = 0.0 if metric.endswith(OF_A_TEXT) else SESSION_SPREAD
    say_disturbed(rows, metric)
    _require_figures(rows, metric)
    if apart := _several(rows.dropna(subset=[metric])):
        each = functools.partial(equal_to_best, metric=metric, larger=larger, within=within)
        return _by_group(rows, apart, each)
    rows = rows.dropna(subset=[metric]).sort_values(metric, ascending=not larger, kind="stable")
    if rows.empty:
        return rows
    best = rows.iloc[0]
    near = (rows[metric] / best[metric] - 1).abs() < within
    near |= rows[metric] == best[metric]
    if f"{metric}_low" in rows:
        near |= (rows[f"{metric}_high"] >= best[f"{metric}_low"]) & (
            rows[f"{metric}_low"] <= best[f"{metric}_high"]
        )
    return rows[near]


def pareto(
    rows: pd.DataFrame,
    cost: str,
    gain: str,
    *,
    larger: bool | None = None,
    same: float | None = None,
) -> pd.DataFrame:
    """The rows that no other beats in both `cost` (less is better) and `gain` (`larger` as in
    `equal_to_best`), by rising cost; of two rows whose costs differ by less than the share `same`
    (0.01; of losses and perplexities 0) only the better one. One front for each machine, study and
    part, where `rows` have several. UserError for a cost of which more is better.

    >>> runs = lab.recorded("memory").query("machine == 'h100' and part == 'train'")
    >>> rows = lab.summarize(runs, ["tokens_per_s", "mem_peak_allocated_gib"])
    >>> lab.pareto(rows, "mem_peak_allocated_gib", "tokens_per_s")["variant"].tolist()
    ['flash_gradcp', 'window_512']
    """
    require_columns([cost, gain], rows)
    larger = _is_larger_better(gain, larger)
    if more_is_better(cost):
        raise UserError(f"more of {cost!r} is better, so it is no cost; cost comes before gain")
    if same is None:
        same = 0.0 if is_quality(cost) else _SAME_COST
    say_disturbed(rows, gain)
    _require_figures(rows, gain)
    if apart := _several(rows.dropna(subset=[cost, gain])):
        each = functools.partial(pareto, cost=cost, gain=gain, larger=larger, same=same)
        return _by_group(rows, apart, each)
    ordered = rows.dropna(subset=[cost, gain]).sort_values(
        [cost, gain], ascending=[True, not larger]
    )
    gains = ordered[gain] if larger else -ordered[gain]
    better = (gains > gains.cummax().shift().fillna(-float("inf"))).to_numpy()
    costs, front = ordered[cost].to_numpy(), list[int]()  # places: labels may stand there twice
    for place in better.nonzero()[0]:
        while front and costs[place] < (1 + same) * costs[front[-1]]:
            front.pop()
        front.append(int(place))
    return ordered.iloc[front]


def _is_larger_better(metric: str, larger: bool | None) -> bool:
    """`larger`, or else what the metric's name says."""
    known = more_is_better(metric) if larger is None else larger
    if known is None:
        raise UserError(
            f"whether more or less of {metric!r} is better is not known: add larger=True or "
            "larger=False"
        )
    return known


def _several(rows: pd.DataFrame) -> list[str]:
    """By which columns `rows` fall apart into such as compare."""
    return [name for name in ("machine", *_APART) if name in rows and rows[name].nunique() > 1]


def _by_group(
    rows: pd.DataFrame, names: list[str], choose: Callable[[pd.DataFrame], pd.DataFrame]
) -> pd.DataFrame:
    """What is chosen of the rows of each group, below each other."""
    return pd.concat([choose(own) for _, own in rows.groupby(names, sort=False)])


def _require_figures(rows: pd.DataFrame, metric: str) -> None:
    """UserError where the rows are runs, several of a variant, whose luckiest would win."""
    if not {"variant", "repeat"} <= {*rows}:
        return
    same = [name for name in ("variant", "machine", *_APART) if name in rows]
    there = rows.dropna(subset=[metric])
    if there.duplicated(same).any():
        name = there[there.duplicated(same)]["variant"].iloc[0]
        raise UserError(
            f"several rows are the variant {name}: make one of them with "
            f"lab.summarize(runs, {metric!r})"
        )


def require_columns(names: Iterable[str], frame: pd.DataFrame) -> None:
    """UserError, with the nearest names, for one that is no column of `frame`, and where that is no
    frame."""
    if not isinstance(frame, pd.DataFrame):
        raise UserError(f"a frame is wanted here, such as lab.load(...) gives, not {frame!r:.80}")
    if unknown := [name for name in names if name not in frame]:
        raise UserError(no_column(unknown[0], frame.columns))


def spread(values: pd.Series) -> float:
    """(largest - smallest) / smallest."""
    return float(values.max() / values.min() - 1)


def block_times(points: pd.DataFrame, tokens: int) -> pd.Series:
    """Milliseconds of all products of one block over `tokens` tokens (rows of a gemm run's
    `points`): forward, dgrad and wgrad of its linear layers, by way of multiplying. A way that
    lacks one of them is missing."""
    layers = points[(points["m"] == tokens) & ~points["layer"].isin(["square", "output"])]
    products = layers.pivot_table(index=["layer", "product"], columns="way", values="ms")
    return products.sum(min_count=max(1, len(products)), axis=0).dropna()


def kept_inputs(d_model: int) -> dict[str, int]:
    """Bytes per token that a block with fused kernels keeps as inputs of matrix products, beyond
    what it keeps anyway, by fp8 recipe: the outputs of the two norms, in compiled `tensorwise`
    cast; `fused` keeps a copy of attention's output, too. None keeps SwiGLU's."""
    return {"bf16": 2 * 2 * d_model, "fused": 3 * d_model, "tensorwise": 2 * d_model}


def work_of(runs: pd.DataFrame) -> pd.DataFrame:
    """What a training step computes, one row per variant: `precision`, `attention` (whether its
    scores are stored), `window` (a dash where it is no shorter than the sequence), `checkpointing`,
    and by its dotted key each other setting that affects speed and differs among the variants.
    Variants with equal rows do the same work under several names."""
    first = runs.drop_duplicates("variant").set_index("variant")
    window = first["attention.window"].where(first["attention.window"] < first["seq_len"])
    work = pd.DataFrame(
        {
            "precision": first["precision"],
            "attention": (first["attention_kernel"] == "eager").map(
                {True: "scores stored", False: "fused"}
            ),
            "window": window.map("{:.0f}".format, na_action="ignore").astype(object).fillna("–"),
            "checkpointing": first["grad_checkpoint"],
        }
    )
    named = {"precision", "grad_checkpoint", "attention.backend", "attention.window"}
    others = [
        key for key in names_that_affect(TrainConfig, "speed") if key in first and key not in named
    ]
    return work.join(
        first[[key for key in others if first[key].astype(str).nunique() > 1]].astype(str)
    )
