"""`lsai predict --hf` of a model that is not this package's: a step of transformers' own code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lsai_core.base.disk_cache import cached_on_disk
from lsai_core.base.errors import Unavailable, UserError
from lsai_core.config.strict import flatten
from lsai_core.model.hf_config import AnotherModel
from lsai_core.profiling.gpus import Gpu
from lsai_lab.cli.script import SHOWN
from lsai_lab.cli.tables import say, table
from lsai_lab.predictions.hf_models import HfModel, HfStep, hf_model, predict_hf

_PRECISIONS = ("bf16", "bf16_autocast", "fp32")
_KEYS = ("seq_len", "batch_size", "grad_accum", "precision", "grad_checkpoint")
_SEQ_LEN, _FORMATS = 4096, {"memory GiB": ".1f", "share": ".0%"}


def predict_hf_model(
    path: Path, gpus: list[Gpu], overrides: dict[str, Any], as_json: bool, refused: AnotherModel
) -> bool:
    """Print what a step of the model of the config.json at `path` takes. False if it fits none of
    `gpus`. `refused`: why it is none of this package's models.

    UserError for overrides that its step has not, and without transformers.
    """
    try:
        model = hf_model(path)
    except Unavailable as error:
        raise UserError(f"{refused}; {error}") from None
    step, remarks = _step_of(model, overrides)
    question = [
        path.resolve().as_posix(),
        str(model.config),
        asdict(step),
        model.remarks,
        [asdict(gpu) for gpu in gpus],
    ]
    found = cached_on_disk(
        "lsai_lab.predictions.hf_models",
        json.dumps(question),
        lambda: predict_hf(model, step, gpus, path),
    )
    found |= {"step": asdict(step), "remarks": [str(refused), *model.remarks, *remarks]}
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print(found, model, step)
    return any(row["verdict"] != "too large" for row in found["gpus"])


def _step_of(model: HfModel, overrides: dict[str, Any]) -> tuple[HfStep, list[str]]:
    """The step that `overrides` ask for, and remarks; UserError for keys and values that it has
    not."""
    said = flatten(overrides)
    if strange := [key for key in said if key not in _KEYS]:
        raise UserError(
            f"{strange[0]} is a setting of this package's own models; a step of transformers' code "
            f"has {', '.join(_KEYS)}"
        )
    allowed = {"precision": _PRECISIONS, "grad_checkpoint": ("none", "full")}
    for key, values in allowed.items():
        if said.get(key, values[0]) not in values:
            raise UserError(
                f"{key} {said[key]!r}: a step of transformers' code has {', '.join(values)}"
            )
    for key in ("seq_len", "batch_size", "grad_accum"):
        if type(said.get(key, 1)) is not int or said.get(key, 1) < 1:
            raise UserError(f"{key}: expected a number from 1 on, got {str(said[key])[:60]!r}")
    text = model.config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    length = said.get("seq_len", min(_SEQ_LEN, longest or _SEQ_LEN))
    remarks = []
    if model.takes not in ("text", "sound") and "seq_len" in said:
        raise UserError(f"seq_len: a model that takes {model.takes} has no sequence of tokens")
    if longest and length > longest:
        remarks.append(f"seq_len {length} is beyond the {longest} positions of the model")
    step = HfStep(
        length,
        said.get("batch_size", 1),
        said.get("precision", "bf16"),
        said.get("grad_checkpoint") == "full",
        said.get("grad_accum", 1),
    )
    return step, remarks


def _print(found: Mapping[str, Any], model: HfModel, step: HfStep) -> None:
    rows = found["gpus"]
    fits = [row["GPU"] for row in rows if row["verdict"] == "fits"]
    one = f"{rows[0]['GPU']}: {rows[0]['verdict']}."
    say(one if len(rows) == 1 else f"Fits {', '.join(fits) or 'none of these'}.")
    tokens = f" x {step.seq_len} tokens" if model.takes in ("text", "sound") else ""
    say(
        f"{model.config.model_type}, {found['parameters']:,} parameters, {step.precision}, fused "
        f"AdamW, {step.batch_size}{tokens}"
        + (", full checkpointing" if step.recompute else "")
        + (f", {step.accumulate} micro-batches" if step.accumulate > 1 else "")
    )
    for remark in found["remarks"]:
        say(f"Note: {remark}.")
    print(f"Attention of transformers: {found['attention']}.")
    say(
        f"Predicted peaks: {found['allocated_gib']:.2f} GiB allocated, "
        f"{found['reserved_gib']:.2f} GiB reserved; of the phases: "
        + ", ".join(f"{name} {size:.2f}" for name, size in found["phases_gib"].items())
    )
    print("\nAt the highest moment, GiB (what waits or is in use, by the operator that made it)")
    for name, size in list(found["causes_gib"].items())[:SHOWN]:
        print(f"  {name:40}{size:9.2f}")
    print(f"\n{table(rows, formats=_FORMATS)}")
