"""lsai_lab: the laboratory around the core, and all that a notebook takes from it: `import lsai_lab
as lab`. Each name is explained by `help(lab.<name>)` and imported when it is first used.

Runs, as frames:

    runs = lab.load("memory")            one row a run: results, config by dotted key, machine,
                                         label, folder; with mine=True every own run
    lab.steps(run), lab.kernels(run)     one row a training step, a kernel; also while it goes on
    lab.points(runs)                     one row a measured point of a bench (attention, context,
                                         gemm)
    lab.config(run)                      what a training run trained, as a TrainConfig
    lab.studies(), lab.study(name)       the studies' names; one's title, question, baseline and
                                         variants
    lab.parameters(name)                 the file params/<name>.yaml

Runs of your own (a run is a row of `load`, a folder, the name you gave it, its key, or
`study.variant`; a recorded one `machine/study.variant`):

    run = lab.open_run(study=..., variant=..., overrides={...}, name=...)
                                         a run object: run.execute(), run.results, run.steps,
                                         run.plot(), run.memory, run.kernels, run.timeline()
    lab.find_run("name")                 the same of a run that is there, own or recorded
    lab.compare(a, b)                    settings that differ, results, and .plot()
    lab.curves(a, b, y="loss", x="elapsed_s")    columns of the steps of any runs, drawn
    lab.sweep(study, variants, {"seq_len": [128, 256]})    runs all, one row each
    lab.load_model(run), lab.generate(run, "text")    the trained model, and what it writes

Memory and time:

    lab.predict("llama3-8b", "24GB")     the peak by cause and a step's time; largest="batch"
    lab.watch(model, optimizer)          phases, memory by cause and kernels of any training loop
    lab.timeline(run)                    the memory of a step by cause, and its kernels

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
import sys
from typing import Any

from lsai_core.base.errors import UserError, hint, not_installed

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
    "lsai_lab.interactive.comparison": ("compare",),
    "lsai_lab.interactive.curves": ("curves",),
    "lsai_lab.interactive.models": ("generate", "load_model"),
    "lsai_lab.interactive.prediction": ("predict",),
    "lsai_lab.interactive.opening": ("open_run",),
    "lsai_lab.interactive.run": ("find_run",),
    "lsai_lab.interactive.sweep": ("sweep",),
    "lsai_lab.interactive.timeline": ("timeline",),
    "lsai_lab.interactive.watch": ("watch",),
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
    "lsai_lab.analysis.ideal": ("ideal_of",),
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
    meant = hint(name, __all__) if name[:1] != "_" else ""
    raise AttributeError(f"module 'lsai_lab' has no attribute {name!r}{meant}")


def __dir__() -> list[str]:
    return __all__


def _complete(context: Any) -> dict[str, Any]:
    """IPython's completer asks here: which names may stand within these quotes."""
    matched: dict[str, Any] = _imported("lsai_lab.interactive.complete").matcher(context)
    return matched


def _offer_names() -> None:
    """Where an IPython shell imports this, let its Tab key know the names."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    matchers = getattr(getattr(shell, "Completer", None), "custom_matchers", None)
    if matchers is not None:
        _complete.matcher_api_version = 2  # type: ignore[attr-defined]
        _complete.matcher_identifier = "lsai_lab"  # type: ignore[attr-defined]
        matchers[:] = [one for one in matchers if one.__name__ != "_complete"] + [_complete]


_offer_names()
