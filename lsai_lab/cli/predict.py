"""`lsai predict`: its options. What answers them needs torch, which a `--help` does not (`prediction.py`)."""

from __future__ import annotations

from typing import Annotated

import typer

from lsai_core.files import deep_merge
from lsai_lab.cli.options import BatchOption, ProfileOption, SetOption, overrides_from


def predict_command(
    study: Annotated[str | None, typer.Option("--study", help="Study in params/studies.")] = None,
    variant: Annotated[str | None, typer.Option("--variant", help="Variant of the study.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="A preset (lab, course, llama3-8b, ...), in bf16 and compiled, without a study."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="One GPU, e.g. rtx4090, h200, or its memory, e.g. 24GB; default: all known."),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Shard over so many GPUs (parallel.fsdp).")] = None,
    techniques: Annotated[
        bool,
        typer.Option(
            "--techniques", help="Compare the techniques that save memory, and name the first that fits (minutes)."
        ),
    ] = False,
    find_longest: Annotated[
        bool, typer.Option("--longest", help="Find the longest sequence that fits the GPU (seq_len is ignored).")
    ] = False,
    batch_size: BatchOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    profile: ProfileOption = None,
    set_: SetOption = None,
) -> None:
    overrides = overrides_from(set_, batch_size)
    if gpus is not None:
        overrides = deep_merge(overrides, {"parallel": {"fsdp": gpus}})
    from lsai_lab.cli.prediction import Question, answer

    answer(Question(study, variant, model, overrides), gpu, profile, find_longest, techniques, as_json)
