"""Options that several commands share, how they become config overrides, and how rows are shown."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from lsai_core.base.errors import UserError
from lsai_core.base.files import deep_merge, flatten
from lsai_lab.project.files import one_line, parse_overrides

WIDTH = 100  # columns of a terminal that lists are made for
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
        help="stdlib, polish-docs, speakleash:<name>, file:<path or glob>, tokens:<path or glob>."
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


def merged(settings: dict[str, Any], shorthands: dict[str, Any]) -> dict[str, Any]:
    """`--set` and what options stand for. UserError if both say something about one key, and not
    the same."""
    given, meant = flatten(settings), flatten(shorthands)
    for key in given.keys() & meant.keys():
        if given[key] != meant[key]:
            raise UserError(
                f"--set {key}={given[key]} and an option that sets it to {meant[key]}; leave one "
                f"of them out"
            )
    return deep_merge(settings, shorthands)


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


def shortened(text: str, width: int) -> str:
    """`text`, cut to so many characters."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def show_rows(
    rows: list[dict[str, Any]], as_json: bool, nothing: str, less: Sequence[str] = ()
) -> None:
    """Print rows as JSON, or as a table without empty columns; instead of an empty table it says
    `nothing`. Where the table is wider than 100 columns, those of `less` go, the first first."""
    import pandas as pd  # `lsai predict` does without

    if as_json:
        return print(json.dumps(rows, indent=1, default=str))
    if not rows:
        return print(nothing)
    rows = [
        {key: one_line(value) if isinstance(value, str) else value for key, value in row.items()}
        for row in rows
    ]
    table = pd.DataFrame(rows).replace({"nan": None, "": None}).dropna(axis="columns", how="all")
    texts = table.select_dtypes(["object", "string"]).columns
    table[texts] = table[texts].astype(object).where(table[texts].notna(), "")
    shown = _text(table)
    for name in less:
        if max(map(len, shown.splitlines())) <= WIDTH:
            break
        table = table.drop(columns=name, errors="ignore")
        shown = _text(table)
    print(shown)


def _text(table: Any) -> str:
    shown: str = table.to_string(
        index=False, na_rep="", float_format=lambda x: f"{x:{',.0f' if abs(x) >= 1000 else '.4g'}}"
    )
    return shown


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of a prediction under their names, right-aligned; a column of nothing is left out."""
    formats = {
        "share": ".0%",
        "step s": ".3g",
        "tokens/s": ",.0f",
        "peak GiB": ".1f",
        "host GiB": ".1f",
        "needs GiB": ".2f",
    }
    columns = []
    for name in rows[0]:
        if any(row[name] is not None for row in rows):
            texts = [
                name,
                *(
                    "" if row[name] is None else format(row[name], formats.get(name, ""))
                    for row in rows
                ),
            ]
            columns.append([text.rjust(max(map(len, texts))) for text in texts])
    return "\n".join("  ".join(line) for line in zip(*columns, strict=True))
