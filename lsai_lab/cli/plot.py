"""`lsai plot`: the comparison plots of a plot configuration, as PNG and SVG files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lsai_core.errors import UserError


def plot(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A name in params/plots (for example course), or a YAML file.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for <plot>.png and <plot>.svg.")],
    runs: Annotated[Path | None, typer.Option(help="Folder of records; default runs/.")] = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="The committed results instead of your own runs.")
    ] = False,
    machine: Annotated[str | None, typer.Option(help="This machine's runs, where there are several machines'.")] = None,
) -> None:
    from lsai_lab.kit.style import apply_style
    from lsai_lab.report.plots import caption, check_plots, draw, load_plots, save
    from lsai_lab.report.selection import newest
    from lsai_lab.runs.records import find_runs, recorded_runs
    from lsai_lab.runs.session import Session

    if recorded and runs is not None:
        raise UserError("--recorded takes the committed records; it does not go with --runs")
    session = Session()
    described = load_plots(session.root, config)
    study = session.study(described.study)
    committed = recorded_runs(session.root / "reports")
    found = committed if recorded else find_runs(runs or session.runs_root)
    of_study = [run for run in found if run.summary.id.study == study.study]
    mine = newest([run for run in of_study if machine in (None, run.machine)])
    machines = sorted({run.machine for run in mine})
    if not mine:
        where = "the committed records" if recorded else str(runs or session.runs_root)
        other = sorted({run.machine for run in of_study})
        raise UserError(
            f"no finished run of study {study.study} in {where}"
            + (f" on {machine}, but on {', '.join(other)}" if other else f"; run `lsai study {study.study}` first")
        )
    if len(machines) > 1:
        raise UserError(f"there are runs of several machines: {', '.join(machines)}; choose one with --machine")
    check_plots(described, study, mine, committed)
    apply_style()
    drawn = 0
    for one in described.plots:
        figure = draw(one, described, study, mine)
        if figure is None:
            print(f"{one.name}: no run on {machines[0]} has {one.metric}")
            continue
        paths = save(figure, out, one.name)
        drawn += 1
        print(f"{paths[0]}, {paths[1].suffix}: {caption(one, described, study, mine, machines[0])}")
    print(f"{drawn} of {len(described.plots)} plots in {out}")
