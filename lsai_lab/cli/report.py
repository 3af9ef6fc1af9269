"""`lsai report`: the whole way from parameters to the rendered report, doing only what is not done yet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lsai_core.errors import UserError
from lsai_lab.cli.options import (
    BatchOption,
    DatasetOption,
    NoMemoryOption,
    ProfileOption,
    SetOption,
    names,
    overrides_from,
)


def report(
    profile: ProfileOption = None,
    only: Annotated[
        str | None, typer.Option(help="Comma-separated studies or variants to run, or patterns such as 'fp8*'.")
    ] = None,
    skip: Annotated[
        str | None, typer.Option(help="Comma-separated studies or variants to leave out, or patterns.")
    ] = None,
    batch_size: BatchOption = None,
    dataset: DatasetOption = None,
    no_memory_profiling: NoMemoryOption = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Report on the records there are; run nothing.")] = False,
    budget: Annotated[
        str | None, typer.Option(help="Run only what is expected to fit this time, such as 20m, 90s or 2h.")
    ] = None,
    formats: Annotated[str, typer.Option(help="html, pdf or html,pdf.")] = "html,pdf",
    engine: Annotated[str, typer.Option(help="auto, quarto or pandoc.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder for index.html and lab-report.pdf; default reports/_output.")
    ] = None,
    set_: SetOption = None,
) -> None:
    from lsai_lab.kit.book import make_report
    from lsai_lab.runs.session import Session

    kinds = names(formats)
    if not kinds or set(kinds) - {"html", "pdf"}:
        raise UserError(f"--formats wants html, pdf or html,pdf, got {formats!r}")
    if engine not in ("auto", "quarto", "pandoc"):
        raise UserError(f"--engine wants auto, quarto or pandoc, got {engine!r}")
    if no_run and (only or skip):
        raise UserError("--only and --skip say what to run, and --no-run runs nothing; leave one of them out")
    session = Session(profile)
    overrides = overrides_from(set_, batch_size, dataset, no_memory_profiling)
    options: dict[str, Any] = {"overrides": overrides} if overrides else {}
    good = make_report(
        session,
        only=names(only),
        skip=names(skip),
        out=out or session.root / "reports" / "_output",
        formats=kinds,
        engine=engine,  # type: ignore[arg-type]
        run_studies=not no_run,
        run_options=options,
        budget_s=_seconds(budget) if budget else None,
    )
    if not good:
        raise typer.Exit(1)


def _seconds(text: str) -> float:
    """`90s`, `20m`, `2h` in seconds."""
    number, unit = text[:-1], {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    if unit is None or not number.isdigit() or not int(number):
        raise UserError(f"--budget wants a time such as 20m, 90s or 2h, got {text!r}")
    return float(int(number) * unit)
