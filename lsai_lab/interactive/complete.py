"""Names that the Tab key completes within quotes: studies, variants, runs, models, GPUs, claims,
settings and their values where a function of `lab` takes them, and the columns of frames."""

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import pandas as pd

import lsai_core
import lsai_lab
from lsai_core.attention.choice import BACKENDS
from lsai_core.base.plugins import names, own
from lsai_core.base.shown import Shown
from lsai_core.config.model import PRESETS
from lsai_core.config.strict import Strict, dotted
from lsai_core.config.train import LOSSES, TrainConfig
from lsai_core.profiling.gpus import ALL_GPUS, find_gpu
from lsai_lab.claims.declared import load_claims
from lsai_lab.data.local import SUFFIXES
from lsai_lab.data.prepare import KINDS
from lsai_lab.interactive.place import Place, before_dot, place_of
from lsai_lab.interactive.results import Results
from lsai_lab.interactive.seen_values import Names, function_of, value_of
from lsai_lab.predictions.plan_space import Numerics
from lsai_lab.project.files import reading_root
from lsai_lab.report.load import names_of_studies, session
from lsai_lab.report.studies import parameter_files
from lsai_lab.runs.find import begun, given_names, opened
from lsai_lab.runs.study import load_study

# A column and the text that it is compared with, at the end of a query.
_COMPARED = re.compile(r"`?([\w.]+)`?\s*[=!]=\s*[\"']([^\"']*)$")
_LAST_WORD = re.compile(r"`?[\w.]*$")
# `dict(` up to the name of a keyword.
_IN_DICT = re.compile(r"\bdict\((?:[^()\[\]{}]*,\s*)?(\w*)$")
# Methods of a column whose texts are those of the column.
_EQUAL = ("eq", "isin", "ne")
# Arguments whose texts are no columns, wherever a frame is drawn, sorted or shown.
_NO_COLUMN = ("aggfunc", "axis", "color", "how", "kind", "log", "palette", "text", "title")


def completions(text: str, shell: Names) -> tuple[str, list[str]]:
    """The word that `text`, a cell up to the cursor, ends with within quotes, or behind a dot, and
    the names that may stand there; the word itself where names of a kind are wanted and there are
    none; no names if nothing is known. `shell`: the variables of the notebook."""
    if (behind := before_dot(text)) is not None:
        return behind[1], _behind_a_dot(*behind, shell)
    if (mapping := _IN_DICT.search(text)) is not None:  # as of a mapping in braces
        word, keys = completions(f'{text[: mapping.start()]}{{"{mapping[1]}', shell)
        return word, [f"{key}=" for key in keys if key.isidentifier() and key != word]
    place = place_of(text)
    if place is None:
        return "", []
    word, known = place.word, _known(place, shell)
    if isinstance(known, pd.DataFrame):
        word, known = _of_frame(known, place)
    begun_word = word.lstrip("`").lower()
    names = list(map(str, () if known is None else known))
    found = [name for name in names if name.lstrip("`").lower().startswith(begun_word)]
    # A word alone keeps magics and files, which can be no name here, out of the list.
    may_be_path = known is None or bool({*word} & {*"/.~"})
    return word, list(dict.fromkeys(found)) or [word] * (not may_be_path)


def _behind_a_dot(node: ast.expr, word: str, shell: Names) -> list[str]:
    """What `lab`, the core or an object of theirs has, without what is there for others."""
    found = value_of(node, shell)
    is_ours = found is lsai_lab or found is lsai_core
    there = dir(found) if is_ours or isinstance(found, Shown | Strict | Results) else []
    return [name for name in there if name.startswith(word) and (word[:1] == "_" or name[0] != "_")]


def matcher(context: Any) -> dict[str, Any]:
    """A matcher of IPython: the names, instead of files."""
    from IPython.core.completer import SimpleCompletion

    shell = sys.modules["IPython"].get_ipython()
    text = context.full_text[: _offset(context)]
    word, names_there = completions(text, shell.user_ns if shell is not None else {})
    return {
        "completions": [SimpleCompletion(name, type="lab") for name in names_there],
        "suppress": bool(names_there),
        "ordered": True,
        "matched_fragment": word,
    }


def _offset(context: Any) -> int:
    """Where the cursor is in the whole text."""
    lines = context.full_text.split("\n")[: context.cursor_line]
    return sum(len(line) + 1 for line in lines) + int(context.cursor_position)


def _known(place: Place, shell: Names) -> Iterable[Any] | None:
    """The names that the place can have; a frame: its columns. None if nothing is known of it."""
    around = place.around
    if isinstance(around, ast.Compare):
        column = value_of(around.left, shell)
        return _texts(column) if isinstance(column, pd.Series) else None
    if isinstance(around, ast.Subscript):
        found = value_of(around.value, shell)
        if isinstance(found, pd.Series):
            return [name for name in found.index if isinstance(name, str)]
        # IPython itself completes a key of a mapping behind a variable.
        mapping = isinstance(found, dict) and not isinstance(around.value, ast.Name)
        return found if mapping or isinstance(found, pd.DataFrame) else None
    if isinstance(around.func, ast.Attribute) and around.func.attr in _EQUAL:
        column = value_of(around.func.value, shell)
        return _texts(column) if isinstance(column, pd.Series) else None
    asked = _Asked(place, around, function_of(around.func, shell), shell)
    if isinstance(asked.function, type) and issubclass(asked.function, Strict):
        return _field(asked)
    kind = _KINDS.get(asked.parameter) if asked.is_ours else None
    return _columns(asked) if kind is None else kind(asked)


def _of_frame(frame: pd.DataFrame, place: Place) -> tuple[str, Iterable[Any]]:
    """The word that is begun and what it can be: a column, in a query also a text of one."""
    call = place.around
    function = call.func if isinstance(call, ast.Call) else None
    if not isinstance(function, ast.Attribute) or function.attr != "query":
        return place.word, frame
    if (compared := _COMPARED.search(place.word)) is not None:
        return compared[2], _texts(frame[compared[1]]) if compared[1] in frame else ()
    words = [name if name.isidentifier() else f"`{name}`" for name in map(str, frame)]
    last = _LAST_WORD.search(place.word)
    return last[0] if last else "", words


def _texts(column: pd.Series) -> list[str]:
    return [text for text in column.dropna().unique() if isinstance(text, str)]


class _Asked:
    """An argument that is being written, its function and the other arguments of the call."""

    def __init__(self, place: Place, call: ast.Call, function: Any, shell: Names) -> None:
        self.place, self.function = place, function
        self._call, self._shell = call, shell
        home = getattr(function, "__module__", None) or ""
        self.is_ours = home.partition(".")[0] in ("lsai_core", "lsai_lab")
        self._named = [*inspect.signature(function).parameters.values()] if self.is_ours else []

    @property
    def parameter(self) -> str:
        """What the argument is called; empty where that is not known."""
        if isinstance(self.place.argument, str):
            return self.place.argument
        several = (n for n, each in enumerate(self._named) if each.kind is each.VAR_POSITIONAL)
        number = min(self.place.argument, next(several, self.place.argument))
        return self._named[number].name if number < len(self._named) else ""

    def beside(self, parameter: str) -> Any:
        """The value of another argument; None if it is not given or not known."""
        given = dict(zip((each.name for each in self._named), self._call.args, strict=False))
        given |= {each.arg: each.value for each in self._call.keywords if each.arg}
        return value_of(given[parameter], self._shell) if parameter in given else None

    @property
    def frame(self) -> pd.DataFrame | None:
        """The first frame that the call is about: whose method it is, or that it is given."""
        call = self._call
        owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        given = [*owner, *call.args, *(each.value for each in call.keywords)]
        found = (value_of(each, self._shell) for each in given)
        return next((frame for frame in found if isinstance(frame, pd.DataFrame)), None)


def _columns(asked: _Asked) -> pd.DataFrame | None:
    """The frame that a call is about, whose columns an argument may name."""
    if asked.parameter in _NO_COLUMN or asked.place.key is not None:
        return None
    return asked.frame


def _drawn(asked: _Asked) -> Iterable[Any]:
    """What can be drawn: the columns of a frame, else those of the steps of runs."""
    from lsai_lab.interactive.curves import COLUMNS

    frame = None if asked.function is lsai_lab.curves else asked.frame
    return COLUMNS if frame is None else frame


def _of_study(what: str) -> Callable[[_Asked], Iterable[str]]:
    """What a study has: its `variants`, its `parts`."""

    def known(asked: _Asked) -> Iterable[str]:
        study = asked.beside("study")
        there = study in names_of_studies()
        return getattr(load_study(reading_root(), study), what) if there else ()

    return known


def _runs(asked: _Asked) -> Iterable[str]:
    """Own runs by name; of the recorded ones the machines, behind `h100/` that machine's. Where a
    model is wanted, the runs that have one."""
    with_model = asked.function in (lsai_lab.load_model, lsai_lab.generate)
    for folder in begun(session().runs_root):
        if not with_model or (folder / "model").is_dir():
            usual = f"{folder.parent.name}.{folder.name.rpartition('-')[0]}"
            yield from given_names(folder) or [usual]
    if not with_model:
        yield from _recorded(asked.place.word)


def _questions(asked: _Asked) -> Iterable[str]:
    """What a prediction or a plan can be asked for: models, own runs, studies, behind `memory.` the
    study's variants."""
    study, dot, _ = asked.place.word.partition(".")
    if dot and study in names_of_studies():
        yield from (f"{study}.{name}" for name in load_study(reading_root(), study).variants)
    yield from PRESETS
    yield from (name for folder in begun(session().runs_root) for name in given_names(folder))
    yield from (f"{name}." for name in names_of_studies())


def _recorded(word: str) -> Iterable[str]:
    folder = reading_root() / "reports" / "recorded"
    machine, slash, _ = word.partition("/")
    if not slash:
        yield from sorted(f"{path.name}/" for path in folder.glob("*/"))
    for path in sorted((folder / machine).glob("*/*/summary.json")) if slash else ():
        yield f"{machine}/{path.parts[-3]}.{path.parts[-2].rpartition('-')[0]}"


def _named(asked: _Asked) -> Iterable[str]:
    """What has a name: drawings, explorables, claims, studies, files of parameters."""
    from lsai_lab.report.drawings import drawings
    from lsai_lab.report.explore.scripts import NAMES

    known: dict[Any, Callable[[], Iterable[str]]] = {
        find_gpu: lambda: [gpu.name for gpu in ALL_GPUS],
        lsai_lab.draw: drawings,
        lsai_lab.explore: lambda: NAMES,
        lsai_lab.judged: load_claims,
        lsai_lab.claims_table: load_claims,
        lsai_lab.parameters: parameter_files,
        lsai_lab.study: names_of_studies,
    }
    return known.get(asked.function, tuple)()


def _settings(asked: _Asked) -> Iterable[str] | None:
    """The settings of a training run with their dots, or the values of one; None of one that can be
    any text."""
    if asked.place.key is None:
        return dotted(TrainConfig) if asked.place.is_key else ()
    return _values(asked.place.key)


def _field(asked: _Asked) -> Iterable[str] | None:
    """The values of a field of `TrainConfig` or of one of its parts, that is being built."""
    parts = {each.annotation: name for name, each in TrainConfig.model_fields.items()}
    above = [] if asked.function is TrainConfig else [parts.get(asked.function, "")]
    inner = [asked.place.key] if asked.place.key else []
    key = ".".join([*above, asked.parameter, *inner])
    if asked.place.is_key:
        return [
            name.removeprefix(f"{key}.")
            for name in dotted(TrainConfig)
            if name.startswith(f"{key}.")
        ]
    return _values(key)


def _values(key: str) -> Iterable[str] | None:
    """The values of a setting; None of one that can be any text."""
    open_ones: dict[str, Callable[[], Iterable[str]]] = {
        "attention.backend": lambda: ("auto", *BACKENDS, *own("attention")),
        "data.source": _sources,
        "loss": lambda: (*LOSSES, *own("losses")),
        "model.preset": lambda: PRESETS,
        "optim.name": lambda: (*names("lsai_core.optimizers.kinds.*"), *own("optimizers")),
    }
    return open_ones.get(key, functools.partial(_choices, key))() or None


def _sources() -> list[str]:
    """Sources of text: those with a name, the beginnings of the others, and files of text here."""
    known = [kind.partition("<")[0] for kind in KINDS]
    here = sorted(path.name for path in Path.cwd().iterdir() if path.suffix in SUFFIXES)
    return [*known, *(f"file:{name}" for name in here)]


def _tags(asked: _Asked) -> Iterable[str]:
    """The tags that runs have already."""
    for folder in begun(session().runs_root):
        yield from opened(folder).plan.get("tags", [])


def _choices(key: str) -> list[str]:
    """The texts that a setting can have, as its type says."""
    kind: Any = TrainConfig
    for name in key.split("."):
        fields = getattr(kind, "model_fields", {})
        kind = fields[name].annotation if name in fields else None
    return [text for text in _arguments(kind) if isinstance(text, str)]


def _arguments(kind: Any) -> list[Any]:
    """The innermost arguments of a type."""
    inner = get_args(kind)
    return [each for one in inner for each in (_arguments(one) or [one])]


# By the names of arguments: a name means the same in every function of `lab`.
_KINDS: dict[str, Callable[[_Asked], Iterable[Any] | None]] = {
    **dict.fromkeys(("study", "studies"), lambda _: names_of_studies()),
    **dict.fromkeys(("variant", "variants"), _of_study("variants")),
    "part": _of_study("parts"),
    "profile": lambda _: sorted(
        path.stem for path in (reading_root() / "params/profiles").glob("*.yaml")
    ),
    **dict.fromkeys(("run", "runs", "which", "first", "second", "beside"), _runs),
    "tags": _tags,
    **dict.fromkeys(("note", "prompt"), lambda _: ()),
    "what": _questions,
    "gpu": lambda _: [gpu.name for gpu in ALL_GPUS],
    "largest": lambda _: ("batch", "length"),
    "numerics": lambda _: get_args(Numerics),
    **dict.fromkeys(("overrides", "over"), _settings),
    **dict.fromkeys(("name", "names"), _named),
    **dict.fromkeys(("columns", "x", "y"), _drawn),
    "baseline": lambda asked: _texts(asked.beside("rows")["variant"]),
}
