"""The explorable that builds a training step, change by change: time by class of kernel, clock,
power, speed, energy and memory, as they were measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lsai_lab.analysis.step_time import class_times, levers
from lsai_lab.report.load import recorded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Build the step: predict before you look"
HEADS = ("step", "ms", "tokens/s", "MHz", "W", "mJ per token", "peak GiB", "loss (nats)")
# What each change is, in the order in which they were made; each keeps those before it.
CHANGES = {
    "eager": ("eager", "PyTorch's operators one by one"),
    "compiled": ("compiled blocks", "torch.compile fuses the pointwise kernels"),
    "fused_loss": ("fused loss", "loss in chunks, never all logits"),
    "fused_blocks": ("fused blocks", "own kernels for SwiGLU and RMSNorm"),
    "fused_optimizer": ("fused optimizer", "one kernel clips and updates"),
    "fp8": ("fp8 matmuls", "matmuls in fp8 with delayed scales"),
}


def data() -> dict[str, Any]:
    """The changes in their order, medians over repeats: `classes` (ms of a step), `step_ms`,
    `clock_mhz`, `watts`, `tokens_per_s`, `joules_per_token`, `peak_gib`, the range of the speed,
    and the validation loss after all `steps` (nats): the mean, and that of each seed."""
    runs = recorded("speed")
    runs = runs[runs["main"] & (runs["part"] == "levers") & (runs["outcome"] == "ok")]
    rows = levers(runs).set_index("variant")
    rows = rows.loc[[variant for variant in CHANGES if variant in rows.index]]
    times = class_times(rows).set_axis(rows.index)
    steps: list[dict[str, Any]] = []
    for variant, middle in rows.iterrows():
        name, about = CHANGES[str(variant)]
        classes = times.loc[variant]
        speed = float(middle["tokens_per_s"])
        mine = runs[runs["variant"] == variant].sort_values("seed")
        losses = [round(float(loss), 3) for loss in mine["validation_loss"]]
        steps.append(
            {
                "name": name,
                "about": about,
                "classes": {kind: round(float(ms), 2) for kind, ms in classes.items()},
                "step_ms": round(float(middle["step_ms"]), 2),
                "tokens_per_s": round(speed, 1),
                "range": [float(middle["low"]), float(middle["high"])],
                "clock_mhz": float(middle["gpu_clock_mhz"]),
                "watts": round(float(middle["gpu_power_w"]), 1),
                "joules_per_token": round(float(middle["gpu_power_w"]) / speed, 5),
                "peak_gib": round(float(middle["mem_peak_allocated_gib"]), 4),
                "steps": int(mine["steps"].max()),
                "loss": round(sum(losses) / len(losses), 3),
                "losses": losses,
            }
        )
        steps[-1]["row"] = _row(steps[-1])
    first = runs.iloc[0]
    about = f"one {first['gpu']}, batch {first['batch_size']:.0f} x {first['seq_len']:,.0f} tokens"
    names = [step["name"] for step in steps]
    return {
        "title": "Build the step.",
        "about": f"{first['parameters'] / 1e9:.2f} B parameters, {about}. Choose a change, guess, "
        "then look. Each keeps those before it.",
        "fields": {
            "change": {"label": "changes up to", "choices": names, "value": names[1]},
            "guess": {"label": "your guess (tokens/s)", "range": [0.8, 2, 0.01], "value": 1},
        },
        "steps": steps,
        "heads": [*HEADS[:-1], *steps[0]["classes"], HEADS[-1]],
    }


def _row(step: Mapping[str, Any]) -> list[Any]:
    """A step's row of the table of values, by `HEADS`, the classes before the last."""
    return [
        step["name"],
        step["step_ms"],
        step["tokens_per_s"],
        step["clock_mhz"],
        step["watts"],
        round(1e3 * step["joules_per_token"], 2),
        step["peak_gib"],
        *step["classes"].values(),
        step["loss"],
    ]


def picture(data: dict[str, Any]) -> Figure:
    """Stacked milliseconds of every step."""
    from matplotlib.figure import Figure as New

    from lsai_lab.report.colors import COLORS

    figure = New(figsize=(6.3, 2.4), layout="constrained")
    axes = figure.subplots()
    for place, step in enumerate(data["steps"]):
        end = 0.0
        for name, size in step["classes"].items():
            label = name if place == len(data["steps"]) - 1 else None
            axes.barh(place, size, left=end, color=COLORS[name], label=label)
            end += size
    axes.set_yticks(range(len(data["steps"])), [step["name"] for step in data["steps"]])
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds per step")
    figure.legend(loc="outside lower center", ncols=4)
    return figure
