"""Options of `lsai predict`, `techniques` and `longest` that say which run is meant
(`lsai_lab.predictions.asked`)."""

from pathlib import Path
from typing import Annotated

import typer

StudyOption = Annotated[str | None, typer.Option(help="Study in params/studies.")]
VariantOption = Annotated[str | None, typer.Option(help="Variant of the study.")]
ModelOption = Annotated[
    str | None, typer.Option(help="A preset (course, llama3-8b, ...), in bf16 and compiled.")
]
HfOption = Annotated[
    Path | None, typer.Option(help="The same of a Hugging Face config.json, or its folder.")
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        help="One GPU, e.g. rtx4090, b200, 'a100 80gb', a MIG slice, or its memory: 24GiB, "
        "which vendors call 24 GB (24GB here is 24 x 10^9 bytes)."
    ),
]
GpusOption = Annotated[
    int | None, typer.Option(min=1, help="Shard over so many GPUs (parallel.fsdp).")
]
PassportOption = Annotated[
    Path | None,
    typer.Option(
        help="Times at the rates of this passport, a file of `lsai probe`, on its device; without "
        "it, at rates that come with this package."
    ),
]
InstalledOption = Annotated[
    str | None,
    typer.Option(
        help="Packages with attention kernels there: fa2,fa3,fa4, or none; default: those of "
        "this environment."
    ),
]
