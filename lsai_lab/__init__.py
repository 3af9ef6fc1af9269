"""lsai_lab: the laboratory around the core, and all that a notebook takes from it: `import lsai_lab
as lab`. Each name is explained by `help(lab.<name>)` and imported when it is first used.

Runs, as frames:

    runs = lab.load("memory")            one row a run: results, config by dotted key, machine,
                                         label, folder; with mine=True every own run
    runs = lab.recorded("memory")        the committed ones alone, as the chapters tell them
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
    lab.plan("llama3-8b", "h100", tokens=131072)    the fastest setting that fits, and why
    lab.watch(model, optimizer)          phases, memory by cause and kernels of any training loop
    lab.timeline(run)                    the memory of a step by cause, and its kernels

What a reader sees:

    lab.table(frame), lab.figure(fig)    a table, a figure
    speed = lab.number(3.96, "{:.2f}x", run)    a number that the text has as [3.96x](#speed)
    lab.loss_chart                       losses and their intervals
    lab.bars, lab.lines, lab.panels      charts; COLORS, GPU_COLORS, name_ends, thousands
    lab.number_map                       a table of numbers coloured by value
    lab.draw(name)                       a drawing of a mechanism
    lab.say("...")                       a sentence with computed numbers, in notebooks of your own
    lab.explore("memory")                a picture with controls: memory, ring, roofline, step,
                                         rounding, numbers, fits
    lab.run_link(text, run)              a link to the page of a run
    lab.style()                          the report's plot style, for figures of your own
    lab.PALETTE, lab.MARKERS, lab.series_style(n)        its colours and markers; those of series n

Your machine:

    own_runs, own_counts, own_ends       your runs; how they ended, and why
    own_rates                            the rates of your machine
    or_nothing                           a table, or one row that says that nothing ran here yet
    own_ratios, own_chart                your ratios beside the recorded ones

Analysis, from frames to frames and numbers:

    with_range                           a figure with the range of its repeats, as text
    summarize, over_repeats, spread      one figure from repeats, and how far they scatter
    half_width, paired                   95% intervals of differences, seed by seed
    text_read                            tokens of a run, distinct ones, passes over its text
    loss_changes, training_loss, loss_by_pass      training loss beside validation loss
    relative, versus, pareto, equal_to_best        comparisons; the best, and what equals it
    with_cost                            energy and money for a billion tokens
    SESSION_SPREAD                       closer speeds of one session are called equal
    session_differences                  how far equal work lies apart between sessions
    work_of                              what a training step of each variant computes
    RATES, machine_rates, tokens_to_fill the measured roof of each GPU
    block_operations, least_times        operations of one block, and their least times
    layer_matmuls, square_matmuls        matmuls timed alone
    HEADS, attention_points, kernel_times, kernel_lead    what the attention bench measured; the
                                         lead of one kernel over the best other one
    attention_curves, window_times       rate and memory over the length; times with a window
    kernel_errors, rounding_error        errors against float64; that of one rounding
    kernels_declared                     the kernels as a table
    auto_shares                          how good the choices of `auto` are
    memory_terms, step_memory            what fills the memory, by formula; a simulated step's
    single_changes                       pairs of settings that differ in one property
    levers, gain_range, compile_pays     what each change gains; from which step compiling pays
    TensorTraffic                        the large tensors that eager operators read and write
    class_times, waterfall               a step's time by class of kernel, down to the ideal step
    matmul_rates, same_kernels           the matmuls of a step: their speed; whether two runs share
    ideal_of                             the least time that a run's step could take
    block_times, kept_inputs             matrix products of one block: their time, the inputs kept
    choices_of                           what `auto` would choose at the shapes of an attention run
    ALLOWED_ERROR                        a correct attention kernel's, over eager attention's

Claims:

    judged                               claims by name, judged by the recorded runs
    load_claims, evaluate                what is claimed, and how runs judge it
    claims_table, claim_value            judged claims as a table; a number in a claim's unit
    claim_interval                       of a claim on losses: the setting whose interval reaches
                                         furthest, with mean, half the joint interval and seeds

Predictions:

    run_predictions, step_errors         recorded runs beside their predictions; errors of the time
    tried_predictions                    configurations predicted first and measured afterwards
    prediction_table                     committed tables: what fits which GPU, published figures
    estimator_errors                     errors of this package and of others' formulas
    rival_table, SAMPLES                 others' programs beside this package, by what was asked
    prediction_errors, error_summary     errors by what was predicted and what tested it
    program_errors, published_errors     of other people's programs; of published figures
    verdicts, host_difference            whether a run fits; what two GPUs differ by
    what_fits, PARTS                     a model's techniques; the parts of its peak

Many nodes:

    scale_config, groupings              the assumptions; what each way to group the GPUs costs
    step_traffic, state_bytes            what a step of FSDP sends; what one GPU keeps
    bytes_per_weight                     of one weight, and of its gradient and states
    recorded_node                        the assumptions with what one node measured
    best_groupings, enough_tokens        the best plans; from how many tokens the network is hidden
    group_size, checkpoint_costs         n*; how often to save, and what it costs
    loss_distance, changes_by_pair       of runs that round alike, what sharding does to the loss
    largest_models                       the largest model of each setting, and its bound
    sharded_peers, scaling_grid          Llama-3-8B beside torchtitan; the course's grid
    ways_measured                        ways of sharing a model, predicted and measured

How much to believe:

    speed_noise, one_setting             how far equal work is apart; one setting in all studies
    claims_with, all_claims, sessions    claims with a verdict, and all; the labels of the records
    peer_comparisons, peer_settings      this package beside other trainers, and their settings
    peer_savings                         the leads beside what our kernels save

One sequence on several GPUs:

    context_points, shared_times         what was measured; of it the times on several GPUs
    against_one_gpu, crossovers          beside one GPU alone; from which length sharing pays
    METHODS, method_times, equal_work    methods' names and times; by how much equal work differs
    best_rate_claims, long_training      claims on the best rate; whole training steps
"""

import importlib
import sys
from typing import Any

from lsai_core.base.errors import UserError, hint, not_installed

_FACE = {
    "lsai_lab.report.load": (
        "load",
        "recorded",
        "steps",
        "points",
        "kernels",
        "studies",
        "study",
        "parameters",
    ),
    "lsai_lab.report.show": ("table", "figure", "say", "run_link"),
    "lsai_lab.report.numbers": ("number",),
    "lsai_lab.report.loss_chart": ("loss_chart",),
    "lsai_lab.report.charts": ("bars", "lines", "panels", "name_ends", "thousands"),
    "lsai_lab.report.colors": ("COLORS", "GPU_COLORS", "PALETTE"),
    "lsai_lab.report.drawings": ("draw",),
    "lsai_lab.report.heatmap": ("number_map",),
    "lsai_lab.report.judged": ("judged",),
    "lsai_lab.report.yours": (
        "own_runs",
        "or_nothing",
        "own_counts",
        "own_ends",
        "own_rates",
        "own_ratios",
        "own_chart",
    ),
    "lsai_lab.report.explore.show": ("explore",),
    "lsai_lab.report.style": ("MARKERS", "series_style"),
    "lsai_lab.report.predicted": (
        "config",
        "run_predictions",
        "prediction_table",
        "tried_predictions",
    ),
    "lsai_lab.analysis.cost": ("with_cost",),
    "lsai_lab.interactive.comparison": ("compare",),
    "lsai_lab.interactive.curves": ("curves",),
    "lsai_lab.interactive.models": ("generate", "load_model"),
    "lsai_lab.interactive.plan": ("plan",),
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
        "kept_inputs",
        "over_repeats",
        "pareto",
        "relative",
        "spread",
        "summarize",
        "versus",
        "with_range",
        "work_of",
    ),
    "lsai_lab.analysis.ideal_step": ("ideal_of",),
    "lsai_lab.analysis.attention": (
        "HEADS",
        "attention_curves",
        "attention_points",
        "auto_shares",
        "kernel_errors",
        "kernel_lead",
        "kernel_times",
        "kernels_declared",
        "rounding_error",
        "window_times",
    ),
    "lsai_lab.analysis.roof": (
        "RATES",
        "block_operations",
        "layer_matmuls",
        "least_times",
        "machine_rates",
        "square_matmuls",
        "tokens_to_fill",
    ),
    "lsai_lab.analysis.techniques": ("memory_terms", "single_changes", "step_memory"),
    "lsai_lab.analysis.tensor_traffic": ("TensorTraffic",),
    "lsai_lab.analysis.step_time": (
        "class_times",
        "compile_pays",
        "gain_range",
        "levers",
        "matmul_rates",
        "same_kernels",
        "waterfall",
    ),
    "lsai_lab.analysis.intervals": ("half_width",),
    "lsai_lab.analysis.losses": (
        "loss_by_pass",
        "loss_changes",
        "paired",
        "text_read",
        "training_loss",
    ),
    "lsai_lab.analysis.sessions": ("session_differences",),
    "lsai_lab.analysis.scale": (
        "best_groupings",
        "bytes_per_weight",
        "checkpoint_costs",
        "enough_tokens",
        "group_size",
        "groupings",
        "recorded_node",
        "scale_config",
        "state_bytes",
        "step_traffic",
    ),
    "lsai_lab.chapters.context": (
        "METHODS",
        "against_one_gpu",
        "best_rate_claims",
        "context_points",
        "crossovers",
        "equal_work",
        "long_training",
        "method_times",
        "shared_times",
    ),
    "lsai_lab.chapters.noise": (
        "all_claims",
        "claims_with",
        "one_setting",
        "sessions",
        "speed_noise",
    ),
    "lsai_lab.analysis.peers": ("peer_comparisons", "peer_savings", "peer_settings"),
    "lsai_lab.chapters.predictions": (
        "PARTS",
        "error_summary",
        "host_difference",
        "prediction_errors",
        "program_errors",
        "published_errors",
        "verdicts",
        "what_fits",
    ),
    "lsai_lab.chapters.sharding": (
        "largest_models",
        "changes_by_pair",
        "loss_distance",
        "scaling_grid",
        "sharded_peers",
    ),
    "lsai_lab.chapters.ways": ("ways_measured",),
    "lsai_lab.benches.attention.errors": ("ALLOWED_ERROR",),
    "lsai_lab.benches.attention_table": ("choices_of",),
    "lsai_lab.claims.declared": ("load_claims",),
    "lsai_lab.claims.evaluate": ("evaluate",),
    "lsai_lab.claims.intervals": ("claim_interval",),
    "lsai_lab.claims.words": ("claim_value", "claims_table"),
    "lsai_lab.predictions.recorded": ("estimator_errors", "step_errors"),
    "lsai_lab.predictions.rivals": ("SAMPLES", "rival_table"),
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
    if name == "lab":  # `from lsai_lab import lab`
        return sys.modules[__name__]
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
