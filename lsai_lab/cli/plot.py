"""`lsai plot`: the comparison plots of a plot configuration, as PNG and SVG files."""

from pathlib import Path
from typing import Annotated

import typer

from lsai_core.base.errors import UserError


def plot(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="A name in params/plots (course, for example), or a YAML file."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for <plot>.png and <plot>.svg.")] = Path(
        "plots"
    ),
    recorded: Annotated[
        bool, typer.Option("--recorded", help="The committed results instead of your own runs.")
    ] = False,
    machine: Annotated[
        str | None, typer.Option(help="This machine's runs, where there are several machines'.")
    ] = None,
) -> None:
    from lsai_lab.project.files import repo_root
    from lsai_lab.report.load import load
    from lsai_lab.report.plots import draw, load_plots, save
    from lsai_lab.report.studies import study
    from lsai_lab.report.style import apply_style

    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder")
    described = load_plots(repo_root(), config)
    if described.part not in study(described.study).parts:
        raise UserError(f"{config}: study {described.study} has no part {described.part!r}")
    runs = load(described.study).query("part == @described.part")
    chosen = runs[~runs["own"].astype(bool) if recorded else runs["own"].astype(bool)]
    if recorded and machine is None:
        chosen = chosen[chosen["main"]]
    if machine is not None:
        chosen = chosen[chosen["machine"] == machine]
    if chosen.empty:
        there = ", ".join(sorted(runs["machine"].unique())) or "none"
        ways = f"run `lsai study {described.study}` first, or add --recorded"
        raise UserError(f"no such run of study {described.study} (there are: {there}); {ways}")
    apply_style()
    for one in described.plots:
        figure = draw(one, chosen)
        if figure is None:
            print(f"{one.name}: no run has {one.metric}")
        else:
            print(*save(figure, out, one.name), sep=", ")
