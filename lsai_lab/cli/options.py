"""Options that several commands share, and how they become config overrides."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lsai_core.errors import UserError
from lsai_core.files import deep_merge
from lsai_lab.files import parse_overrides

ProfileOption = Annotated[str | None, typer.Option(help="Machine profile in params/profiles; detected if not given.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a key, e.g. optim.lr=3e-4. Repeatable.")]
BatchOption = Annotated[int | None, typer.Option("--batch-size", min=1, help="Sequences per micro-batch.")]
DatasetOption = Annotated[
    str | None, typer.Option("--dataset", help="stdlib, polish-docs, speakleash:<name>, file:<path or glob>.")
]
NoMemoryOption = Annotated[bool, typer.Option("--no-memory-profiling", help="Do not measure the phases' memory.")]

AgainOption = Annotated[
    bool, typer.Option("--again", help="Repeat finished runs; what they found is kept in their folders, in earlier/.")
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="A name for these runs, by which `lsai runs` finds them.")
]
NoteOption = Annotated[str | None, typer.Option("--note", help="A note to keep with these runs.")]
TagOption = Annotated[list[str] | None, typer.Option("--tag", help="A tag for these runs. Repeatable.")]


def overrides_from(
    pairs: list[str] | None, batch_size: int | None = None, dataset: str | None = None, no_memory: bool = False
) -> dict[str, Any]:
    """The `--set` pairs and the shorthand options as one nested mapping."""
    overrides = parse_overrides(pairs or [])
    if batch_size is not None:
        overrides = deep_merge(overrides, {"batch_size": batch_size})
    if dataset is not None:
        overrides = deep_merge(overrides, {"data": {"source": dataset}})
    if no_memory:
        overrides = deep_merge(overrides, {"profile": {"memory_steps": 0}})
    return overrides


def names(text: str | None) -> list[str]:
    """A comma-separated list as given on the command line. Raises UserError for a list of nothing, which would select all."""
    found = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not found:
        raise UserError(f"expected names separated by commas, got {text!r}; leave the option out to select everything")
    return found
