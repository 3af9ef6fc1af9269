"""The section on the loss: bf16 and fp8 from the same seeds, step by step, and how far apart they end."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from lsai_lab.kit.style import series_style
from lsai_lab.report.fp8.results import Fp8Results
from lsai_lab.report.losses import curve, final_loss, last_steps, mean_curve, smoothed, smoothing, validation_loss
from lsai_lab.report.show import show_figure, show_table, show_text

_TITLES = {"train": "final training loss", "validation": "validation loss"}


def show_loss(results: Fp8Results) -> None:
    """Table, figure and verdict of one machine; nothing if no pair of runs is there."""
    losses, config = results.losses, results.config("loss")
    if losses.empty or config is None:
        return
    table = losses[["label", "seed", "key", "key_bf16"]].assign(
        **{
            "train, bf16": losses["train_bf16"],
            "train, fp8": losses["train_fp8"],
            "difference": losses["train_difference"],
            "validation, bf16": losses["validation_bf16"],
            "validation, fp8": losses["validation_fp8"],
            "difference ": losses["validation_difference"],
        }
    )
    steps, model = last_steps(config.steps), config.model
    show_table(
        table.rename(columns={"label": "recipe"}),
        f"tbl-fp8-loss-{results.slug}",
        f"Loss in nats per token after {config.steps} steps of {config.batch_size} x {config.seq_len} tokens on {results.machine} ({model.n_layers} layers, "
        f"width {model.d_model:,}): training loss as the mean of the last {steps} steps, validation loss over held-out text. Both runs "
        "of a row start from the same weights and see the same tokens.",
        formats={
            name: "+.3%" if name.startswith("difference") else ".4f" for name in table if "," in name or "diff" in name
        },
        links={"train, fp8": "key", "train, bf16": "key_bf16"},
    )
    show_figure(
        _figure(results),
        f"fig-fp8-loss-{results.slug}",
        f"Training loss in bf16 and fp8 on {results.machine}, the mean of {losses['seed'].nunique()} "
        f"seed{'s' if losses['seed'].nunique() > 1 else ''} (left), and the relative difference of fp8 from bf16 of each seed{smoothing(config.steps)} "
        "(right).",
    )
    show_text("\n".join(f"- {sentence}" for sentence in verdicts(results)))


def verdicts(results: Fp8Results) -> list[str]:
    """Mean and spread over seeds of each recipe's difference, held against how far the seeds of bf16 lie apart."""
    text = []
    for label, some in results.losses.groupby("label", sort=False):
        for what in ("train", "validation"):
            difference, apart = some[f"{what}_difference"], seeds_apart(results, what)
            sentence = f"*{label}, {_TITLES[what]}:* {difference.mean():+.3%} against bf16"
            if len(some) > 1:
                sentence += f" (mean of {len(some)} seeds, from {difference.min():+.3%} to {difference.max():+.3%}, "
                sentence += f"standard deviation {difference.std():.3%})"
            if apart is not None:
                largest = difference.abs().max()
                sentence += f"; the seeds of bf16 lie {apart:.3%} apart, "
                sentence += (
                    "more than any of these differences" if apart > largest else "no more than the largest of these"
                )
            text.append(sentence + ".")
        if len(some) > 1:
            same = some["validation_difference"].map(np.sign).nunique() == 1
            chance = f"the same in every seed, which by chance alone happens in 1 of {2 ** (len(some) - 1)} cases"
            sign = chance if same else "not the same in every seed: no systematic cost is seen"
            text.append(f"*{label}:* the sign of the validation difference is {sign}.")
    return text


def in_short(results: Fp8Results) -> list[str]:
    """One sentence for each recipe."""
    text = []
    for label, some in results.losses.groupby("label", sort=False):
        apart = seeds_apart(results, "validation")
        beside = f", where the seeds of bf16 lie {apart:.2%} apart" if apart is not None else ""
        mean, config = some["validation_difference"].mean(), results.config("loss")
        steps = config.steps if config else 0
        text.append(
            f"*Loss, {label}:* the validation loss after {steps} steps differs from bf16 by {mean:+.2%}{beside}."
        )
    return text


def seeds_apart(results: Fp8Results, what: str) -> float | None:
    """Range of the bf16 runs' losses over their seeds, relative to the mean; None for a single seed."""
    of = {"train": final_loss, "validation": validation_loss}[what]
    values = [of(run) for run in results.loss_runs(str(results.study.baseline)).values()]
    return (max(values) - min(values)) / float(np.mean(values)) if len(values) > 1 else None


def _figure(results: Fp8Results) -> Figure:
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.3, 3.1))
    plain = results.loss_runs(str(results.study.baseline))
    curves = {repeat: curve(run) for repeat, run in plain.items()}
    names = [str(results.study.baseline), *results.losses["variant"].unique()]
    for index, name in enumerate(names):
        runs = results.loss_runs(name)
        mean = mean_curve(runs[repeat] for repeat in sorted(set(runs) & set(curves)))
        style = series_style(index)
        every = max(1, len(mean) // 8)
        label = results.study.variants[name].label
        left.plot(mean.index, mean, label=label, markevery=(index * every // 2, every), **style)
        if index == 0:
            continue
        for repeat in sorted(set(runs) & set(curves)):
            change = (curve(runs[repeat]) / curves[repeat] - 1) * 100
            smooth = smoothed(change)
            seed = runs[repeat].config["seed"]
            right.plot(smooth.index, smooth, linewidth=1.1, label=f"{label}, seed {seed}", **_line(index - 1 + repeat))
    right.axhline(0, color="#444444", linewidth=0.8)
    left.set(xlabel="step", ylabel="training loss (nats per token)")
    right.set(xlabel="step", ylabel="difference from bf16 (%)")
    fig.legend(loc="outside lower center", ncols=3, fontsize=7.5)
    return fig


def _line(index: int) -> dict[str, object]:
    style = series_style(index + 2)
    return {"color": style["color"], "linestyle": style["linestyle"]}
