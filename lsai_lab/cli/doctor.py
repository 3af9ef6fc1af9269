"""`lsai doctor`: what this machine can and cannot run, why, and the command that would change
it."""

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console

from lsai_core.base.tables import wrapped
from lsai_lab.machine.checks import Check, run_checks
from lsai_lab.machine.environment import environment

_STYLES = {"ok": ("✓", "green"), "missing": ("✗", "red"), "not needed": ("–", "dim")}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Show what this machine can and cannot run, why, and the fix; exit 1 only if something
    essential is broken."""
    checks = run_checks()
    missing = [check for check in checks if check.ok is False]
    broken = [check.name for check in missing if check.essential]
    here, console = environment(), Console(highlight=False, markup=False, soft_wrap=True)
    if as_json:
        rows = [{**dataclasses.asdict(check), "status": check.status} for check in checks]
        print(json.dumps({"usable": not broken, "environment": here, "checks": rows}, indent=1))
        raise typer.Exit(bool(broken))
    style = "red" if broken else ""
    console.print(
        wrapped(f"This machine: {here['machine']}. {_verdict(missing, broken)}"), style=style
    )
    for check in checks:
        symbol, style = _STYLES[check.status]
        told = f"{symbol} {check.name} ({check.status}): {check.detail}"
        console.print(wrapped(told, "  "), style=style)
        if check.fix and check.fix != check.detail:
            console.print(f"  → {check.fix}", style="yellow")  # in one line, to be copied
    if broken:
        raise typer.Exit(1)


def _verdict(missing: list[Check], broken: list[str]) -> str:
    if broken:
        return f"Not usable until this is fixed: {', '.join(broken)}."
    if missing:
        return (
            f"Usable. {len(missing)} optional parts are missing; runs that need them are recorded "
            f"as unavailable."
        )
    return "Usable. Nothing is missing that this machine could have."
