"""What rounding weights costs on fresh text, when, and which share of the updates it loses."""

import pandas as pd

from lsai_lab.analysis.intervals import half_width
from lsai_lab.analysis.losses import loss_changes, require_one_run_a_seed
from lsai_lab.report.load import steps

LOST = "lost_"  # of a step's row: `lost_<class of tensors>`


def lost_updates(runs: pd.DataFrame) -> pd.DataFrame:
    """The share of updates that left a weight as it was (`profile.lost_updates`), a row for each
    counted step and class of tensors of each run of `lab.load`: `part`, `variant`, `repeat`,
    `step`, `class`, `share`."""
    found = []
    for run in runs.to_dict("records"):
        rows = steps(run)
        rows = rows[["step", *(name for name in rows if name.startswith(LOST))]]
        long = rows.melt("step", var_name="class", value_name="share").dropna()
        long["class"] = long["class"].str.removeprefix(LOST)
        found.append(long.assign(**{name: run[name] for name in ("part", "variant", "repeat")}))
    columns = ["part", "variant", "repeat", "step", "class", "share"]
    return pd.concat([pd.DataFrame(columns=columns), *found], ignore_index=True)[columns]


def rounding_costs(runs: pd.DataFrame, base: str = "fp32") -> pd.DataFrame:
    """A row for each variant of `runs` but `base`, all of one machine and with equal seeds: what
    `lab.loss_changes` has, and `lost_<class>`, the share of updates that were lost at the last
    counted step (the mean of the seeds)."""
    lost = lost_updates(runs)
    last = lost[lost["step"] == lost["step"].max()]
    shares = last.pivot_table(index="variant", columns="class", values="share", sort=False)
    return loss_changes(runs, base).join(shares.add_prefix(LOST))


def cost_by_steps(runs: pd.DataFrame, base: str = "fp32", steps_each: int = 185) -> pd.DataFrame:
    """How far the losses of each variant lie from those of `base` of the same seed as training goes
    on, all of one machine: `variant`, `loss` (training, the mean over each `steps_each` steps, or
    validation, where it was measured), `tokens` read until then, `mean` of the seeds, `half` of the
    95 % interval, `n`. UserError if a variant has two runs of one seed."""
    ended = runs[runs["outcome"] == "ok"]
    require_one_run_a_seed(ended)
    found = []
    for run in ended.to_dict("records"):
        rows = steps(run)
        groups = rows.groupby(rows["step"] // steps_each)
        training = groups.agg(tokens=("tokens", "max"), value=("loss", "mean"))
        kinds = {"training": training}
        if "validation_loss" in rows:
            judged = rows.dropna(subset="validation_loss")
            kinds["validation"] = judged[["tokens"]].assign(value=judged["validation_loss"])
        for kind, frame in kinds.items():
            names = {name: run[name] for name in ("variant", "repeat")}
            found.append(frame.assign(loss=kind, **names))
    wide = pd.concat(found).pivot_table(
        index=["loss", "tokens", "repeat"], columns="variant", values="value", sort=False
    )
    apart = wide.drop(columns=base).sub(wide[base], axis=0).melt(ignore_index=False).reset_index()
    groups = apart.dropna(subset="value").groupby(["variant", "loss", "tokens"], sort=False)
    return groups["value"].agg(mean="mean", half=half_width, n="count").reset_index()
