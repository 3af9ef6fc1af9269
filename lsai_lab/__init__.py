"""lsai_lab: the laboratory around the core, and all that a notebook takes from it: `import lsai_lab
as lab`. Each name is explained by `help(lab.<name>)` and imported when it is first used.

Runs, as frames:

    runs = lab.load("memory")            one row a run: results, config by dotted key, machine,
                                         label, folder
    lab.steps(run), lab.kernels(run)     one row a training step, a kernel
    lab.points(runs)                     one row a measured point of a bench (attention, context,
                                         gemm)
    lab.config(run)                      what a training run trained, as a TrainConfig
    lab.studies(), lab.study(name)       the studies' names; one's title, question, baseline and
                                         variants
    lab.parameters(name)                 the file params/<name>.yaml
    run = lab.open_run(study=..., variant=..., part=...)    a run of your own: run.execute(),
                                                            run.results

What a reader sees:

    lab.table(frame), lab.figure(fig), lab.say("...")    a table, a figure, a sentence
    lab.run_link(text, run)              a link to the page of a run
    lab.style()                          the report's plot style, for figures of your own
    lab.PALETTE, lab.MARKERS, lab.series_style(n)        its colours and markers; those of series n

Analysis, from frames to frames and numbers:

    summarize, over_repeats, spread, half_width    one figure from repeats, and how far they scatter
    relative, versus, pareto, equal_to_best        comparisons; the best, and what equals it
    SESSION_SPREAD                       what two sessions of one GPU differ by at equal work
    work_of                              what a training step of each variant computes
    ideal_of                             the least time that a run's step could take
    block_times, kept_inputs             matrix products of one block: their time, the inputs kept
    choices_of                           what `auto` would choose at the shapes of an attention run
    ALLOWED_ERROR                        a correct attention kernel's, over eager attention's

Claims:

    load_claims, evaluate                what is claimed, and how runs judge it
    claims_table, claim_value            judged claims as a table; a number in a claim's unit
    fallen_claims                        those that fell, as a sentence
    furthest_difference                  of a claim on losses: the variant that is furthest off

Predictions:

    run_predictions, step_errors         recorded runs beside their predictions; errors of the time
    tried_predictions                    configurations predicted first and measured afterwards
    prediction_table                     committed tables: what fits which GPU, published figures
    estimator_errors                     errors of this package and of other estimators

Many nodes:

    scale_config, groupings              the assumptions; what each way to group the GPUs costs
    step_traffic, state_bytes            what a step of FSDP sends; what one GPU keeps
    bytes_per_weight                     of one weight, and of its gradient and states
"""

import importlib
from typing import Any

from lsai_core.base.errors import UserError, not_installed

_FACE = {
    "lsai_lab.report.load": (
        "load",
        "steps",
        "points",
        "kernels",
        "studies",
        "study",
        "parameters",
    ),
    "lsai_lab.report.show": ("table", "figure", "say", "run_link"),
    "lsai_lab.report.style": ("PALETTE", "MARKERS", "series_style"),
    "lsai_lab.report.predicted": (
        "config",
        "run_predictions",
        "prediction_table",
        "tried_predictions",
    ),
    "lsai_lab.runs.interactive": ("open_run",),
    "lsai_lab.analysis.summary": (
        "SESSION_SPREAD",
        "block_times",
        "equal_to_best",
        "half_width",
        "kept_inputs",
        "over_repeats",
        "pareto",
        "relative",
        "spread",
        "summarize",
        "versus",
        "work_of",
    ),
    "lsai_lab.analysis.ideal_step": ("ideal_of",),
    "lsai_lab.analysis.scale": (
        "bytes_per_weight",
        "groupings",
        "scale_config",
        "state_bytes",
        "step_traffic",
    ),
    "lsai_lab.benches.attention.errors": ("ALLOWED_ERROR",),
    "lsai_lab.benches.attention_table": ("choices_of",),
    "lsai_lab.claims.declared": ("load_claims",),
    "lsai_lab.claims.evaluate": ("evaluate", "furthest_difference"),
    "lsai_lab.claims.words": ("claim_value", "claims_table", "fallen_claims"),
    "lsai_lab.predictions.recorded": ("estimator_errors", "step_errors"),
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
