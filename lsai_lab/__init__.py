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
    lab.studies(), lab.study(name)       the studies and how many recorded runs each has; one's
                                         title, question, baseline and variants
    lab.machines()                       what the labels of the machines stand for: h200, h200-d

Runs of your own (a run is a row of `load`, a folder, the name you gave it, its key, or
`study.variant`; a recorded one `machine/study.variant`):

    run = lab.open_run(study=..., variant=..., overrides={...}, name=...)
                                         a run object: run.execute(), run.results, run.steps,
                                         run.plot(), run.phases, run.kernels, run.timeline()
    lab.open_run("memory", "bf16", part="batch").execute()    the largest batch that trains here
    lab.find_run("name")                 the same of a run that is there, own or recorded
    lab.compare(a, b)                    settings that differ, results, and .plot()
    lab.curves(a, b, y="loss", x="elapsed_s")    columns of the steps of any runs, drawn
    lab.sweep(study, variants, {"seq_len": [128, 256]})    runs all, one row each
    lab.load_model(run), lab.generate(run, "text")    the trained model, and what it writes

Memory and time:

    lab.predict("llama3-8b", "24GiB")     the peak by cause and a step's time; largest="batch"
    lab.plan("llama3-8b", "h100", tokens=131072)    the fastest setting that fits, and why
    with lab.simulated_gpu("h100") as gpu:    any PyTorch step on a GPU that is not there:
                                         gpu.peak_reserved_gib, gpu.verdict, gpu.memory, plot()
    lab.watch(model, optimizer)          phases, memory by cause and kernels of any training loop
    lab.timeline(run)                    the memory of a step by cause, and its kernels

What a reader sees:

    lab.table(frame), lab.figure(fig)    a table, a figure
    lab.bars, lab.lines                  charts
    lab.style()                          the report's plot style
    lab.draw(name)                       a drawing of a mechanism
    lab.explore("memory")                a picture with controls: memory, ring, roofline, step,
                                         rounding, numbers, fits

From frames to frames and numbers:

    lab.summarize                        one figure from repeats, with its range
    lab.relative                         comparisons with a variant
    lab.pareto, lab.equal_to_best        the best, and what equals it
    lab.judged(...), lab.claims_table(...)    claims by name, judged by the recorded runs; as a
                                         table

What only chapters use (`help("lsai_lab.chapters")` lists it) is there, too: `lab.number`, ...
"""

import difflib
import functools
import importlib
import inspect
import sys
import types
from typing import Any

from lsai_core.base.errors import UnknownName, UserError, did_you_mean, not_installed
from lsai_core.base.shown import checked_call
from lsai_lab.chapters import NAMES

# By module: what a person looks for, which the Tab key and `help` list.
_FACE = {
    "lsai_lab.report.load": (
        "load",
        "recorded",
        "steps",
        "points",
        "kernels",
    ),
    "lsai_lab.report.studies": ("studies", "study"),
    "lsai_lab.report.machines": ("machines",),
    "lsai_lab.report.show": ("table", "figure"),
    "lsai_lab.report.charts": ("bars", "lines"),
    "lsai_lab.report.drawings": ("draw",),
    "lsai_lab.report.judged": ("claims_table", "judged"),
    "lsai_lab.report.explore.show": ("explore",),
    "lsai_lab.report.predicted": ("config",),
    "lsai_lab.interactive.comparison": ("compare",),
    "lsai_lab.interactive.curves": ("curves",),
    "lsai_lab.interactive.models": ("generate", "load_model"),
    "lsai_lab.interactive.plan": ("plan",),
    "lsai_lab.interactive.prediction": ("predict",),
    "lsai_lab.interactive.opening": ("open_run",),
    "lsai_lab.interactive.run": ("find_run",),
    "lsai_lab.interactive.simulated": ("simulated_gpu",),
    "lsai_lab.interactive.sweep": ("sweep",),
    "lsai_lab.interactive.timeline": ("timeline",),
    "lsai_lab.interactive.watch": ("watch",),
    "lsai_lab.analysis.summary": ("equal_to_best", "pareto", "relative", "summarize"),
}
_MODULES = {name: module for module, names in [*_FACE.items(), *NAMES.items()] for name in names}
__all__ = ["style", *(name for names in _FACE.values() for name in names)]


def _imported(module: str) -> Any:
    """The module; without the packages of the extra `report` a UserError that says so."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (line := not_installed(error)) is None:
            raise
        raise UserError(line) from None


@functools.cache
def _face(module: str, name: str) -> Any:
    """What a name stands for; wrong arguments of a function are told in one line."""
    found = getattr(_imported(module), name)
    return checked_call(found, f"lab.{name}") if inspect.isfunction(found) else found


def __getattr__(name: str) -> Any:
    if name == "lab":  # `from lsai_lab import lab`
        return sys.modules[__name__]
    if name == "style":
        return checked_call(_imported("lsai_lab.report.style").apply_style, "lab.style")
    if name in _MODULES:
        return _face(_MODULES[name], name)
    said = f"module 'lsai_lab' has no attribute {name!r}"
    if name[:1] == "_":
        raise AttributeError(said)
    raise UnknownName(f"{said}; {_meant(name)}")


class _Folder(types.ModuleType):
    """A folder of the package, which an import makes an attribute of the one above it; who calls it
    meant a function."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        raise UnknownName(f"lab.{name} is no function; {_meant(name)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is types.ModuleType and value.__name__ == f"{self.__name__}.{name}":
            value.__class__ = _Folder
        super().__setattr__(name, value)


# What people look for here that is no function of its own.
_ELSEWHERE = {
    "delete": "!lsai runs delete removes a run",
    "gpus": 'within lab.predict("llama3-8b", " the Tab key lists them',
    **dict.fromkeys(
        ("find_batch", "largest_batch"),
        'lab.open_run("memory", "bf16", part="batch").execute() measures it, '
        'lab.predict("llama3-8b", "h100", largest="batch") predicts it',
    ),
    "longest": 'lab.predict("llama3-8b", "h100", largest="length") predicts it',
    "presets": 'within lab.predict(" the Tab key lists them',
    "report": "!lsai report makes the pages",
    "run": "lab.open_run opens a run, lab.find_run one that is there",
    "variants": 'lab.study("memory").variants has those of a study',
}


def _meant(name: str) -> str:
    """What a name that is not there may mean: one that the Tab key shows, or a command."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    from lsai_lab.cli.app import COMMANDS

    command = name.replace("_", "-")
    ways = [did_you_mean(name, __all__) or _of_chapters(name)]
    ways += [f"!lsai {command} is a command"] if command in COMMANDS else []
    return "; ".join(filter(None, ways)) or "the Tab key behind lab. lists what there is"


def _of_chapters(name: str) -> str:
    """A name of the chapters that is spelt almost so."""
    near = difflib.get_close_matches(name, _MODULES, n=1, cutoff=0.8)
    return did_you_mean(name, near)


def __dir__() -> list[str]:
    return __all__


def _complete(context: Any) -> dict[str, Any]:
    """IPython's completer asks here: which names may stand within these quotes."""
    matched: dict[str, Any] = _imported("lsai_lab.interactive.complete").matcher(context)
    return matched


def _offer_names() -> None:
    """Where an IPython shell imports this, let its Tab key know the names, and show a tokenizer as
    a line."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    matchers = getattr(getattr(shell, "Completer", None), "custom_matchers", None)
    if matchers is not None:
        _complete.matcher_api_version = 2  # type: ignore[attr-defined]
        _complete.matcher_identifier = "lsai_lab"  # type: ignore[attr-defined]
        matchers[:] = [one for one in matchers if one.__name__ != "_complete"] + [_complete]
        texts = shell.display_formatter.formatters["text/plain"]  # type: ignore[union-attr]
        texts.for_type_by_name("tokenizers", "Tokenizer", _show_tokenizer)


def _show_tokenizer(tokenizer: Any, printer: Any, _cycle: bool) -> None:
    """In a line, instead of all its words."""
    size, example = tokenizer.get_vocab_size(), 'encode("text").ids'
    printer.text(f"tokenizer of {size:,} tokens: .{example}, .decode(ids)")


sys.modules[__name__].__class__ = _Folder
_offer_names()
