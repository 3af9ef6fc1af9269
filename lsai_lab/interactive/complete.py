"""Names that the Tab key completes within quotes: studies, variants, parts, profiles, models, GPUs
and runs, where a function of `lab` takes them."""

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from lsai_core.config.presets import PRESETS
from lsai_core.config.strict import dotted
from lsai_core.config.train import TrainConfig
from lsai_core.profiling.gpus import GPUS
from lsai_lab.interactive.run import Run
from lsai_lab.project.files import reading_root
from lsai_lab.report.load import session, studies
from lsai_lab.runs.find import begun, given_names
from lsai_lab.runs.study import load_study

# A call of `lab` that is open at the cursor: the function, and its arguments so far.
_CALL = re.compile(r"\blab\.(\w+)\(([^()]*)$")
# The keyword whose value, or list of values, is being written.
_KEYWORD = re.compile(r"(\w+)\s*=\s*[\[(]?(?:\s*[\"'][^\"']*[\"']\s*,)*\s*$")
# The results of a run, which IPython does not look up by itself.
_RESULT = re.compile(r"\b(\w+)\.results\[[\"'](\w*)$")
# A key of a mapping of settings: `overrides={"opt`, or what a sweep varies.
_SETTING = re.compile(r"(\{|\{.*,)\s*[\"']([\w.]*)$")
_STUDY = re.compile(r"(?:\bstudy\s*=\s*|^\s*)[\"']([\w-]+)[\"']")


def names_for(text: str) -> list[str]:
    """What may stand where `text`, the cell up to the cursor, ends within quotes; empty if nothing
    is known."""
    found = _CALL.search(text)
    if found is None or sum(map(found[2].count, "\"'")) % 2 == 0:
        return []
    function, (before, begun_word) = found[1], re.split(r"[\"'](?=[^\"']*$)", found[2])
    keyword, study = _KEYWORD.search(before), _STUDY.search(before)
    if keyword is None and (brace := _SETTING.search(found[2])) is not None:
        return sorted(key for key in _settings() if key.startswith(brace[2]))
    places = _POSITIONAL.get(function, ("",))
    number = len(re.findall(r"[\"']\s*,", before))
    kind = keyword[1] if keyword else places[min(number, len(places) - 1)]
    known = _KINDS[kind](study[1] if study else "") if kind in _KINDS else ()
    return sorted(name for name in known if name.lower().startswith(begun_word.lower()))


def matcher(context: Any) -> dict[str, Any]:
    """A matcher of IPython: the names, instead of files."""
    from IPython.core.completer import SimpleCompletion

    text = context.full_text[: _offset(context)]
    names = names_for(text) or _results(text)
    word = re.search(r"[^\"']*$", text)
    return {
        "completions": [SimpleCompletion(name, type="lab") for name in names],
        "suppress": bool(names),
        "matched_fragment": word[0] if word else "",
    }


def _results(text: str) -> list[str]:
    """The names of results of the run that a variable holds, where one is asked for."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if (found := _RESULT.search(text)) is None or shell is None:
        return []
    run = shell.user_ns.get(found[1])
    ended = isinstance(run, Run) and run.outcome != "unfinished"
    return [name for name in (run.results if ended else ()) if name.startswith(found[2])]


def _offset(context: Any) -> int:
    """Where the cursor is in the whole text."""
    lines = context.full_text.split("\n")[: context.cursor_line]
    return sum(len(line) + 1 for line in lines) + int(context.cursor_position)


def _variants(study: str) -> Iterable[str]:
    return load_study(reading_root(), study).variants if study in studies() else ()


def _parts(study: str) -> Iterable[str]:
    return load_study(reading_root(), study).parts if study in studies() else ()


def _settings() -> Iterable[str]:
    """The settings of a training run, with their dots."""
    return dotted(TrainConfig)


def _profiles(_: str) -> Iterable[str]:
    return [path.stem for path in (reading_root() / "params" / "profiles").glob("*.yaml")]


def _runs(_: str) -> Iterable[str]:
    for folder in begun(session().runs_root):
        usual = f"{folder.parent.name}.{folder.name.rpartition('-')[0]}"
        yield from given_names(folder) or [usual]
    for path in (reading_root() / "reports" / "recorded").glob("*/*/*/summary.json"):
        machine, study, run = path.parts[-4:-1]
        yield f"{machine}/{study}.{run.rpartition('-')[0]}"


_KINDS: dict[str, Callable[[str], Iterable[str]]] = {
    "study": lambda _: studies(),
    "variant": _variants,
    "variants": _variants,
    "part": _parts,
    "profile": _profiles,
    "run": _runs,
    "model": lambda _: PRESETS,
    "gpu": lambda _: [gpu.name for gpu in GPUS],
    "largest": lambda _: ("batch", "length"),
}
# What the arguments of a function are that have no name, the last also of those after it.
_POSITIONAL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("load", "study"), ("study",)),
    **dict.fromkeys(("open_run", "sweep"), ("study", "variants")),
    **dict.fromkeys(
        ("steps", "kernels", "config", "find_run", "compare", "curves", "timeline", "generate"),
        ("run",),
    ),
    "load_model": ("run",),
    "run_link": ("", "run"),
    "predict": ("model", "gpu"),
}
