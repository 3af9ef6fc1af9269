"""What stands beside every loss: how much text a run read, how often it read the same text, and how
the training loss compares where the validation loss does.

A run reads windows of `seq_len` tokens in a new order in each pass over the training text, each
window once a pass (`lsai_core.training.batches`).
"""

import functools
from pathlib import Path

import pandas as pd

from lsai_core.base.errors import UserError
from lsai_lab.analysis.intervals import half_width
from lsai_lab.project.files import load_yaml, reading_root
from lsai_lab.runs.records import Stamp, read_metrics, stamp

LAST_STEPS = 100
NEEDED = ("tokens", "seq_len", "dataset")


def text_read(runs: pd.DataFrame) -> pd.DataFrame:
    """Of each row of `lab.load`, with its index: `tokens` that the run was trained on,
    `distinct_tokens` among them, and `passes` over the training text.

    Missing where a run has no tokens, or where neither its record (`text_tokens`) nor
    `params/datasets.yaml` says how long its text is.
    """
    path = reading_root() / "params" / "datasets.yaml"
    known = load_yaml(path) if path.exists() else {}
    if not set(NEEDED) <= {*runs}:
        return pd.DataFrame(
            index=runs.index, columns=["tokens", "distinct_tokens", "passes"], dtype=float
        )
    tokens, length = (pd.to_numeric(runs[name], errors="coerce") for name in NEEDED[:2])
    text = pd.to_numeric(runs["dataset"].astype(str).map(known), errors="coerce")
    if "text_tokens" in runs:
        text = pd.to_numeric(runs["text_tokens"], errors="coerce").fillna(text)
    in_a_pass = (text - 1) // length * length
    in_a_pass = in_a_pass.where(in_a_pass > 0)
    return pd.DataFrame(
        {
            "tokens": tokens.where(in_a_pass.notna()),
            "distinct_tokens": tokens.clip(upper=in_a_pass).where(in_a_pass.notna()),
            "passes": tokens / in_a_pass,
        }
    )


def training_loss(runs: pd.DataFrame, last: int = LAST_STEPS) -> pd.Series:
    """Of each row of `lab.load`, with its index, the mean training loss of its `last` steps (of
    all, if it took fewer); missing where it recorded none, or one of them is no number. Read from
    `metrics.jsonl`."""
    found = [_losses(run)["loss"].tail(last).mean(skipna=False) for run in runs["run"]]
    return pd.Series(found, index=runs.index, dtype=float)


def loss_by_pass(runs: pd.DataFrame) -> pd.DataFrame:
    """The training loss of each row of `lab.load` in each pass over the text: `variant`, `repeat`,
    `run`, `pass` (from 1), `first` and `last` step of it (from 0), `loss`, their mean.

    A step belongs to the pass in which its first sequence lies.
    """
    runs, rows = runs.reset_index(drop=True), []
    read = text_read(runs)
    for place, run in runs.iterrows():
        losses = _losses(run["run"])
        in_a_pass = read.loc[place, "tokens"] / read.loc[place, "passes"]
        before = losses["tokens_in_step"].cumsum() - losses["tokens_in_step"]
        if losses.empty or pd.isna(in_a_pass) or before.isna().any():
            continue
        for number, steps in losses.groupby((before // in_a_pass).astype(int)):
            row = {name: run[name] for name in ("variant", "repeat", "run")}
            row |= {"pass": number + 1, "loss": steps["loss"].mean(skipna=False)}
            rows.append(row | {"first": int(steps["step"].min()), "last": int(steps["step"].max())})
    return pd.DataFrame(rows, columns=["variant", "repeat", "run", "pass", "first", "last", "loss"])


def require_one_run_a_seed(runs: pd.DataFrame) -> None:
    """UserError if two of `runs` have one variant and one seed (`repeat`): a mean over both would
    mix two parts of a study, or two machines."""
    twice = runs[runs.duplicated(["variant", "repeat"])]
    if not twice.empty:
        variant, repeat = twice.iloc[0][["variant", "repeat"]]
        raise UserError(
            f"losses are compared seed by seed, and {variant} has several runs of repeat {repeat}; "
            "choose one part and one machine"
        )


def first_pairs(runs: pd.DataFrame, base: str) -> pd.Series:
    """Of each variant but `base` the folders `(of base, of the variant)` of the first seed that
    both have; `runs`: rows of one machine and part, one a seed."""
    wide = runs.pivot(index="repeat", columns="variant", values="run").sort_index()
    if base not in wide:
        return pd.Series(dtype=object)
    both = {name: wide[[base, name]].dropna() for name in wide.columns if name != base}
    found = {name: tuple(ends.iloc[0]) for name, ends in both.items() if len(ends)}
    return pd.Series(found, dtype=object)


def paired(
    values: pd.Series, runs: pd.DataFrame, base: str, settings: int | None = None
) -> pd.DataFrame:
    """How far each variant lies from `base`, seed by seed: `mean` of the differences, `half` of the
    95 % interval, joint for all `settings` (of all variants, if not given), and `n` seeds.

    `values` has the index of `runs`, rows of one machine and part; a row a variant. UserError if a
    variant has two runs of one seed.
    """
    ended = runs[runs["outcome"] == "ok"]
    require_one_run_a_seed(ended)
    wide = ended.assign(value=values).pivot_table(
        index="repeat", columns="variant", values="value", sort=False
    )
    if base not in wide:
        return pd.DataFrame(columns=["mean", "half", "n"], dtype=float)
    apart = wide.drop(columns=base).sub(wide[base], axis=0)
    joint = settings or max(1, len(apart.columns))
    return pd.DataFrame(
        {
            "mean": apart.mean(),
            "half": apart.apply(half_width, settings=joint),
            "n": apart.count(),
        }
    )


def loss_changes(runs: pd.DataFrame, base: str, last: int = LAST_STEPS) -> pd.DataFrame:
    """Validation and training loss beside each other, as differences from variant `base` of one
    machine and part, a row a variant: `validation` and `training` (the mean over seeds), each with
    its `_half` of the joint 95 % interval; `n` seeds; `tokens`, `distinct_tokens`, `passes`; and
    `run`, the pair of folders (of base, of the variant) of the first seed.

    The training loss of a run is the mean of its `last` steps.
    """
    validation = paired(runs["validation_loss"], runs, base)
    training = paired(training_loss(runs, last), runs, base)
    read = text_read(runs).groupby(runs["variant"], sort=False).max()
    return pd.DataFrame(
        {
            "validation": validation["mean"],
            "validation_half": validation["half"],
            "training": training["mean"],
            "training_half": training["half"],
            "n": validation["n"],
            "run": first_pairs(runs[runs["outcome"] == "ok"], base),
        },
        index=validation.index,
    ).join(read)


def step_losses(run: str | Path) -> pd.Series:
    """The training loss of each step of a run, by the step (from 0)."""
    return _losses(run).set_index("step")["loss"]


def _losses(run: str | Path) -> pd.DataFrame:
    """`step`, `loss` and `tokens_in_step` of the steps of a run; empty if it has no record of
    them."""
    return _read_losses(Path(run), stamp(Path(run)))


@functools.lru_cache(maxsize=1024)
def _read_losses(folder: Path, _stamp: Stamp) -> pd.DataFrame:
    try:
        rows = read_metrics(folder)
    except UserError:  # it is damaged
        rows = pd.DataFrame()
    columns = rows.reindex(columns=["step", "loss", "tokens_in_step"])
    return columns.apply(pd.to_numeric, errors="coerce")
