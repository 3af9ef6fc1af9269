"""lsai_lab: the laboratory around the core, and what a notebook takes from it: `import lsai_lab as
lab`.

    runs = lab.load("memory")            one row a run: results, config by dotted key, machine,
                                         label, folder
    lab.steps(run), lab.kernels(run)     one row a training step, a kernel
    lab.points(runs)                     one row a measured point of a bench (attention, context,
                                         gemm)
    lab.summarize, relative, pareto, equal_to_best, spread    from frames to frames and numbers
                                                              (lsai_lab.analysis.summary)
    lab.table(frame), lab.figure(fig), lab.say("...")         what a reader sees
                                                              (lsai_lab.report.show)
    run = lab.open_run(study=..., variant=..., part=...)    a run of your own: run.execute(),
                                                            run.results
    lab.study(name)                      a study's title, question, baseline and variants
    lab.style()                          the report's plot style, for figures of your own

Everything is imported when it is first used.
"""

import importlib
from typing import Any

from lsai_core.base.errors import UserError, not_installed

_FACE = {
    "lsai_lab.report.load": ("load", "steps", "points", "kernels", "study"),
    "lsai_lab.report.show": ("table", "figure", "say", "run_link"),
    "lsai_lab.runs.interactive": ("open_run",),
    "lsai_lab.analysis.summary": (
        "over_repeats",
        "summarize",
        "relative",
        "pareto",
        "equal_to_best",
        "spread",
    ),
}
__all__ = ["style", *(name for names in _FACE.values() for name in names)]


def _imported(module: str) -> Any:
    """The module; without the packages of the extra `report` a UserError that says so."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (line := not_installed(error)) is None:
            raise
        raise UserError(line) from None


def __getattr__(name: str) -> Any:
    if name == "style":
        return _imported("lsai_lab.report.style").apply_style
    for module, names in _FACE.items():
        if name in names:
            return getattr(_imported(module), name)
    raise AttributeError(f"module 'lsai_lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
