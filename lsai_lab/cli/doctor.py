"""`lsai doctor`: what this machine can and cannot run, why, and the command that would change it."""

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lsai_lab.checks import Check, run_checks
from lsai_lab.environment import environment

_SYMBOLS = {"ok": ("✓ ok", "green"), "missing": ("✗ missing", "red"), "not needed": ("– not needed", "dim")}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False) -> None:
    """Show what this machine can and cannot run, why, and the fix; exit 1 only if something essential is broken."""
    checks = run_checks()
    broken = [check for check in checks if check.essential and check.ok is False]
    if as_json:
        rows = [{**dataclasses.asdict(check), "status": check.status} for check in checks]
        print(json.dumps({"usable": not broken, "environment": environment(), "checks": rows}, indent=1))
    else:
        _show(checks, broken)
    if broken:
        raise typer.Exit(1)


def _show(checks: list[Check], broken: list[Check]) -> None:
    console = Console()
    table = Table(title=f"This machine: {environment()['machine']}", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("why", overflow="fold")
    for check in checks:
        symbol, style = _SYMBOLS[check.status]
        why = Text(check.detail)
        if check.fix and check.fix != check.detail:
            why.append(f"\n→ {check.fix}", style="yellow")
        table.add_row(check.name, Text(symbol, style=style), why)
    console.print(table)
    missing = sum(check.ok is False for check in checks)
    if broken:
        console.print(f"Not usable until this is fixed: {', '.join(check.name for check in broken)}.", style="red")
    elif missing:
        console.print(f"Usable. {missing} optional parts are missing; runs that need them are recorded as unavailable.")
    else:
        console.print("Usable. Nothing is missing that this machine could have.")
