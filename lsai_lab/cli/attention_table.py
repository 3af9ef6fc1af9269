"""`lsai attention-table`: the measured table behind attention's `auto`, made from the committed records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from lsai_core.files import write_text
from lsai_lab.files import repo_root
from lsai_lab.runs.records import recorded_runs

if TYPE_CHECKING:
    from lsai_core.attention.measured import Ranking


def attention_table(
    write: Annotated[bool, typer.Option("--write", help="Refresh the table that ships with the package.")] = False,
) -> None:
    """Show which backend `auto` takes at every measured shape; exit 1 if the shipped table is not what the records give."""
    from lsai_core.attention.measured import TABLE, table_text

    found = committed_rankings(repo_root())
    if write:
        write_text(TABLE, table_text(found))
    _show(found)
    if TABLE.read_text(encoding="utf-8") != table_text(found):
        print("the table that ships differs from the records: run `lsai attention-table --write` and commit it")
        raise typer.Exit(1)


def committed_rankings(root: Path) -> list[Ranking]:
    """What the committed records of the checkout `root` give."""
    from lsai_lab.benches.attention_table import recorded_rankings

    return recorded_rankings(recorded_runs(root / "reports"))


def _show(rankings: list[Ranking]) -> None:
    console = Console()
    if not rankings:
        console.print("no attention run on a GPU is recorded: auto follows its fixed order everywhere")
        return
    table = Table()
    for name in ("GPU", "format", "head dim", "heads", "mask", "length", "training", "inference"):
        table.add_column(name)
    for r in rankings:
        mask = f"window {r.window}" if r.window is not None else "causal" if r.causal else "full"
        shape = (str(r.head_dim), "grouped" if r.grouped else "equal", mask, str(r.length))
        table.add_row(r.gpu, r.dtype, *shape, *(" > ".join(names[:3]) for names in (r.training, r.inference)))
    console.print(table)
