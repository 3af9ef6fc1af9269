"""The longest sequences that memory allows, predicted, beside the longest real steps on record.

A search is three or four predictions of a few seconds, so the table is short; the chapter is made again only when code or records
change. Time is no limit here: at these lengths a step of the 8 B model takes from many minutes to hours.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from lsai_core.config import TrainConfig
from lsai_core.errors import UserError
from lsai_core.files import deep_merge
from lsai_core.profiling.predict import Gpu, find_gpu, longest
from lsai_core.profiling.predict.prediction import MARGIN
from lsai_lab.report.context.training import Trained
from lsai_lab.report.show import run_link, show_table
from lsai_lab.runs.session import Session

_BASE: dict[str, Any] = {
    "precision": "bf16", "compile": True, "batch_size": 1, "data": {"vocab_size": 257}, "grad_checkpoint": "full",
}  # fmt: skip
_HOST = {"mlp_chunk": 16384, "saved_inputs": "host"}
_SETTINGS: dict[str, dict[str, Any]] = {
    "full checkpointing": {},
    "… in chunks": {"mlp_chunk": 16384},
    "… in chunks, inputs on the host": _HOST,
    "… and weights and states there": {**_HOST, "parallel": {"cpu_offload": True}},
}
_FULL, _CHUNKS, _INPUTS, _OFFLOAD = _SETTINGS
# Model, GPUs, settings. The 1 B model's weights and chunks hardly matter, and over eight GPUs nobody's states do.
_ROWS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("llama3.2-1b", 1, (_FULL, _INPUTS)),
    ("llama3.2-1b", 8, (_FULL, _INPUTS)),
    ("llama3-8b", 1, (_FULL, _CHUNKS, _INPUTS, _OFFLOAD)),
    ("llama3-8b", 8, (_FULL, _INPUTS)),
)


def show_longest(machines: list[Trained], profile: str | None) -> None:
    """The table, for the reader's own GPU if it is a known one, else for an H200; profile `quick` shows its first row only."""
    session = Session(profile)
    gpu = _gpu(session.env["gpu"])
    rows = _ROWS[:1] if session.profile.profile == "quick" else _ROWS
    table = predicted(gpu, rows)
    real = {(model, gpus): really_taken(machines, gpu, model, gpus) for model, gpus, _ in rows}
    first = ~table.duplicated(["model", "GPUs"])
    table["real step"] = [
        real[row.model, row.GPUs] if shown else None for row, shown in zip(table.itertuples(), first, strict=True)
    ]
    table = table.dropna(axis="columns", how="all")
    beside = " Beside it the longest real step on record." if "real step" in table else ""
    none = " A row without numbers: the weights alone do not fit." if table["tokens"].isna().any() else ""
    show_table(
        table,
        "tbl-context-longest-predicted",
        f"The longest sequence that memory allows on {gpu.name} ({gpu.memory_gib:g} GiB), predicted: one sequence, bf16 weights and "
        f"AdamW states, {MARGIN:.0%} of each GPU to spare. Host memory is what all processes need together, however much a "
        f"machine has.{beside}{none}",
        formats={"tokens": "{:,.0f}", "peak each (GiB)": ".1f", "host, all (GiB)": "{:,.0f}"},
    )


def _gpu(name: str | None) -> Gpu:
    try:
        return find_gpu(name or "H200")
    except UserError:  # a GPU that is not in the table
        return find_gpu("H200")


def predicted(gpu: Gpu, rows: tuple[tuple[str, int, tuple[str, ...]], ...]) -> pd.DataFrame:
    """One row per model, number of GPUs and setting: tokens, the peak of each GPU, host memory of all of them (GiB)."""
    found = []
    for model, gpus, names in rows:
        for name in names:
            row: dict[str, Any] = {"model": model, "GPUs": gpus, "settings": name}
            config = deep_merge(_BASE | {"model": {"preset": model}, "parallel": {"cp": gpus}}, _SETTINGS[name])
            try:
                best = longest(TrainConfig.model_validate(config), gpu)
            except UserError:  # nothing fits
                found.append(row)
                continue
            numbers = {"peak each (GiB)": best.prediction.peak, "host, all (GiB)": best.host_gib or None}
            found.append(row | {"tokens": best.tokens} | numbers)
    return pd.DataFrame(found)


def really_taken(machines: list[Trained], gpu: Gpu, model: str, gpus: int) -> str | None:
    """The most tokens of a recorded step of the whole model on that many such GPUs, with a link to its run."""
    taken = []
    for trained in machines:
        if trained.runs[0].env.get("gpu") != gpu.driver_name or trained.longest.empty:
            continue
        rows = trained.longest
        whole = rows[(rows["model"] == model) & (rows["processes"] == gpus) & (rows["layers"] == rows["wanted"])]
        taken += list(zip(whole["tokens"], whole["key"], strict=True))
    if not taken:
        return None
    tokens, key = max(taken)
    return run_link(f"{tokens:,}", key)
