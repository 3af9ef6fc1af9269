"""A run's own page: what was asked, where it ran, how it went, what came out. Called by the run notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lsai_core.files import flatten
from lsai_lab.environment import environment
from lsai_lab.kit.style import apply_style, series_style
from lsai_lab.report.fp8.products import most_measured, show_points
from lsai_lab.report.show import show_figure, show_table, show_text
from lsai_lab.runs.execute import ActiveRun
from lsai_lab.runs.records import Run


def show_config(run: ActiveRun) -> None:
    """The resolved config, one row per key."""
    apply_style()
    show_text(f"**{run.label}**: run `{run.id.folder}` of study `{run.id.study}`. Command: `{run.command}`")
    rows = [{"key": f"`{key}`", "value": value} for key, value in _texts(run.config.model_dump(mode="json")).items()]
    show_table(pd.DataFrame(rows), "tbl-config", "Everything that defines this run, resolved.")


def show_environment() -> None:
    """Machine and software of this process."""
    facts = _texts({k: v for k, v in environment().items() if v not in (None, "", {})})
    rows = [{"fact": key, "value": value} for key, value in facts.items()]
    show_table(pd.DataFrame(rows), "tbl-environment", "Machine and software of this run.")


def show_results(run: ActiveRun) -> None:
    """Figures and tables of a finished run, by its kind; a run that did not end well says how it ended."""
    record = run.record()
    if record.summary.outcome != "ok":
        show_text(f"This run ended as **{record.summary.outcome}**: {record.summary.reason}")
    if record.summary.results:
        _PAGES[record.summary.kind](record)


def _texts(value: dict[str, Any]) -> dict[str, str]:
    """Nested mappings as dotted keys, values as short text."""
    return {key: "none" if item is None else str(item) for key, item in flatten(value).items()}


def _training(record: Run) -> None:
    results = record.summary.results
    show_figure(
        _loss_and_speed(record.metrics),
        "fig-training",
        f"Loss and speed per step. Final validation loss {results['validation_loss']:.3f} nats per token "
        f"(perplexity {results['validation_perplexity']:.1f}). Early steps are slower: warm-up and memory measurement "
        "are left out of the reported speed.",
    )
    phases = {"forward": "forward", "backward": "backward", "optimizer": "optimizer"}
    memory = {label: results.get(f"mem_{phase}_peak_gib") for label, phase in phases.items()}
    if all(memory.values()):
        fig, axes = plt.subplots(figsize=(6.3, 1.9))
        axes.barh(list(memory)[::-1], [float(v or 0) for v in memory.values()][::-1], color=series_style(0)["color"])
        axes.set(xlabel="peak memory (GiB)")
        show_figure(
            fig, "fig-phases", f"Peak memory of each phase of a step, {results.get('memory_kind', 'allocated')}."
        )
    _results_table(record)


def _loss_and_speed(metrics: pd.DataFrame) -> Figure:
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.3, 2.6))
    left.plot(metrics["step"], metrics["loss"], color=series_style(0)["color"], label="training")
    if "validation_loss" in metrics:
        seen = metrics.dropna(subset=["validation_loss"])
        left.plot(seen["step"], seen["validation_loss"], "D", color=series_style(1)["color"], label="validation")
    left.set(xlabel="step", ylabel="loss (nats per token)")
    left.legend()
    right.plot(metrics["step"], metrics["tokens_per_s"] / 1e3, color=series_style(2)["color"])
    right.set(xlabel="step", ylabel="thousand tokens/s", ylim=(0, None))
    return fig


def _peer(record: Run) -> None:
    caption = "Loss and speed per step. The first steps, which warm up and compile, are left out of the reported speed."
    show_figure(_loss_and_speed(record.metrics), "fig-training", caption)
    _results_table(record)


def _batch_search(record: Run) -> None:
    results = record.summary.results
    _tries(record, "batch", f"The largest batch that trains is {results['largest_batch']}")


def _model_search(record: Run) -> None:
    results, train = record.summary.results, record.config["measure"] == "train"
    does, by = "trains" if train else "loads", "scaling factor" if record.config["grow"] == "all" else "layers"
    largest = f"The largest {by} that {does} on {results['world_size']} process(es) is {results['largest_size']}"
    _tries(
        record,
        by,
        f"{largest}, {results['parameters'] / 1e6:,.4g} M parameters; the estimate was {results['estimated_size']}",
    )
    _results_table(record)


def _tries(record: Run, size: str, largest: str) -> None:
    results = record.summary.results
    tries = pd.DataFrame(results["tries"])
    tries.insert(0, "try", range(1, len(tries) + 1))
    tries = tries.rename(columns={"size": size, "peak_gib": "peak GiB", "seconds": "s", "note": "what it said"})
    tries["what it said"] = tries["what it said"].astype("string").str.slice(0, 80)
    show_table(
        tries.dropna(axis=1, how="all"),
        "tbl-tries",
        f"Every try, in order. {largest} ({results['search_limit_kind']}: {results['search_limit_gib']:.1f} GiB).",
    )


def _gemm(record: Run) -> None:
    points = record.metrics
    points = points[points["outcome"] == "ok"]
    if (tokens := most_measured(points)) is not None:
        show_points(points, tokens, record, "run")
    _results_table(record)


def _ceilings(record: Run) -> None:
    _results_table(record)


def _attention(record: Run) -> None:
    from lsai_lab.report.attention.points import show_points

    show_points(record)


def _context(record: Run) -> None:
    from lsai_lab.report.context.points import show_points

    show_points(record)


def _results_table(record: Run) -> None:
    rows = [
        {"result": f"`{name}`", "value": f"{value:,.5g}" if isinstance(value, float) else str(value)}
        for name, value in record.summary.results.items()
        if value is not None and not isinstance(value, list)
    ]
    show_table(pd.DataFrame(rows), "tbl-results", "All results of this run, as recorded.")


_PAGES: dict[str, Callable[[Run], None]] = {
    "train": _training,
    "batch_search": _batch_search,
    "model_search": _model_search,
    "ceilings": _ceilings,
    "gemm": _gemm,
    "scale": _results_table,
    "attention": _attention,
    "context": _context,
    "peer": _peer,
}
