"""What rounding weights costs on fresh text, when, and which share of the updates it loses."""

from collections.abc import Mapping

import pandas as pd

from lsai_lab.analysis.intervals import half_width
from lsai_lab.analysis.losses import (
    first_pairs,
    loss_by_pass,
    loss_changes,
    require_one_run_a_seed,
    text_read,
    training_loss,
)
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
    95 % interval, `n`, and `run`, the first seed's pair of folders. UserError if a variant has two
    runs of one seed."""
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
    costs = groups["value"].agg(mean="mean", half=half_width, n="count").reset_index()
    return costs.assign(run=costs["variant"].map(first_pairs(ended, base)))


Studies = Mapping[str, tuple[pd.DataFrame, str]]  # in words: the runs, their variant in fp32
WAYS = {"bf16": "to nearest", "bf16_1": "to nearest"}
WAYS |= {"bf16_rounded": "stochastic", "bf16sr_1": "stochastic"}


def cost_by_pass(studies: Studies) -> pd.DataFrame:
    """What each way to round bf16 states costs in each pass over the text: `study`, `way`, `pass`
    (from 1), `change` of the training loss over fp32 states of the same seed (nats, the mean of the
    seeds), `half` of its 95 % interval, `runs`, study and way in words, and `run`, the first seed's
    pair of folders."""
    found = []
    for study, (runs, base) in studies.items():
        by_pass = loss_by_pass(runs)
        wide = by_pass.pivot_table(index=["pass", "repeat"], columns="variant", values="loss")
        pairs = first_pairs(by_pass[by_pass["pass"] == 1], base)
        for variant, way in WAYS.items():
            if variant in wide:
                apart = (wide[variant] - wide[base]).groupby("pass")
                frame = pd.DataFrame({"change": apart.mean(), "half": apart.apply(half_width)})
                named = frame.reset_index().assign(study=study, way=way)
                both = [pairs[variant]] * len(named)
                found.append(named.assign(runs=f"{study}, {way}", run=both))
    return pd.concat(found)


def what_was_read(studies: Studies) -> pd.DataFrame:
    """Of each study the runs with fp32 states: `seeds`, `tokens` and `distinct` ones (millions),
    `passes`, the means of the `validation` and of the `training` loss, and the first `run`."""
    rows = []
    for study, (runs, base) in studies.items():
        plain = runs[runs["variant"] == base]
        read = text_read(plain).iloc[0]
        rows.append(
            {
                "runs": study,
                "seeds": len(plain),
                "tokens": read["tokens"] / 1e6,
                "distinct": read["distinct_tokens"] / 1e6,
                "passes": read["passes"],
                "validation": plain["validation_loss"].mean(),
                "training": training_loss(plain).mean(),
                "run": plain["run"].iloc[0],
            }
        )
    return pd.DataFrame(rows)
