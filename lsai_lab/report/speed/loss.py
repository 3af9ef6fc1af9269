"""The section on the loss of the speed chapter: levers and attention kernels compute the same function, so the curves must agree.

Every variant starts from the same weights and sees the same tokens; with repeats, curves and losses are means over the seeds that
all variants have. What is left are the roundings of bf16, which training amplifies: the distances below are their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lsai_lab.kit.style import series_style
from lsai_lab.report.losses import final_loss, last_steps, mean_curve, smoothed, smoothing, validation_loss
from lsai_lab.report.show import show_figure, show_table, show_text
from lsai_lab.report.speed.results import Speed
from lsai_lab.runs.records import Run

PART = "loss"


@dataclass(frozen=True)
class Curves:
    """The good runs of the part on one machine: for every variant the run of each seed that all of them have."""

    speed: Speed
    runs: dict[str, list[Run]]

    @property
    def first(self) -> Run:
        return next(iter(self.runs.values()))[0]

    def label(self, variant: str) -> str:
        return self.speed.study.variants[variant].label.removeprefix("+ ")

    @cached_property
    def losses(self) -> pd.DataFrame:
        """Training loss, a row per step and a column per variant."""
        return pd.DataFrame({name: mean_curve(runs) for name, runs in self.runs.items()})

    @cached_property
    def apart(self) -> pd.DataFrame:
        """Smoothed relative distance of each variant's training loss from the mean of all of them."""
        return (self.losses.div(self.losses.mean(axis=1), axis=0) - 1).apply(smoothed)

    @cached_property
    def final(self) -> pd.DataFrame:
        """One row per variant: final losses, and their relative distances from the means of all variants."""
        rows = pd.DataFrame(
            {
                "label": [self.label(name) for name in self.runs],
                "key": [runs[0].summary.id.key for runs in self.runs.values()],
                "train": [sum(map(final_loss, runs)) / len(runs) for runs in self.runs.values()],
                "validation": [sum(map(validation_loss, runs)) / len(runs) for runs in self.runs.values()],
            },
            index=list(self.runs),
        )
        for what in ("train", "validation"):
            rows[f"{what}_apart"] = rows[what] / rows[what].mean() - 1
        return rows


def curves_of(speed: Speed) -> Curves | None:
    """What can be compared on this machine; None if it is less than two variants."""
    good = [run for run in speed.runs if run.summary.id.part == PART and run.summary.outcome == "ok"]
    found: dict[str, dict[int, Run]] = {name: {} for name in speed.study.measured(PART)}
    for run in good:
        if run.summary.id.variant in found:
            found[run.summary.id.variant][run.summary.id.repeat] = run
    there = {name: by_seed for name, by_seed in found.items() if by_seed}
    seeds = sorted(set.intersection(*map(set, there.values()))) if there else []
    if len(there) < 2 or not seeds:
        return None
    return Curves(speed, {name: [by_seed[seed] for seed in seeds] for name, by_seed in there.items()})


def show_losses(machines: list[Speed]) -> None:
    """Each machine on which at least two variants can be compared; a sentence if there is none."""
    found = [curves for speed in machines if (curves := curves_of(speed)) is not None]
    for curves in found:
        show_loss(curves)
    if not found:
        show_text("No machine has records of this part yet: `lsai study speed --parts loss` makes them.")


def show_loss(curves: Curves) -> None:
    """Sentences, figure and table of one machine."""
    speed = curves.speed
    show_text(f"### {speed.machine} {{#sec-speed-loss-{speed.slug}}}")
    show_text("\n".join(f"- {sentence}" for sentence in sentences(curves)))
    config, seeds = curves.first.config, len(curves.runs[curves.first.summary.id.variant])
    mean = f"means of {seeds} seeds, " if seeds > 1 else ""
    show_figure(
        _figure(curves),
        f"fig-speed-loss-{speed.slug}",
        f"Training loss of {len(curves.runs)} variants on {speed.machine}, {mean}one over the other (left), and each one's distance "
        f"from the mean of all{smoothing(config['steps'])} (right).",
    )
    model, steps = config["model"], last_steps(config["steps"])
    final = curves.final
    show_table(
        pd.DataFrame(
            {
                "variant": final["label"],
                "key": final["key"],
                "train loss": final["train"],
                "from the mean (%)": final["train_apart"] * 100,
                "val. loss": final["validation"],
                "from the mean (%) ": final["validation_apart"] * 100,
            }
        ),
        f"tbl-speed-loss-{speed.slug}",
        f"Loss in nats per token after {config['steps']} steps of {config['batch_size']} x {config['seq_len']} tokens on {speed.machine} "
        f"({model['n_layers']} layers, width {model['d_model']:,}, learning rate {config['optim']['lr']:g}): training loss as the mean "
        f"of the last {steps} steps, validation loss over held-out text, each with its distance from the mean of all variants.",
        formats={"train loss": ".4f", "val. loss": ".4f", "from the mean (%)": "+.2g", "from the mean (%) ": "+.2g"},
        links={"variant": "key"},
    )


def sentences(curves: Curves) -> list[str]:
    """How far the curves lie apart on their way and at their ends."""
    spread = curves.apart.max(axis=1) - curves.apart.min(axis=1)
    step = spread.idxmax()
    low, high = curves.apart.loc[step].idxmin(), curves.apart.loc[step].idxmax()
    final, first, last = curves.final, curves.losses.iloc[0].mean(), curves.final["train"].mean()
    ends = {what: final[what].max() / final[what].min() - 1 for what in ("train", "validation")}
    smooth = smoothing(len(spread))
    return [
        f"*Same curve:* while the training loss falls from {first:.2f} to {last:.2f}, the curves of {len(curves.runs)} variants{smooth and smooth + ','} "
        f"lie at most {_percent(spread[step])} apart (at step {step}: {curves.label(low)} below {curves.label(high)}), "
        f"in the middle of all steps {_percent(spread.median())}.",
        f"*Same end:* the final training losses lie {_percent(ends['train'])} apart, the validation losses "
        f"{_percent(ends['validation'])}.",
    ]


def _percent(share: float) -> str:
    """With two digits, however small it is: fp32 sums on a CPU differ in the sixth."""
    return f"{share * 100:.2g}%"


def _figure(curves: Curves) -> Figure:
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.3, 3.6))
    for index, name in enumerate(curves.runs):
        style = series_style(index)
        line = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.1}
        left.plot(curves.losses.index, smoothed(curves.losses[name]), label=curves.label(name), **line)
        right.plot(curves.apart.index, curves.apart[name] * 100, **line)
    left.set(xlabel="step", ylabel="training loss (nats per token)")
    right.set(xlabel="step", ylabel="distance from the mean (%)")
    fig.legend(loc="outside lower center", ncols=3, fontsize=7.5)
    return fig
