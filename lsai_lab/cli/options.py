"""Options that several commands share, and how they become config overrides."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lsai_core.base.errors import UserError
from lsai_lab.project.files import merged, parse_overrides

# Which run is meant (`lsai_lab.predictions.asked`), and where.
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
    int | None,
    typer.Option(min=1, help="On so many GPUs in all: FSDP shares what --set parallel.* leaves."),
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

ProfileOption = Annotated[
    str | None, typer.Option(help="Machine profile in params/profiles; detected if not given.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key, e.g. optim.lr=3e-4. Repeatable.")
]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Sequences per micro-batch.")]
DatasetOption = Annotated[
    str | None,
    typer.Option(
        help="stdlib, polish-docs, debian-docs, speakleash:<name>, file:<path or glob>, "
        "tokens:<path or glob>."
    ),
]
NoMemoryOption = Annotated[
    bool, typer.Option("--no-memory-profiling", help="Do not measure the phases' memory.")
]
OnlyOption = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated variants to run (for a report also studies), or patterns such as "
        "'*_1'."
    ),
]
SkipOption = Annotated[
    str | None, typer.Option(help="Comma-separated variants to leave out, as with --only.")
]
PartsOption = Annotated[str | None, typer.Option(help="Comma-separated parts to measure.")]
AgainOption = Annotated[
    bool, typer.Option("--again", help="Repeat finished runs; earlier/ keeps what they found.")
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="A name for these runs, as `lsai runs` finds them.")
]
NoteOption = Annotated[str | None, typer.Option(help="A note to keep with these runs.")]
TagOption = Annotated[list[str] | None, typer.Option(help="A tag for these runs. Repeatable.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be run or submitted, and stop.")
]
FullOption = Annotated[
    bool, typer.Option("--full", help="Everything, however wide: settings, reasons, names.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]
OneStudy = Annotated[str, typer.Argument(metavar="STUDY", help="Study in params/studies.")]
AnyStudy = Annotated[str | None, typer.Argument(metavar="[STUDY]", help="Only this study.")]


def overrides_from(
    pairs: list[str] | None,
    batch_size: int | None = None,
    dataset: str | None = None,
    no_memory: bool = False,
) -> dict[str, Any]:
    """The `--set` pairs and the shorthand options as one nested mapping."""
    shorthands: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size}
    shorthands |= {} if dataset is None else {"data": {"source": dataset}}
    shorthands |= {"profile": {"memory_steps": 0}} if no_memory else {}
    return merged(parse_overrides(pairs or []), shorthands)


def exclude(options: dict[str, Any], why: str) -> None:
    """UserError if more than one of `options` (as they are written, each with what was given) is
    given; `why` they exclude each other."""
    given = [name for name, value in options.items() if value not in (None, False, [])]
    if len(given) > 1:
        raise UserError(
            f"{' and '.join(given)} contradict each other: {why}; leave one of them out"
        )


def names(text: str | None) -> list[str]:
    """A comma-separated list as given on the command line. Raises UserError for a list of nothing,
    which would select all."""
    found = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not found:
        raise UserError(
            f"expected names separated by commas, got {text!r}; leave the option out to select "
            f"everything"
        )
    return found
