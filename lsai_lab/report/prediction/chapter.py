"""What the memory model's chapter shows: predicted against measured, parts at the peak, and what fits where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lsai_core.config import TrainConfig
from lsai_core.profiling.predict import GPUS, estimate, find_gpu, verdict
from lsai_core.profiling.predict.prediction import MARGIN, PARTS
from lsai_lab.kit.style import HATCHES, PALETTE, apply_style, series_style
from lsai_lab.report.prediction.data import compare as against_records
from lsai_lab.report.prediction.data import largest_batches, measured_ceilings, out_of_memory, over_seeds
from lsai_lab.report.selection import select_runs
from lsai_lab.report.show import run_link, show_figure, show_table, show_text
from lsai_lab.runs.records import Run
from lsai_lab.runs.session import Session
from lsai_lab.techniques import Technique, compare, first_that_fits

# The task of the chapter's second half: the course's model in the shape in which the studies of speed train it.
TASK: dict[str, Any] = {
    "model": {"preset": "course"}, "precision": "bf16", "compile": True, "seq_len": 4096, "batch_size": 2,
}  # fmt: skip
SMALL = ("RTX 4090", "RTX 5090", "A100-40", "H100", "H200")


@dataclass
class Compared:
    """Every measured training run with its prediction, and the runs that they were made from."""

    frame: pd.DataFrame
    runs: list[Run]
    reports: Path


def load(own_runs: list[str], profile: str | None) -> Compared:
    """Predict every training run that there is a record of, the reader's own and the committed ones."""
    apply_style()
    session = Session(profile)
    reports = session.root / "reports"
    runs = select_runs(None, session.runs_root, reports, own_runs)
    frame = against_records(runs, reports)
    if frame.empty:
        show_text("No training run has been recorded yet; `lsai study memory` makes some.")
    return Compared(frame, runs, reports)


def show_runs(compared: Compared) -> None:
    """The scatter plot, the table, and the errors in words."""
    frame = compared.frame
    if frame.empty:
        return
    show_text(accuracy(frame))
    fig, axes = plt.subplots(figsize=(4.6, 3.6))
    low, high = frame["measured"].min() / 1.5, frame["measured"].max() * 1.5
    line = np.array([low, high])
    axes.plot(line, line, color="#444444", linewidth=0.8, label="equal")
    axes.fill_between(line, 0.9 * line, 1.1 * line, color="#dddddd", linewidth=0, label="within 10 %", zorder=0)
    for index, ((machine, study), some) in enumerate(frame.groupby(["machine", "study"], sort=False)):
        style = series_style(index) | {"linestyle": "none", "markersize": 6, "markerfacecolor": "none"}
        axes.plot(some["measured"], some["predicted"], label=f"{study}, {machine}", **style)
    axes.set(
        xscale="log", yscale="log", xlabel="measured peak (GiB)", ylabel="predicted peak (GiB)", xlim=line, ylim=line
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    fig.legend(loc="outside lower center", ncols=2)
    show_figure(
        fig,
        "fig-prediction-scatter",
        f"Predicted against measured peak memory of {len(frame)} training runs, one mark a run. On a GPU: active bytes of the "
        "caching allocator; on a CPU: bytes of live tensors.",
    )
    table = over_seeds(frame)
    shown = table.assign(time=table["estimated_s"] / table["step_s"])
    shown = shown[["machine", "study", "variant", "part", "runs", "measured", "predicted", "error", "time", "key"]]
    shown = shown.rename(columns={"measured": "measured GiB", "predicted": "predicted GiB", "time": "roofline / step"})
    show_table(
        shown.dropna(axis="columns", how="all"),
        "tbl-prediction-runs",
        "Peak memory, predicted and measured (medians over repeats). Roofline / step: the time of a step, estimated "
        "from its GPU's matmul, copy and link ceilings as if it were compiled, as a share of the time that it took (GPUs of the table only).",
        formats={
            "error": lambda error: "0.0%" if abs(error) < 5e-4 else f"{error:+.1%}",
            "roofline / step": ".0%",
            "measured GiB": ".3g",
            "predicted GiB": ".3g",
        },
        links={"variant": "key"},
    )


def accuracy(frame: pd.DataFrame) -> str:
    """How good the predictions are, in words."""
    error = frame["error"].abs()
    worst = frame.loc[error.idxmax()]
    text = (
        f"Over {len(frame)} runs on {frame['machine'].nunique()} machine{'s' if frame['machine'].nunique() > 1 else ''} the "
        f"prediction is within 5% of the measured peak for **{(error <= 0.05).mean():.0%}**"
        + (f" and within 10% for **{(error <= 0.10).mean():.0%}**" if (error > 0.05).any() else "")
        + f"; the median error is {error.median():.1%}, the largest "
        f"{worst['error']:+.1%} ({run_link(worst['variant'], worst['key'])}, study {worst['study']}, {worst['machine']})."
    )
    older = frame[frame["older"]]
    if len(older) and len(older) < len(frame):
        now = frame[~frame["older"]]["error"].abs()
        text += (
            f" {len(older)} of them were recorded before attention kept a copy of v instead of the whole product of query, key "
            f"and value, so that runs with a fused kernel took more than the same step takes now; without these the "
            f"largest error is {now.max():.1%}."
        )
    elif len(older):
        text += (
            " All of them were recorded before attention kept a copy of v instead of the whole product of query, key and value, "
            "so that runs with a fused kernel took more than the same step takes now."
        )
    if unread := frame.attrs.get("unread"):
        text += f" Not compared: {'; '.join(unread)}."
    return text


def show_limits(compared: Compared) -> None:
    """How full a GPU can really be: the prediction for the largest batches that trained."""
    failed = out_of_memory(compared.runs)
    if len(failed):
        words = [f"{run_link(row.variant, row.key)} {row.share:.0%}" for row in failed.itertuples()]
        show_text(
            f"Runs that ran out of memory, and the share of their GPU that they are predicted to need: {', '.join(words)}."
        )
    table = largest_batches(compared.runs)
    if table.empty:
        return
    low, high = table.loc[table["share"].idxmin()], table.loc[table["share"].idxmax()]
    show_table(
        table.rename(columns={"batch": "largest batch", "predicted": "predicted GiB", "share": "of the GPU"}),
        "tbl-prediction-limits",
        "The largest batch that trained (searched by trying), and what it is predicted to need.",
        formats={"predicted GiB": ".1f", "of the GPU": ".0%", "largest batch": ",.0f"},
        links={"variant": "key"},
    )
    show_text(
        f"The largest batches that really trained are predicted to need {low['share']:.0%} ({low['variant']}) to "
        f"{high['share']:.0%} ({high['variant']}) of their GPU. What is missing to 100% is what the allocator reserves and "
        "cannot use, because free blocks lie in pieces, and the driver's context. `fits` in this report is the answer of a replay of "
        f"the allocator with {MARGIN:.0%} of the GPU to spare; `tight` is the same without."
    )


def techniques() -> list[Technique]:
    """The chapter's task under every technique."""
    return compare(TrainConfig.model_validate(TASK))[1:]


def show_parts(rows: list[Technique]) -> None:
    """What the peak consists of, technique by technique."""
    names = [part for part in PARTS if any(row.prediction.parts[part] > 0.05 for row in rows)]
    fig, axes = plt.subplots(figsize=(6.3, 0.3 * len(rows) + 1.2))
    left = np.zeros(len(rows))
    places = np.arange(len(rows))[::-1]
    for index, part in enumerate(names):
        sizes = np.array([row.prediction.parts[part] for row in rows])
        axes.barh(places, sizes, 0.7, left=left, label=part, color=PALETTE[index], hatch=HATCHES[index], linewidth=0.6)
        left += sizes
    for place, row in zip(places, rows, strict=True):
        axes.text(row.prediction.peak + 1, place, f"{row.prediction.peak:.1f}", va="center", fontsize=8)
    axes.set_yticks(places, [row.name for row in rows])
    axes.set(xlabel="GiB on each GPU at the peak", xlim=(0, 1.1 * left.max()))
    axes.grid(axis="y", visible=False)
    fig.legend(loc="outside lower center", ncols=4)
    config = rows[0].config
    show_figure(
        fig,
        "fig-prediction-parts",
        f"Predicted peak of one training step of the course model ({config.batch_size} x {config.seq_len} tokens a GPU, compiled, "
        "bf16 weights) and what it consists of. Where a bar shows no gradients, the peak stands at the end of the forward pass, "
        "before there are any.",
    )


def show_fits(rows: list[Technique], compared: Compared) -> None:
    """Which technique fits which GPU, and the estimated speed."""
    gpus = [find_gpu(name) for name in SMALL]
    h200 = find_gpu("H200")
    ceilings = measured_ceilings(h200, compared.reports)
    table = []
    for row in rows:
        time = estimate(row.config, h200, ceilings)
        table.append(
            {"technique": row.name, "GPUs": row.config.parallel.world_size, "peak GiB": row.prediction.peak,
             **{gpu.name: _word(row, gpu) for gpu in gpus}, "H200 tokens/s": time.tokens_per_s if time else None}
        )  # fmt: skip
    basis = "measured" if ceilings else "data-sheet"
    show_table(
        pd.DataFrame(table),
        "tbl-prediction-fits",
        "Does it fit? The same task on GPUs of different size, and the tokens/s of one H200 at its "
        f"{basis} ceilings (eager runs are slower). –: does not fit.",
        formats={"peak GiB": ".1f", "H200 tokens/s": ",.0f"},
    )
    lines = []
    for gpu in GPUS:
        first = first_that_fits([row for row in rows if gpu.fp8 or "fp8" not in row.name], gpu)
        lines.append(
            f"- **{gpu.name}** ({gpu.memory_gib:g} GiB): "
            + (f"{first.name}, {first.prediction.peak:.1f} GiB" if first else "none of these techniques is enough")
        )
    show_text("The first technique of the list that fits, from the least change to the largest:\n\n" + "\n".join(lines))


def _word(row: Technique, gpu: Any) -> str | None:
    if "fp8" in row.name and not gpu.fp8:
        return None
    said = verdict(row.prediction, gpu)
    return None if said == "too large" else said
